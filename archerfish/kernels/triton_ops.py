"""The GPU backend: torch's products, and Triton kernels for what stands between them in a decoder.

Host arrays travel through pinned memory, so that no operation waits for the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from archerfish.kernels import triton_attention, triton_norm, triton_rope
from archerfish.kernels.ops import Activation, HeadShape, Ids, KVLayer, PagedBatch, Rotary
from archerfish.kernels.reference import TorchOps
from archerfish.kernels.triton_attention import Tile, attend_decodes, attend_prefills, to_device

Tensor = torch.Tensor
COPY_WORDS = 2048  # of 4 bytes that a program copies at a time
WORD_BYTES = 4
INTERPRETER_PROCESSORS = 4  # that Triton's interpreter claims to have


@triton.jit(do_not_specialize=["num_words"])
def copy_blocks_kernel(memories, sources, targets, num_words, block: tl.constexpr):
    memory = tl.load(memories + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    source = memory + tl.load(sources + tl.program_id(0)) * num_words
    target = memory + tl.load(targets + tl.program_id(0)) * num_words
    for start in range(0, num_words, block):
        words = start + tl.arange(0, block)
        tl.store(target + words, tl.load(source + words, mask=words < num_words, other=0), mask=words < num_words)


class TritonOps(TorchOps):
    """TorchOps with Triton kernels for decoders."""

    name = "torch + Triton"

    def __init__(self, device: str = "cuda", dtype: str = "bfloat16") -> None:
        super().__init__(device, dtype)
        self.decode_tile: Tile | None = None  # instead of the chosen one, for tests and measurements
        self.prefill_tile: Tile | None = None
        self._memories: dict[tuple[int, ...], Tensor] = {}  # addresses of keys and values of all layers, on the device

    @cached_property
    def num_processors(self) -> int:
        if self.device == "cpu":
            return INTERPRETER_PROCESSORS
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def ids(self, values: Ids) -> Tensor:
        return to_device(values, torch.device(self.device))

    def floats(self, values: npt.NDArray[np.float64]) -> Tensor:
        return to_device(values, torch.device(self.device))

    def copy_blocks(self, layers: Sequence[KVLayer[Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
        """All layers, which are of one shape, in one launch."""
        if not pairs or not layers:
            return
        memory = layers[0].keys
        block_bytes = memory.stride(0) * memory.element_size()
        if block_bytes % WORD_BYTES:
            super().copy_blocks(layers, pairs)
            return
        addresses = tuple(memory.data_ptr() for layer in layers for memory in (layer.keys, layer.values))
        if addresses not in self._memories:
            self._memories[addresses] = self.ids(np.array(addresses, dtype=np.int64))
        sources, targets = self.ids(np.array(pairs, dtype=np.int64).T.copy())
        copy_blocks_kernel[(len(pairs), len(addresses))](
            self._memories[addresses], sources, targets, block_bytes // WORD_BYTES, block=COPY_WORDS, num_warps=4
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        is_plain = x.dtype == self.torch_dtype and (residual is None or residual.dtype == x.dtype)
        if not is_plain or x.shape[-1] > triton_norm.MAX_WIDTH:
            return super().rms_norm(x, weight, eps, residual=residual)
        return triton_norm.rms_norm(x, weight, eps, residual)

    def store_kv(
        self, qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotary: Rotary[Tensor] | None, *,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:
        return triton_rope.store_kv(qkv, kv, batch, heads, rotary, q_norm, k_norm, eps)

    def paged_attention(self, q: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape) -> Tensor:
        if heads.head_dim > triton_attention.MAX_HEAD_DIM:
            return super().paged_attention(q, kv, batch, heads)
        out = torch.empty((len(q), q.shape[1]), dtype=q.dtype, device=q.device)
        if batch.num_decodes:
            attend_decodes(q, kv, batch, heads, out, self.num_processors, self.decode_tile)
        if batch.num_decodes < len(batch.query_lens):
            attend_prefills(q, kv, batch, heads, out, self.prefill_tile)
        if batch.num_tokens < len(q):
            out[batch.num_tokens :] = 0
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if activation not in ("silu", "gelu_tanh"):
            return super().gated(x, activation)
        return triton_norm.gated(x, activation == "silu")
