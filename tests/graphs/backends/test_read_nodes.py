"""Reads the nodes of a CUDA graph, through bindings that are faked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda_graph import FakeDriver, Kind, kernel

from ostinato.errors import CaptureError
from ostinato.graphs.backends.cuda import nodes
from ostinato.graphs.backends.graph_node import RangeKind, Word

WORDS = [("parameter 0", 0x1000), ("parameter 2+0", 0x2000), ("parameter 2+8", 0x3000)]


def read(monkeypatch: pytest.MonkeyPatch, *found: Any, **more: Sequence[Any]) -> list[Any]:
    graphs = {1: found, **{int(key[1:]): value for key, value in more.items()}}
    monkeypatch.setattr(nodes, "driver", FakeDriver(graphs))
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: 1)
    return nodes.read_nodes(graph)


@pytest.mark.parametrize("packed", [False, True], ids=["one by one", "in one buffer"])
@pytest.mark.parametrize("loaded", [False, True], ids=["kernel", "function"])
def test_parameters_of_kernels_are_read(
    monkeypatch: pytest.MonkeyPatch, packed: bool, loaded: bool
) -> None:
    (node,) = read(monkeypatch, kernel(packed=packed, loaded=loaded))
    assert (node.kind, node.name) == ("kernel", "kernel(float*)")
    assert [(word.where, word.value) for word in node.words if word.value > 0xFF] == WORDS


def test_copies_fills_and_child_graphs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_MEMCPY, WidthInBytes=4096)
    copy.srcMemoryType, copy.srcHost, copy.srcDevice = 1, 0x9000, 0
    copy.dstMemoryType, copy.dstHost, copy.dstDevice = 2, None, 0x5000
    fill = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_MEMSET, dst=0x6000)
    child = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_GRAPH, child=2)
    host = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_HOST)
    found = read(monkeypatch, copy, child, host, _2=[fill])
    assert [node.kind for node in found] == ["memcpy", "memset", "host"]
    assert found[0].name == "memcpy of 4,096 bytes a row"
    assert found[0].words == (
        Word("source (host)", 0x9000),
        Word("destination", 0x5000, is_address=True),
    )
    assert found[1].words == (Word("destination", 0x6000, is_address=True),)


def test_an_empty_graph_has_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch) == []


def test_errors_of_the_driver_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    child = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_GRAPH, child=3)
    with pytest.raises(CaptureError, match="CUDA cannot read a captured graph: 1"):
        read(monkeypatch, child)


def test_memory_that_the_driver_knows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "driver", FakeDriver({}))
    assert nodes.mapped_memory(0x4010) == (0x4000, 0x4100, RangeKind.OUTSIDE_TORCH)
    assert nodes.mapped_memory(0x4200) is None
    assert nodes.mapped_memory(0x8000) is None
