"""The blocks of running sequences: where they come from, and what the cache keeps of them afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.logits_cache import CacheKey, LogitsCache, state_hash_of
from archerfish.cache.node import Node
from archerfish.cache.radix import HitRecord, RadixCache, RadixKey
from archerfish.errors import InvariantError
from archerfish.sequence import Namespace, Request, Sequence


@dataclass(slots=True)
class Found:
    """What the cache has for a sequence that is to be admitted."""

    num_tokens: int
    blocks: list[int]
    node: Node  # ends where the tokens end; locked
    logits_handle: int = 0  # of kept logits; if there are some, num_tokens is all of the sequence


class SequenceMemory:
    """Gives blocks to sequences out of the free list and the cache, and takes them back into the tree.

    A sequence owns a reference to each of its blocks. It locks the node up to which its tokens are in the tree, or the root: a
    lock on the root protects nothing, but shows whether the cache was cleared meanwhile.

    A state is the whole of its block. So the last block of a sequence, which still changes, never goes into the tree and is
    never copied.
    """

    def __init__(
        self, blocks: BlockManager, cache: RadixCache, logits_cache: LogitsCache | None, model_state_hash: str,
        fixed_chunk: int, logits_row_bytes: int,
    ) -> None:
        self.blocks = blocks
        self.cache = cache
        self._logits_cache = logits_cache  # of handles: the runner keeps the logits themselves
        self._row_bytes = logits_row_bytes
        self._next_handle = 1
        self._stored: set[int] = set()  # handles that the step being committed has stored
        self._dropped: list[int] = []  # handles that nothing will ask for any more
        if logits_cache is not None:
            logits_cache.on_drop = self._dropped.append
        self.fixed_chunk = fixed_chunk
        self.num_held_tokens = 0  # of sequences that hold blocks
        self.num_held_blocks = 0
        self._block_size = blocks.block_size
        # Where a match may end: where chunks do, and the cache's own rule must hold as well.
        self._match_step = math.lcm(fixed_chunk, self._block_size if cache.whole_blocks else 1) if fixed_chunk else 1
        self._model_state_hash = model_state_hash
        self._state_hashes: dict[Namespace, str] = {}

    @property
    def logits_cache(self) -> LogitsCache | None:
        """None where it could not keep anything: it lives with the tree, and both may be turned off while sequences run."""
        cache = self._logits_cache
        return cache if cache is not None and cache.max_bytes and self.cache.is_enabled else None

    @property
    def num_available(self) -> int:
        return self.blocks.num_free + self.cache.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks of the free list, and where it is short, of what the cache can spare. None: there are not enough."""
        blocks = self.blocks
        short = num_blocks - blocks.num_free
        if short > 0 and (short > self.cache.num_evictable or self.cache.evict(short) < short):
            return None
        return blocks.allocate(num_blocks)

    def grow(self, seq: Sequence, num_blocks: int) -> bool:
        taken = self.take(num_blocks)
        if taken is None:
            return False
        seq.blocks += taken
        self.num_held_blocks += num_blocks
        return True

    # Handles of kept logits

    def new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1

    def take_dropped(self) -> list[int]:
        """Handles that no step after the next one names."""
        dropped = self._dropped[:]
        self._dropped.clear()
        return dropped

    def drop_unstored(self, kept: list[tuple[int, int]]) -> None:
        """Drop the logits that a step kept and that did not get into the LogitsCache."""
        self._dropped += [handle for _, handle in kept if handle not in self._stored]
        self._stored.clear()

    def drop_again(self, handles: list[int]) -> None:
        """The step that was to drop these has failed, maybe before it did."""
        self._dropped += handles

    # Admission

    def look_up(self, seq: Sequence) -> Found:
        """The longest prefix that may be taken from the cache, locked."""
        request, num_known = seq.request, len(seq.tokens)
        key = RadixKey(seq.tokens, request.namespace)
        limit = num_known - 1
        if request.params.prompt_logprobs is not None and seq.index == 0:
            limit = min(limit, seq.num_reported)
        handle = 0
        if self.logits_cache is not None and num_known == seq.num_prompt and limit == num_known - 1:
            handle = self.logits_cache.get(CacheKey(key, num_known, self._state_hash(request.namespace))) or 0
            limit += handle > 0
        if self.fixed_chunk:
            limit = min(limit, seq.num_prompt)
        match = self.cache.match_prefix(key, limit=limit, counts=seq.hit is None)
        if not seq.num_preemptions:
            seq.hit = match.record
        num_tokens, node = match.num_tokens, match.node
        if num_tokens < num_known:
            handle = 0
            num_tokens -= num_tokens % self._match_step
        if num_tokens < node.end:  # cut the node there, so that no more is locked than is used
            node = self.cache.insert(RadixKey(seq.tokens[:num_tokens], request.namespace), match.blocks, handle=match)
        self.cache.lock(node)
        return Found(num_tokens, match.blocks, node, handle)

    def num_blocks_wanted(self, seq: Sequence, found: Found) -> int:
        """Blocks that the sequence needs for all its tokens, without those that it can share."""
        return self.num_blocks_for(len(seq.tokens)) - found.num_tokens // self._block_size

    def put_back(self, found: Found) -> None:
        self.cache.unlock(found.node)

    def without_match(self, found: Found) -> Found:
        """In place of what was found, nothing: all that the cache has can be evicted."""
        root = found.node.tree.root
        self.cache.lock(root)
        self.put_back(found)
        return Found(0, [], root)

    def adopt(self, seq: Sequence, found: Found) -> list[tuple[int, int]]:
        """Hand what was found to the sequence. Returns the block to copy, (from, to), where the match ends inside one.

        The source of the copy gets one more owner: free it when the step is done. One block must be available.
        """
        num_full, rest = divmod(found.num_tokens, self._block_size)
        seq.node = found.node
        seq.blocks = found.blocks[:num_full]
        self.blocks.share(seq.blocks)
        self.num_held_blocks += num_full
        self.num_held_tokens += found.num_tokens
        seq.num_computed = found.num_tokens
        seq.logits_handle = found.logits_handle
        if not rest:
            return []
        source = found.blocks[num_full]
        self.blocks.share((source,))
        if not self.grow(seq, 1):
            raise InvariantError("A sequence was admitted without a block for the one to copy.")
        return [(source, seq.blocks[-1])]

    # What the cache keeps

    def store_prompt(self, seq: Sequence, handle: int) -> None:
        """The prompt is computed: others may have it now, and its logits if they were kept under a handle."""
        cache, num_tokens = self.cache, self._num_kept(seq.num_prompt)
        if not cache.is_enabled or seq.node.is_stale or not num_tokens:
            return
        key = RadixKey(seq.tokens[:num_tokens], seq.request.namespace)
        num_blocks = self.num_blocks_for(num_tokens)
        node = cache.insert(key, seq.blocks[:num_blocks], handle=seq.node)
        # Where the tree had the prompt from elsewhere, locking it would keep blocks that this sequence does not use.
        if node.blocks[-1] == seq.blocks[num_blocks - 1]:
            cache.lock(node)
            cache.unlock(seq.node)
            seq.node = node
        if handle and self.logits_cache is not None and num_tokens == seq.num_prompt:
            wanted = CacheKey(key, num_tokens, self._state_hash(seq.request.namespace))
            if self.logits_cache.insert(wanted, handle, self._row_bytes, node):
                self._stored.add(handle)

    def _num_kept(self, num_tokens: int) -> int:
        """How many of a sequence's tokens can go into the tree."""
        return num_tokens - num_tokens % self._block_size if self.cache.whole_blocks else num_tokens

    def release(self, seq: Sequence, *, keeps: bool) -> None:
        """Take everything back; `keeps`: what is computed goes into the tree."""
        num_tokens = min(seq.num_computed, len(seq.tokens))
        if self.fixed_chunk:  # what came one by one would be computed in chunks by another, with other roundings
            num_tokens = min(num_tokens, seq.num_prompt)
        num_tokens = self._num_kept(num_tokens)
        if keeps and num_tokens and self.cache.is_enabled and not seq.node.is_stale:
            key = RadixKey(seq.tokens[:num_tokens], seq.request.namespace)
            self.cache.insert(key, seq.blocks[: self.num_blocks_for(num_tokens)], handle=seq.node)
        self.cache.unlock(seq.node)
        self.blocks.free(seq.blocks)
        self.num_held_tokens -= seq.num_computed
        self.num_held_blocks -= len(seq.blocks)
        seq.blocks = []
        seq.node = None
        seq.logits_handle = seq.num_sent = 0
        seq.num_computed = 0

    def forget_computed(self, seq: Sequence, num_left: int) -> None:
        """A step failed: only so many tokens of the sequence can be trusted."""
        if seq.num_computed > num_left:
            self.num_held_tokens -= seq.num_computed - num_left
            seq.num_computed = num_left

    def explain(self, token_ids: SequenceOf[int], namespace: Namespace) -> HitRecord:
        """What `look_up` would find for a prompt now; changes nothing."""
        key, num_tokens = RadixKey(token_ids, namespace), len(token_ids)
        wanted = CacheKey(key, num_tokens, self._state_hash(namespace))
        has_logits = self.logits_cache is not None and wanted in self.logits_cache
        return self.cache.explain(key, limit=num_tokens if has_logits else num_tokens - 1)

    def num_cached(self, request: Request) -> int:
        return self.cache.peek(RadixKey(request.prompt_token_ids, request.namespace))

    def _state_hash(self, namespace: Namespace) -> str:
        state_hash = self._state_hashes.get(namespace)
        if state_hash is None:
            if len(self._state_hashes) > 4096:
                self._state_hashes.clear()
            state_hash = self._state_hashes[namespace] = state_hash_of(self._model_state_hash, namespace)
        return state_hash
