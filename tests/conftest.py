"""Everything that can run on the CPU backend does, and runs again on CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from ostinato import GraphPool

settings.register_profile("ostinato", deadline=None, derandomize=True)
settings.load_profile("ostinato")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test: every test that takes it holds on both backends."""
    torch.manual_seed(0)
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def pool(device: torch.device) -> Iterator[GraphPool]:
    """A pool that captures whatever it is asked to."""
    with GraphPool(device, lazy_capture=True) as pool:
        yield pool
