"""The host's side of attention in Triton: what the kernels read about a batch, and how their work is divided into
programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from archerfish.background import WeakCache
from archerfish.kernels.batches import BlockMask, Ids
from archerfish.kernels.ops import HeadShape, PagedBatch
from archerfish.kernels.triton.tiles import next_power_of_2

Tensor = torch.Tensor
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4  # that a step of split decodes should have
MAX_SHARED_PARTS = 32
SHARED_PROGRAMS_PER_PROCESSOR = 1  # that shared keys should have: a tile's registers fill a processor
GATHER_STEP = 128  # rows of a piece of gathered keys, a multiple of every tile's step
GATHER_RATIO = 2  # keys per new token, up to which gathering is quicker
# Limits of `decode_tile`, in sequences times KV heads: of decodes that are split, and of those that are not.
LONE_DECODE = 16
FEW_DECODES = 48
HALF_BUSY = 99
SOME_DECODES = 768
MANY_DECODES = 1024
MOST_DECODES = 1664
ALIGNED_BYTES = 16  # of an address that kernels are compiled for
MIN_ROWS, SHORT_ROWS = 16, 64  # the fewest rows of a tile that tl.dot takes; rows of the smallest tile of prefill


@dataclass(frozen=True)
class Gathering:
    """Where prefills copy their keys to: each sequence begins at a multiple of GATHER_STEP rows."""

    starts: Tensor  # (sequences,) first row
    sequences: Tensor  # (tiles,) of GATHER_STEP rows: their sequence
    firsts: Tensor  # (tiles,) their first key
    num_rows: int


@dataclass
class AttentionPlan:
    """What the attention kernels read about a batch, on the device; lengths are int32. Made once for all layers.

    The plan of a recorded step lies over buffers that each step refills. Of a batch of decodes the kernels read
    context_lens only, and a context of 0 gives a row of zeros.
    """

    context_lens: Tensor  # (sequences,)
    query_starts: Tensor  # (sequences,) row of the first new token
    query_lens: Tensor  # (sequences,)
    shared_len: Tensor | None = (
        None  # (1,) leading keys that all decodes share, in the blocks of sequence 0; each has more
    )
    num_splits: int = 0  # parts of each decode; 0: as many as keep the device busy
    num_expected: int = 0  # decodes that are probably there, the other rows being filling; 0: all
    num_rows: int = (
        0  # of a recorded pass: room for new tokens of prompts, whose tiles the device lists; 0: the host does
    )
    is_gathered: bool = False  # prefill copies its keys into contiguous rows first, which costs little beside attention
    num_short_heads: int = 0  # query heads per KV head, up to which most prompts fit into the smallest tile
    tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by queries per tile: sequence, first query
    gathering: Gathering | None = None
    scratch: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by purpose, shape and type

    def pair(
        self, purpose: str, first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Two tensors of scratch memory, which every layer writes anew."""
        key = (purpose, first, second, dtype)
        if key not in self.scratch:
            device = self.context_lens.device
            self.scratch[key] = (
                torch.empty(first, dtype=dtype, device=device),
                torch.empty(second, dtype=dtype, device=device),
            )
        return self.scratch[key]


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def send_pieces(
    pieces: Sequence[Ids], device: torch.device, dtype: type[np.signedinteger[Any]] = np.int32
) -> list[Tensor]:
    """Host arrays on the device in one integer type, sent as one; each begins at a multiple of ALIGNED_BYTES.

    A kernel is compiled once more for each of its pointers that is aligned in another way.
    """
    lengths = [len(piece) for piece in pieces]
    step = ALIGNED_BYTES // np.dtype(dtype).itemsize
    places = np.cumsum([0, *(-(-length // step) * step for length in lengths)]).tolist()
    words = np.zeros(places[-1], dtype=dtype)
    for piece, length, place in zip(pieces, lengths, places, strict=False):
        words[place : place + length] = piece
    sent = to_device(words, device)
    return [sent[place : place + length] for length, place in zip(lengths, places, strict=False)]


@WeakCache
def find_plan(batch: PagedBatch[Tensor]) -> AttentionPlan:
    assert batch.query_lens.sum() == batch.num_tokens, "a batch that the device has laid out has a plan"
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    num_new, num_keys = batch.num_tokens - batch.num_decodes, int(batch.context_lens[batch.num_decodes :].sum())
    pieces = (batch.context_lens, starts, batch.query_lens, np.array([batch.num_shared]))
    contexts, rows, query_lens, shared = send_pieces(pieces, batch.token_ids.device)
    plan = AttentionPlan(contexts, rows, query_lens, shared if batch.num_shared else None)
    if num_new and not batch.is_deterministic:
        plan.is_gathered = num_keys <= GATHER_RATIO * num_new
        plan.num_short_heads = SHORT_ROWS * (len(batch.query_lens) - batch.num_decodes) // num_new
    return plan


def cut(lengths: Ids, size: int) -> tuple[Ids, Ids]:
    """Sequences divided into pieces of at most a size: the sequence of each piece, and where in it the piece begins."""
    counts = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    return sequence, (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * size


def list_tiles(batch: PagedBatch[Tensor], num_queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and first query of every tile of the sequences with several new tokens, those with most keys first."""
    lens, contexts = batch.query_lens[batch.num_decodes :], batch.context_lens[batch.num_decodes :]
    sequence, first = cut(lens, num_queries)
    order = np.argsort(lens[sequence] - contexts[sequence] - first, kind="stable")
    sequences, firsts = send_pieces((sequence[order] + batch.num_decodes, first[order]), device)
    return sequences, firsts


def list_tiles_on_device(plan: AttentionPlan, num_decodes: int, num_queries: int) -> tuple[Tensor, Tensor]:
    """As `list_tiles`, the last tiles first. Tiles beyond those that are needed begin after every query."""
    counts = (plan.query_lens[num_decodes:].long() + num_queries - 1) // num_queries
    ends = counts.cumsum(0)
    most = min(plan.num_rows, plan.num_rows // num_queries + len(counts))
    place = ends[-1] - 1 - torch.arange(most, device=ends.device)
    owner = torch.searchsorted(ends, place, right=True).clamp_max_(len(counts) - 1)
    firsts = torch.where(place >= 0, (place - (ends - counts)[owner]) * num_queries, plan.num_rows)
    return (owner + num_decodes).int(), firsts.int()


def plan_gathering(batch: PagedBatch[Tensor], device: torch.device) -> Gathering:
    lens = batch.context_lens.copy()
    lens[: batch.num_decodes] = 0
    sequence, first = cut(lens, GATHER_STEP)
    padded = -(-lens // GATHER_STEP) * GATHER_STEP
    starts = np.cumsum(padded) - padded
    rows, sequences, firsts = send_pieces((starts, sequence, first), device)
    return Gathering(rows, sequences, firsts, int(padded.sum()))


@dataclass(frozen=True)
class Tile:
    """Shape of the work of one program and how it is compiled."""

    rows: int  # of queries times the heads that share a KV head
    step: int  # keys taken at a time
    num_warps: int
    num_stages: int


def decode_tile(
    heads: HeadShape,
    dtype: torch.dtype,
    num_sequences: int,
    is_split: bool,
    num_processors: int,
    *,
    is_narrow: bool = False,
) -> Tile:
    """What was quickest for contexts of 200 to 8000 keys on a Hopper: of tiles that are as good, the one whose programs
    fill the processors in their last round too. is_narrow: keys are in FP8.

    One warp alone took FP8 that was never loaded, which was NaN where another kernel's data lay (Triton 3.6).
    """
    rows = max(MIN_ROWS, next_power_of_2(heads.num_heads // heads.num_kv_heads))
    num_programs = num_sequences * heads.num_kv_heads
    if dtype == torch.float32 or heads.head_dim > 128:
        return Tile(rows, 32, 4, 2)
    if is_narrow:
        return (
            Tile(rows, 128, 2, 2)
            if rows == MIN_ROWS and not is_split
            else Tile(rows, 128 if rows == MIN_ROWS else 64, 4, 3)
        )
    if is_split and num_programs < HALF_BUSY:
        if num_programs < LONE_DECODE:
            return Tile(rows, 16, 1, 3)
        return Tile(rows, 32, 2, 3) if num_programs < FEW_DECODES else Tile(rows, 32, 1, 3)
    is_full = rows == MIN_ROWS and num_programs < MANY_DECODES and fills(num_programs, 2 * num_processors)
    if num_programs < SOME_DECODES and not is_full:
        return Tile(rows, 128, 4, 2)
    if num_programs < MANY_DECODES or rows > MIN_ROWS:
        return Tile(rows, 64, 4 if rows == MIN_ROWS else 2, 3)
    return Tile(rows, 32, 1 if num_programs >= MOST_DECODES or fills(num_programs, 4 * num_processors) else 2, 3)


def fills(num_programs: int, at_once: int) -> bool:
    """Whether hardly a processor waits for the last programs, of which so many run at once."""
    return num_programs % at_once == 0 or num_programs % at_once > 0.9 * at_once


def shared_tile(heads: HeadShape, dtype: torch.dtype, num_rows: int) -> Tile:
    """For the keys that decodes of num_rows heads in all share."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    if num_rows <= SHORT_ROWS or heads.head_dim > 128:
        return Tile(SHORT_ROWS, 64, 4, 2)
    return Tile(128, 64, 8, 2)


def prefill_tile(heads: HeadShape, dtype: torch.dtype, is_gathered: bool, is_short: bool) -> Tile:
    """is_short: most sequences fit into the smallest tile, or a tile should overlap few rows of a mask."""
    least = next_power_of_2(heads.num_heads // heads.num_kv_heads)
    if dtype == torch.float32:
        return Tile(max(32, least), 32, 4, 2)
    if is_gathered:
        return Tile(max(SHORT_ROWS, least), 64, 4, 3)
    if heads.head_dim > 128:
        return Tile(max(128, least), 64, 8, 2)
    if is_short:
        return Tile(max(SHORT_ROWS, least), 64, 4, 2)
    return Tile(max(256, least), 64, 8, 3) if heads.head_dim > 64 else Tile(max(128, least), 64, 4, 3)


@dataclass(frozen=True)
class LaidMask:
    """A block mask as the kernels take it."""

    visible: Tensor  # contiguous; any tensor where there is no mask
    num_rows: int
    num_columns: int
    size: int
    span: int  # rows of the mask that the queries of a tile may fall into, as a power of 2; 0: no mask


def lay_mask(mask: BlockMask[Tensor] | None, tile: Tile, num_queries: int, nothing: Tensor) -> tuple[Tile, LaidMask]:
    """The tile, with a step that divides the mask's blocks, and the mask for tiles of num_queries queries."""
    if mask is None:
        return tile, LaidMask(nothing, 0, 0, 0, 0)
    visible = mask.visible.contiguous()
    num_rows, num_columns = visible.shape
    if visible.dtype == torch.bool:
        visible = visible.view(torch.uint8)
    span = next_power_of_2(1 + (mask.size + num_queries - 2) // mask.size)
    step = math.gcd(tile.step, mask.size)
    return replace(tile, step=step), LaidMask(visible, num_rows, num_columns, mask.size, span)


def choose_splits(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    """How many parts each decode is split into, so that all processors have work; 1 where there are enough
    sequences."""
    num_programs = num_sequences * num_kv_heads
    if 3 * num_programs >= 4 * num_processors:
        return 1
    if 4 * num_programs >= 3 * num_processors:
        return 2
    return max(1, min(MAX_SPLITS, PROGRAMS_PER_PROCESSOR * num_processors // num_programs))


def choose_shared_parts(num_programs: int, num_processors: int) -> int:
    """How many parts the shared keys are split into, where every part takes num_programs programs."""
    return max(1, min(MAX_SHARED_PARTS, SHARED_PROGRAMS_PER_PROCESSOR * num_processors // num_programs))
