"""Limits of engines that are measured, so that several of them fit on one device."""

from __future__ import annotations

from dataclasses import replace

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

_SPARE_BLOCKS = 2  # of each sequence: a step's drafts, and a free block that it must leave


def with_room(config: EngineConfig, *, num_seqs: int, length: int, why: str) -> EngineConfig:
    """Derive limits that were not given from the batches; limits that were given must suffice.

    ``why``: where ``length`` comes from, for the error.
    """
    for name, limit, needed in (
        ("max_num_seqs", config.max_num_seqs, num_seqs),
        ("max_model_len", config.max_model_len, length),
    ):
        if limit is not None and limit < needed:
            raise ConfigError(
                f"{name} {limit} is too small for this measurement, which needs {needed} ({why}); "
                "raise it or measure less"
            )
    return replace(
        config,
        max_num_seqs=config.max_num_seqs or num_seqs,
        max_model_len=config.max_model_len or length,
    )


def with_kv_cache_for(config: EngineConfig, *, num_seqs: int, length: int) -> EngineConfig:
    """Limit the KV cache to this many sequences at once, unless its size was given.

    An engine takes most of the device's memory otherwise, and leaves none for the others.
    """
    if config.kv_cache_memory_bytes is not None or config.kv_cache_tokens is not None:
        return config
    block_size = config.block_size * config.decode_context_parallel_size
    blocks = -(-length // block_size) + _SPARE_BLOCKS
    tokens = max(num_seqs * blocks * block_size, config.max_model_len or 0)
    return replace(config, kv_cache_tokens=tokens)
