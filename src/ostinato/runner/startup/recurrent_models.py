"""What differs for a model with recurrent layers: what it excludes, and memory for its states."""

from __future__ import annotations

import logging

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.base import CausalLM
from ostinato.recurrent.base import bytes_per_row

logger = logging.getLogger(__name__)

NO_PREFIX_CACHING = (
    "the model has recurrent layers, whose states are those after a request's last token, not "
    "those after a prefix"
)


def check_options(config: EngineConfig, model: CausalLM) -> None:
    """Raise for options that a model with recurrent layers does not support."""
    if not model.recurrent_specs:
        return
    if config.enable_prefix_caching:
        raise ConfigError(f"enable_prefix_caching is on, but {NO_PREFIX_CACHING}; leave it out")
    if config.speculative is not None:
        raise ConfigError(
            "speculative does not work with models with recurrent layers, whose states cannot go "
            "back when a draft is rejected; omit it"
        )
    if config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} does not support models with recurrent layers; "
            "leave it out"
        )
    if config.enable_prefix_caching is None:
        logger.info("prefix caching is off: %s", NO_PREFIX_CACHING)


def without_states(budget: int, model: CausalLM, max_num_seqs: int) -> int:
    """What the states of recurrent layers leave of ``budget`` bytes for keys and values."""
    states = (max_num_seqs + 1) * bytes_per_row(model.recurrent_specs, model.dtype)
    if states > budget:
        raise ConfigError(
            f"the KV cache has {budget:,} bytes, but the states of {max_num_seqs} requests in the "
            f"model's recurrent layers take {states:,}; raise kv_cache_memory_bytes or lower "
            "max_num_seqs"
        )
    return budget - states
