"""Starts the model, the runner and the scheduler of an engine, on one rank or several."""

from __future__ import annotations

import threading

import torch

from ostinato.config import EngineConfig
from ostinato.engine.tune import tune_at_start
from ostinato.models.base import CausalLM
from ostinato.ranks.sharing import Started, Unshared
from ostinato.runner import startup
from ostinato.runner.ambient import without_autocast, without_default_device
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.scheduler import Scheduler

# Loading sets process-wide state: the default dtype and device, the random state.
starting = threading.Lock()


@without_autocast
@without_default_device
@torch.inference_mode(False)  # what is allocated here is written outside of it too
def start(config: EngineConfig) -> Started:
    """Load, allocate and capture, on several ranks if the configuration says so.

    A process starts one engine at a time; a second thread waits.
    """
    if config.world_size > 1:
        from ostinato.ranks.start import start_ranks

        return start_ranks(config)
    with starting:
        loaded = startup.load(config)
        tune_at_start(config, loaded.model)  # before captures, which take what is known
        runner, resolved = startup.build_runner(config, loaded)
    return Started(loaded=loaded, runner=runner, resolved_mode=resolved, sharing=Unshared())


def new_scheduler(config: EngineConfig, model: CausalLM, runner: ModelRunner) -> Scheduler:
    """A scheduler for a replica of ``model``, within the limits of ``runner``."""
    cache, plan = runner.cache, runner.plan
    return Scheduler(
        BlockAllocator(
            cache.num_blocks,
            cache.block_size,
            enable_prefix_caching=config.enable_prefix_caching is not False
            and not model.recurrent_specs,
        ),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=cache.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_drafts=config.num_drafts(model.device),
    )
