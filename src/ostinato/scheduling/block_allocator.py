"""``BlockAllocator``: who holds which block of the KV cache, and which blocks can be found again.

Numbers only: it never touches the cache's memory and knows no requests. A block is held (counted by
reference), idle (nobody holds it, but its content has a name and can be reused until the block is
needed), or free. Names are chained hashes: the name of a full block covers every token before it,
so equal names mean equal keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from ostinato.errors import ConfigError, OutOfBlocksError, SchedulingError

NAME_BYTES = 16


def root_hash(salt: bytes = b"") -> bytes:
    """The parent of a sequence's first block. Sequences with different salts share nothing."""
    return blake2b(salt, digest_size=NAME_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the full block with these tokens that follows the block named ``parent``."""
    # Parents have one length and tokens have one width, so different chains give different bytes.
    data = parent + pack(f"{len(token_ids)}q", *token_ids)
    return blake2b(data, digest_size=NAME_BYTES).digest()


@dataclass
class PrefixStats:
    """Tokens looked up at first admissions, and how many of them were found."""

    query_tokens: int = 0
    hit_tokens: int = 0


class BlockAllocator:
    """Hands out the blocks 1 to ``num_blocks`` - 1. Block 0 is nobody's: padding refers to it.

    ``num_blocks`` counts block 0. With ``enable_prefix_caching`` False nothing is ever found again.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        if type(num_blocks) is not int or num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be an integer of at least 2 (block 0 is reserved), "
                f"got {num_blocks!r}"
            )
        if type(block_size) is not int or block_size < 1:
            raise ConfigError(f"block_size must be an integer of at least 1, got {block_size!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixStats()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack; the lowest number goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to be evicted comes first
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """How many blocks ``allocate`` could hand out now, idle ones included."""
        return len(self._free) + len(self._idle)

    def ref_count(self, block: int) -> int:
        self._check_known(block)
        return self._refs[block]

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of ``hashes``.

        Takes no references: whoever wants them calls ``take`` before anything is allocated.
        """
        blocks: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with unspecified content, held once by the caller. All or none."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{count} KV cache blocks were asked for, but of {self.num_blocks - 1} only "
                f"{self.num_free_blocks} are free; nothing was taken. Finish or preempt a request "
                "first, or give the cache more blocks"
            )
        kept = max(len(self._free) - count, 0)
        blocks = self._free[kept:][::-1]
        del self._free[kept:]
        while len(blocks) < count:
            blocks.append(self._evict())
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def take(self, blocks: Sequence[int]) -> None:
        """One more reference to each block, which must be held or findable."""
        for block in blocks:
            self._check_known(block)
            if not self._refs[block] and block not in self._idle:
                raise SchedulingError(f"block {block} is free: it has no content to share")
        for block in blocks:
            self._idle.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, first block first.

        Blocks that nobody holds any more and that have a name stay findable; a sequence's last
        blocks are evicted before its first, because the last are of no use without the first.
        """
        for block in blocks:
            self._check_held(block)
        if len(set(blocks)) != len(blocks):
            raise SchedulingError(f"a block occurs twice in one release: {list(blocks)}")
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._name_of[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def publish(self, block: int, name: bytes) -> None:
        """Make a held block, full and computed, findable under the hash ``name``.

        If another block has that name it keeps it: both have the same content.
        """
        self._check_held(block)
        if not self.enable_prefix_caching or name in self._block_of:
            return
        if self._name_of[block] is not None:
            raise SchedulingError(
                f"block {block} is already findable under another hash; a full block never changes"
            )
        self._name_of[block] = name
        self._block_of[name] = block

    def reset_prefix_cache(self) -> None:
        """Forget every name. Held blocks stay held.

        After a change of weights call it while nothing runs: a sequence that goes on would publish
        later blocks that were computed from its old ones.
        """
        self._block_of.clear()
        self._name_of = [None] * self.num_blocks
        self._free.extend(self._idle)
        self._idle.clear()

    def release_all(self) -> None:
        """Nobody holds anything any more; names are kept.

        It rebuilds everything from the names alone, so it also repairs the state after an exception
        that interrupted another method half-way.
        """
        self._refs = [0] * self.num_blocks
        self._name_of = [None] * self.num_blocks
        for name, block in self._block_of.items():
            self._name_of[block] = name
        idle = [block for block in self._idle if self._name_of[block] is not None]
        # Names were given first block first; eviction starts with the last.
        self._idle = OrderedDict.fromkeys([*idle, *reversed(self._block_of.values())])
        self._free = [b for b in range(self.num_blocks - 1, 0, -1) if self._name_of[b] is None]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        name = self._name_of[block]
        assert name is not None, f"idle block {block} has no name"
        del self._block_of[name]
        self._name_of[block] = None
        return block

    def _check_held(self, block: int) -> None:
        if 0 < block < self.num_blocks and self._refs[block]:
            return
        self._check_known(block)
        raise SchedulingError(
            f"nobody holds block {block}; it was freed before, or never handed out"
        )

    def _check_known(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise SchedulingError(
                f"there is no block {block}; requests can hold 1 to {self.num_blocks - 1}"
            )
