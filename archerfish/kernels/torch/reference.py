"""What each operation means, in plain torch. Runs on any device that torch has."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (the name that every torch reader expects)

from archerfish.kernels.adapters import Adapters
from archerfish.kernels.batches import BlockMask, Ids, Segments
from archerfish.kernels.decoding import FILLING_POSITION, NUM_INPUTS, ON_DEVICE, DecodeState, Input, PassSize
from archerfish.kernels.experts import Routing
from archerfish.kernels.formats import INT8, Tensors, WeightFormat
from archerfish.kernels.machine import cpu
from archerfish.kernels.ops import (
    Activation,
    HeadShape,
    KVLayer,
    LinearWeight,
    NormWeights,
    Ops,
    PackedWeight,
    PagedBatch,
    Pooling,
    Rotary,
    Rotation,
)
from archerfish.kernels.recurrent import RecurrentOps
from archerfish.kernels.sampling import Drawn, Logprobs, PoolStats, SamplingBatch, TokenCounts
from archerfish.kernels.stored import FP8_LARGEST, GPU_TYPES, StoredTensor
from archerfish.kernels.torch.activations import ACTIVATIONS, gated
from archerfish.kernels.torch.adapters import TorchAdapters
from archerfish.kernels.torch.from_store import stored_parts
from archerfish.kernels.torch.sampling import TorchSampling, sampling_batch
from archerfish.kernels.torch.wkv import TorchRecurrentOps

Tensor = torch.Tensor
DUMMY_SCALE = 0.02  # of random weights
FP8 = torch.float8_e4m3fn
FP8_HEADROOM = 4.0  # times the largest key or value that was seen when scales were set


class TorchWeight(PackedWeight[Tensor]):
    """A linear map in any format, whose matrix is dequantised for every product."""

    def __init__(self, ops: TorchOps, weight_format: WeightFormat, tensors: Tensors, bias: Tensor | None) -> None:
        self.ops = ops
        self.weight_format = weight_format
        self.tensors = tensors
        self.bias = bias

    def dequantised(self) -> Tensor:
        """The matrix in the compute type."""
        return self.weight_format.dequantise(self.tensors, self.ops.torch_dtype)

    def multiply(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        y = F.linear(x.to(self.ops.torch_dtype), self.dequantised(), self.bias)
        if residual is not None:
            y = y + residual
        return ACTIVATIONS[activation](y)


class TorchOps(Ops[Tensor]):
    """The reference backend."""

    name = "torch reference"
    sampling_kind: ClassVar[type[TorchSampling]] = TorchSampling
    products: ClassVar[Mapping[str, type[TorchWeight]]] = {}  # by the name of a format; others are dequantised
    kept_types: Collection[str] = GPU_TYPES  # of stored matrices that are multiplied with as they are

    def __init__(self, device: str = "cpu", dtype: str = "float32") -> None:
        super().__init__()
        self.device = device
        self.dtype = dtype
        self.torch_dtype: torch.dtype = getattr(torch, dtype)
        self._sampling = self.sampling_kind(device)

    def tensor(self, values: npt.NDArray[Any] | Tensor) -> Tensor:
        return values if isinstance(values, Tensor) else torch.from_numpy(values).to(self.device)

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = x.float().cpu().numpy()
        return array

    def vector(self, weight: Tensor, *, plus: float = 0.0, times: float = 1.0) -> Tensor:
        vector = weight.to(self.device, torch.float32)
        return vector if (plus, times) == (0.0, 1.0) else (vector + plus) * times

    def to_device(self, tensor: Tensor | StoredTensor) -> Tensor:
        """A quantised tensor, such as a lookup table, becomes plain."""
        if isinstance(tensor, StoredTensor):
            return torch.from_numpy(tensor.as_floats()).to(self.torch_dtype).to(self.device)
        return tensor.to(self.device)

    def pack_linear(
        self, parts: Sequence[Any], biases: Sequence[Tensor | None], weight_format: WeightFormat
    ) -> TorchWeight:
        if any(isinstance(part, StoredTensor) for part in parts):
            weight_format, found = stored_parts(parts, self.kept_types)
            loaded: list[Tensors] = [{name: self.to_device(each) for name, each in part.items()} for part in found]
        else:
            loaded = [weight_format.load(self.to_device(part)) for part in parts]
        given = [each for each in biases if each is not None]
        bias = None
        if given:  # a missing one counts as zeros unless all are missing
            sizes = [weight_format.num_outputs(each) for each in loaded]
            stacked = [
                given[0].new_zeros(size) if each is None else each for size, each in zip(sizes, biases, strict=True)
            ]
            bias = torch.cat(stacked).to(self.device, self.torch_dtype)
        product = self.products.get(weight_format.name, TorchWeight)
        if weight_format is INT8 and self.rounds_rows:
            product = self.products.get("int8 times int8", product)
        return product(self, weight_format, weight_format.stack(loaded), bias)

    def new_adapters(self, num_slots: int, max_rank: int) -> Adapters[Tensor]:
        return TorchAdapters(self, num_slots, max_rank)

    def embed(self, tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        total = F.embedding(ids[0], tables[0]).float()
        for table, index in zip(tables[1:], ids[1:], strict=True):
            total += F.embedding(index, table)
        return total

    def layer_norm(self, x: Tensor, norm: NormWeights[Tensor]) -> Tensor:
        return F.layer_norm(x.float(), norm.weight.shape, norm.weight, norm.bias, norm.eps).to(self.torch_dtype)

    def rotated(self, qkv: Tensor, positions: Tensor, heads: HeadShape, rotation: Rotation[Tensor]) -> Tensor:
        num_turned = heads.num_heads + heads.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, heads.head_dim).tensor_split((heads.num_heads, num_turned), dim=1)
        return torch.cat((*self._turn(q, k, positions, rotation), v), dim=1).to(self.torch_dtype).view(len(qkv), -1)

    def _turn(self, q: Tensor, k: Tensor, positions: Tensor, rotation: Rotation[Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys, (tokens, heads, head_dim), normalised and rotated."""
        rotary = rotation.rotary
        q_norm = rotation.q_norm
        k_norm = rotation.k_norm
        if q_norm is not None:
            q = F.rms_norm(q.float().reshape(len(q), -1, len(q_norm)), q_norm.shape, q_norm, rotation.eps).view(q.shape)
        if k_norm is not None:
            k = F.rms_norm(k.float().reshape(len(k), -1, len(k_norm)), k_norm.shape, k_norm, rotation.eps).view(k.shape)
        if rotary is not None:
            cos_sin = rotary.cos_sin[positions]
            q, k = (rotate(x, cos_sin, rotary.rotary_dim, is_interleaved=rotary.is_interleaved) for x in (q, k))
        return q, k

    def attention(
        self,
        qkv: Tensor,
        segments: Segments,
        heads: HeadShape,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        parts: list[Tensor] = []
        start, sizes = 0, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        for length, group in groupby(segments.lengths):  # neighbours of equal length share a call
            num_rows = len(list(group))
            end = start + length * num_rows
            rows = qkv[start:end].view(num_rows, length, -1, heads.head_dim)
            start, mask = end, None
            if heads.is_causal or heads.window:
                mask = visible(length, length, heads.window, qkv.device, is_causal=heads.is_causal)
            if bias is not None:
                mask = bias[:, :length, :length].to(qkv.dtype)
            if heads.softcap or sinks is not None:
                each = (torch.split(row, sizes, 1) for row in rows)
                parts += [attend(q.flatten(1), k, v, heads, sinks=sinks) for q, k, v in each]
                continue
            q, k, v = torch.split(rows.transpose(1, 2), sizes, 1)
            is_grouped = heads.num_kv_heads != heads.num_heads
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale, enable_gqa=is_grouped)
            parts.append(found.transpose(1, 2).reshape(length * num_rows, -1))
        return torch.cat(parts)

    def relative_bias(self, table: Tensor, buckets: Ids) -> Tensor:
        return F.embedding(self.tensor(buckets), table).permute(2, 0, 1).to(self.torch_dtype).contiguous()

    def pool(self, x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
        if mode == "cls":
            return x[self.tensor(segments.starts[:-1])].float()
        if mode == "lasttoken":
            return x[self.tensor(segments.starts[1:] - 1)].float()
        lengths = self.tensor(np.asarray(segments.lengths, dtype=np.int64))
        if mode == "mean_sqrt_len_tokens":
            total = torch.segment_reduce(x.float(), "sum", lengths=lengths)
            return total / lengths.sqrt().unsqueeze(1)
        return torch.segment_reduce(x.float(), mode, lengths=lengths)

    def normalize(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1)

    def new_kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVLayer[Tensor]:
        shape, is_fp8 = (num_blocks, block_size, num_kv_heads, head_dim), self.kv_dtype == "fp8"
        dtype = FP8 if is_fp8 else self.torch_dtype
        num_bytes = math.prod(shape) * dtype.itemsize

        def memory() -> Tensor:
            if (
                self.device == "cpu"
            ):  # the system gives it when it is first written to; torch.zeros would touch all of it
                return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device).view(dtype).view(shape)

        return KVLayer(memory(), memory(), torch.ones((2, num_kv_heads), device=self.device) if is_fp8 else None)

    def fit_kv_scales(self, layers: Sequence[KVLayer[Tensor]], num_blocks: int) -> None:
        for layer in layers:
            assert layer.scales is not None
            for memory, scales in zip(layer[:2], layer.scales, strict=True):
                largest = memory[:num_blocks].float().abs().amax((0, 1, 3))
                scales.copy_(torch.where(largest > 0, largest * FP8_HEADROOM / FP8_LARGEST, 1.0))

    def free_unused(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, layers: Sequence[KVLayer[Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = self.tensor(np.array(pairs, dtype=np.int64).T.copy())
        for layer in layers:
            for memory in (layer.keys, layer.values):
                memory = memory.view(torch.uint8) if memory.dtype == FP8 else memory  # torch copies no FP8
                memory.index_copy_(0, targets, memory.index_select(0, sources))

    def lookup(self, table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
        rows = F.embedding(ids, table).to(self.torch_dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=self.torch_dtype, device=self.device)

    def rotary(
        self, cos_sin: npt.NDArray[np.float32], rotary_dim: int, *, is_interleaved: bool = False
    ) -> Rotary[Tensor]:
        return Rotary(torch.from_numpy(cos_sin).to(self.device), rotary_dim, is_interleaved)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return F.rms_norm(total.float(), weight.shape, weight, eps).to(self.torch_dtype), total

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def store_kv(
        self, qkv: Tensor, kv: KVLayer[Tensor], batch: PagedBatch[Tensor], heads: HeadShape, rotation: Rotation[Tensor]
    ) -> Tensor:
        q, k, v = qkv.view(len(qkv), -1, heads.head_dim).tensor_split(
            (heads.num_heads, heads.num_heads + heads.num_kv_heads), dim=1
        )
        q, k = self._turn(q, k, batch.positions, rotation)
        slots = batch.slots[: batch.num_tokens]
        is_real = slots >= 0
        for place, (memory, new) in enumerate(
            ((kv.keys, k[: len(slots)][is_real]), (kv.values, v[: len(slots)][is_real]))
        ):
            if kv.scales is not None:
                scaled = (new.float() / kv.scales[place][:, None]).clamp(-FP8_LARGEST, FP8_LARGEST)
                memory, new = memory.view(torch.uint8), scaled.to(FP8).view(torch.uint8)
            memory.view(-1, *memory.shape[2:])[slots[is_real]] = new.to(memory.dtype)
        return q.to(self.torch_dtype).reshape(len(qkv), -1)

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
        out = torch.zeros_like(q)
        start = 0
        lengths = zip(batch.query_lens.tolist(), batch.context_lens.tolist(), strict=True)
        for table, (num_new, context_len) in zip(batch.block_tables, lengths, strict=True):
            blocks = table[: -(-context_len // batch.block_size)]
            keys, values = (self._read_kv(kv, place, blocks)[:context_len] for place in range(2))
            if num_new and context_len:  # else it is filling
                out[start : start + num_new] = attend(q[start : start + num_new], keys, values, heads, mask, sinks)
            start += num_new
        return out

    def _read_kv(self, kv: KVLayer[Tensor], place: int, blocks: Tensor) -> Tensor:
        memory = (kv.keys, kv.values)[place]
        if kv.scales is None:
            return memory[blocks].flatten(0, 1)
        codes = memory.view(torch.uint8)[blocks].view(FP8).flatten(0, 1).float()
        return (codes * kv.scales[place][:, None]).to(self.torch_dtype)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gated(gate, up, activation)

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
        num_experts = routing.num_experts
        ids, weights = choose_experts(logits, routing)
        hidden = self.gated(
            self._of_experts(x.repeat_interleave(routing.num_chosen, 0), ids, gate_up, num_experts), activation
        )
        y = self._of_experts(hidden, ids, down, num_experts)
        total = (y.view(*ids.shape, y.shape[1]) * weights.unsqueeze(2)).sum(1)
        if shared is not None:
            total += shared if logits.shape[1] == num_experts else shared * logits[:, num_experts:].float().sigmoid()
        return total.to(self.torch_dtype)

    def _of_experts(self, x: Tensor, ids: Tensor, weight: LinearWeight[Tensor], num: int) -> Tensor:
        """The products of rows with the matrices of their experts."""
        packed, table = weight.get(), self.adapted(weight)
        assert isinstance(packed, TorchWeight)
        matrices = packed.dequantised().chunk(num)
        biases: Sequence[Tensor | None] = [None] * num if packed.bias is None else packed.bias.chunk(num)
        y = x.new_empty(len(x), len(matrices[0]))
        for expert in set(ids.flatten().tolist()):
            rows = (ids.flatten() == expert).nonzero()[:, 0]
            y[rows] = F.linear(x[rows], matrices[expert], biases[expert])
        if table is None:
            return y
        assert isinstance(self.adapters, TorchAdapters)
        return self.adapters.add(y, x, table, places=self.adapters.places(ids, num))

    def rows(self, x: Tensor, indices: Ids | Tensor) -> Tensor:
        return x.index_select(0, self.tensor(indices))

    def first_rows(self, x: Tensor, num_rows: int) -> Tensor:
        return x[:num_rows]

    def random_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        made: dict[str, Tensor] = {}
        random = torch.Generator(self.device).manual_seed(0)
        for name, shape in shapes.items():
            tensor = torch.randn(shape, generator=random, device=self.device) * DUMMY_SCALE
            made[name] = (1 + tensor if len(shape) == 1 and name.endswith("norm.weight") else tensor).to(
                self.torch_dtype
            )
        return made

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.allocating("A step"), torch.inference_mode():
            yield

    def start_thread(self, num_threads: int) -> None:
        if self.device == "cpu":
            torch.set_num_threads(num_threads or cpu().num_cores)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def put(self, target: Tensor, indices: Ids, values: Tensor) -> None:
        target[self.tensor(indices)] = values

    def logits(self, x: Tensor, head: LinearWeight[Tensor], *, softcap: float = 0.0) -> Tensor:
        scores = self.linear(x, head).float()
        return softcap * torch.tanh(scores / softcap) if softcap else scores

    def pool_stats(self) -> PoolStats:
        return self._sampling.buffers.pool_stats()

    def sample(self, logits: Tensor, batch: SamplingBatch[Tensor]) -> Drawn[Tensor]:
        return self._sampling.sample(logits, batch)

    def token_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int, *, rows: Ids | None = None
    ) -> Logprobs[Tensor]:
        return self._sampling.token_logprobs(logits, token_ids, num_top, rows)

    def recurrent(self) -> RecurrentOps[Tensor]:
        return TorchRecurrentOps(self)

    def new_decode_state(self, num_rows: int, most_blocks: int) -> DecodeState[Tensor]:
        tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=self.device)
        return DecodeState(tokens, torch.zeros(num_rows + 1, most_blocks, dtype=torch.int32, device=self.device))

    def set_tables(self, state: DecodeState[Tensor], rows: Ids, block_tables: Ids) -> None:
        state.tables[self.tensor(rows), : block_tables.shape[1]] = self.tensor(block_tables).int()

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor], block_size: int, *, is_shared: bool
    ) -> tuple[PagedBatch[Tensor], SamplingBatch[Tensor]]:
        rows = inputs[Input.ROW]
        positions = inputs[Input.POSITION]
        blocks = inputs[Input.BLOCK]
        is_real = positions >= 0
        state.tables[rows[is_real], positions[is_real] // block_size] = blocks[is_real].int()
        tokens = torch.where(inputs[Input.TOKEN] == ON_DEVICE, state.last_tokens[rows], inputs[Input.TOKEN])
        num_real = int(is_real.sum())
        batch = PagedBatch(
            num_tokens=num_real,
            num_decodes=num_real,
            query_lens=np.ones(num_real, dtype=np.int64),
            context_lens=(positions[:num_real] + 1).cpu().numpy(),
            token_ids=tokens,
            positions=positions.clamp_min(0),
            slots=blocks * block_size + positions % block_size,
            block_tables=state.tables[rows[:num_real]].long(),
            block_size=block_size,
        )
        return batch, sampling_batch(inputs, positions + 1, torch.arange(inputs.shape[1], device=self.device), state)

    def pass_batch(
        self, inputs: Tensor, size: PassSize, state: DecodeState[Tensor], block_size: int, *, keeps_all: bool
    ) -> tuple[PagedBatch[Tensor], SamplingBatch[Tensor], Tensor]:
        counting = torch.arange(size.num_rows, device=self.device)
        batch, columns, chosen = pass_rows(inputs, size, state, block_size, counting, keeps_all)
        query_lens, contexts = columns[Input.COUNT].cpu().numpy(), columns[Input.POSITION].cpu().numpy() + 1
        every = torch.arange(chosen.shape[1], device=self.device)
        batch = replace(batch, query_lens=query_lens, context_lens=contexts)
        return batch, sampling_batch(chosen, chosen[Input.POSITION] + 1, every, state), chosen

    def scored_report(self, report: Tensor, scores: Logprobs[Tensor]) -> Tensor:
        own, top = (x.contiguous().view(torch.int64) for x in (scores.logprobs, scores.top_logprobs))
        return torch.cat((report, scores.ranks[None], own[None], scores.top_ids.t(), top.t()))

    def keep_tokens(self, inputs: Tensor, state: DecodeState[Tensor], tokens: Tensor) -> None:
        state.last_tokens[inputs[Input.ROW]] = tokens

    def send(self, values: Ids, target: Tensor) -> Callable[[], None]:
        target.copy_(torch.from_numpy(values))
        return lambda: None

    def fetch(self, x: Tensor) -> Callable[[], npt.NDArray[Any]]:
        return x.cpu().numpy

    def new_counts(self, num_rows: int, vocab_size: int) -> TokenCounts[Tensor]:
        return TokenCounts(torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=self.device))

    def set_counts(self, counts: TokenCounts[Tensor], row: int, prompt: Ids, output: Ids) -> None:
        output_ids, numbers = np.unique(output, return_counts=True)
        prompt_ids = np.unique(prompt)
        ids = np.concatenate((output_ids, prompt_ids))
        pairs = self.tensor(np.stack((ids, np.concatenate((2 * numbers, np.ones_like(prompt_ids))))))  # one copy
        counts.counts[row].zero_().index_add_(0, pairs[0], pairs[1].int())

    def add_counts(self, counts: TokenCounts[Tensor], row: int, output: Ids, *, source: int | None = None) -> None:
        if source is not None:
            counts.counts[row].copy_(counts.counts[source])
        counts.counts[row].index_add_(0, self.tensor(output), counts.counts.new_full((len(output),), 2))


def pass_rows(
    inputs: Tensor, size: PassSize, state: DecodeState[Tensor], block_size: int, counting: Tensor, keeps_all: bool
) -> tuple[PagedBatch[Tensor], Tensor, Tensor]:
    """Rows of a pass over prompts, laid out on the device, its columns, and those of the tokens to choose: keeps_all,
    one behind every row. counting: the numbers of all rows.

    Fillings have negative slots, and count as tokens. The lengths of the host are not those of the sequences.
    """
    num = size.num_columns
    columns, tokens = inputs[: NUM_INPUTS * num].view(NUM_INPUTS, num), inputs[NUM_INPUTS * num :]
    rows = columns[Input.ROW]
    last = columns[Input.POSITION]
    counts = columns[Input.COUNT]
    ends, tables = counts.cumsum(0), state.tables[rows]
    owner = torch.searchsorted(ends, counting, right=True).clamp_max_(num - 1)
    is_real = (counting < ends[-1]) & (last[owner] >= 0)
    positions = torch.where(is_real, counting + (last + 1 - ends)[owner], 0)
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    lens, chosen = np.ones(num, dtype=np.int64), columns
    if keeps_all:  # the token behind a sequence's last row is the one to remember
        chosen = columns[:, owner]
        chosen[Input.POSITION] = torch.where(is_real, positions, FILLING_POSITION)
        chosen[Input.ROW].masked_fill_(counting + 1 != ends[owner], len(state.last_tokens) - 1)
    return (
        PagedBatch(
            num_tokens=size.num_rows,
            num_decodes=size.num_decodes,
            query_lens=lens,
            context_lens=lens,
            token_ids=torch.where(tokens == ON_DEVICE, state.last_tokens[rows][owner], tokens),
            positions=positions,
            slots=torch.where(is_real, slots, -1),
            block_tables=tables,
            block_size=block_size,
            kept_rows=None if keeps_all else (ends - 1).clamp_min(0),
        ),
        columns,
        chosen,
    )


def rotate(x: Tensor, cos_sin: Tensor, rotary_dim: int, *, is_interleaved: bool = False) -> Tensor:
    """x: (tokens, heads, head_dim), cos_sin: (tokens, rotary_dim); in float32."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if is_interleaved:
        first, second = x[..., :rotary_dim].float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        return torch.cat((turned, x[..., rotary_dim:].float()), dim=-1)
    first, second, rest = x.float().tensor_split((rotary_dim // 2, rotary_dim), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: HeadShape,
    mask: BlockMask[Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a sequence's last tokens: q (new, heads * head_dim), keys and values (all, kv_heads, head_dim)."""
    num_new, num_all = len(q), len(keys)
    grouped = q.view(num_new, heads.num_kv_heads, -1, heads.head_dim).float()
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float()) * heads.scale
    if heads.softcap:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    seen = visible(num_new, num_all, heads.window, q.device, mask, is_causal=heads.is_causal)
    scores.masked_fill_(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(heads.num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_all]
    return torch.einsum("hgqk,khd->qhgd", weights, values.float()).reshape(num_new, -1).to(q.dtype)


def visible(
    num_new: int,
    num_all: int,
    window: int,
    device: torch.device,
    mask: BlockMask[Tensor] | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """(new, all): which keys each of a sequence's last tokens sees."""
    query = torch.arange(num_all - num_new, num_all, device=device).unsqueeze(1)
    key = torch.arange(num_all, device=device)
    seen = (key <= query) if is_causal else torch.ones_like(query + key, dtype=torch.bool)
    if window:
        seen = seen & (key > query - window) & (key < query + window)
    if mask is None:
        return seen
    row, column = query // mask.size, key // mask.size
    num_rows, num_columns = mask.visible.shape
    listed = mask.visible.bool()[row.clamp_max(num_rows - 1), column.clamp_max(num_columns - 1)]
    return seen & (listed | (row == column))


def choose_experts(logits: Tensor, routing: Routing[Tensor]) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights, in float32: (rows, chosen) each."""
    given = logits[:, : routing.num_experts].float()
    scores = given.sigmoid() if routing.is_sigmoid else given.softmax(1)
    ids = (scores if routing.bias is None else scores + routing.bias).topk(routing.num_chosen, 1).indices
    weights = scores.gather(1, ids)
    if routing.is_normed:
        weights = weights / weights.sum(1, keepdim=True)
    return ids, weights * routing.scale
