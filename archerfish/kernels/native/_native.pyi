# ruff: noqa: A002
# The module of csrc/module.cpp, bind_pack.cpp, bind_sample.cpp and bind_wkv.cpp. Values of a tape are numbers; -1: none.
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

def levels() -> list[str]: ...
def all_threads(num_threads: int) -> Threads: ...
def shift(tape: Tape, x: int, inputs: Floats, factors: Floats, outs: Sequence[int]) -> None: ...
def mix_heads(
    tape: Tape, inputs: Sequence[int], weights: Sequence[Floats], eps: float, states: Floats, out: int
) -> None: ...

class Level:
    def __init__(self, name: str = "") -> None: ...
    @property
    def name(self) -> str: ...

class Threads:
    @property
    def count(self) -> int: ...
    def pin(self, cores: Sequence[int]) -> None: ...

class Matrix:
    def __init__(self, format: int, num_outputs: int, num_inputs: int) -> None: ...
    @property
    def format(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def set_bias(self, bias: Floats, /) -> None: ...
    def add_rows(
        self, rows: Array, first: int, count: int, type: int = 0, scales: Array | None = None, mins: Array | None = None
    ) -> None: ...
    def unpack(self, out: Floats, level: Level) -> None: ...

class Packing:
    def __init__(self, matrices: Sequence[Matrix]) -> None: ...
    def run(self, threads: Threads, num_threads: int) -> None: ...

class Tape:
    def __init__(self, level: Level, /) -> None: ...
    @property
    def num_replays(self) -> int: ...
    @property
    def num_allocations(self) -> int: ...
    def value(self, rows: int, row_bytes: int, /) -> int: ...
    def result(self, rows: int, row_bytes: int, /) -> int: ...
    def constant(self, array: Array, /) -> int: ...
    def linear(
        self,
        matrix: Matrix,
        x: int,
        out: int,
        first: int,
        width: int,
        activation: int = 0,
        is_gated: bool = False,
        residual: int = -1,
        softcap: float = 0.0,
        norm: Floats | None = None,
        eps: float = 0.0,
        before: int = -1,
        total: int = -1,
        is_deterministic: bool = False,
    ) -> None: ...
    def lora(
        self,
        y: int,
        x: int,
        inner: int,
        down: Array,
        up: Array,
        ranks: Array,
        sizes: Sequence[int],
        is_lookup: bool,
        activation: int,
        softcap: float,
        scale: float,
    ) -> None: ...
    def norm(
        self,
        x: int,
        before: int,
        total: int,
        weight: Floats | None,
        bias: Floats | None,
        eps: float,
        width: int,
        out: int,
    ) -> None: ...
    def tables(
        self,
        tables: Sequence[Array],
        types: Sequence[int],
        inputs: Sequence[int],
        offsets: Sequence[int],
        packed: Matrix | None,
        scale: float,
        width: int,
        out: int,
    ) -> None: ...
    def store_kv(
        self,
        qkv: int,
        q: int,
        heads: Sequence[int],
        cos_sin: Floats | None,
        rotary_dim: int,
        q_norm: Floats | None,
        k_norm: Floats | None,
        eps: float,
        keys: Array | None,
        values: Array | None,
        type: int,
        is_interleaved: bool = False,
    ) -> None: ...
    def attend(
        self,
        q: int,
        out: int,
        heads: Sequence[int],
        scale: float,
        window: int,
        softcap: float,
        keys: Array | None,
        values: Array | None,
        type: int,
        bias: int,
        is_exact: bool,
        is_causal: bool,
        sinks: Floats | None = None,
    ) -> None: ...
    def route(
        self,
        logits: int,
        sizes: Sequence[int],
        is_sigmoid: bool,
        is_normed: bool,
        scale: float,
        bias: Floats | None,
        ids: int,
        weights: int,
        order: int,
    ) -> None: ...
    def experts(
        self,
        matrix: Matrix,
        x: int,
        sizes: Sequence[int],
        ids: int,
        order: int,
        activation: int,
        weights: int,
        logits: int,
        shared: int,
        is_deterministic: bool,
        out: int,
        down: Array | None = None,
        up: Array | None = None,
        ranks: Array | None = None,
        parts: Sequence[int] = (),
        inner: int = -1,
    ) -> None: ...
    def gated(self, x: int, width: int, activation: int, out: int) -> None: ...
    def kept_rows(self, x: int, row_bytes: int, out: int) -> None: ...
    def copy(self, x: int, out: int, row_bytes: int) -> None: ...
    def pool(self, x: int, width: int, mode: int, out: int) -> None: ...
    def normalize(self, x: int, width: int, out: int) -> None: ...
    def run(
        self,
        threads: Threads,
        num_threads: int,
        sizes: Sequence[int],
        inputs: Sequence[Array | None],
        results: Sequence[Array],
    ) -> None: ...

class Sampler:
    def __init__(self, level: Level) -> None: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def num_allocations(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def sample(
        self, threads: Threads, num_threads: int, logits: Floats, parts: Sequence[Array | None], report: Array, /
    ) -> None: ...
    def score(
        self,
        threads: Threads,
        num_threads: int,
        logits: Floats,
        token_ids: Array,
        rows: Array | None,
        logprobs: Array,
        ranks: Array,
        top_ids: Array,
        top_logprobs: Array,
        /,
    ) -> None: ...
    def draw(
        self, logits: Floats, temperature: float, top_k: int, top_p: float, number: float, /
    ) -> tuple[int, int]: ...
