"""``close()`` gives everything back: where no memory is left, and whatever a part of it raises."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from ostinato import LLM, GraphConfig, GraphPool, SamplingParams, graphed
from ostinato.errors import ClosedError
from ostinato.graphs.backends.cpu.backend import CpuBackend
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.manager import CudaGraphManager
from ostinato.graphs.wrapper import CUDAGraphWrapper

TINY: dict[str, Any] = {
    "model": "tiny",
    "random_weights": True,
    "device": "cpu",
    "max_model_len": 128,
    "graphs": GraphConfig(capture_sizes=[1, 2, 4]),
    "show_progress": False,
}

EXHAUSTED = """
import os, resource, sys, torch
from ostinato import LLM, GraphConfig, SamplingParams, graphed

what, smallest = sys.argv[1], int(sys.argv[2])
if what == "graphed":
    closed = graphed(lambda x: x * 2, sizes=[1, 2])
    closed(torch.ones(1, 3))
else:
    closed = LLM("tiny", random_weights=True, device="cpu", max_model_len=128, show_progress=False,
                 graphs=GraphConfig(capture_sizes=[1, 2, 4]),
                 tensor_parallel_size=1 + (what == "ranks"))
    closed.generate([[1, 2, 3]], SamplingParams(max_tokens=8))

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

def exhaust(sizes, errors):
    hog = None
    for size in sizes:
        try:
            while size:
                hog = hog, bytearray(size)
            while True:
                hog = hog, None, None, None
        except MemoryError as error:
            errors[next(slots)] = error  # freed, it would leave room for an object or two

# Nothing below takes memory, not even an integer: failures must be those of close().
sizes = [2**n for n in range(20, 3, -1) if 2**n >= smallest] + [0] * (smallest == 16)
errors, slots = [None] * len(sizes), iter(range(len(sizes)))
unlimited = 2 * (resource.RLIM_INFINITY,)
close = closed.close  # a bound method is an object
before = used()
resource.setrlimit(resource.RLIMIT_AS, (before, resource.RLIM_INFINITY))
exhaust(sizes, errors)
close()
resource.setrlimit(resource.RLIMIT_AS, unlimited)
sys.stdout.write(f"{before - used()}")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize(
    ("what", "smallest"),
    # Threads of torch's, which ranks have, are not ours to save where not a byte is left.
    [("graphed", 16), ("llm", 16), ("ranks", 4096)],
)
def test_nothing_is_raised_where_no_memory_is_left(what: str, smallest: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXHAUSTED, what, str(smallest)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    arena_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert int(done.stdout) > arena_bytes / 2, "the addresses of the pool were not given back"


class Fault:
    """Makes a method raise, at every call, and counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.num_calls = 0

        def fails(*args: Any) -> None:
            self.num_calls += 1
            raise MemoryError(f"{owner.__name__}.{name}")

        monkeypatch.setattr(owner, name, fails)


PARTS = [
    (Tape, "close"),
    (CUDAGraphWrapper, "discard"),
    (CudaGraphManager, "clear_graphs"),
    (CpuBackend, "close"),
    (GraphPool, "close"),
]


@pytest.mark.parametrize(("owner", "name"), PARTS, ids=[f"{o.__name__}.{n}" for o, n in PARTS])
def test_the_rest_is_given_back_if_a_part_raises(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(**TINY)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    runner: Any = llm.engine.runner
    weight = weakref.ref(next(iter(runner.model.embed_tokens.parameters())))
    cache = weakref.ref(runner.kv_cache.layers[0][0])
    with monkeypatch.context() as patched:
        fault = Fault(patched, owner, name)
        with pytest.raises(MemoryError, match=rf"{owner.__name__}\.{name}"):
            llm.close()
    assert fault.num_calls > 0
    llm.close()  # and the second time is harmless
    with pytest.raises(ClosedError):
        llm.generate([[1]])
    assert runner.pool.closed or owner is GraphPool
    assert cache() is None
    assert not hasattr(llm.engine, "model")
    del llm, runner
    gc.collect()
    assert weight() is None


def test_every_graph_is_closed_if_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with GraphPool("cpu") as pool:
        first, second = (graphed(torch.nn.Linear(2, 2), sizes=[1, 2], pool=pool) for _ in range(2))
        first(torch.ones(1, 2))
        second(torch.ones(1, 2))
        fault = Fault(monkeypatch, Tape, "close")
        with pytest.raises(MemoryError, match=r"Tape\.close"):
            pool.close()
        monkeypatch.undo()
    assert fault.num_calls == pool.num_graphs_captured == 4
    assert pool.closed
    assert pool.num_bytes == 0


def test_tensors_outlive_the_memory_of_their_pool() -> None:
    """What a caller still holds is readable; its pool has let go of it."""
    with GraphPool("cpu", lazy_capture=True) as pool:
        double = graphed(lambda x: x * 2, sizes=[4], pool=pool, copy_outputs=False)
        output = double(torch.arange(4.0))
    pool.close()
    assert output.tolist() == [0, 2, 4, 6]
    assert pool.num_bytes == 0
