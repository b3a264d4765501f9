"""Reads the nodes of a CUDA graph, through bindings that are faked: structs in host memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.errors import CaptureError
from ostinato.graphs.backends.cuda import nodes
from ostinato.graphs.backends.graph_node import RangeKind, Word

LAYOUT = [(0, 8), (8, 4), (16, 24)]  # a pointer, a number, a struct with two pointers
IMAGE = struct.pack("<Qi4xQQi4x", 0x1000, 7, 0x2000, 0x3000, 5)
WORDS = [("parameter 0", 0x1000), ("parameter 2+0", 0x2000), ("parameter 2+8", 0x3000)]


class Kind(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4


class FakeDriver:
    """As much of ``cuda.bindings.driver`` as reading a graph takes. A graph is a list of nodes."""

    CUgraphNodeType = Kind
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_ARRAY=3)
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR="start", CU_POINTER_ATTRIBUTE_RANGE_SIZE="size"
    )

    def __init__(self, graphs: dict[int, Sequence[Any]]) -> None:
        self._graphs = graphs

    def CUgraph(self, handle: int) -> int:
        return handle

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:
        if graph not in self._graphs:
            return 1, None, None
        found = self._graphs[graph]
        return 0, list(found[:count]), len(found)

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return 0, node.kind

    def _params(self, node: Any) -> Any:
        return 0, node

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _params  # noqa: N815

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> Any:
        return 0, node.child

    def cuFuncGetName(self, func: int) -> Any:
        return 0, b"_Z6kernelPf"

    cuKernelGetName = cuFuncGetName  # noqa: N815

    def cuFuncGetParamInfo(self, func: int, index: int) -> Any:
        return (0, *LAYOUT[index]) if index < len(LAYOUT) else (1, None, None)

    cuKernelGetParamInfo = cuFuncGetParamInfo  # noqa: N815

    def cuPointerGetAttribute(self, name: str, address: int) -> Any:
        return (0, {"start": 0x4000, "size": 0x100}[name]) if address >> 12 == 4 else (1, None)


def kernel(*, packed: bool, loaded: bool = True) -> Any:
    """A kernel node with its parameters one by one, or in one buffer; it keeps their memory."""
    node = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_KERNEL, func=int(loaded), kern=2)
    node.kernelParams = node.extra = 0
    if packed:
        node.kept = ctypes.create_string_buffer(IMAGE, len(IMAGE)), ctypes.c_size_t(len(IMAGE))
        buffer, size = map(ctypes.addressof, node.kept)
        node.tags = (ctypes.c_void_p * 5)(1, buffer, 2, size, 0)
        node.extra = ctypes.addressof(node.tags)
    else:
        parts = [IMAGE[offset : offset + size] for offset, size in LAYOUT]
        node.kept = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        node.pointers = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, node.kept))
        node.kernelParams = ctypes.addressof(node.pointers)
    return node


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
