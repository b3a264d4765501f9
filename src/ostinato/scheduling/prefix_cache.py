"""Prefix caching: complete blocks are hashed, and requests with the same prefix reuse them."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.scheduling.block_allocator import BlockAllocator, block_hashes, root_hash
from ostinato.scheduling.request import Request

_HASHED_AT_ONCE = 16  # blocks: enough to share the cost of slicing, few to waste at a miss


class PrefixReuse:
    """Hashes the blocks of requests for ``allocator``; does nothing without prefix caching.

    A request keeps its hashes, so each block is hashed once, however often it is looked up. Looking
    a prompt up hashes no further than it is found: hashing all of a long one takes milliseconds, in
    which the device would wait for its first step. ``hash_blocks`` computes the rest beside it.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    def take(self, request: Request) -> list[int]:
        """Take and return the cached blocks that hold the request's prefix.

        At least one token is left to compute, because cached tokens give no logits.
        """
        blocks = self._match(request)
        self._allocator.take(blocks)
        return blocks

    def num_cached_tokens(self, request: Request) -> int:
        """How many of the request's first tokens are in cached blocks now."""
        return len(self._match(request)) * self._allocator.block_size

    def _match(self, request: Request) -> list[int]:
        allocator = self._allocator
        if not allocator.enable_prefix_caching:
            return []
        shareable = (request.num_tokens - 1) // allocator.block_size
        return allocator.match_prefix(self._hashes(request, shareable))

    def _hashes(self, request: Request, num_blocks: int) -> Iterator[bytes]:
        """The hashes of the first blocks, computed as they are asked for."""
        hashes = request.block_hashes
        for index in range(num_blocks):
            if index >= len(hashes):
                self._extend_hashes(request, min(index + _HASHED_AT_ONCE, num_blocks))
            yield hashes[index]

    def hash_blocks(self, request: Request, stop: int) -> None:
        """Compute what ``publish`` of all blocks before ``stop`` needs."""
        if self._allocator.enable_prefix_caching:
            self._extend_hashes(request, stop)

    def publish(self, request: Request, first: int, stop: int) -> None:
        """Make a request's newly completed blocks ``first`` to ``stop`` reusable."""
        if not self._allocator.enable_prefix_caching:
            return
        self._extend_hashes(request, stop)
        for index in range(first, stop):
            self._allocator.publish(request.block_ids[index], request.block_hashes[index])

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """Compute missing hashes of the first ``num_blocks`` blocks."""
        hashes, size = request.block_hashes, self._allocator.block_size
        if num_blocks > len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            tokens = request.token_ids(len(hashes) * size, num_blocks * size)
            contents: list[bytes] = []
            if request.contents:
                contents = [
                    _content(request, i * size, size) for i in range(len(hashes), num_blocks)
                ]
            hashes += block_hashes(parent, tokens, size, contents)


def _content(request: Request, start: int, size: int) -> bytes:
    """The digests of all contents that tokens of the block at ``start`` stand for."""
    return b"".join(
        each.digest for each in request.contents if each.start < start + size and start < each.stop
    )
