"""The CPU backend: our own kernels (csrc/), on tapes that are replayed without Python.

Activations are float32. `dtype` is the type of keys and values, and the one that float32 matrices are kept in; matrices
of other types stay as they are stored, those of GGUF in their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from archerfish.errors import DeviceError
from archerfish.kernels.batches import BlockMask, Ids, Segments
from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import WeightFormat
from archerfish.kernels.machine import cpu, usable_cores
from archerfish.kernels.native._native import Level, all_threads
from archerfish.kernels.native.adapters import NativeAdapters
from archerfish.kernels.native.recorder import (
    Handle,
    Input,
    Recorder,
    Replayer,
    Rows,
    TapeRunner,
    Value,
    set_batch,
    set_segments,
)
from archerfish.kernels.native.recurrent import NativeRecurrentOps
from archerfish.kernels.native.sampling import NativeSampling
from archerfish.kernels.native.weights import (
    ACTIVATIONS,
    TYPES,
    NativeWeight,
    Table,
    as_stored,
    expert_matrix,
    stack_parts,
)
from archerfish.kernels.ops import (
    KV_SCALE_BYTES,
    Activation,
    HeadShape,
    KVLayer,
    LinearWeight,
    NormWeights,
    Ops,
    PagedBatch,
    Pooling,
    Rotary,
    Rotation,
)
from archerfish.kernels.pool import set_pass_threads
from archerfish.kernels.sampling import Drawn, Logprobs, PoolStats, SamplingBatch, TokenCounts
from archerfish.kernels.stored import StoredTensor

POOLINGS: dict[Pooling, int] = {"mean": 0, "cls": 1, "lasttoken": 2, "max": 3, "mean_sqrt_len_tokens": 4}
INT8_TYPE = len(TYPES)  # of keys and values alone
DUMMY_SCALE = 0.02  # of random weights


class NativeOps(Ops[Any]):
    """Tensors are arrays of the host, or values of a tape that is being recorded."""

    name = "native"
    reads_stored = True
    activation_dtype = "float32"

    def __init__(self, device: str = "cpu", dtype: str = "float32", level: str = "") -> None:
        super().__init__()
        self.device = device
        self.dtype = dtype
        self.type = TYPES[dtype]
        self.level = Level(level)
        self.runner = TapeRunner(self.level, all_threads(cpu().num_cores))
        self._sampling = NativeSampling(self.runner)
        self._tables: dict[int, Table] = {}  # quantised lookup tables by the address of their data

    def pin_threads(self, is_wanted: bool) -> None:
        if is_wanted:
            self.runner.threads.pin(usable_cores())

    def start_thread(self, num_threads: int) -> None:
        set_pass_threads(num_threads)

    # Arrays of the host

    def tensor(self, values: npt.NDArray[Any] | Handle) -> Handle:
        return values

    def to_numpy(self, x: Handle) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = x.astype(np.float32, copy=False)
        return found

    def rows(self, x: Handle, indices: Ids | Handle) -> Handle:
        if not isinstance(x, Value):
            return x[indices]
        assert isinstance(indices, Value) and indices.source is Input.KEPT_ROWS
        recorder = self.runner.current()
        out = recorder.new(Rows.KEPT, x.width, 0)
        recorder.tape.kept_rows(recorder(x), 4 * x.width, recorder(out))
        return out

    def first_rows(self, x: Handle, num_rows: int) -> Handle:
        return x[:num_rows]

    def concat(self, parts: Sequence[Handle]) -> Handle:
        return np.concatenate(list(parts))

    def put(self, target: Handle, indices: Ids, values: Handle) -> None:
        target[indices] = values

    def send(self, values: Ids, target: Handle) -> Callable[[], None]:
        target[...] = values
        return lambda: None

    def fetch(self, x: Handle) -> Callable[[], npt.NDArray[Any]]:
        return lambda: x

    def replayed(self, call: Callable[[Any], Handle]) -> Callable[[Any], Handle]:
        """Where ranks exchange something within a pass, each operation is a tape of its own."""
        return Replayer(self.runner, call) if self.ranks.is_alone else call

    def new_adapters(self, num_slots: int, max_rank: int) -> NativeAdapters:
        return NativeAdapters(self, num_slots, max_rank)

    def recurrent(self) -> NativeRecurrentOps:
        return NativeRecurrentOps(self)

    # Weights

    def to_device(self, tensor: Handle) -> Handle:
        if isinstance(tensor, Table) or (isinstance(tensor, np.ndarray) and tensor.dtype == np.float32):
            return tensor
        tensor = as_stored(tensor)
        if not tensor.quant_type:
            return tensor
        key = tensor.data.ctypes.data
        if key not in self._tables:
            self._tables[key] = Table(*stack_parts([tensor], self.runner, self.dtype))
        return self._tables[key]

    def vector(self, weight: Handle, *, plus: float = 0.0, times: float = 1.0) -> Handle:
        return np.ascontiguousarray((as_stored(weight).as_floats() + np.float32(plus)) * np.float32(times))

    def pack_linear(
        self, parts: Sequence[Handle], biases: Sequence[Handle | None], weight_format: WeightFormat
    ) -> NativeWeight:
        tied = [each.matrix for each in parts if isinstance(each, Table)]
        matrices = tied or stack_parts(parts, self.runner, self.dtype, weight_format.name, rounds_rows=self.rounds_rows)
        if any(bias is not None for bias in biases):
            sizes = [part.shape[0] for part in parts]
            given = [
                np.zeros(size, dtype=np.float32) if bias is None else self.vector(bias)
                for size, bias in zip(sizes, biases, strict=True)
            ]
            ends = np.cumsum([matrix.num_outputs for matrix in matrices])
            for matrix, bias in zip(matrices, np.split(np.concatenate(given), ends[:-1]), strict=True):
                matrix.set_bias(bias)
        return NativeWeight(self.runner, matrices, is_deterministic=self.is_deterministic)

    def prepare(self, then: Callable[[], None] = lambda: None) -> None:
        super().prepare()
        self.runner.start_packing(then)

    def release(self) -> None:
        self._tables.clear()
        super().release()

    def random_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Handle]:
        made: dict[str, Handle] = {}
        random = np.random.default_rng(0)
        for name, shape in shapes.items():
            array = random.standard_normal(shape, dtype=np.float32) * np.float32(DUMMY_SCALE)
            if len(shape) == 1 and name.endswith("norm.weight"):
                array += 1
            made[name] = StoredTensor(shape, "float32", array)
        return made

    # Lookups and norms

    def _look_up(self, tables: Sequence[Handle], ids: Sequence[Handle], scale: float) -> Handle:
        recorder = self.runner.current()
        sources: list[int] = []
        inputs = (Input.TOKEN_IDS, Input.POSITIONS, Input.TYPE_IDS)
        for each, free in zip(ids, inputs, strict=False):
            if isinstance(each, Value):
                assert each.source is not None
                sources.append(each.source)
            else:
                recorder.step.set(free, np.ascontiguousarray(each))
                sources.append(free)
        offsets = [each.offset if isinstance(each, Value) else 0 for each in ids]
        width = tables[0].shape[1]
        num_rows = 0 if isinstance(ids[0], Value) else len(ids[0])
        out = recorder.new(Rows.TOKENS, width, num_rows)
        packed = tables[0].matrix if isinstance(tables[0], Table) else None
        stored = [None if isinstance(each, Table) else as_stored(each) for each in tables]
        plain = [np.empty(0, dtype=np.float32) if each is None else each.data for each in stored]
        types = [0 if each is None else TYPES[each.dtype] for each in stored]
        recorder.tape.tables(plain, types, sources, offsets, packed, scale, width, recorder(out))
        self.runner.finish(recorder)
        return out

    def embed(self, tables: Sequence[Handle], ids: Sequence[Handle]) -> Handle:
        return self._look_up([tables[0], *map(self._plain_table, tables[1:])], ids, 1.0)  # only the first can be packed

    def _plain_table(self, table: Handle) -> Handle:
        if not isinstance(table, Table):
            return table
        self.runner.finish_packing()
        floats = np.empty(table.shape, dtype=np.float32)
        table.matrix.unpack(floats, self.level)
        return floats

    def lookup(self, table: Handle, ids: Handle, *, scale: float = 1.0) -> Handle:
        return self._look_up((table,), (ids,), scale)

    def _norm(
        self, x: Handle, before: Handle | None, weight: Handle | None, bias: Handle | None, eps: float
    ) -> tuple[Handle, Handle]:
        recorder, width = self.runner.current(), x.shape[1]
        out = recorder.like(x, width)
        total = x if before is None or weight is None else recorder.like(x, width)
        place = -1 if total is x else recorder(total)
        recorder.tape.norm(recorder(x), recorder(before), place, weight, bias, eps, width, recorder(out))
        self.runner.finish(recorder)
        return out, total

    def layer_norm(self, x: Handle, norm: NormWeights[Handle]) -> Handle:
        return self._norm(x, None, norm.weight, norm.bias, norm.eps)[0]

    def rms_norm(
        self, x: Handle, weight: Handle, eps: float, *, residual: Handle | None = None
    ) -> tuple[Handle, Handle]:
        return self._norm(x, residual, weight, None, eps)

    def add(self, x: Handle, residual: Handle) -> Handle:
        return self._norm(x, residual, None, None, 0.0)[0]

    def normed_linear(
        self,
        x: Handle,
        norm: Handle,
        eps: float,
        weight: LinearWeight[Handle],
        *,
        residual: Handle | None = None,
        gate: Activation | None = None,
    ) -> tuple[Handle, Handle]:
        if self.adapted(weight) is not None:
            return super().normed_linear(x, norm, eps, weight, residual=residual, gate=gate)
        packed = weight.get()
        assert isinstance(packed, NativeWeight)
        y, total = packed.multiply_normed(x, norm, eps, residual, gate)
        return (y if gate is None or packed.can_gate else self.gated(y, gate)), total

    def logits(self, x: Handle, head: LinearWeight[Handle], *, softcap: float = 0.0) -> Handle:
        packed = head.get()
        assert isinstance(packed, NativeWeight)
        table = self.adapted(head)
        if table is not None and self.adapters is not None:
            return self.adapters.add(packed.multiply(x, "none", None), x, table, softcap=softcap)
        return packed.multiply(x, "none", None, softcap=softcap)

    def gated(self, x: Handle, activation: Activation) -> Handle:
        recorder, width = self.runner.current(), x.shape[1] // 2
        out = recorder.like(x, width)
        recorder.tape.gated(recorder(x), width, ACTIVATIONS[activation], recorder(out))
        self.runner.finish(recorder)
        return out

    def experts(
        self,
        x: Handle,
        logits: Handle,
        routing: Routing[Handle],
        gate_up: LinearWeight[Handle],
        down: LinearWeight[Handle],
        activation: Activation,
        *,
        shared: Handle | None = None,
    ) -> Handle:
        recorder, num_chosen = self.runner.current(), routing.num_chosen
        first, second = (expert_matrix(weight) for weight in (gate_up, down))
        sizes = [logits.shape[1], routing.num_experts, num_chosen]
        ids, weights, order = (recorder.like(x, num_chosen) for _ in range(3))  # numbers of 4 bytes
        hidden, out = recorder.like(x, num_chosen * second.num_inputs), recorder.like(x, x.shape[1])
        recorder.tape.route(
            recorder(logits),
            sizes,
            routing.is_sigmoid,
            routing.is_normed,
            routing.scale,
            routing.bias,
            recorder(ids),
            recorder(weights),
            recorder(order),
        )
        chosen: dict[str, Any] = {
            "sizes": sizes,
            "ids": recorder(ids),
            "order": recorder(order),
            "is_deterministic": self.is_deterministic,
        }
        tables = [self.adapted(weight) for weight in (gate_up, down)]
        before, after = (
            {} if table is None else cast(NativeAdapters, self.adapters).of_experts(recorder, x, table, num_chosen)
            for table in tables
        )
        recorder.tape.experts(
            first,
            recorder(x),
            activation=ACTIVATIONS[activation],
            weights=-1,
            logits=-1,
            shared=-1,
            out=recorder(hidden),
            **chosen,
            **before,
        )
        recorder.tape.experts(
            second,
            recorder(hidden),
            activation=0,
            weights=recorder(weights),
            logits=recorder(logits),
            shared=recorder(shared),
            out=recorder(out),
            **chosen,
            **after,
        )
        self.runner.finish(recorder)
        return out

    # Attention

    def _attend(
        self,
        recorder: Recorder,
        q: Handle,
        heads: HeadShape,
        kv: KVLayer[Handle] | None,
        bias: Handle | None,
        sinks: Handle | None,
    ) -> Handle:
        width = heads.num_heads * heads.head_dim
        out = recorder.like(q, width)
        shape = [heads.num_heads, heads.num_kv_heads, heads.head_dim]
        keys, values = (None, None) if kv is None else (kv.keys, kv.values)
        recorder.tape.attend(
            recorder(q),
            recorder(out),
            shape,
            heads.scale,
            heads.window,
            heads.softcap,
            keys,
            values,
            TYPES["float32"] if kv is None else self._kv_type(kv),
            recorder(bias),
            is_exact=self.is_deterministic or self.dtype == "float32",
            is_causal=heads.is_causal or kv is not None,
            sinks=sinks,
        )
        self.runner.finish(recorder)
        return out

    def attention(
        self,
        qkv: Handle,
        segments: Segments,
        heads: HeadShape,
        *,
        bias: Handle | None = None,
        sinks: Handle | None = None,
    ) -> Handle:
        recorder = self.runner.current()
        if recorder.is_eager:
            set_segments(recorder.step, segments)
            recorder.step.sizes[3] = 0 if bias is None else bias.shape[1]
        return self._attend(recorder, qkv, heads, None, bias, sinks)

    def relative_bias(self, table: Handle, buckets: Ids) -> Handle:
        return np.ascontiguousarray(as_stored(table).as_floats()[buckets].transpose(2, 0, 1), dtype=np.float32)

    def rotary(
        self, cos_sin: npt.NDArray[np.float32], rotary_dim: int, *, is_interleaved: bool = False
    ) -> Rotary[Handle]:
        return Rotary(np.ascontiguousarray(cos_sin), rotary_dim, is_interleaved)

    def new_kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVLayer[Handle]:
        is_int8, dtype = self.kv_dtype == "int8", "float32" if self.dtype == "float32" else "uint16"
        shape = (num_blocks, block_size, num_kv_heads, head_dim + KV_SCALE_BYTES * is_int8)
        keys, values = (np.zeros(shape, dtype="int8" if is_int8 else dtype) for _ in range(2))
        return KVLayer(keys, values)

    def _kv_type(self, kv: KVLayer[Handle]) -> int:
        return INT8_TYPE if kv.keys.dtype == np.int8 else self.type

    def copy_blocks(self, layers: Sequence[KVLayer[Handle]], pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = np.array(pairs, dtype=np.int64).T
        for layer in layers:
            for memory in (layer.keys, layer.values):
                memory[targets] = memory[sources]

    def store_kv(
        self, qkv: Handle, kv: KVLayer[Handle], batch: PagedBatch[Handle], heads: HeadShape, rotation: Rotation[Handle]
    ) -> Handle:
        recorder = self.runner.current()
        if recorder.is_eager:
            set_batch(recorder.step, batch)
        q = recorder.like(qkv, heads.num_heads * heads.head_dim)
        recorder.step.sizes[Rows.TOKENS] = batch.num_tokens if recorder.is_eager else 0
        self._turn(recorder, qkv, q, heads, rotation, kv)
        return q

    def _turn(
        self,
        recorder: Recorder,
        qkv: Handle,
        q: Handle,
        heads: HeadShape,
        rotation: Rotation[Handle],
        kv: KVLayer[Handle] | None,
    ) -> None:
        rotary = rotation.rotary
        keys, values, kind = (None, None, TYPES["float32"]) if kv is None else (kv.keys, kv.values, self._kv_type(kv))
        recorder.tape.store_kv(
            recorder(qkv),
            recorder(q),
            [heads.num_heads, heads.num_kv_heads, heads.head_dim],
            None if rotary is None else rotary.cos_sin,
            0 if rotary is None else rotary.rotary_dim,
            rotation.q_norm,
            rotation.k_norm,
            rotation.eps,
            keys,
            values,
            kind,
            rotary is not None and rotary.is_interleaved,
        )
        self.runner.finish(recorder)

    def rotated(self, qkv: Handle, positions: Handle, heads: HeadShape, rotation: Rotation[Handle]) -> Handle:
        recorder = self.runner.current()
        if recorder.is_eager:
            recorder.step.set(Input.POSITIONS, positions)
            recorder.step.sizes[Rows.TOKENS] = len(positions)
        self._turn(recorder, qkv, qkv, heads, rotation, None)
        return qkv

    def paged_attention(
        self,
        q: Handle,
        kv: KVLayer[Handle],
        batch: PagedBatch[Handle],
        heads: HeadShape,
        *,
        mask: BlockMask[Handle] | None = None,
        sinks: Handle | None = None,
    ) -> Handle:
        if mask is not None:
            raise DeviceError("The native CPU backend has no block masks.", hint="Use the backend 'torch reference'.")
        recorder = self.runner.current()
        if recorder.is_eager:
            set_batch(recorder.step, batch)
        return self._attend(recorder, q, heads, kv, None, sinks)

    # Encoders

    def pool(self, x: Handle, segments: Segments, mode: Pooling) -> Handle:
        recorder, width = self.runner.current(), x.shape[1]
        if recorder.is_eager:
            set_segments(recorder.step, segments)
            recorder.step.sizes[Rows.TOKENS] = len(x)
        out = recorder.new(Rows.SEQUENCES, width, recorder.step.sizes[Rows.SEQUENCES])
        recorder.tape.pool(recorder(x), width, POOLINGS[mode], recorder(out))
        self.runner.finish(recorder)
        return out

    def normalize(self, x: Handle) -> Handle:
        recorder, width = self.runner.current(), x.shape[1]
        out = recorder.like(x, width)
        recorder.tape.normalize(recorder(x), width, recorder(out))
        self.runner.finish(recorder)
        return out

    # Sampling

    def sample(self, logits: Handle, batch: SamplingBatch[Handle]) -> Drawn[Handle]:
        return self._sampling.sample(logits, batch)

    def token_logprobs(
        self, logits: Handle, token_ids: Handle, num_top: int, *, rows: Ids | None = None
    ) -> Logprobs[Handle]:
        return self._sampling.token_logprobs(logits, token_ids, num_top, rows)

    def new_counts(self, num_rows: int, vocab_size: int) -> TokenCounts[Handle]:
        return self._sampling.new_counts(num_rows, vocab_size)

    def set_counts(self, counts: TokenCounts[Handle], row: int, prompt: Ids, output: Ids) -> None:
        self._sampling.set_counts(counts, row, prompt, output)

    def add_counts(self, counts: TokenCounts[Handle], row: int, output: Ids, *, source: int | None = None) -> None:
        self._sampling.add_counts(counts, row, output, source)

    def pool_stats(self) -> PoolStats:
        return self._sampling.pool_stats()
