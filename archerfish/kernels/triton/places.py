"""The host's side of attention in Triton: what the kernels ask of a batch, and how their work is cut up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from archerfish.kernels.ops import BlockMask, HeadShape, Ids, PagedBatch
from archerfish.kernels.triton.tiles import next_power_of_2

Tensor = torch.Tensor
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4  # that the parts of decodes should come to
MAX_SHARED_PARTS = 32
SHARED_PROGRAMS_PER_PROCESSOR = 1  # that their parts should come to: a tile's registers fill a processor
GATHER_STEP = 128  # rows of a piece of gathered keys; steps divide it
GATHER_RATIO = 2  # keys to new tokens up to which gathering pays
LONE_DECODE, FEW_DECODES, HALF_BUSY = 16, 48, 99  # sequences times KV heads, up to which a tile of a split decode is best
SOME_DECODES, MANY_DECODES, MOST_DECODES = 768, 1024, 1664  # and of one that is not split
ALIGNED_WORDS = 4  # 16 bytes
MIN_ROWS, SHORT_ROWS = 16, 64  # of a tile that tl.dot takes; of the smallest for several new tokens


@dataclass(frozen=True)
class Gathering:
    """Where keys go that are laid side by side for prefills: of each sequence from a multiple of GATHER_STEP on."""

    starts: Tensor  # (sequences,) first row
    sequences: Tensor  # (tiles,) of GATHER_STEP rows: their sequence
    firsts: Tensor  # (tiles,) their first key
    num_rows: int


@dataclass
class Places:
    """What the kernels ask of a batch, on the device; lengths as int32. Found once for all layers by `find_places`.

    The batch of a recorded step has places over buffers that each step refills: of a batch of decodes only context_lens is
    read, and a context of 0 gives a row of zeros.
    """

    context_lens: Tensor  # (sequences,)
    query_starts: Tensor  # (sequences,) row of the first new token
    query_lens: Tensor  # (sequences,)
    shared_len: Tensor | None = None  # (1,) leading keys that lie in the blocks of sequence 0 for all decodes, which have more
    num_splits: int = 0  # parts of each decode; 0: as many as keep the device busy
    is_gathered: bool = False  # laying keys side by side costs little beside attending to them
    num_short_heads: int = 0  # that share a KV head, up to which several new tokens are few rows
    tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by queries per tile: sequence, first query
    gathering: Gathering | None = None
    scratch: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by purpose, shape and type

    def pair(
        self, purpose: str, first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Two tensors that every layer writes anew."""
        key = (purpose, first, second, dtype)
        if key not in self.scratch:
            device = self.context_lens.device
            self.scratch[key] = torch.empty(first, dtype=dtype, device=device), torch.empty(second, dtype=dtype, device=device)
        return self.scratch[key]


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def send_pieces(pieces: Sequence[Ids], device: torch.device) -> list[Tensor]:
    """Host arrays as int32 on the device, sent as one; each begins where an allocation might.

    A kernel is compiled once more for each of its pointers that is aligned in another way.
    """
    lengths = [len(piece) for piece in pieces]
    places = np.cumsum([0, *(-(-length // ALIGNED_WORDS) * ALIGNED_WORDS for length in lengths)]).tolist()
    words = np.zeros(places[-1], dtype=np.int32)
    for piece, length, place in zip(pieces, lengths, places, strict=False):
        words[place : place + length] = piece
    sent = to_device(words, device)
    return [sent[place : place + length] for length, place in zip(lengths, places, strict=False)]


def find_places(batch: PagedBatch[Tensor]) -> Places:
    places: Places | None = batch.notes.get("places")
    if places is not None:
        return places
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    num_new, num_keys = batch.num_tokens - batch.num_decodes, int(batch.context_lens[batch.num_decodes :].sum())
    pieces = (batch.context_lens, starts, batch.query_lens, np.array([batch.num_shared]))
    contexts, rows, query_lens, shared = send_pieces(pieces, batch.token_ids.device)
    places = Places(contexts, rows, query_lens, shared if batch.num_shared else None)
    if num_new and not batch.is_deterministic:
        places.is_gathered = num_keys <= GATHER_RATIO * num_new
        places.num_short_heads = SHORT_ROWS * (len(batch.query_lens) - batch.num_decodes) // num_new
    batch.notes["places"] = places
    return places


def cut(lengths: Ids, size: int) -> tuple[Ids, Ids]:
    """Pieces of at most a size: of which sequence each is, and where in it it begins."""
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


def decode_tile(heads: HeadShape, dtype: torch.dtype, num_sequences: int, is_split: bool) -> Tile:
    """What was quickest for contexts of 200 to 3500 keys on a Hopper."""
    rows = max(MIN_ROWS, next_power_of_2(heads.num_heads // heads.num_kv_heads))
    num_programs = num_sequences * heads.num_kv_heads
    if dtype == torch.float32 or heads.head_dim > 128:
        return Tile(rows, 32, 4, 2)
    if is_split and num_programs < HALF_BUSY:
        if num_programs < LONE_DECODE:
            return Tile(rows, 16, 1, 3)
        return Tile(rows, 32, 2, 3) if num_programs < FEW_DECODES else Tile(rows, 32, 1, 3)
    if num_programs < SOME_DECODES:
        return Tile(rows, 128, 4, 2)
    if num_programs < MANY_DECODES or rows > MIN_ROWS:
        return Tile(rows, 64, 4 if rows == MIN_ROWS else 2, 3)
    return Tile(rows, 32, 2 if num_programs < MOST_DECODES else 1, 3)


def shared_tile(heads: HeadShape, dtype: torch.dtype, num_rows: int) -> Tile:
    """For the keys that decodes of num_rows heads in all share."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    if num_rows <= SHORT_ROWS or heads.head_dim > 128:
        return Tile(SHORT_ROWS, 64, 4, 2)
    return Tile(128, 64, 8, 2)


def prefill_tile(heads: HeadShape, dtype: torch.dtype, is_gathered: bool, is_short: bool) -> Tile:
    """is_short: most sequences have no more rows than the smallest tile, or a tile should span few rows of a mask."""
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
    span: int  # rows that the queries of a tile may lie in, as a power of 2; 0: no mask


def lay_mask(mask: BlockMask[Tensor] | None, tile: Tile, num_queries: int, nothing: Tensor) -> tuple[Tile, LaidMask]:
    """The mask for tiles of so many queries, and the tile, whose steps of keys become such that a block holds whole ones."""
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
    """Parts of a decode, so that all processors have work; 1 where there are sequences enough."""
    num_programs = num_sequences * num_kv_heads
    if 3 * num_programs >= 4 * num_processors:
        return 1
    if 4 * num_programs >= 3 * num_processors:
        return 2
    return max(1, min(MAX_SPLITS, PROGRAMS_PER_PROCESSOR * num_processors // num_programs))


def choose_shared_parts(num_programs: int, num_processors: int) -> int:
    """Parts of the keys that decodes share, which so many programs take each."""
    return max(1, min(MAX_SHARED_PARTS, SHARED_PROGRAMS_PER_PROCESSOR * num_processors // num_programs))
