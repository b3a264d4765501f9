"""Starts a model on several ranks: join, compare, load, capture. Runs alike on every rank."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import ResolvedMode
from ostinato.loading.load import LoadedModel
from ostinato.parallel.sharded.sharded_models import weights_fingerprint
from ostinato.ranks.rendezvous import join_world
from ostinato.ranks.shared_results import SharingFollower, SharingLeader
from ostinato.ranks.sharing import Sharing, Started, Unshared
from ostinato.ranks.steps import FollowingRunner, LeadingRunner, RankRunner
from ostinato.ranks.world import World
from ostinato.runner import startup
from ostinato.runner.model_runner import ModelRunner

# Settings that may differ between ranks.
_OWN = ("show_progress",)


def start_ranks(config: EngineConfig) -> Started:
    """Join or start the world, and start this rank's part of the model."""
    world = join_world(config)
    loaded, runner, resolved = start_rank(config, world)
    sharing: Sharing = Unshared()
    if isinstance(runner, FollowingRunner):
        sharing = SharingFollower(runner)
    elif world.symmetric:
        sharing = SharingLeader(world)
    return Started(loaded=loaded, runner=runner, resolved_mode=resolved, sharing=sharing)


def start_rank(config: EngineConfig, world: World) -> tuple[LoadedModel, ModelRunner, ResolvedMode]:
    """Build this rank's part of the model and its runner, with graphs. Closes the world on failure.

    Settings, weights and plans are compared between ranks before they matter. If they differ, all
    ranks raise an error that says how.
    """
    config = replace(config, show_progress=config.show_progress and world.is_first)
    kind: type[RankRunner] = LeadingRunner if world.is_first else FollowingRunner
    try:
        if config.enable_lora and world.symmetric:
            raise ConfigError(
                "enable_lora needs ranks that LLM starts itself; leave out torchrun, and write "
                f"data_parallel_size={config.data_parallel_size} in a plain process"
            )
        with world.together():
            for field in fields(config):
                if field.name not in _OWN:
                    value = repr(getattr(config, field.name))
                    world.rank_context.check_same(f"the setting {field.name}", value)
            sees_text = world.is_first or world.symmetric
            with world.by_itself():
                loaded = startup.load(config, world.rank_context, tokenizer=sees_text)
                fingerprint = weights_fingerprint(
                    loaded.model, None if config.random_weights else loaded.path
                )
            world.rank_context.check_same("the weights", fingerprint)
            num_ahead = 1 if config.schedules_ahead_on(world.device) else 0
            make = partial(kind, world=world, num_ahead=num_ahead)
            runner, resolved = startup.build_runner(config, loaded, world.rank_context, make)
        assert isinstance(runner, RankRunner), "make_runner returns one"
        runner.begin()
    except BaseException:
        world.close()
        raise
    return loaded, runner, resolved
