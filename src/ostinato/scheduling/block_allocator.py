"""``BlockAllocator``: reference counts of KV cache blocks, and the hashes of reusable blocks.

It handles block numbers only, never the cache's memory or requests. A block is held (by reference
count), idle (not held, but hashed, so its content can be reused until the block is needed), or
free. Hashes are chained: the hash of a full block covers every token before it, so equal hashes
mean equal keys and values.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ostinato.errors import ConfigError, OutOfBlocksError, SchedulingError

HASH_BYTES = 16


def root_hash(salt: bytes = b"") -> bytes:
    """The parent hash of a sequence's first block. Different salts share no blocks."""
    return blake2b(salt, digest_size=HASH_BYTES).digest()


def block_hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, contents: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """The hashes of full blocks with these tokens, the first after the block ``parent``.

    ``contents``: what is in each block besides its tokens; none: nothing in any.
    """
    # Parents and tokens have fixed widths, so different chains give different bytes.
    tokens = array("q", token_ids)
    data, width = tokens.tobytes(), block_size * tokens.itemsize
    for index, start in enumerate(range(0, len(data), width)):
        content = parent + data[start : start + width]
        if contents:
            content += contents[index]
        parent = blake2b(content, digest_size=HASH_BYTES).digest()
        yield parent


@dataclass
class PrefixStats:
    """Tokens looked up at first admissions, and how many of them were found."""

    query_tokens: int = 0
    hit_tokens: int = 0


class BlockAllocator:
    """Hands out the blocks 1 to ``num_blocks`` - 1. Block 0 is reserved for padding.

    ``num_blocks`` includes block 0. Without ``enable_prefix_caching`` no block is ever reused.
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
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack; the lowest number is on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._block_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks ``allocate`` can hand out now, including idle ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold ``num_tokens`` of a request."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``hashes``.

        Takes no references: call ``take`` before the next ``allocate``.
        """
        blocks: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with unspecified content and one reference each, or none."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{count} KV cache blocks were requested, but only {self.num_free_blocks} of "
                f"{self.num_blocks - 1} are free; none were allocated. Finish or preempt a request "
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
        """Add a reference to each block, which must be held or idle."""
        for block in blocks:
            self._check_known(block)
            if not self._refs[block] and block not in self._idle:
                raise SchedulingError(f"block {block} is free: it has no content to share")
        for block in blocks:
            self._idle.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given first block first.

        Blocks with a hash and no references left become idle. A sequence's last blocks are evicted
        before its first, because the last are useless without the first.
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
        """Make a held block, full and computed, reusable under the hash ``name``.

        If another block has that hash already, it keeps it: both have the same content.
        """
        self._check_held(block)
        if not self.enable_prefix_caching or name in self._block_of:
            return
        if self._name_of[block] is not None:
            raise SchedulingError(
                f"block {block} already has another hash; a full block never changes"
            )
        self._name_of[block] = name
        self._block_of[name] = block

    def reset_prefix_cache(self) -> None:
        """Forget every hash. Held blocks stay held.

        After a change of weights, call it while nothing runs: a running sequence would publish
        later blocks that were computed from its old ones.
        """
        self._block_of.clear()
        self._name_of = [None] * self.num_blocks
        self._free.extend(self._idle)
        self._idle.clear()

    def release_all(self) -> None:
        """Drop all references; keep the hashes.

        All state is rebuilt from the hashes alone, so this also repairs it after an exception that
        interrupted another method half-way.
        """
        self._refs = [0] * self.num_blocks
        self._name_of = [None] * self.num_blocks
        for name, block in self._block_of.items():
            self._name_of[block] = name
        idle = [block for block in self._idle if self._name_of[block] is not None]
        # Hashes were published first block first; eviction starts with the last.
        self._idle = OrderedDict.fromkeys([*idle, *reversed(self._block_of.values())])
        self._free = [b for b in range(self.num_blocks - 1, 0, -1) if self._name_of[b] is None]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        name = self._name_of[block]
        assert name is not None, f"idle block {block} has no hash"
        del self._block_of[name]
        self._name_of[block] = None
        return block

    def _check_held(self, block: int) -> None:
        if 0 < block < self.num_blocks and self._refs[block]:
            return
        self._check_known(block)
        raise SchedulingError(
            f"block {block} has no references: it was freed before, or never allocated"
        )

    def _check_known(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise SchedulingError(
                f"block {block} does not exist; requests can hold blocks 1 to {self.num_blocks - 1}"
            )
