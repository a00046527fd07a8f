"""Sequences that use the cache as the scheduler does, with block contents that can be checked token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from archerfish.cache.block_manager import BlockManager
from archerfish.cache.radix import Match, Node, RadixCache, RadixKey
from archerfish.errors import StaleHandleError
from archerfish.sequence import Namespace
from tests.cache.invariants import check_cache

NAMESPACES = [Namespace(), Namespace("a"), Namespace("a", "lora"), Namespace("b")]


def prefix_hashes(namespace: Namespace, tokens: list[int], before: list[int] | None = None) -> list[int]:
    """What the KV of each token depends on: namespace and all tokens up to it. `before` is extended."""
    hashes = before if before is not None else []
    last = hashes[-1] if hashes else hash(namespace)
    for token in tokens[len(hashes) :]:
        last = hash((last, token))
        hashes.append(last)
    return hashes


@dataclass(eq=False)
class Running:
    """A simulated sequence: all of its known tokens are computed."""

    namespace: Namespace
    tokens: list[int]
    hashes: list[int]
    blocks: list[int]
    node: Node  # what it locks
    num_covered: int  # of its tokens are on the path to it


@dataclass
class Simulation:
    """A block pool whose contents are prefix hashes, a cache over it, and the sequences that run."""

    num_blocks: int
    block_size: int
    policy: str = "lru"
    whole_blocks: bool = False
    running: list[Running] = field(default_factory=list)
    old_matches: list[tuple[Match, bool]] = field(default_factory=list)  # and whether it must be stale

    def __post_init__(self) -> None:
        self.now = 0.0
        self.blocks = BlockManager(self.num_blocks, self.block_size)
        self.dropped: list[Node] = []
        self.cache = RadixCache(
            self.blocks,
            policy=self.policy,
            clock=lambda: self.now,
            on_drop=self.dropped.append,
            whole_blocks=self.whole_blocks,
        )
        self.contents: list[list[int]] = [[0] * self.block_size for _ in range(self.num_blocks)]
        self.inserted: dict[Namespace, list[list[int]]] = {}  # of namespaces that have lost nothing since
        self.has_evicted = False
        self.num_operations = 0

    # What is checked

    def check_contents(self, match: Match, hashes: list[int]) -> None:
        size, contents = self.block_size, self.contents
        assert len(match.blocks) == -(-match.num_tokens // size)
        for index, block in enumerate(match.blocks):
            expected = hashes[index * size : min((index + 1) * size, match.num_tokens)]
            assert contents[block][: len(expected)] == expected, (match, index)

    def check(self) -> None:
        """Every invariant, and the contents of every block of every node and sequence."""
        check_cache(self.cache, [sequence.blocks for sequence in self.running])
        for namespace, tree in self.cache._trees.items():
            stack = [(child, list[int](), list[int]()) for child in tree.root.children.values()]
            while stack:
                node, tokens, hashes = stack.pop()
                path = tokens + list(memoryview(node.edge).cast("I"))
                hashes = prefix_hashes(namespace, path, list(hashes))
                self._check_blocks(node.start // self.block_size, node.blocks, hashes)
                stack.extend((child, path, hashes) for child in node.children.values())
        for sequence in self.running:
            self._check_blocks(0, sequence.blocks, sequence.hashes)

    def _check_blocks(self, first: int, blocks: list[int], hashes: list[int]) -> None:
        for index, block in enumerate(blocks, first):
            expected = hashes[index * self.block_size : (index + 1) * self.block_size]
            assert self.contents[block][: len(expected)] == expected

    def check_longest(self, match: Match, namespace: Namespace, tokens: list[int], limit: int) -> None:
        """As long as nothing was evicted, a match is the longest common prefix with anything inserted."""
        if self.has_evicted:
            return
        longest = 0
        for other in self.inserted.get(namespace, ()):
            shorter = min(len(other), len(tokens))
            longest = max(longest, next((i for i in range(shorter) if other[i] != tokens[i]), shorter))
        assert match.num_tokens == self.usable(min(longest, limit))

    def usable(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.block_size if self.whole_blocks else num_tokens

    # What happens

    def start(self, namespace: Namespace, tokens: list[int], limit: int, insert_at: int | None = None) -> bool:
        """Admit a prompt: match, lock, share, copy on write, compute. False where it does not fit."""
        self.num_operations += 1
        key = RadixKey(tokens, namespace)
        foreseen = self.cache.explain(key, limit=limit)
        match = self.cache.match_prefix(key, limit=limit)
        assert match.record == foreseen
        hashes = prefix_hashes(namespace, tokens)
        self.check_contents(match, hashes)
        self.check_longest(match, namespace, tokens, limit)
        self.cache.lock(match.node)
        num_shared = match.num_tokens // self.block_size
        wanted = -(-len(tokens) // self.block_size) - num_shared
        if not self.make_room(wanted):
            self.cache.unlock(match.node)
            return False
        self.blocks.share(match.blocks[:num_shared])
        blocks = match.blocks[:num_shared] + self.blocks.allocate(wanted)
        if match.num_tokens % self.block_size:
            self.contents[blocks[num_shared]] = list(self.contents[match.blocks[-1]])
        sequence = Running(namespace, tokens, hashes, blocks, match.node, match.num_tokens)
        self._write(sequence, match.num_tokens)
        self.running.append(sequence)
        if insert_at is not None:
            self.insert(sequence, insert_at)
        return True

    def _write(self, sequence: Running, begin: int) -> None:
        size = self.block_size
        for position in range(begin, len(sequence.tokens)):
            self.contents[sequence.blocks[position // size]][position % size] = sequence.hashes[position]

    def make_room(self, wanted: int) -> bool:
        missing = wanted - self.blocks.num_free
        if missing <= 0:
            return True
        if missing > self.cache.num_evictable:
            return False
        self.evict(missing)
        return True

    def extend(self, sequence: Running, tokens: list[int]) -> bool:
        """Decode: more tokens for a sequence that runs."""
        self.num_operations += 1
        begin = len(sequence.tokens)
        wanted = -(-(begin + len(tokens)) // self.block_size) - len(sequence.blocks)
        if not self.make_room(wanted):
            return False
        sequence.blocks += self.blocks.allocate(wanted)
        sequence.tokens = sequence.tokens + tokens
        prefix_hashes(sequence.namespace, sequence.tokens, sequence.hashes)
        self._write(sequence, begin)
        return True

    def insert(self, sequence: Running, length: int | None = None) -> None:
        """Cache what a sequence has computed, in full or up to `length`, and move its lock there."""
        self.num_operations += 1
        tokens = sequence.tokens[:length]
        tokens = tokens[: self.usable(len(tokens))]
        key = RadixKey(tokens, sequence.namespace)
        if sequence.node.is_stale:
            try:
                self.cache.insert(key, sequence.blocks, handle=sequence.node)
            except StaleHandleError:
                return
            raise AssertionError("a stale handle was taken")
        node = self.cache.insert(key, sequence.blocks, handle=sequence.node)
        assert node.end == len(tokens)
        self.inserted.setdefault(sequence.namespace, []).append(tokens)
        if len(tokens) > sequence.num_covered:
            self.cache.lock(node)
            self.cache.unlock(sequence.node)
            sequence.node, sequence.num_covered = node, len(tokens)
        assert self.cache.peek(key) == len(tokens)

    def finish(self, sequence: Running, *, keeps: bool) -> None:
        self.num_operations += 1
        if keeps:
            self.insert(sequence)
        self.running.remove(sequence)
        self.cache.unlock(sequence.node)
        self.blocks.free(sequence.blocks)

    def evict(self, num_blocks: int) -> None:
        """Evictions bring back exactly what num_evictable loses, and enough."""
        self.num_operations += 1
        self.now += 1
        evictable, free = self.cache.num_evictable, self.blocks.num_free
        nodes = self.cache.stats().node_count
        freed = self.cache.evict(num_blocks)
        assert freed == self.blocks.num_free - free == evictable - self.cache.num_evictable
        assert freed >= min(num_blocks, evictable)
        if self.cache.stats().node_count < nodes:
            self.has_evicted = True

    def clear(self, namespace: Namespace | None) -> None:
        self.num_operations += 1
        self.now += 1
        self.old_matches = [
            (match, is_stale or namespace in (None, match.node.tree.namespace)) for match, is_stale in self.old_matches
        ]
        self.cache.clear(namespace)
        self.inserted = {} if namespace is None else {n: keys for n, keys in self.inserted.items() if n != namespace}
        if namespace is None:
            assert self.cache.num_evictable == self.cache.stats().total_cached == 0
            self.has_evicted = False

    def remember(self, namespace: Namespace, tokens: list[int]) -> None:
        """Keep a match without a lock, to be tried when it may be stale."""
        self.num_operations += 1
        self.old_matches.append((self.cache.match_prefix(RadixKey(tokens, namespace)), False))

    def try_old_match(self) -> None:
        """A match from before a clear, or of an evicted node, is refused; any other can be locked."""
        if not self.old_matches:
            return
        self.num_operations += 1
        match, must_be_stale = self.old_matches.pop()
        must_be_stale = must_be_stale or match.node in self.dropped
        try:
            self.cache.lock(match.node)
        except StaleHandleError:
            assert must_be_stale
        else:
            assert not must_be_stale
            self.cache.unlock(match.node)
        if not self.old_matches:
            self.dropped.clear()
