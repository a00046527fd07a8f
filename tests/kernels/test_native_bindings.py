"""Wrong sizes, types, strides and numbers from Python raise a ValueError or TypeError in every binding.

`make test-sanitizers` runs this with many more examples: there, an access out of bounds ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_native = pytest.importorskip("archerfish.kernels.native._native")

EXAMPLES = 6000 if "NATIVE_MODULE" in os.environ else 250
BLOCK_BYTES = {
    3: 128,
    4: 128,
    5: 160,
    6: 160,
    7: 256,
    8: 144,
    9: 176,
    10: 210,
    12: 128,
}  # a row of 256 inputs, by format
INPUTS, OUTPUTS, TOKENS, SLOTS = 256, 64, 5, 16
SIZES = [TOKENS, 2, 2, 3, 4, 2]  # tokens, kept rows, sequences, table width, block size, pieces
STEP = [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 1, 2, 8, -1], [0, 1, 99, 2, 3, -7], [0, 3, 5], [3, 8], [1, 4]]
STEP += [[0, 1, 0, 1, 0], [-1, 0, 1, -2, 3], [0, 1], [1, 0], [0, 3, 5], [0, 1, 2], [0, 1, 2, 1, 0]]
NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 17, 2**28, 2**28 + 1, 2**31 - 1, 2**40, 2**63 - 1, 2**64)
FLOATS = (0.0, 0.5, 2.0, 17.0)  # integer formats take finite activations only


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def words(*shape: int) -> Any:
    return np.ones(shape, np.int64)


def doubles(*shape: int) -> Any:
    return np.ones(shape, np.float64)


class Scene:
    """A tape, a matrix and a sampler, and the arrays of a step that fit all calls of `CALLS`."""

    def __init__(self, number: int = 0, level: str = "") -> None:
        self.format, self.Level, self.Threads = number, _native.Level(level), _native.all_threads(2)
        self.Tape, self.Sampler = _native.Tape(self.Level), _native.Sampler(self.Level)
        self.Matrix, self.Packing = _native.Matrix(number, OUTPUTS, INPUTS), _native.Packing([])
        self.results = list[Any]()

    def value(self, width: int, rows: int = 0) -> int:
        """A value of the tape. rows: the number of a `recorder.Rows`."""
        made = int(self.Tape.value(rows, 4 * width))
        self.Tape.copy(self.Tape.constant(ones(TOKENS, width)), made, 4 * width)
        return made

    def new_result(self, width: int) -> list[Any]:
        self.results.append(ones(TOKENS, width))
        return [0, 4 * width]

    def result(self, width: int) -> int:
        return int(self.Tape.result(*self.new_result(width)))

    def rows(self) -> list[Any]:
        num_bytes = BLOCK_BYTES.get(self.format)
        data = ones(OUTPUTS, INPUTS) if num_bytes is None else ones(OUTPUTS, num_bytes, dtype=np.uint8)
        return [data, 0, OUTPUTS, 0, *(ones(OUTPUTS, INPUTS // 32, dtype=np.uint16) for _ in range(2))]

    def packed(self) -> Any:
        self.Matrix.add_rows(*self.rows())
        _native.Packing([self.Matrix]).run(self.Threads, 2)
        return self.Matrix

    def experts(self, *, is_second: bool) -> list[Any]:
        ids, weights, order, logits = self.value(2), self.value(2), self.value(2), self.value(3)
        self.Tape.route(logits, [3, 2, 2], False, True, 1.0, ones(2), ids, weights, order)
        parts = [32] if is_second else [16, 16]
        stacks = [ones(4, 2 * len(parts), INPUTS), ones(4, 2, 32), words(4), parts, self.value(4 * len(parts))]
        end = [weights, logits, self.value(32)] if is_second else [-1, -1, -1]
        x = self.value(2 * INPUTS if is_second else INPUTS)
        return [self.packed(), x, [3, 2, 2], ids, order, 6, *end, False, self.value(32), *stacks]

    def attention(self, *, has_keys: bool) -> list[Any]:
        keys = [ones(SLOTS, 2, 16, dtype=np.uint16) for _ in range(2)] if has_keys else [None, None]
        end = [2, -1] if has_keys else [0, self.Tape.constant(ones(4, 3, 3))]
        return [self.value(64 if has_keys else 128), self.value(64), [4, 2, 16], 0.1, 3, 2.0, *keys, *end, False, True]

    def lora(self, *, is_lookup: bool) -> list[Any]:
        stacks = [ones(2, 5, 2) if is_lookup else ones(2, 4, 32), ones(2, 2, 48), words(2)]
        sizes = [48] if is_lookup else [16, 32]
        return [self.value(48, 1), self.value(32, 1), self.value(4, 1), *stacks, sizes, is_lookup, 1, 0.0, 1.0]

    def sampling(self) -> list[Any]:
        """All arrays of a SamplingBatch, for three rows of 70 logits."""
        three, row, one = doubles(3), doubles(1), words(1)
        parts = [three, 0 * words(3), words(3), words(3), three / 9, one, 5 * one, row / 2, one, one, row, one, one]
        parts += [one, words(1, 2), words(3), 60 * words(3), words(3), one, one, ones(3, 70, dtype=np.int32)]
        return [*parts, words(3, 4), words(3), row, row, row]

    def step(self) -> list[Any]:
        return [self.Threads, 2, [*SIZES], [np.array(numbers) for numbers in STEP], self.results]

    def whole_step(self) -> list[Any]:
        """A step of operations that read all of its arrays."""
        for name in ("Tape.pool", "Tape.kept_rows", "Tape.tables", "Tape.lora", "Tape.store_kv", "shift", "mix_heads"):
            self.call(name, CALLS[name](self))
        self.call("Tape.attend", self.attention(has_keys=True))
        return self.step()

    def call(self, name: str, args: list[Any]) -> None:
        owner, _, method = name.rpartition(".")
        (getattr(getattr(self, owner), method) if owner else getattr(_native, name))(*args)


CALLS: dict[str, Callable[[Scene], list[Any]]] = {
    "levels": lambda s: [],
    "all_threads": lambda s: [2],
    "Level": lambda s: [s.Level.name],
    "Threads.pin": lambda s: [[]],
    "Matrix": lambda s: [s.format, OUTPUTS, INPUTS],
    "Matrix.add_rows": lambda s: s.rows(),
    "Matrix.set_bias": lambda s: [ones(OUTPUTS)],
    "Matrix.unpack": lambda s: [s.packed() and ones(OUTPUTS, INPUTS), s.Level],
    "Packing": lambda s: [[_native.Matrix(0, 8, 8), s.Matrix]],
    "Packing.run": lambda s: [s.Threads, 2],
    "Sampler": lambda s: [s.Level],
    "Sampler.draw": lambda s: [ones(70), 1.0, 3, 0.5, 0.7],
    "Sampler.sample": lambda s: [s.Threads, 2, ones(3, 70), s.sampling(), words(2, 3)],
    "Sampler.score": lambda s: [
        *(s.Threads, 2, ones(3, 70), np.array([5, 69]), np.array([2, 0])),
        *(doubles(2), words(2), words(2, 4), doubles(2, 4)),
    ],
    "Tape": lambda s: [s.Level],
    "Tape.value": lambda s: [1, 64],
    "Tape.result": lambda s: s.new_result(4),
    "Tape.constant": lambda s: [ones(3, 4)],
    "Tape.copy": lambda s: [s.value(8), s.result(8), 32],
    "Tape.kept_rows": lambda s: [s.value(8), 32, s.value(8, 1)],
    "Tape.gated": lambda s: [s.value(64), 32, 3, s.value(32)],
    "Tape.normalize": lambda s: [s.value(32), 32, s.Tape.constant(ones(TOKENS, 32))],
    "Tape.pool": lambda s: [s.value(32), 32, 2, s.value(32, 2)],
    "Tape.norm": lambda s: [s.value(32), s.value(32), s.value(32), ones(32), ones(32), 1e-5, 32, s.value(32)],
    "Tape.tables": lambda s: [
        *([ones(5, INPUTS), ones(4, INPUTS, dtype=np.uint16), ones(2, INPUTS)], [0, 2, 0], [0, 1, 7], [0, 1, 0]),
        *(s.packed(), 2.0, INPUTS, s.result(INPUTS)),
    ],
    "Tape.linear": lambda s: [
        *(s.packed(), s.value(INPUTS), s.result(OUTPUTS), 0, OUTPUTS, 1, False, s.value(OUTPUTS), 0.0, ones(INPUTS)),
        *(1e-5, s.value(INPUTS), s.value(INPUTS), False),
    ],
    "Tape.lora": lambda s: s.lora(is_lookup=s.format % 2 == 1),
    "Tape.route": lambda s: [s.value(3), [3, 2, 2], False, True, 1.0, ones(2), s.value(2), s.value(2), s.value(2)],
    "Tape.experts": lambda s: s.experts(is_second=s.format % 2 == 1),
    "Tape.store_kv": lambda s: [
        *(s.value(128), s.value(64), [4, 2, 16], ones(4, 16), 16, ones(16), ones(32), 1e-5),
        *(ones(SLOTS, 2, 20, dtype=np.int8), ones(SLOTS, 2, 20, dtype=np.int8), 3, False),
    ],
    "Tape.attend": lambda s: [*s.attention(has_keys=s.format % 2 == 1), ones(4)],
    "Tape.run": lambda s: s.whole_step(),
    "shift": lambda s: [s.Tape, s.value(32), ones(2, 32), ones(2, 32), [s.value(32), s.value(32)]],
    "mix_heads": lambda s: [
        s.Tape,
        [s.value(32) for _ in range(8)],
        [ones(32)] * 5,
        1e-5,
        ones(2, 2, 16, 16),
        s.value(32),
    ],
}
# Each read or wrote other memory before it was checked: the binding, an argument and what it was.
WRONG: list[tuple[str, int, Any]] = [
    ("Matrix.set_bias", 0, ones(99_999)),
    ("Matrix.add_rows", 1, 1),
    ("Matrix.add_rows", 0, ones(1, INPUTS)),
    ("Matrix", 0, 99),
    ("Matrix.unpack", 0, ones(1, 1)),
    ("Packing", 0, [None]),
    ("Tape.tables", 0, [ones(5, INPUTS)] * 40),
    ("Tape.linear", 1, 10**6),
    ("Tape.linear", 4, 1),
    ("Tape.lora", 5, words(1)),
    ("Tape.experts", 2, [3, 9, 2]),
    ("Tape.norm", 6, 10**6),
    ("Tape.store_kv", 2, [4, 0, 16]),
    ("Tape.attend", 2, [4]),
    ("Tape.route", 1, [3]),
    ("Tape.run", 2, [1]),
    ("Tape.run", 3, [None] * 99),
    ("Tape.run", 4, []),
    ("Tape.value", 0, 7),
    ("Sampler.sample", 4, words(1)),
    ("Sampler.score", 7, words(0, 4)),
    ("mix_heads", 1, [0] * 40),
    ("mix_heads", 2, [ones(32)]),
    ("Threads.pin", 0, [-1]),
]


@pytest.mark.parametrize(("name", "place", "wrong"), WRONG, ids=[f"{name} {place}" for name, place, _ in WRONG])
def test_known_cases_are_refused(name: str, place: int, wrong: Any) -> None:
    scene = Scene()
    args = CALLS[name](scene)
    args[place] = wrong
    with pytest.raises((ValueError, TypeError)):
        scene.call(name, args)


@pytest.mark.parametrize("number", range(13))
def test_right_arguments_are_taken(number: int) -> None:
    """And every binding is in the table."""
    classes = {name: each for name, each in vars(_native).items() if isinstance(each, type)}
    found = {name for name, each in vars(_native).items() if callable(each)} - {"Threads"}  # all_threads makes these
    for owner, each in classes.items():
        found |= {f"{owner}.{name}" for name, method in vars(each).items() if callable(method) and name[0] != "_"}
    assert found == CALLS.keys()
    for name in CALLS:
        scene = Scene(number)
        scene.call(name, CALLS[name](scene))
        scene.call("Tape.run", scene.step())


def changed_array(draw: Any, x: Any) -> Any:
    entries, read_only, unaligned = x.copy(), x.copy(), np.frombuffer(bytes(1) + x.tobytes(), x.dtype, offset=1)
    if x.size:
        number = draw(st.sampled_from(FLOATS if x.dtype.kind == "f" else NUMBERS[:-1]))
        entries.flat[draw(st.integers(0, x.size - 1))] = np.asarray(number).astype(x.dtype)
    read_only.flags.writeable = False
    made = [entries, read_only, unaligned.reshape(x.shape), np.repeat(x, 2, axis=-1)[..., ::2], x.T, x[None], x.sum()]
    made += [
        x[:0],
        x[1:],
        x[..., ::-1],
        x[..., :-1],
        x.reshape(-1),
        np.concatenate([x, x]),
        np.broadcast_to(x[:1], x.shape),
    ]
    return draw(st.sampled_from([*made, *(x.astype(each) for each in (np.float64, np.int32, np.uint8))]))


def changed(draw: Any, x: Any) -> Any:
    """An argument that is wrong, in most cases."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, "x", 1.5, [], [1, 2], np.zeros(0, np.float32)]))
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return draw(st.sampled_from([*NUMBERS, x - 1, x + 1, 2 * x]))
    if isinstance(x, float):
        return draw(st.sampled_from(FLOATS))
    if isinstance(x, np.ndarray) and x.ndim:
        return changed_array(draw, x)
    if isinstance(x, list) and x:
        place = draw(st.integers(0, len(x) - 1))
        new = draw(st.sampled_from([[], [x[place], x[place]], [changed(draw, x[place])], [changed(draw, x[place])]]))
        return [*x[:place], *new, *x[place + 1 :]]
    return x


@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_wrong_arguments_raise_value_errors(data: st.DataObject) -> None:
    scene = Scene(data.draw(st.integers(0, 12)), data.draw(st.sampled_from(_native.levels())))
    name = data.draw(st.sampled_from([name for name in CALLS if name != "levels"]))
    args = CALLS[name](scene)
    for place in data.draw(st.sets(st.integers(0, len(args) - 1), min_size=1, max_size=2)):
        args[place] = changed(data.draw, args[place])
    try:
        scene.call(name, args)
        scene.call("Tape.run", scene.step())
    except (TypeError, ValueError):
        pass
