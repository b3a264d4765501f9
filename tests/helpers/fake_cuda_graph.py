"""CUDA's bindings, faked: graphs are lists of nodes, whose parameters are in host memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

LAYOUT = [(0, 8), (8, 4), (16, 24)]  # a pointer, a number, a struct with two pointers
_IMAGE = struct.Struct("<Qi4xQQi4x")
POINTERS = (0x1000, 0x2000, 0x3000)


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


def kernel(
    *, packed: bool = False, loaded: bool = True, pointers: tuple[int, int, int] = POINTERS
) -> Any:
    """A kernel node with three ``pointers``, its
    parameters one by one or in one buffer. It keeps their memory."""
    image = _IMAGE.pack(pointers[0], 7, *pointers[1:], 5)
    node = SimpleNamespace(kind=Kind.CU_GRAPH_NODE_TYPE_KERNEL, func=int(loaded), kern=2)
    node.kernelParams = node.extra = 0
    if packed:
        node.kept = ctypes.create_string_buffer(image, len(image)), ctypes.c_size_t(len(image))
        buffer, size = map(ctypes.addressof, node.kept)
        node.tags = (ctypes.c_void_p * 5)(1, buffer, 2, size, 0)
        node.extra = ctypes.addressof(node.tags)
    else:
        parts = [image[offset : offset + size] for offset, size in LAYOUT]
        node.kept = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        node.pointers = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, node.kept))
        node.kernelParams = ctypes.addressof(node.pointers)
    return node


class FakeCUDAGraph:
    """Passes for torch's class, of which no instance can be made without a GPU.

    ``handle`` is its key in the driver.
    """

    __class__ = torch.cuda.CUDAGraph  # what isinstance asks

    def __init__(self, handle: int | None = 1) -> None:
        self._handle = handle

    def raw_cuda_graph(self) -> int:
        if self._handle is None:
            raise RuntimeError("You cannot access the raw cudaGraph_t\nwithout keep_graph=true")
        return self._handle

    def pool(self) -> tuple[int, int]:
        return 0, 5
