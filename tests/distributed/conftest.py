"""One pool of gloo processes for the whole run: starting them costs seconds, using them nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Four worker processes. ``gloo_pool.run(function, *args, world_size=4)``: see ``GlooPool``."""
    pool = GlooPool()
    yield pool
    pool.close()
