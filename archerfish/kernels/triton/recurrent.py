"""RWKV-7 on a GPU: launches of the kernels in `triton/wkv.py` and `triton/mixes.py`."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from archerfish.background import WeakCache
from archerfish.kernels.decoding import ON_DEVICE, DecodeState, Input
from archerfish.kernels.ops import LinearWeight, NormWeights
from archerfish.kernels.recurrent import (
    FIRST_SLOT,
    NO_SLOT,
    BlockWeights,
    HeadInputs,
    HeadWeights,
    RecurrentBatch,
    StateLayer,
)
from archerfish.kernels.sampling import SamplingBatch
from archerfish.kernels.torch.reference import TorchOps, TorchWeight
from archerfish.kernels.torch.sampling import sampling_batch
from archerfish.kernels.torch.wkv import TorchRecurrentOps
from archerfish.kernels.triton import mixes, wkv
from archerfish.kernels.triton.launch import early_start
from archerfish.kernels.triton.linear import RowsWeight
from archerfish.kernels.triton.tiles import LinearTile, cdiv, dot_block, dot_tile, next_power_of_2, shared_bytes

Tensor = torch.Tensor
SHIFT_BLOCK = 1024  # columns of a program
CHUNK = 16  # tokens: the least that a product of tiles takes
MIN_CHUNKED = 16  # tokens of the longest sequence from which on chunks are used
HEAD_WARPS = 8  # of a head: with 4, a state and what is made of it fill all registers and more
DECODE_HEIGHT, DECODE_WARPS = (
    32,
    1,
)  # of a piece of a state, and of a head with one token: a single warp waits for no other
MAX_WIDTH = 4096  # of rows that every program normalises
MAX_NORMED_WIDTH = 16384  # of a row that one program normalises
COLUMNS_PER_WARP = 256  # so that a row and the weights are spread over threads in the same way
HELD_ELEMENTS = 2048  # of weights, in the registers of a warp
FEW_ROWS = 4  # decodes of a step, up to which `mix_rows_kernel` is quicker than tensor cores
PARTS_ROWS = 256  # decodes up to which one kernel for all products of a mix is quicker than cuBLAS for each
PART_ROWS = 64  # of a program: what the tensor cores of a Hopper take at once
RAISED_ROWS, RAISED_OUTPUTS = 64, 64  # of a program
NUM_PARTS = 7  # matrices that a time mix multiplies its shifted inputs with
WIDE_MIXES = (0, 2, 3)  # of receptance, key and value, among r, w, k, v, a, g
RANK_NAMES = ("decay_rank", "rate_rank", "gate_rank", "value_rank")


@dataclass(frozen=True)
class Parts:
    """The matrices that a mix multiplies its shifted inputs with, in one kernel: seven of a time mix, one of a channel
    mix."""

    matrices: list[
        Tensor
    ]  # as many as a kernel takes; of a first layer's time mix and of a channel mix some stand twice
    scales: Tensor | None  # of all outputs, a part after the other
    sizes: list[int]  # outputs of each part
    ranks: dict[str, int]  # of a time mix

    @classmethod
    def of(cls, maps: Sequence[LinearWeight[Tensor]], ranks: Sequence[int] = (0, 0, 0, 0)) -> Parts | None:
        """None if the maps have biases or no format that the kernels read, or if not all have the same one."""
        packed = [each.get() for each in maps]
        rows = [each for each in packed if isinstance(each, RowsWeight) and each.bias is None]
        scales = [each.scales for each in rows if each.scales is not None]
        if len(rows) < len(packed) or 0 < len(scales) < len(rows):
            return None
        matrices = [each.matrix for each in rows]
        sizes = [len(matrix) for matrix in matrices[:3]] + [*ranks] if len(matrices) > 1 else [len(matrices[0])]
        matrices += [matrices[0]] * (NUM_PARTS - len(matrices))
        return cls(matrices, torch.cat(scales) if scales else None, sizes, dict(zip(RANK_NAMES, ranks, strict=True)))

    @property
    def num_outputs(self) -> int:
        return sum(self.sizes)

    @property
    def is_time(self) -> bool:
        return len(self.sizes) > 1


@dataclass(frozen=True)
class FusedWeights:
    """The weights of a layer as the kernels of `triton/mixes.py` take them."""

    time: Parts
    channel: Parts
    ups: list[
        Tensor
    ]  # the wide ends of decay, rate, gate and value mix; a first layer has another's in place of the last
    biases: list[Tensor]  # of decay, rate and value mix, likewise
    wide: list[TorchWeight]  # receptance, key and value

    @classmethod
    def of(cls, weights: BlockWeights[Tensor]) -> FusedWeights | None:
        """None where formats, biases or activations are not what the kernels expect."""
        time = weights.time
        lows = [time.decay, time.rate, time.gate, *([time.value_mix] if time.value_mix else [])]
        ups = [low.up.get() for low in lows]
        plain = [up for up in ups if isinstance(up, RowsWeight) and up.scales is None]
        biases = [up.bias for up in plain if up.bias is not None]
        has_biases = [up.bias is not None for up in plain] == [True, True, False, True][: len(lows)]
        activations = [low.activation for low in lows] == ["tanh", "none", "sigmoid", "none"][: len(lows)]
        if len(plain) < len(ups) or not has_biases or not activations:
            return None
        ranks = [up.matrix.shape[1] for up in plain] + [0] * (4 - len(plain))
        time_parts = Parts.of([time.receptance, time.key, time.value, *(low.down for low in lows)], ranks)
        channel_parts = Parts.of([weights.channel.key])
        if time_parts is None or channel_parts is None:
            return None
        matrices = [up.matrix for up in plain]
        wide = [each.get() for each in (time.receptance, time.key, time.value)]
        firsts = [each for each in wide if isinstance(each, TorchWeight)]
        return cls(time_parts, channel_parts, (matrices + matrices[:1])[:4], (biases + biases[:1])[:3], firsts)


find_fused = WeakCache(FusedWeights.of)
find_last_rows = WeakCache(lambda batch: batch.starts[1:] - 1)  # of each piece, once for all layers


class TritonRecurrentOps(TorchRecurrentOps):
    """Shift and heads in one kernel each; whole layers in few kernels for steps of nothing but decodes."""

    parts_rows = PARTS_ROWS

    def __init__(self, ops: TorchOps, min_chunked: int = MIN_CHUNKED) -> None:
        super().__init__(ops)
        self.min_chunked = min_chunked
        self._counting: dict[int, Tensor] = {}  # 0, 1, 2 ... by how many

    def shift(self, x: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor], factors: Tensor) -> tuple[Tensor, ...]:
        num_rows, width = x.shape
        num_factors = factors.numel() // width
        x = x.contiguous()
        out = torch.empty((num_factors, num_rows, width), dtype=x.dtype, device=x.device)
        stores = batch.num_decodes == batch.num_sequences
        block = min(next_power_of_2(width), SHIFT_BLOCK)
        wkv.shift_kernel[(num_rows, cdiv(width, block))](
            x,
            inputs,
            batch.previous,
            batch.targets,
            factors,
            out,
            num_rows,
            inputs.stride(0),
            width=width,
            block=block,
            num_factors=num_factors,
            stores=stores,
            num_warps=max(1, min(8, block // 256)),
        )
        if not stores:
            inputs.index_copy_(0, batch.targets, x.index_select(0, find_last_rows(batch)))
        return out.unbind(0)

    def mix_heads(
        self, inputs: HeadInputs[Tensor], weights: HeadWeights[Tensor], states: Tensor, batch: RecurrentBatch[Tensor]
    ) -> Tensor:
        """Longer inputs in chunks where one has at least `min_chunked` tokens."""
        num_heads, dim = states.shape[1], states.shape[2]
        out = torch.empty_like(inputs.value)
        has_value_mix = inputs.first_value is not None and inputs.value_mix is not None
        tensors = [
            each.contiguous()
            for each in (
                inputs.receptance,
                inputs.decay,
                inputs.key,
                inputs.value,
                inputs.rate,
                inputs.gate,
                inputs.value if inputs.first_value is None else inputs.first_value,
                inputs.value if inputs.value_mix is None else inputs.value_mix,
            )
        ]
        vectors = (weights.removal, weights.replacement, weights.bonus, weights.norm, weights.norm_bias, weights.eps)
        pieces = (states, batch.sources, batch.targets, batch.starts)
        num_decodes, num_sequences = batch.num_decodes, batch.num_sequences
        last = (out, states.stride(0), out.shape[1])
        if num_decodes:
            wkv.mix_decodes_kernel[(num_decodes, num_heads)](
                *tensors,
                *vectors,
                *pieces[:3],
                *last,
                dim=dim,
                height=min(dim, DECODE_HEIGHT),
                has_value_mix=has_value_mix,
                num_warps=DECODE_WARPS,
                **early_start(out.device),
            )
        if num_decodes == num_sequences:
            return out
        grid, rest = (num_sequences - num_decodes, num_heads), (*pieces, batch.first_pieces[num_decodes:], *last)
        if int(batch.query_lens.max()) < self.min_chunked or batch.is_deterministic:
            wkv.mix_tokens_kernel[grid](
                *tensors, *vectors, *rest, dim=dim, has_value_mix=has_value_mix, num_warps=HEAD_WARPS
            )
        else:
            wkv.mix_chunks_kernel[grid](
                *tensors, *vectors, *rest, dim=dim, has_value_mix=has_value_mix, chunk=CHUNK, num_warps=HEAD_WARPS
            )
        return out

    def fused_block(
        self,
        x: Tensor,
        first_value: Tensor | None,
        weights: BlockWeights[Tensor],
        batch: RecurrentBatch[Tensor],
        layer: StateLayer[Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        is_decodes = batch.num_decodes == batch.num_sequences and 0 < batch.num_decodes <= len(x)
        is_plain = (
            x.dtype in (self.ops.torch_dtype, torch.float32) and x.stride(1) == 1 and x.shape[1] <= MAX_NORMED_WIDTH
        )
        if not is_decodes or not is_plain:
            return None
        fused = find_fused(weights)
        if fused is None:
            return None
        mix = self._mix_few if len(x) <= FEW_ROWS and x.shape[1] <= MAX_WIDTH else self._mix_many
        return mix(x, first_value, weights, fused, batch, layer)

    def _mix_few(
        self,
        x: Tensor,
        first_value: Tensor | None,
        weights: BlockWeights[Tensor],
        fused: FusedWeights,
        batch: RecurrentBatch[Tensor],
        layer: StateLayer[Tensor],
    ) -> tuple[Tensor, Tensor]:
        (num_rows, width) = x.shape
        dtype = self.ops.torch_dtype
        time = weights.time
        channel = weights.channel
        products = torch.empty(num_rows * fused.time.num_outputs, dtype=dtype, device=x.device)
        normed, channel_before, out = torch.empty((3, num_rows, width), dtype=dtype, device=x.device)
        mix_rows(x, time.norm, time.factors, layer.time_input, normed, batch, fused.time, products)
        size = num_rows * width
        value = products[2 * size : 3 * size].view(num_rows, width)
        heads = time.heads
        (_, num_heads, dim, _) = layer.wkv.shape
        ranks = fused.time.ranks
        blocks = {f"{name[:-4]}block": max(1, next_power_of_2(rank)) for name, rank in ranks.items()}
        mixes.mix_few_heads_kernel[(batch.num_decodes, num_heads)](
            products,
            *fused.ups,
            *fused.biases,
            value if first_value is None else first_value,
            heads.removal,
            heads.replacement,
            heads.bonus,
            heads.norm,
            heads.norm_bias,
            heads.eps,
            layer.wkv,
            batch.sources,
            batch.targets,
            normed,
            layer.time_input,
            layer.channel_input,
            channel_before,
            out,
            num_rows,
            layer.wkv.stride(0),
            layer.time_input.stride(0),
            layer.channel_input.stride(0),
            width=width,
            dim=dim,
            num_warps=HEAD_WARPS,
            **ranks,
            **blocks,
            **early_start(x.device),
        )
        x = self.ops.linear(out, time.out, residual=x)
        hidden = torch.empty((num_rows, fused.channel.num_outputs), dtype=dtype, device=x.device)
        mix_rows(x, channel.norm, channel.factor, channel_before, layer.channel_input, batch, fused.channel, hidden)
        return self.ops.linear(hidden, channel.value, residual=x), value

    def _mix_many(
        self,
        x: Tensor,
        first_value: Tensor | None,
        weights: BlockWeights[Tensor],
        fused: FusedWeights,
        batch: RecurrentBatch[Tensor],
        layer: StateLayer[Tensor],
    ) -> tuple[Tensor, Tensor]:
        (num_rows, width) = x.shape
        time = weights.time
        channel = weights.channel
        sizes = fused.time.sizes
        mixed = norm_and_shift(x, time.norm, time.factors, layer.time_input, batch)
        products = torch.empty(num_rows * sum(sizes), dtype=mixed.dtype, device=x.device)
        wide, low = products.split((3 * num_rows * width, num_rows * sum(sizes[3:])))
        receptance, key, value = wide = wide.view(3, num_rows, width)
        is_narrow = num_rows > self.parts_rows
        if is_narrow:
            for mix, weight, out in zip(WIDE_MIXES, fused.wide, wide, strict=True):
                torch.mm(mixed[mix], weight.dequantised().t(), out=out)
        multiply_parts(mixed, fused.time, products, is_narrow=is_narrow)
        raised = raise_rows(low, fused, num_rows, width)
        inputs = HeadInputs(
            receptance=receptance,
            decay=raised[0],
            key=key,
            value=value,
            rate=raised[1],
            gate=raised[2],
            first_value=first_value,
            value_mix=raised[3] if len(raised) > 3 else None,
        )
        x = self.ops.linear(self.mix_heads(inputs, time.heads, layer.wkv, batch), time.out, residual=x)
        mixed = norm_and_shift(x, channel.norm, channel.factor, layer.channel_input, batch)
        if is_narrow:
            hidden = self.ops.linear(mixed[0], channel.key, activation="relu_squared")
        else:
            hidden = torch.empty((num_rows, fused.channel.num_outputs), dtype=mixed.dtype, device=x.device)
            multiply_parts(mixed, fused.channel, hidden)
        return self.ops.linear(hidden, channel.value, residual=x), value

    def decode_batch(
        self, inputs: Tensor, state: DecodeState[Tensor]
    ) -> tuple[RecurrentBatch[Tensor], SamplingBatch[Tensor]]:
        num = inputs.shape[1]
        if num not in self._counting:
            self._counting[num] = torch.arange(num + 1, device=inputs.device)
        every, ones = self._counting[num], np.ones(num, dtype=np.int64)
        places = torch.empty((5, num), dtype=torch.int64, device=inputs.device)
        wkv.stage_states_kernel[(num,)](
            inputs[Input.TOKEN],
            inputs[Input.ROW],
            inputs[Input.POSITION],
            inputs[Input.BLOCK],
            inputs[Input.SOURCE],
            state.last_tokens,
            places,
            num,
            on_device=ON_DEVICE,
            first_slot=FIRST_SLOT,
            no_slot=NO_SLOT,
            num_warps=1,
        )
        token_ids, previous, sources, targets, positions = places
        batch = RecurrentBatch(
            num_tokens=num,
            num_decodes=num,
            query_lens=ones,
            piece_counts=ones,
            piece_lens=ones,
            token_ids=token_ids,
            previous=previous,
            sources=sources,
            targets=targets,
            starts=every,
            first_pieces=every,
        )
        return batch, sampling_batch(inputs, positions, every[:-1], state)


def choose_part_tile(element_bytes: int, device: torch.device) -> LinearTile:
    """A tile of `multiply_parts`, with as many stages as there is room for."""
    outputs, columns = 32, 256 // element_bytes
    stage_bytes = (PART_ROWS + outputs) * columns * element_bytes
    return dot_tile(outputs, columns, max(1, min(6, shared_bytes(device) // stage_bytes)))


def mix_rows(
    x: Tensor,
    norm: NormWeights[Tensor],
    factors: Tensor,
    before: Tensor,
    normed: Tensor,
    batch: RecurrentBatch[Tensor],
    parts: Parts,
    out: Tensor,
) -> None:
    """Norm, shift and products of a mix. before: inputs before these; normed: where these inputs go."""
    num_rows, width = x.shape
    columns = next_power_of_2(width)
    num_warps = max(1, min(16, columns // COLUMNS_PER_WARP))
    outputs = max(1, min(16, HELD_ELEMENTS * num_warps // (columns if num_rows == 1 else 2 * columns)))
    mixes.mix_rows_kernel[(sum(cdiv(size, outputs) for size in parts.sizes),)](
        x,
        norm.weight,
        norm.bias,
        factors,
        before,
        batch.previous,
        batch.targets,
        normed,
        out,
        *parts.matrices,
        parts.scales,
        norm.eps,
        x.stride(0),
        before.stride(0),
        normed.stride(0),
        width=width,
        columns=columns,
        rows=num_rows,
        outputs=outputs,
        num_outputs=parts.sizes[0],
        is_time=parts.is_time,
        num_warps=num_warps,
        **parts.ranks,
        **early_start(x.device),
    )


def norm_and_shift(
    x: Tensor, norm: NormWeights[Tensor], factors: Tensor, inputs: Tensor, batch: RecurrentBatch[Tensor]
) -> Tensor:
    """`layer_norm` and `shift` of decodes: (factors, rows, width), in the type of the inputs in slots."""
    num_rows, width = x.shape
    num_factors, columns = factors.numel() // width, next_power_of_2(width)
    out = torch.empty((num_factors, num_rows, width), dtype=inputs.dtype, device=x.device)
    mixes.norm_shift_kernel[(num_rows,)](
        x,
        norm.weight,
        norm.bias,
        factors,
        inputs,
        batch.previous,
        batch.targets,
        out,
        norm.eps,
        x.stride(0),
        inputs.stride(0),
        num_rows,
        width=width,
        columns=columns,
        num_factors=num_factors,
        num_warps=max(1, min(16, columns // COLUMNS_PER_WARP)),
        **early_start(x.device),
    )
    return out


def multiply_parts(mixed: Tensor, parts: Parts, out: Tensor, *, is_narrow: bool = False) -> None:
    """The products of a mix behind `norm_and_shift`. is_narrow: of the narrow parts alone."""
    _, num_rows, width = mixed.shape
    tile = choose_part_tile(mixed.element_size(), mixed.device)
    num_tiles = sum(cdiv(size, tile.outputs) for size in parts.sizes[3 if is_narrow else 0 :])
    mixes.multiply_parts_kernel[(num_tiles, cdiv(num_rows, PART_ROWS))](
        mixed,
        out,
        *parts.matrices,
        parts.scales,
        num_rows,
        width=width,
        rows=PART_ROWS,
        outputs=tile.outputs,
        columns=tile.columns,
        num_outputs=parts.sizes[0],
        is_time=parts.is_time,
        is_narrow=is_narrow,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **parts.ranks,
        **early_start(mixed.device),
    )


def raise_rows(low: Tensor, fused: FusedWeights, num_rows: int, width: int) -> Tensor:
    """Decay, rate, gate and, unless the layer is the first, value mix: (3 or 4, rows, width)."""
    ranks = fused.time.ranks
    num_parts = sum(rank > 0 for rank in ranks.values())
    out = torch.empty((num_parts, num_rows, width), dtype=low.dtype, device=low.device)
    grid = (num_parts, cdiv(width, RAISED_OUTPUTS), cdiv(num_rows, RAISED_ROWS))
    mixes.raise_rows_kernel[grid](
        low,
        *fused.ups,
        *fused.biases,
        out,
        num_rows,
        width=width,
        rows=RAISED_ROWS,
        outputs=RAISED_OUTPUTS,
        **ranks,
        block=dot_block(max(ranks.values())),
        is_even=all(rank % 16 == 0 for rank in ranks.values()),
        num_warps=4,
        **early_start(low.device),
    )
    return out
