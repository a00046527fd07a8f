"""Triton's interpreter, without what it does in vain, which was most of its time."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Change the interpreter of this process; what kernels compute stays the same."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    describe_when_asked(core)
    find, seen = interpreter._get_np_dtype, dict[str, Any]()  # types of pointers have no hash, but names
    interpreter._get_np_dtype = lambda of: (
        seen[name] if (name := of.scalar.name) in seen else seen.setdefault(name, find(of))
    )
    # The checks cost eight operations for each of integers, and assert nothing unless `debug` is set.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    broadcast_where_shapes_differ(interpreter.interpreter_semantic)
    patch_once(interpreter, core)


def describe_when_asked(core: Any) -> None:
    """Shapes of tensors, and names and types of shapes, are made when something looks at them."""

    def make_tuple(self: Any, args: Sequence[Any], stated: Any = None) -> None:
        self.values = list(args)
        self._type = stated if stated is None or isinstance(stated, core.tuple_type) else core.tuple_type(stated)

    def type_of_tuple(self: Any) -> Any:
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    def make_block(self: Any, element: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else core._unwrap_if_constexpr(shape)
        numbers = tuple(map(core._unwrap_if_constexpr, sizes))
        if not numbers:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element
        self.shape = block_shape(numbers)
        self.numel = count(numbers)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar

    def numbers_of(tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.type.shape.values) if tensor.type.is_block() else ()

    count = cache(core.validate_block_shape)
    constant = cache(core.constexpr)
    block_shape = cache(core.tuple)
    shape_of = cache(lambda numbers: core.tuple([constant(number) for number in numbers]))
    unwrap, equal = core._unwrap_if_constexpr, core.tuple.__eq__
    core._unwrap_if_constexpr = lambda value: value if type(value) in (int, core.tensor) else unwrap(value)
    core.tuple.__eq__ = lambda self, other: constant(True) if self is other else equal(self, other)
    core.tuple.__init__ = make_tuple
    core.tuple.type = property(type_of_tuple, lambda self, value: setattr(self, "_type", value))
    core.block_type.__init__ = make_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = make_tensor
    core.tensor.shape = property(lambda self: shape_of(numbers_of(self)))
    core.tensor.numel = property(lambda self: constant(count(numbers_of(self))))


def broadcast_where_shapes_differ(semantic: Any) -> None:
    original = semantic.broadcast_impl_value

    def broadcast(one: Any, other: Any) -> tuple[Any, Any]:
        shapes = [each.type.shape if each.type.is_block() else None for each in (one, other)]
        return (one, other) if shapes[0] is shapes[1] else original(one, other)

    semantic.broadcast_impl_value = broadcast


def patch_once(interpreter: Any, core: Any) -> None:
    """The interpreter redefines the language at every launch, and at every call of a function inside of a kernel."""
    language: Any = importlib.import_module("triton.language")

    def bind(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope.set_attr(owner, name, call)

    semantic = interpreter.interpreter_semantic
    interpreter._patch_attr = bind
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    # Its scalars are arrays of one element, which numpy 2.5 no longer takes for numbers.
    scope.set_attr(core.tensor, "__index__", lambda self: int(self.handle.data.item()))
    nothing = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(*args, **options)
