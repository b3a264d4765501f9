"""Starts the model and the runner of an engine, on one rank or several."""

from __future__ import annotations

import threading

from ostinato.config import EngineConfig
from ostinato.engine.tune import tune_at_start
from ostinato.ranks.sharing import Started, Unshared
from ostinato.runner import startup
from ostinato.runner.autocast import without_autocast

# Loading sets process-wide state: the default dtype and device, the random state.
starting = threading.Lock()


@without_autocast
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
