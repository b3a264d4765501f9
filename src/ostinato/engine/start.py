"""Starting what an engine drives: on one rank, or on several if the configuration says so."""

from __future__ import annotations

import threading

from ostinato.config import EngineConfig
from ostinato.ranks.sharing import Started, Unshared
from ostinato.runner import startup
from ostinato.runner.autocast import without_autocast

# Loading sets what the whole process has one of: the default dtype and device, the random state.
_starting = threading.Lock()


@without_autocast
def start(config: EngineConfig) -> Started:
    """Load, allocate, capture; on several ranks if the configuration says so.

    One at a time in a process: a second thread waits.
    """
    if config.layout.world_size > 1:
        from ostinato.ranks.start import start_ranks

        return start_ranks(config)
    with _starting:
        loaded = startup.load(config)
        runner, resolved = startup.build_runner(config, loaded)
    return Started(loaded=loaded, runner=runner, resolved_mode=resolved, sharing=Unshared())
