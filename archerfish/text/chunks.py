"""ChunkTokenizer: token ids of texts by looking up the ids of their words, for tokenizers of the BERT kind.

BERT's normaliser changes each character by itself, or with the marks after it, and its pre-tokenizer cuts at white
space and around punctuation. So the ids of a text without added tokens are the ids of its chunks between the characters
in `CUTS`. A lookup costs a tenth of the Rust tokenizer's time, which bounds embeddings on a GPU.
"""

from __future__ import annotations

import secrets
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from archerfish.kernels.batches import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Keys = npt.NDArray[np.uint64]
CUTS = " \n\t\r" + string.punctuation
IS_CUT = bytes(chr(value) in CUTS for value in range(256))
CUT_NUMBERS = np.array([CUTS.find(chr(value)) + 1 for value in range(256)])
TEXT_END = ord("\n")
KEY_BYTES = 15  # of a chunk in its key; the sixteenth byte is the length
MAX_CHUNK_BYTES = 64  # longer chunks are not stored
MAX_CHUNKS = 1 << 17
MAX_IDS = 1 << 18
MAX_LONG_CHUNKS = 1 << 14  # about 12 MB; a full table is replaced by an empty one
SLOT_BITS, MAX_PROBES = 18, 8
MIN_CHARACTERS, BLOCK_CHARACTERS = 256, 1 << 19  # of a block: texts that are looked up together
USUAL_SHARE = 1 / 8  # of unknown chunks in a block; learning them costs about half of tokenising the texts
LEARNED_SHARE, MIN_LEARNED = 1 / 4, 64  # the most chunks that are learned from a block
MAX_PAUSE = 31  # blocks in a row that the Rust tokenizer reads
MASKS = np.array([(1 << 8 * num_bytes) - 1 for num_bytes in range(9)], np.uint64)
LENGTHS = np.arange(256)
HEAD_MASKS, TAIL_MASKS = MASKS[np.minimum(LENGTHS, 8)], MASKS[np.clip(LENGTHS - 8, 0, 7)]


class Block(NamedTuple):
    """Texts cut into chunks: the cutting characters and the chunk after each."""

    data: bytes
    marks: npt.NDArray[np.uint8]
    starts: Ids
    lengths: Ids
    heads: Keys  # the first eight bytes of each chunk
    tails: Keys  # the next seven, and the length

    @classmethod
    def of(cls, joined: str) -> Block:
        """The chunks of a string that begins and ends with a cut."""
        data = joined.encode()
        cuts = np.flatnonzero(np.frombuffer(data.translate(IS_CUT), np.bool_))
        marks = np.frombuffer(data, np.uint8).take(cuts)
        words = np.frombuffer(data + bytes(32 - len(data) % 8), "<u8")
        starts = cuts[:-1] + 1
        lengths = cuts[1:] - starts
        places, shifts = starts >> 3, ((starts & 7) << 3).view(np.uint64)
        rests = np.uint64(64) - shifts
        first = words.take(places)
        second = words.take(places + 1)
        third = words.take(places + 2)
        short = np.minimum(lengths, 255)
        heads = (first >> shifts | second << rests) & HEAD_MASKS.take(short)
        tails = (second >> shifts | third << rests) & TAIL_MASKS.take(short) | short.view(np.uint64) << np.uint64(56)
        return cls(data, marks, starts, lengths, heads, tails)


class KnownChunks:
    """A hash table from chunks to their token ids. Chunks have numbers; number 0 has no ids.

    Readers take no lock: the ids of a number are written before the number can be found, and never change.
    """

    def __init__(self, cut_ids: list[list[int]]) -> None:
        self.firsts, self.counts = np.zeros(MAX_CHUNKS, np.int64), np.zeros(MAX_CHUNKS, np.int64)
        self.ids = np.zeros(MAX_IDS, np.int64)
        self.long: dict[bytes, int] = {}
        self.is_full = False
        self._num_chunks, self._num_ids = 1, 0
        self._heads, self._tails = np.zeros(MAX_CHUNKS, np.uint64), np.zeros(MAX_CHUNKS, np.uint64)
        self._slots = np.zeros(1 << SLOT_BITS, np.int64)
        self._factors = [
            np.uint64(secrets.randbits(64) | 1) for _ in range(2)
        ]  # random, so that no text can force collisions
        nothing = np.zeros(1, np.uint64)
        self._name(self._store(cut_ids)[:1], nothing, nothing)  # an empty chunk has no ids

    def find(self, heads: Keys, tails: Keys) -> Ids:
        """Numbers of chunks by key; -1 for unknown ones."""
        slots = self._slots_of(heads, tails)
        numbers = self._slots.take(slots)
        others = np.flatnonzero((self._heads.take(numbers) != heads) | (self._tails.take(numbers) != tails))
        probing = others[numbers[others] > 0]
        numbers[others] = -1
        for probe in range(1, MAX_PROBES):
            if not probing.size:
                break
            found = self._slots.take(slots[probing] + probe, mode="wrap")
            is_it = (self._heads.take(found) == heads[probing]) & (self._tails.take(found) == tails[probing])
            numbers[probing[is_it]] = found[is_it]
            probing = probing[~is_it & (found > 0)]
        return numbers

    def add(self, chunks: Mapping[bytes, Sequence[int]], heads: Keys, tails: Keys) -> None:
        """Learn the ids of chunks with these keys, as far as there is room."""
        numbers = self._store(list(chunks.values()))
        short = np.flatnonzero([len(chunk) <= KEY_BYTES for chunk in islice(chunks, len(numbers))])
        self._name(numbers[short], heads[short], tails[short])
        named = zip(islice(chunks, len(numbers)), numbers.tolist(), strict=True)
        long = ((chunk, number) for chunk, number in named if len(chunk) > KEY_BYTES)
        self.long.update(islice(long, MAX_LONG_CHUNKS - len(self.long)))
        self.is_full = len(numbers) < len(chunks) or len(self.long) == MAX_LONG_CHUNKS

    def _store(self, ids: Sequence[Sequence[int]]) -> Ids:
        ends = np.cumsum([len(each) for each in ids])
        num_fitting = min(int(np.searchsorted(ends, MAX_IDS - self._num_ids, "right")), MAX_CHUNKS - self._num_chunks)
        numbers = np.arange(self._num_chunks, self._num_chunks + num_fitting)
        flat = [token_id for each in ids[:num_fitting] for token_id in each]
        self.ids[self._num_ids : self._num_ids + len(flat)] = flat
        self.counts[numbers] = np.diff(ends[:num_fitting], prepend=0)
        self.firsts[numbers] = self._num_ids + ends[:num_fitting] - self.counts[numbers]
        self._num_chunks, self._num_ids = self._num_chunks + num_fitting, self._num_ids + len(flat)
        return numbers

    def _name(self, numbers: Ids, heads: Keys, tails: Keys) -> None:
        """Enter chunks into the hash table; a chunk whose slots are all taken stays unknown."""
        self._heads[numbers], self._tails[numbers] = heads, tails
        slots = self._slots_of(heads, tails)
        for probe in range(MAX_PROBES):
            places = (slots + probe) % len(self._slots)
            is_free = self._slots[places] == 0
            self._slots[places[is_free]] = numbers[is_free]
            is_left = self._slots[places] != numbers
            slots, numbers = slots[is_left], numbers[is_left]

    def _slots_of(self, heads: Keys, tails: Keys) -> Ids:
        return ((heads ^ tails * self._factors[0]) * self._factors[1] >> np.uint64(64 - SLOT_BITS)).view(np.int64)


class ChunkTokenizer:
    """Gives the ids of a Rust tokenizer, several times faster. Safe to use from several threads at once."""

    def __init__(self, rust: RustTokenizer, max_length: int, prefix: list[int], suffix: list[int]) -> None:
        """The Rust tokenizer truncates at max_length; prefix and suffix are the special tokens around every text."""
        self._rust = rust
        self._max_length = max_length
        self._prefix = prefix
        self._suffix = suffix
        self._added = [token.content for token in rust.get_added_tokens_decoder().values()]
        self._marks = {next((c for c in content if c in string.punctuation), content) for content in self._added}
        cut_ids = {cut: rust.encode(cut, add_special_tokens=False).ids for cut in CUTS}
        self._cut_ids = list({**cut_ids, chr(TEXT_END): [*suffix, *prefix]}.values())
        self._known = KnownChunks(self._cut_ids)
        self._learning = threading.Lock()
        self._share = 1.0  # of new chunks in the last block
        self._pause = self._num_left_out = 0  # blocks

    @classmethod
    def of(cls, rust: RustTokenizer, max_length: int) -> ChunkTokenizer | None:
        """None for a tokenizer that may read a chunk differently in different texts."""
        from tokenizers.models import WordPiece
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        is_bert = isinstance(rust.normalizer, BertNormalizer) and isinstance(rust.pre_tokenizer, BertPreTokenizer)
        if not is_bert or not isinstance(rust.model, WordPiece) or rust.model.token_to_id(rust.model.unk_token) is None:
            return None
        has_normalized = any(token.normalized for token in rust.get_added_tokens_decoder().values())
        if has_normalized or max_length <= rust.num_special_tokens_to_add(False):
            return None
        one = rust.encode("a")
        if one.special_tokens_mask.count(0) != 1:
            return None
        place = one.special_tokens_mask.index(0)
        return cls(rust, max_length, one.ids[:place], one.ids[place + 1 :])

    def tokenize(self, texts: Sequence[str], max_length: int) -> list[Ids | None]:
        """Ids of texts, before `cut`; None for texts that the Rust tokenizer has to read."""
        found: list[Ids | None] = []
        for block in blocks(texts):
            found += self._tokenize(block, max_length)
        return found

    def _tokenize(self, texts: Sequence[str], max_length: int) -> list[Ids | None]:
        joined = "\n".join(["", *texts, ""])
        is_fitting = MIN_CHARACTERS <= len(joined) <= BLOCK_CHARACTERS + 1
        if not is_fitting or max_length <= len(self._prefix) + len(self._suffix) or self._is_pausing():
            return [None] * len(texts)
        unreadable: set[int] = set()  # texts for the Rust tokenizer
        if any(mark in joined for mark in self._marks):
            unreadable.update(i for i, text in enumerate(texts) if any(content in text for content in self._added))
        if joined.count("\n") > len(texts) + 1:
            joined = "\n".join(["", *[text.replace("\n", " ") for text in texts], ""])
        known, block = self._known, Block.of(joined)
        chunks = known.find(block.heads, block.tails)
        ends = np.flatnonzero(block.marks == TEXT_END)
        self._adapt(self._fill_in(known, block, chunks))
        unknown = np.flatnonzero(chunks < 0)
        unreadable.update((np.searchsorted(ends, unknown, "right") - 1).tolist())
        numbers = np.zeros((len(block.marks), 2), np.int64)
        numbers[:, 0] = CUT_NUMBERS.take(block.marks)
        numbers[:-1, 1] = np.maximum(chunks, 0)
        ids, bounds = self._ids_of(known, numbers.reshape(-1), ends * 2)
        return [None if i in unreadable else ids[start:end] for i, (start, end) in enumerate(pairwise(bounds))]

    def _ids_of(self, known: KnownChunks, numbers: Ids, text_ends: Ids) -> tuple[Ids, list[int]]:
        """All ids of chunks in a row, and where the texts between these ends begin and end."""
        counts = known.counts.take(numbers)
        ends = np.cumsum(counts)
        places = np.repeat(known.firsts.take(numbers) + counts - ends, counts) + np.arange(ends[-1])
        return known.ids.take(places), (ends[text_ends] - len(self._prefix)).tolist()

    def cut(self, ids: Ids, max_length: int) -> Ids:
        """At most max_length ids of a text, with the special tokens at its end."""
        if len(ids) <= max_length:
            return ids
        return np.concatenate([ids[: max_length - len(self._suffix)], np.array(self._suffix, np.int64)])

    def _fill_in(self, known: KnownChunks, block: Block, chunks: Ids) -> float:
        """Learn unknown chunks and write their numbers into `chunks`. Gives the share of new chunks in the block."""
        unknown = np.flatnonzero(chunks < 0)
        starts, ends = block.starts[unknown], block.starts[unknown] + block.lengths[unknown]
        found = [block.data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        places = dict(zip(found, unknown.tolist(), strict=True))
        new = {chunk: place for chunk, place in places.items() if chunk not in known.long}
        if new:
            self._learn(known, block, new, max(int(len(chunks) * LEARNED_SHARE), MIN_LEARNED))
            chunks[unknown] = known.find(block.heads[unknown], block.tails[unknown])
        for i in np.flatnonzero(ends - starts > KEY_BYTES).tolist():
            chunks[unknown[i]] = known.long.get(found[i], -1)
        return len(new) / len(chunks)

    def _learn(self, known: KnownChunks, block: Block, places: Mapping[bytes, int], most: int) -> None:
        """Read at most `most` new chunks with the Rust tokenizer and store their ids. places: of the chunks in the
        block."""
        new = [chunk for chunk in places if len(chunk) <= MAX_CHUNK_BYTES][:most]
        read = self._rust.encode_batch_fast([chunk.decode() for chunk in new], add_special_tokens=False)
        ids = {chunk: each.ids for chunk, each in zip(new, read, strict=True) if len(each) < self._max_length}
        keys = [places[chunk] for chunk in ids]
        with self._learning:
            known.add(ids, block.heads[keys], block.tails[keys])
            if known.is_full and known is self._known:
                self._known = KnownChunks(self._cut_ids)

    def _adapt(self, share: float) -> None:
        """Pause for more and more blocks while many chunks are new and learning does not reduce their number."""
        is_worthwhile = share <= max(USUAL_SHARE, self._share * 0.9)
        self._pause = 0 if is_worthwhile else min(self._pause * 2 + 1, MAX_PAUSE)
        self._share, self._num_left_out = share, 0

    def _is_pausing(self) -> bool:
        self._num_left_out += 1
        return self._num_left_out <= self._pause


def blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split a list of texts into parts of a bounded number of characters, or of one text."""
    start = num_characters = 0
    for place, text in enumerate(texts):
        num_characters += len(text) + 1
        if num_characters > BLOCK_CHARACTERS and place > start:
            yield texts[start:place]
            start, num_characters = place, len(text) + 1
    yield texts[start:]
