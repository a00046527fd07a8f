"""ChatEnvironment: a jinja2 sandbox for chat templates that also bounds time and memory.

A template comes with a model's files, so it is not trusted. jinja2's sandbox hides Python's internals, but lets a
template loop for hours or build gigabytes. Here every loop iteration, call and filter is counted, and the size of texts
and lists is checked before they are made. The counting is compiled into the template: each loop body and loop condition
begins with it.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # loop iterations, calls and filters; a chat of 10,000 messages takes about 200,000
MAX_CHARACTERS = 64_000_000  # the sum of all texts that a rendering makes, intermediate ones included
MAX_SIZE = 8_000_000  # characters of one text, or items of one list
MAX_SLOW_SIZE = 1_000_000  # characters that a filter outside of QUICK_FILTERS reads; it takes up to 3 us for each
MAX_BITS = 100_000  # bits of an integer, because the time of a division grows with their square
LARGE = 4096  # characters; each larger text is a reason to look at the clock
MAX_SECONDS = 3.0  # processor time of this thread
MAX_WIDTH = 1000  # characters of padding or indentation
UNPADDED = frozenset((  # filters and methods whose numbers are no widths
    "count", "endswith", "find", "format", "index", "replace", "rfind", "rindex", "rsplit", "split", "startswith", "truncate",
))  # fmt: skip
LINE_WIDTHS = ("expandtabs", "indent", "tojson")  # filters and methods that pad each line, item or character
STRUCTURE_FILTERS = frozenset((  # filters that make no text of their values
    "abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list", "map", "random",
    "reject", "rejectattr", "reverse", "round", "select", "selectattr",
))  # fmt: skip
QUICK_FILTERS = (STRUCTURE_FILTERS - {"list"}) | {
    "capitalize", "e", "escape", "indent", "join", "lower", "replace", "safe", "string", "tojson", "trim", "upper",
}  # fmt: skip
FORMAT_WIDTH = re.compile(r"\{|\d{4,}")  # of str.format, also one that is a value itself
PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")


class LimitError(TemplateError):
    """A template exceeded a limit."""


class RaisedError(TemplateError):
    """The message of a template's raise_exception."""


class Budget(threading.local):
    """The steps, characters and seconds that are left of the rendering in this thread."""

    num_steps = num_characters = 0
    deadline = 0.0

    def start(self) -> None:
        self.num_steps, self.num_characters = MAX_STEPS, MAX_CHARACTERS
        self.deadline = time.thread_time() + MAX_SECONDS

    def take(self, num_characters: int = 0, num_steps: int = 1, num_read: int = 0) -> None:
        self.num_characters -= num_characters
        self.num_steps -= num_steps
        if num_characters > MAX_SIZE:
            raise LimitError(f"it makes a text or a list of more than {MAX_SIZE:,}")
        if self.num_characters < 0:
            raise LimitError(f"it makes more than {MAX_CHARACTERS:,} characters")
        if self.num_steps < 0:
            raise LimitError(f"it takes more than {MAX_STEPS:,} steps")
        is_due = num_characters > LARGE or num_read > LARGE or self.num_steps % 64 == 0
        if is_due and time.thread_time() > self.deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def take_text_of(self, value: Any) -> Any:
        """Count the characters of a value's text and return the value. A list that is in it several times counts each
        time."""
        pending = [value]
        while pending:
            item, num_characters = pending.pop(), 0
            if isinstance(item, str | list | tuple | set | frozenset | range):
                num_characters = len(item)
            elif isinstance(item, int):
                num_characters = check_bits(item.bit_length()) // 3
            self.take(num_characters)
            if isinstance(item, Mapping):
                pending += [*item.keys(), *item.values()]
            elif not isinstance(item, str | int) and num_characters:
                pending += item
        return value


class GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PublicNamespace(Namespace):
    """namespace() without names that begin with an underscore, which have a meaning in Python."""

    def __init__(self, *given: Any, **values: Any) -> None:
        for name in dict(*given, **values):
            refuse_private(name)
        super().__init__(*given, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        super().__setitem__(name, value)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that templates of transformers expect, with limits."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self.budget.take_text_of,
        )
        self.filters["tojson"] = to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            line = loop.lineno
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("is_in_bounds", lineno=line), lineno=line))
            if loop.test is not None:
                loop.test = nodes.And(nodes.EnvironmentAttribute("is_in_bounds", lineno=line), loop.test, lineno=line)
        joined: nodes.Template = ConcatTransformer().visit(tree)
        return joined

    @property
    def is_in_bounds(self) -> bool:
        """Counts a step; True, or an error. A property, because calls are slow in a sandbox."""
        self.budget.take()
        return True

    def join_texts(self, *values: object) -> str:
        """The operator `~`."""
        self.budget.take_text_of(values)
        return "".join(map(str, values))

    def concat(self, texts: Iterable[str]) -> str:
        """Called with the pieces of a macro, a block or the whole template."""
        pieces = list(texts)
        self.budget.take(sum(map(len, pieces)), 0)
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        num_characters = 0
        for value in (left, right):
            check_bits(value.bit_length() if isinstance(value, int) else 0)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            num_characters = len(left) + len(right)
        elif operator == "*":
            num_characters = product_size(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        self.budget.take(num_characters)
        return super().call_binop(context, operator, left, right)

    def _check_percent(self, text: str, values: object) -> None:
        if PERCENT_WIDTH.search(text):
            raise LimitError(f"it pads to more than {MAX_WIDTH:,} characters")
        self._take_uses((text, values), text.count("%"))

    def _take_uses(self, values: object, num_uses: int) -> None:
        """Count the text of values that a format may use several times."""
        before = self.budget.num_characters
        self.budget.take_text_of(values)
        self.budget.take((before - self.budget.num_characters) * num_uses, 0)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            text: str = value.__self__
            if any(spec and FORMAT_WIDTH.search(spec) for _, _, spec, _ in Formatter().parse(text)):
                raise LimitError(f"it pads to more than {MAX_WIDTH:,} characters")
            self._take_uses((text, args, kwargs), text.count("{"))
            return formatted(*args, **kwargs)

        return functools.update_wrapper(bounded_format, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self.budget.take(num_read=size_of(owner))
        if isinstance(owner, str | bytes | int):
            args = tuple(map(as_list, args))
            self._check_growth(name, (owner, *args), kwargs)
        result = super().call(context, function, *args, **kwargs)
        self.budget.take(size_of(result), 0)
        return result

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with counting and size checks."""
        num_own = int(hasattr(function, "jinja_pass_arg"))  # arguments that jinja2 adds before the template's

        @functools.wraps(function)  # carries over the marks of filters that want the context or the environment
        def filter_within_bounds(*args: Any, **kwargs: Any) -> Any:
            budget, size = self.budget, max(map(size_of, args), default=0)
            budget.take(num_read=size)
            if size > MAX_SLOW_SIZE and name not in QUICK_FILTERS:
                raise LimitError(f"it gives {name} more than {MAX_SLOW_SIZE:,} characters or items")
            if name not in STRUCTURE_FILTERS:
                args = tuple(map(as_list, args))
                self._check_growth(name, args[num_own:], kwargs)
            result = function(*args, **kwargs)
            budget.take(size_of(result), 0)
            return counted(result, budget) if isinstance(result, Iterator) else result

        return filter_within_bounds

    def _check_growth(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the size of a text before a filter makes it, or a method, whose object is the first argument."""
        self.budget.take_text_of([value for value in (*args, *kwargs.values()) if not isinstance(value, str)])
        width = 0 if name in UNPADDED else max_width(args[1:], kwargs)
        if name in LINE_WIDTHS:
            self._take_uses(args[:1], width)
        elif name == "sum" and any(isinstance(value, list | tuple) for value in (*args[1:], *kwargs.values())):
            raise LimitError("it sums lists, which copies each of them many times")
        elif name == "format":
            self._check_percent(str(args[0]), (args[1:], kwargs))
        elif name in ("replace", "join"):
            given = dict(zip(("text", "old", "new"), args, strict=False)) | kwargs
            text, old, new = (given.get(key, "") for key in ("text", "old", "new"))
            if name == "join":
                self.budget.take(size_of(text) * size_of(kwargs.get("d", old)), 0)
            else:
                texts: list[Any] = [value if isinstance(value, bytes) else str(value) for value in (text, old, new)]
                self.budget.take(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]), 0)


class ConcatTransformer(NodeTransformer):
    """Replaces the operator `~`, which jinja2 cannot intercept, by a call of `join_texts`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        method = nodes.EnvironmentAttribute("join_texts", lineno=node.lineno)
        return nodes.Call(method, node.nodes, [], None, None, lineno=node.lineno)


def counted(values: Iterator[Any], budget: Budget) -> Iterator[Any]:
    for value in values:
        budget.take()
        yield value


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 0


def max_width(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int:
    found = max((value for value in (*args, *kwargs.values()) if isinstance(value, int)), default=1)
    if found > MAX_WIDTH:
        raise LimitError(f"it pads to more than {MAX_WIDTH:,} characters")
    return found


def check_bits(num_bits: int) -> int:
    if num_bits > MAX_BITS:
        raise LimitError(f"it makes an integer of more than {MAX_BITS:,} bits")
    return num_bits


def product_size(left: Any, right: Any) -> int:
    """The number of items or bits of a product."""
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            return len(value) * max(0, times)
    return left.bit_length() + right.bit_length() if isinstance(left, int) and isinstance(right, int) else 0


def refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def raise_exception(message: object) -> None:
    raise RaisedError(str(message))


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; jinja2's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
