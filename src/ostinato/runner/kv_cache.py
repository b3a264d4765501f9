"""The paged KV cache: one pair of tensors per layer, in blocks of a fixed number of tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError

logger = logging.getLogger(__name__)


def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """What one block takes in all layers together."""
    elements = sum(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in specs)
    return block_size * elements * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """How many blocks there are, the one that is nobody's included, and how long requests get."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)


def size_cache(
    budget: int,
    *,
    bytes_per_block: int,
    block_size: int,
    model_limit: int,
    max_model_len: int | None,
    max_num_seqs: int,
) -> CacheSize:
    """Blocks for ``budget`` bytes, never more than all requests can use.

    A length that the user asked for must fit; where none was asked for, the longest that fits is
    taken and said.
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len {max_model_len} is above what the model can take, {model_limit}"
        )
    affordable = budget // bytes_per_block
    wanted = max_model_len or model_limit
    needed = -(-wanted // block_size) + 1
    if affordable < needed:
        if max_model_len is not None or affordable < 2:
            raise ConfigError(
                f"the KV cache has {budget:,} bytes, room for {max(affordable - 1, 0)} blocks of "
                f"{block_size} tokens, but one request of {wanted} tokens takes {needed - 1} "
                f"blocks ({needed * bytes_per_block:,} bytes with the spare one); raise "
                "kv_cache_memory_bytes or lower max_model_len"
            )
        wanted = (affordable - 1) * block_size
        logger.warning(
            "max_model_len becomes %d instead of the model's %d: that is what fits into %d bytes "
            "of KV cache; raise kv_cache_memory_bytes for more",
            wanted,
            model_limit,
            budget,
        )
    useful = max_num_seqs * -(-wanted // block_size) + 1
    return CacheSize(
        num_blocks=min(affordable, useful), block_size=block_size, max_model_len=wanted
    )


class KVCache:
    """Owns the memory. Block 0 is nobody's: padding may refer to it."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec in specs:
            keys, values = (
                torch.zeros(
                    (num_blocks, block_size, spec.num_kv_heads, dim), dtype=dtype, device=device
                )
                for dim in (spec.head_dim, spec.value_dim)
            )
            self.layers.append((keys, values))

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)
