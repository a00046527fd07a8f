"""The GPU backend: torch's products, and Triton kernels for those with few rows and for what stands between them.

Host arrays travel through pinned memory, so that no operation waits for the device. At the front of a recorded step of
decodes `stage_kernel` turns what the host sent (`decoding.py`) into a batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from archerfish.errors import InvalidOptionError
from archerfish.kernels.adapters import Adapters
from archerfish.kernels.batches import BlockMask, Ids, Segments
from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input, PassSize
from archerfish.kernels.experts import Routing
from archerfish.kernels.ops import (
    Activation,
    HeadShape,
    KVLayer,
    LinearWeight,
    NormWeights,
    PagedBatch,
    Pooling,
    R,
    Rotation,
)
from archerfish.kernels.recurrent import RecurrentOps
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.stored import GPU_TYPES, StoredTensor
from archerfish.kernels.torch.reference import TorchOps, TorchWeight, pass_rows
from archerfish.kernels.torch.sampling import sampling_batch
from archerfish.kernels.triton import attention as triton_attention
from archerfish.kernels.triton import compiling
from archerfish.kernels.triton import encoder as triton_encoder
from archerfish.kernels.triton import linear as triton_linear
from archerfish.kernels.triton import norm as triton_norm
from archerfish.kernels.triton.adapters import TritonAdapters
from archerfish.kernels.triton.attention import attend_decodes, takes_new
from archerfish.kernels.triton.compiling import CompileCounts
from archerfish.kernels.triton.experts import compute_experts
from archerfish.kernels.triton.linear import (
    ByteRowsWeight,
    FewRowsWeight,
    Fp8RowsWeight,
    GroupsWeight,
    Int8BothWeight,
    Int8RowsWeight,
    PlainRowsWeight,
    RowsWeight,
    Uploads,
    expand_queries,
)
from archerfish.kernels.triton.plan import SHORT_ROWS, AttentionPlan, Tile, find_plan, to_device
from archerfish.kernels.triton.prefill import attend_prefills
from archerfish.kernels.triton.sampling import TritonSampling
from archerfish.kernels.triton.tiles import NORMED_WIDTH
from archerfish.types import Progress

Tensor = torch.Tensor
FLOAT32_WIDTH = 2048  # of models that add up their layers in float32; in wider ones that would cost 2 % of a prefill
COPY_WORDS = 2048  # of 4 bytes that a program copies at a time
TABLE_STEP = 256  # blocks of a list that are moved at a time
WORD_BYTES = 4
FP8_CAPABILITY = (8, 9)
PINNED_BYTES = 1 << 18  # of a buffer that is used again for what is fetched
EXPECTED_SHARE = 4  # one in so many of the decodes that a recorded pass over prompts has room for are there
TYPES = {torch.float32: "<f4", torch.int64: "<i8"}  # by their names in CUDA's array interface
INTERPRETER_PROCESSORS = 4  # that Triton's interpreter claims to have


@triton.jit(do_not_specialize=["num_words"])
def copy_blocks_kernel(memories, sources, targets, num_words, block: tl.constexpr):
    memory = tl.load(memories + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    source = memory + tl.load(sources + tl.program_id(0)) * num_words
    target = memory + tl.load(targets + tl.program_id(0)) * num_words
    for start in range(0, num_words, block):
        words = start + tl.arange(0, block)
        tl.store(target + words, tl.load(source + words, mask=words < num_words, other=0), mask=words < num_words)


@triton.jit(do_not_specialize=["num_rows"])
def stage_kernel(
    token_words,
    row_words,
    position_words,
    block_words,
    shared_words,
    last_tokens,
    tables,
    token_ids,
    places,
    table_copies,
    lengths,
    num_rows,
    table_stride,
    block_size: tl.constexpr,
    on_device: tl.constexpr,
    step: tl.constexpr,
):
    """places: positions, slots and next positions; lengths: contexts, and behind them how many tokens are shared."""
    sequence = tl.program_id(0)
    token = tl.load(token_words + sequence)
    row = tl.load(row_words + sequence)
    position = tl.load(position_words + sequence)
    block = tl.load(block_words + sequence)
    is_real = position >= 0
    tl.store(token_ids + sequence, tl.where(token == on_device, tl.load(last_tokens + row), token))
    tl.store(places + sequence, tl.maximum(position, 0))
    tl.store(places + num_rows + sequence, tl.where(is_real, block * block_size + position % block_size, -1))
    tl.store(places + 2 * num_rows + sequence, position + 1)
    tl.store(lengths + sequence, (position + 1).to(tl.int32))
    tl.store(lengths + num_rows, tl.load(shared_words).to(tl.int32), mask=sequence == 0)
    own = tl.where(is_real, position // block_size, -1).to(tl.int32)
    source = tables + row * table_stride
    target = table_copies + sequence.to(tl.int64) * table_stride
    for start in range(0, own + 1, step):
        entries = start + tl.arange(0, step)
        known = tl.load(source + entries, mask=entries < own, other=0)
        tl.store(target + entries, tl.where(entries == own, block.to(tl.int32), known), mask=entries <= own)
    tl.store(source + own, block.to(tl.int32), mask=is_real)


class TensorMemory:
    """The memory of a tensor, for CUDA's array interface; it does not keep the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned_view(tensor: Tensor) -> Tensor:
    """A view of a tensor's memory that does not keep it alive; the tensor itself where there can be none."""
    return (
        torch.as_tensor(TensorMemory(tensor), device=tensor.device)
        if tensor.dtype in TYPES and tensor.numel()
        else tensor
    )


class TritonOps(TorchOps):
    """TorchOps with Triton kernels."""

    name = "torch + Triton"
    sampling_kind = TritonSampling
    products: ClassVar[Mapping[str, type[TorchWeight]]] = {
        "plain": PlainRowsWeight,
        "int8": Int8RowsWeight,
        "int8 times int8": Int8BothWeight,
        "fp8": Fp8RowsWeight,
        "groups": GroupsWeight,
        "int4": GroupsWeight,
    }
    max_recorded_head_dim = triton_attention.MAX_HEAD_DIM
    has_fp8 = True  # the card computes with FP8

    def __init__(self, device: str = "cuda", dtype: str = "bfloat16") -> None:
        super().__init__(device, dtype)
        if device != "cpu" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            self.has_fp8, self.kept_types = False, GPU_TYPES - {"FP8"}
        self.decode_tile: Tile | None = None  # instead of the chosen one, for tests and measurements
        self.prefill_tile: Tile | None = None
        self.encoder_tile: Tile | None = None
        self._memories: dict[tuple[int, ...], Tensor] = {}  # addresses of keys and values of all layers, on the device
        self._counting: dict[int, Tensor] = {}  # 0, 1, 2 ... by how many
        self._pinned: list[Tensor] = []  # buffers of `fetch` that are free
        self._uploads: Uploads | None = None  # while weights are being prepared
        self.is_async = self.can_record = device == "cuda"
        self.compiled = CompileCounts()

    @contextmanager
    def starting(self, key: str, rehearse: Callable[[], None], progress: Progress) -> Iterator[None]:
        if self.device != "cpu":  # where the interpreter compiles nothing
            self.compiled.is_ready = False
            compiling.count_for(self.compiled)
            kernel_list = compiling.list_path(f"{key}/{self.num_processors}")
            compiling.compile_ahead(kernel_list, rehearse, self.compiled, progress)
        yield
        self.compiled.is_ready = True

    def compile_counts(self) -> Mapping[str, int]:
        return {
            "kernels_compiled_at_start": self.compiled.num_at_start,
            "kernels_compiled_late": len(self.compiled.late),
        }

    @contextmanager
    def computing(self) -> Iterator[None]:
        compiling.count_for(self.compiled)
        with super().computing():
            yield

    def prepare(self, then: Callable[[], None] = lambda: None) -> None:
        if self.device == "cpu":
            super().prepare(then)
            return
        self._uploads = Uploads(self.device)
        try:
            super().prepare()
        finally:
            self._uploads.close()
            self._uploads = None
        then()

    def new_kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVLayer[Tensor]:
        if self.kv_dtype == "fp8" and not self.has_fp8:
            raise InvalidOptionError("[engine] kv_dtype is fp8, which this card does not have.", hint="Leave it out.")
        return super().new_kv_layer(num_blocks, block_size, num_kv_heads, head_dim)

    def to_device(self, tensor: Tensor | StoredTensor) -> Tensor:
        uploads = self._uploads
        if isinstance(tensor, StoredTensor):
            tensor = torch.from_numpy(tensor.as_floats()).to(self.torch_dtype)
        tensor = tensor.contiguous()  # a rank's part of a matrix may be some of its columns
        return super().to_device(tensor) if uploads is None or tensor.device.type != "cpu" else uploads.send(tensor)

    @cached_property
    def _graph_memory(self) -> Any:
        """One memory for what all captured calls compute on the way: they run one after the other."""
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(self, call: Callable[[], R]) -> Callable[[], R] | None:
        if self.device == "cpu" or compiling.is_rehearsing():
            return None
        memory, stream = self._graph_memory
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            try:
                graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            except RuntimeError:
                ctypes.pythonapi.Py_IncRef(
                    ctypes.py_object(graph)
                )  # torch ends the process when it deletes such a graph
                raise
            try:
                result = call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        # The next recording may use the memory of this result, so it must be read or copied before another pass runs.
        shown: Any = unowned_view(result) if isinstance(result, Tensor) else tuple(map(unowned_view, cast(Any, result)))

        def repeat() -> R:
            graph.replay()
            return cast(R, shown)

        return repeat

    def host_buffer(self, size: int) -> Ids:
        if self.device == "cpu":
            return super().host_buffer(size)
        buffer: Ids = torch.zeros(size, dtype=torch.int64, pin_memory=True).numpy()
        return buffer

    def send(self, values: Ids, target: Tensor) -> Callable[[], None]:
        target.copy_(torch.from_numpy(values), non_blocking=True)
        if self.device == "cpu":
            return lambda: None
        done = torch.cuda.Event()
        done.record()
        return done.synchronize

    def fetch(self, x: Tensor) -> Callable[[], npt.NDArray[Any]]:
        if self.device == "cpu":
            return super().fetch(x)
        is_small, done = x.nbytes <= PINNED_BYTES, torch.cuda.Event()
        if not (is_small and self._pinned):
            self._pinned.append(torch.empty(max(x.nbytes, PINNED_BYTES), dtype=torch.uint8, pin_memory=True))
        memory = self._pinned.pop()
        copy = memory[: x.nbytes].view(x.dtype).view(x.shape)
        copy.copy_(x, non_blocking=True)
        done.record()

        def wait() -> npt.NDArray[Any]:
            done.synchronize()
            array: npt.NDArray[Any] = copy.numpy()
            if is_small:
                array = array.copy()
                self._pinned.append(memory)
            return array

        return cache(wait)  # an interrupt may make the caller ask again

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor], block_size: int, *, is_shared: bool
    ) -> tuple[PagedBatch[Tensor], SamplingBatch[Tensor]]:
        num = inputs.shape[1]
        token_ids = torch.empty(num, dtype=torch.int64, device=inputs.device)
        places = torch.empty((3, num), dtype=torch.int64, device=inputs.device)  # positions, slots, next positions
        lengths = torch.empty(num + 1, dtype=torch.int32, device=inputs.device)
        tables = torch.empty((num, state.tables.shape[1]), dtype=torch.int32, device=inputs.device)
        stage_kernel[(num,)](
            inputs[Input.TOKEN],
            inputs[Input.ROW],
            inputs[Input.POSITION],
            inputs[Input.BLOCK],
            inputs[Input.NUM_SHARED],
            state.last_tokens,
            state.tables,
            token_ids,
            places,
            tables,
            lengths,
            num,
            state.tables.stride(0),
            block_size=block_size,
            on_device=ON_DEVICE,
            step=TABLE_STEP,
            num_warps=2,
        )
        ones, contexts = np.ones(num, dtype=np.int64), lengths[:num]
        batch = PagedBatch(
            num_tokens=num,
            num_decodes=num,
            query_lens=ones,
            context_lens=ones,
            token_ids=token_ids,
            positions=places[0],
            slots=places[1],
            block_tables=tables,
            block_size=block_size,
        )
        shared_len = lengths[num:] if is_shared else None
        find_plan.keep(AttentionPlan(contexts, contexts, contexts, shared_len=shared_len), batch)
        return batch, sampling_batch(inputs, places[2], self._count(num), state)

    def pass_batch(
        self, inputs: Tensor, size: PassSize, state: DecodeState[Tensor], block_size: int, *, keeps_all: bool
    ) -> tuple[PagedBatch[Tensor], SamplingBatch[Tensor], Tensor]:
        batch, columns, chosen = pass_rows(inputs, size, state, block_size, self._count(size.num_rows), keeps_all)
        lens = columns[Input.COUNT]
        plan = AttentionPlan(
            (columns[Input.POSITION] + 1).int(),
            (lens.cumsum(0) - lens).int(),
            lens.int(),
            num_rows=size.num_tokens,
            num_expected=-(-size.num_decodes // EXPECTED_SHARE),
            num_short_heads=SHORT_ROWS // size.num_tokens,
        )
        find_plan.keep(plan, batch)
        sampling = sampling_batch(chosen, chosen[Input.POSITION] + 1, self._count(chosen.shape[1]), state)
        return batch, sampling, chosen

    def _count(self, num: int) -> Tensor:
        """0, 1, 2 ..., made once."""
        if num not in self._counting:
            self._counting[num] = torch.arange(num, device=self.device)
        return self._counting[num]

    def keep_tokens(self, inputs: Tensor, state: DecodeState[Tensor], tokens: Tensor) -> None:
        state.last_tokens.scatter_(0, inputs[Input.ROW], tokens)

    def new_adapters(self, num_slots: int, max_rank: int) -> Adapters[Tensor]:
        return TritonAdapters(self, num_slots, max_rank)

    def recurrent(self) -> RecurrentOps[Tensor]:
        from archerfish.kernels.triton.recurrent import TritonRecurrentOps

        return TritonRecurrentOps(self)

    @cached_property
    def num_processors(self) -> int:
        if self.device == "cpu":
            return INTERPRETER_PROCESSORS
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def tensor(self, values: npt.NDArray[Any] | Tensor) -> Tensor:
        return values if isinstance(values, Tensor) else to_device(values, torch.device(self.device))

    def copy_blocks(self, layers: Sequence[KVLayer[Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
        """All layers, which are of one shape, in one launch."""
        memory = layers[0].keys
        block_bytes = memory.stride(0) * memory.element_size()
        if block_bytes % WORD_BYTES:
            super().copy_blocks(layers, pairs)
            return
        addresses = tuple(memory.data_ptr() for layer in layers for memory in (layer.keys, layer.values))
        if addresses not in self._memories:
            self._memories[addresses] = self.tensor(np.array(addresses, dtype=np.int64))
        sources, targets = self.tensor(np.array(pairs, dtype=np.int64).T.copy())
        copy_blocks_kernel[(len(pairs), len(addresses))](
            self._memories[addresses], sources, targets, block_bytes // WORD_BYTES, block=COPY_WORDS, num_warps=4
        )

    def lookup(self, table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """In float32 up to FLOAT32_WIDTH; all that layers add to it then stays so."""
        if table.shape[1] > FLOAT32_WIDTH:
            return super().lookup(table, ids, scale=scale)
        return triton_norm.lookup(table, ids, scale)

    def sum_dtype(self, width: int) -> str:
        return "float32" if width <= FLOAT32_WIDTH else self.dtype

    def can_normalise(self, x: Tensor) -> bool:
        """Whether kernels take rows like these into a norm: they have the compute type, or float32."""
        return x.dtype in (self.torch_dtype, torch.float32) and x.stride(-1) == 1

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        is_plain = self.can_normalise(x) and (residual is None or self.can_normalise(residual))
        if not is_plain or x.shape[-1] > triton_norm.MAX_WIDTH:
            return super().rms_norm(x, weight, eps, residual=residual)
        return triton_norm.rms_norm(x, weight, eps, residual, self.torch_dtype)

    def store_kv(
        self, qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotation: Rotation[Tensor]
    ) -> Tensor:
        return triton_norm.store_kv(qkv, kv, batch, heads, rotation)

    def paged_attention(
        self,
        q: Tensor,
        kv: KVLayer[Tensor],
        batch: PagedBatch[Tensor],
        heads: HeadShape,
        *,
        mask: BlockMask[Tensor] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if heads.head_dim > triton_attention.MAX_HEAD_DIM:
            return super().paged_attention(q, kv, batch, heads, mask=mask, sinks=sinks)
        out = torch.empty((len(q), q.shape[1]), dtype=q.dtype, device=q.device)
        if batch.num_decodes:
            attend_decodes(q, kv, batch, heads, out, self.num_processors, self.decode_tile, mask, sinks=sinks)
        if batch.num_decodes < len(batch.query_lens):
            attend_prefills(q, kv, batch, heads, out, self.prefill_tile, mask, sinks)
        if batch.num_tokens < len(q):
            out[batch.num_tokens :] = 0
        return out

    def store_and_attend(
        self,
        qkv: Tensor,
        kv: KVLayer[Tensor] | None,
        batch: Any,
        heads: HeadShape,
        rotation: Rotation[Tensor],
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """In one kernel where all sequences have one new token."""
        if kv is None or not takes_new(batch, heads, rotation):
            return super().store_and_attend(qkv, kv, batch, heads, rotation, sinks=sinks)
        out = torch.empty((len(qkv), heads.num_heads * heads.head_dim), dtype=qkv.dtype, device=qkv.device)
        attend_decodes(qkv, kv, batch, heads, out, self.num_processors, self.decode_tile, None, rotation, sinks)
        if batch.num_tokens < len(qkv):
            out[batch.num_tokens :] = 0
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if activation not in ("silu", "gelu_tanh"):
            return super().gated(x, activation)
        return triton_norm.gated(x, activation == "silu")

    def gated_linear(self, x: Tensor, weight: LinearWeight[Tensor], gate: Activation) -> Tensor:
        table = self.adapted(weight)
        if table is None or len(table.sizes) != 2 or not isinstance(self.adapters, TritonAdapters):
            return super().gated_linear(x, weight, gate)
        return self.adapters.add_gated(weight.get().multiply(x, "none", None), x, table, gate)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing[Tensor],
        gate_up: LinearWeight[Tensor],
        down: LinearWeight[Tensor],
        activation: Activation,
        *,
        shared: Tensor | None = None,
    ) -> Tensor:
        first, second = cast(TorchWeight, gate_up.get()), cast(TorchWeight, down.get())
        tables = [self.adapted(weight) for weight in (gate_up, down)]
        adapters = None if tables[0] is None else cast(TritonAdapters, self.adapters)
        return compute_experts(
            x.to(self.torch_dtype).contiguous(),
            logits,
            routing,
            first,
            second,
            activation,
            shared,
            is_deterministic=self.is_deterministic,
            adapters=adapters,
            tables=tables,
        )

    # Products with few rows

    def normed_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: LinearWeight[Tensor],
        *,
        residual: Tensor | None = None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.adapted(weight) is not None:
            return super().normed_linear(x, norm, eps, weight, residual=residual, gate=gate)
        packed = weight.get()
        if not isinstance(packed, FewRowsWeight) or not packed.takes(x):
            if isinstance(packed, ByteRowsWeight) and packed.takes_normed(x, gate) and self.can_normalise(x):
                return packed.multiply_normed(x, norm, eps, residual, gate)
            return super().normed_linear(x, norm, eps, weight, residual=residual, gate=gate)
        is_gated, activation = gate is not None, gate or "none"
        if isinstance(packed, RowsWeight) and residual is None:
            tile = packed.tile_for(x, is_gated=is_gated)
            if not tile.is_dot and (tile.num_programs > 0 or x.shape[1] <= NORMED_WIDTH):
                return triton_linear.linear(
                    x,
                    packed,
                    tile,
                    activation=activation,
                    is_gated=is_gated,
                    norm=norm,
                    eps=eps,
                    dtype=self.torch_dtype,
                ), x
        x, total = self.rms_norm(x, norm, eps, residual=residual)
        return packed.multiply_few(x, activation, is_gated=is_gated, dtype=self.torch_dtype), total

    def logits(self, x: Tensor, head: LinearWeight[Tensor], *, softcap: float = 0.0) -> Tensor:
        packed, table = head.get(), self.adapted(head)
        if softcap or x.dtype != self.torch_dtype or not isinstance(packed, FewRowsWeight):
            return super().logits(x, head, softcap=softcap)
        if packed.takes(x):
            y = packed.multiply_few(x, dtype=torch.float32)
        elif packed.bias is not None or not x.is_cuda or x.dtype == torch.float32:
            return super().logits(x, head)
        else:  # float32 straight from the product
            matrix = packed.dequantised()
            y = torch.mm(x, expand_queries(matrix).t(), out_dtype=torch.float32)[:, : len(matrix)]
        return y if table is None or self.adapters is None else self.adapters.add(y, x, table)

    # Encoders

    def encoder_inputs(self, num_tokens: int) -> triton_encoder.FixedInputs:
        return triton_encoder.FixedInputs(num_tokens, torch.device(self.device))

    def embed(self, tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        if len(tables) not in (2, 3) or tables[0].shape[1] > triton_encoder.MAX_WIDTH:
            return super().embed(tables, ids)
        return triton_encoder.embed(tables, ids)

    def layer_norm(self, x: Tensor, norm: NormWeights[Tensor]) -> Tensor:
        if x.shape[1] > triton_encoder.MAX_WIDTH:
            return super().layer_norm(x, norm)
        return triton_encoder.layer_norm(x, norm, self.torch_dtype)

    def linear_layer_norm(
        self, x: Tensor, weight: LinearWeight[Tensor], residual: Tensor, norm: NormWeights[Tensor]
    ) -> Tensor:
        """The residual is added on the way into the norm."""
        if residual.shape[1] > triton_encoder.MAX_WIDTH:
            return super().linear_layer_norm(x, weight, residual, norm)
        return triton_encoder.layer_norm(self.linear(x, weight), norm, self.torch_dtype, residual)

    def rotated(self, qkv: Tensor, positions: Tensor, heads: HeadShape, rotation: Rotation[Tensor]) -> Tensor:
        return triton_norm.rotated(qkv, positions, heads, rotation)

    def attention(
        self,
        qkv: Tensor,
        segments: Segments,
        heads: HeadShape,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if heads.head_dim > triton_encoder.MAX_HEAD_DIM or sinks is not None:
            return super().attention(qkv, segments, heads, bias=bias, sinks=sinks)
        return triton_encoder.attention(qkv, segments, heads, bias, self.encoder_tile)

    def pool(self, x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
        return triton_encoder.pool(x, segments, mode)

    def normalize(self, x: Tensor) -> Tensor:
        return super().normalize(x) if x.shape[1] > triton_encoder.MAX_WIDTH else triton_encoder.normalize(x)
