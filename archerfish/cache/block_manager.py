"""The owners of blocks: a free list, and a count of owners for each block. The memory itself is KVCachePool's."""

from __future__ import annotations

from collections.abc import Iterable

from archerfish.errors import InvalidInputError, InvalidOptionError, InvariantError, OutOfBlocksError

MAX_BLOCK_SIZE = 1 << 20  # of states; KV has smaller ones


class BlockManager:
    """Blocks 0 to num_blocks - 1 of `block_size` tokens each; every operation is O(1) per block."""

    __slots__ = ("_free", "_refs", "block_size", "num_free", "num_total")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise InvalidOptionError(f"num_blocks must be at least 1, not {num_blocks}.")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise InvalidOptionError(f"block_size must be from 1 to {MAX_BLOCK_SIZE}, not {block_size}.")
        self.block_size = block_size
        self.num_total = self.num_free = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is taken first
        self._refs = [0] * num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one owner each; all of them or none."""
        free = self._free
        left = len(free) - num_blocks
        if num_blocks < 0:
            raise InvalidInputError(f"Cannot allocate {num_blocks} blocks.")
        if left < 0:
            raise OutOfBlocksError(f"{num_blocks:,} blocks are wanted; {len(free):,} of {self.num_total:,} are free.")
        taken = free[left:]
        del free[left:]
        self.num_free = left
        taken.reverse()
        refs = self._refs
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these blocks."""
        refs = self._refs
        for block in blocks:
            if not 0 <= block < self.num_total or not refs[block]:
                raise InvariantError(f"Block {block} is shared but has no owner.")
            refs[block] += 1

    def free(self, blocks: Iterable[int]) -> int:
        """One owner less for each of these blocks. Returns how many had no other owner and are free now."""
        refs, free = self._refs, self._free
        before, total = self.num_free, self.num_total
        for block in blocks:
            count = refs[block] if 0 <= block < total else 0
            if count == 1:
                refs[block] = 0
                free.append(block)
            elif count:
                refs[block] = count - 1
            else:
                raise InvariantError(f"Block {block} is freed but has no owner.")
        free[before:] = free[before:][::-1]  # neighbours are taken in their order again: reading backwards is slower
        self.num_free = len(free)
        return self.num_free - before

    def ref_count(self, block: int) -> int:
        """How many own this block; 0: it is free."""
        if not 0 <= block < self.num_total:
            raise InvalidInputError(f"There is no block {block}: blocks are 0 to {self.num_total - 1}.")
        return self._refs[block]

    @property
    def ref_counts(self) -> list[int]:
        """How many own each block; not to be changed."""
        return self._refs

    def get_physical_blocks(self, logical: Iterable[int]) -> list[int]:
        """The places in the pool of blocks that `allocate` gave: these are numbered by their place, so they are the
        same."""
        physical = list(logical)
        for block in physical:
            if not self.ref_count(block):
                raise InvalidInputError(f"Block {block} is free.", hint="Give blocks that `allocate` gave.")
        return physical
