"""The paged KV cache: one pair of tensors per layer, in blocks of a fixed number of tokens.

Where values are columns of the keys (latent attention), they are a view of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError
from ostinato.parallel.context.context_part import ContextPart
from ostinato.runner.sleep.sleep_memory import SleepMemory

logger = logging.getLogger(__name__)


def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """The bytes of one block in all layers together."""
    elements = sum(spec.num_kv_heads * spec.cached_dim for spec in specs)
    return block_size * elements * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The number of blocks, including the reserved block 0, and the longest request.

    A block has ``block_size`` tokens. With a ``part``, this rank stores only some of them.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    part: ContextPart | None = None

    @property
    def block_slots(self) -> int:
        """Tokens of a block that are stored here."""
        return self.block_size if self.part is None else self.block_size // self.part.size

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
    max_tokens: int | None = None,
    part: ContextPart | None = None,
) -> CacheSize:
    """Choose the number of blocks for ``budget`` bytes, at most what all requests can use.

    ``max_tokens``: no more blocks than hold this many tokens, even if they would fit.

    ``block_size``: tokens of a block that are stored here; with a ``part`` other ranks store more.

    A ``max_model_len`` set by the user must fit; otherwise the longest that fits is used and
    logged.
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len {max_model_len} exceeds the model's limit of {model_limit}; lower it"
        )
    block_size *= 1 if part is None else part.size
    # Without attention, blocks take no memory.
    affordable = budget // bytes_per_block if bytes_per_block else sys.maxsize
    option = "kv_cache_memory_bytes"
    if max_tokens is not None and -(-max_tokens // block_size) + 1 < affordable:
        affordable, option = -(-max_tokens // block_size) + 1, "kv_cache_tokens"
    wanted = max_model_len or model_limit
    needed = -(-wanted // block_size) + 1
    if affordable < needed:
        if max_model_len is not None or affordable < 2:
            raise ConfigError(
                f"the KV cache has {budget:,} bytes, room for {max(affordable - 1, 0)} blocks of "
                f"{block_size} tokens, but one request of {wanted} tokens needs {needed - 1} "
                f"blocks ({needed * bytes_per_block:,} bytes with the reserved one); raise "
                "kv_cache_memory_bytes or lower max_model_len"
            )
        wanted = (affordable - 1) * block_size
        logger.warning(
            "max_model_len is %d instead of the model's %d, because no more fits in %d blocks of "
            "KV cache (%d bytes); raise %s for more",
            wanted,
            model_limit,
            affordable - 1,
            (affordable - 1) * bytes_per_block,
            option,
        )
    useful = max_num_seqs * -(-wanted // block_size) + 1
    return CacheSize(
        num_blocks=min(affordable, useful),
        block_size=block_size,
        max_model_len=wanted,
        part=part,
    )


class KVCache:
    """Owns the memory, or ``sleeping`` does, if that is to be released and come back.

    Block 0 is reserved for padding.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sleeping: SleepMemory | None = None,
    ) -> None:
        zeros = partial(torch.zeros, device=device) if sleeping is None else sleeping.zeros
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec in specs:
            shape = num_blocks, block_size, spec.num_kv_heads
            keys = zeros((*shape, spec.head_dim), dtype=dtype)
            values = keys[..., : spec.value_dim]
            if not spec.values_in_keys:
                values = zeros((*shape, spec.value_dim), dtype=dtype)
            self.layers.append((keys, values))

    @property
    def num_bytes(self) -> int:
        each = [tensor for pair in self.layers for tensor in pair if tensor.is_contiguous()]
        return sum(tensor.nbytes for tensor in each)  # values that are a view of keys are not
