"""``inspect_graph``, on a graph, bindings and an allocator that are faked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda_graph import FakeCUDAGraph, FakeDriver, kernel
from torch import nn

from ostinato import MemoryKind, StaleGraphError, compat, inspect_graph
from ostinato.errors import ConfigError
from ostinato.graphs.backends.cuda import nodes

# Where there is CUDA, torch's class cannot be faked, and tests/gpu have real graphs.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CPU build of torch")

FREE = {"size": 0x1000, "state": "inactive"}
ALLOCATED = {"size": 0x1000, "state": "active_allocated"}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The segments of torch's allocator: one of no pool, one of the graph's, one of another."""
    segments = [
        {"address": 0x10000, "blocks": [FREE, ALLOCATED], "segment_pool_id": (0, 0)},
        {"address": 0x20000, "blocks": [FREE, FREE], "segment_pool_id": (0, 5)},
        {"address": 0x30000, "blocks": [FREE, FREE], "segment_pool_id": (0, 6)},
    ]
    for segment in segments:
        segment["total_size"] = 0x2000
    monkeypatch.setattr(compat, "memory_snapshot", lambda: {"segments": segments})
    return segments


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, memory: Any) -> Any:
    """Makes a graph of kernels that hold these pointers, three each."""

    def of(*pointers: tuple[int, int, int]) -> FakeCUDAGraph:
        driver = FakeDriver({1: [kernel(pointers=each) for each in pointers]})
        monkeypatch.setattr(nodes, "driver", driver)
        monkeypatch.setattr(nodes, "CAN_READ_NODES", True)
        return FakeCUDAGraph()

    return of


def test_addresses_owners_and_stale_memory_are_shown(capture: Any) -> None:
    module = nn.Linear(4, 4)
    weight = module.weight.data_ptr()
    graph = capture((weight, 0x11000, 0x20008), (0x10010, 0x4010, 0x30000))
    ledger = inspect_graph(graph, {"model": module}, name="step")
    assert ledger.count() == {
        MemoryKind.PARAMETER: 1,
        MemoryKind.UNKNOWN: 3,  # allocated without a name, freed, and known to the driver alone
        MemoryKind.POOL: 2,
    }
    text = str(ledger)
    assert text.startswith("step: 2 kernel; addresses: 1 parameter, 2 pool, 3 unknown")
    assert f"parameter 'model.weight' {weight:#x}" in " ".join(text.split())
    assert "0x10010  parameter 0  STALE: freed" in text
    with pytest.raises(
        StaleGraphError, match=r"step, node 1 \(kernel\(float\*\)\): unknown memory"
    ):
        ledger.check(thorough=True)
    ledger.check()  # no owner has moved


def test_a_moved_parameter_is_found_later(capture: Any) -> None:
    module = nn.Linear(4, 4)
    ledger = inspect_graph(capture((module.weight.data_ptr(), 1, 2)), {"model": module})
    ledger.check(thorough=True)
    kept = module.weight.data
    module.weight.data = kept.clone()
    (stale,) = ledger.stale()
    assert (stale.owner, stale.address) == ("parameter 'model.weight'", kept.data_ptr())


def test_memory_that_was_freed_after_the_capture_is_found(
    capture: Any, memory: list[dict[str, Any]]
) -> None:
    ledger = inspect_graph(capture((0x11000, 1, 2)), {"x": torch.zeros(4)})
    assert ledger.stale() == []
    memory[0]["blocks"] = [{"size": 0x2000, "state": "active_awaiting_free"}]
    assert [each.why for each in ledger.stale()] == ["freed"]


def test_a_graph_that_was_not_kept_is_refused(capture: Any) -> None:
    capture()
    with pytest.raises(
        ConfigError,
        match=r"cannot be read \(You cannot access the raw cudaGraph_t\); capture it with "
        r"torch\.cuda\.CUDAGraph\(keep_graph=True\), and inspect it before reset\(\)",
    ):
        inspect_graph(FakeCUDAGraph(handle=None))


def test_without_bindings_graphs_cannot_be_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CAN_READ_NODES", False)
    with pytest.raises(ConfigError, match="bindings, which are missing: pip install cuda-bindings"):
        inspect_graph(FakeCUDAGraph())
