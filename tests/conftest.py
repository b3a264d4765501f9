"""Every test that can run on the CPU backend does, and runs again on CUDA if there is a GPU."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_processes import ForkServer
from forked_ranks import RankStarter
from hypothesis import settings
from quick_interpreter import quicken_interpreter
from workers import GlooPool

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is first imported
    if find_spec("triton"):
        quicken_interpreter()

    # torch.manual_seed keeps the caller's stack, as text, for each device that may yet start.
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        absent.manual_seed_all = lambda seed: None

from ostinato import GraphPool

settings.register_profile("ostinato", deadline=None, derandomize=True)
settings.load_profile("ostinato")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GPU_TESTS = Path(__file__).parent / "gpu"
# Images are an optional part of the package.
_WITH_IMAGES = ["vision/*", "gpu/test_images_gpu.py", "project/test_docs.py"]
# So is the server, but not AsyncLLM.
_OVER_HTTP = ["serving/http/*"]
_HAS_SERVER = all(map(find_spec, ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx")))
collect_ignore_glob = [
    *([] if find_spec("PIL") else _WITH_IMAGES),
    *([] if _HAS_SERVER else _OVER_HTTP),
]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run on both backends, and those in ``tests/gpu``, are marked ``gpu``."""
    for item in items:
        assert isinstance(item, pytest.Function)
        if "device" in item.fixturenames or GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
    mark_sweeps(items)


_FEW_CASES = 16


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark all but a few parameters of a sweep as ``slow``: of tests marked so, and of all that
    have many parameters.

    They are drawn at random: a regular stride would miss some values of an axis.
    """
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if len(cases) <= _FEW_CASES and not cases[0].get_closest_marker("sweep"):
            continue
        num_quick = min(len(cases), max(2, len(cases) // 16))
        quick = set(random.Random(0).sample(range(len(cases)), num_quick))
        for index, item in enumerate(cases):
            if index not in quick:
                item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """Tests interrupt themselves, which a shell has its background jobs ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Most objects are short-lived tensors and their metadata, few of them in cycles.
gc.set_threshold(20_000, 20, 20)
_num_frozen_modules = 0


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Exclude everything imported so far from garbage collection, which every capture runs."""
    global _num_frozen_modules
    if len(sys.modules) > _num_frozen_modules + 20:  # a collection takes a tenth of a second
        gc.collect()
        gc.freeze()
        _num_frozen_modules = len(sys.modules)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test: every test that takes it runs on both backends."""
    torch.manual_seed(0)
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def pool(device: torch.device) -> Iterator[GraphPool]:
    """A pool that captures on demand."""
    with GraphPool(device, lazy_capture=True) as pool:
        yield pool


# One for the whole run each: starting them takes seconds, using them is free.
@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts processes that need not import torch."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def gloo_pool(fork_server: ForkServer) -> Iterator[GlooPool]:
    """Four worker processes. ``gloo_pool.run(function, *args, world_size=4)``: see ``GlooPool``."""
    pool = GlooPool(fork_server)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def forked_ranks(fork_server: ForkServer) -> Iterator[None]:
    """Ranks that ``LLM`` starts are forks, where how they start is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        starter = SimpleNamespace(PIPE=subprocess.PIPE, Popen=RankStarter(fork_server))
        patch.setattr("ostinato.ranks.processes.subprocess", starter)
        yield
