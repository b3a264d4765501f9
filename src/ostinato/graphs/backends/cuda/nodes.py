"""Reads the nodes of a captured CUDA graph through CUDA's Python bindings.

The other source of the address ledger: kernels with the bytes of their parameters, copies and fills
with their addresses. Works on any graph, also those that other code captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from ostinato import compat
from ostinato.errors import CaptureError
from ostinato.graphs.backends.graph_node import (
    GraphNode,
    MemoryRange,
    Parameter,
    RangeKind,
    Word,
    kernel_node,
)

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

CAN_READ_NODES = driver is not None
_BUFFER, _BUFFER_SIZE = 1, 2  # tags of CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE


def read_nodes(graph: torch.cuda.CUDAGraph) -> list[GraphNode]:
    """All nodes of a graph captured with ``keep_graph``, those of child graphs included.

    Does not synchronise. The order is that of the capture.
    """
    return list(_nodes(driver.CUgraph(int(graph.raw_cuda_graph()))))


def _nodes(graph: Any) -> Iterator[GraphNode]:
    _, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count)) if count else ((), 0)
    kinds = driver.CUgraphNodeType
    for node in nodes:
        (kind,) = _checked(driver.cuGraphNodeGetType(node))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel(node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            yield _memcpy(node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            (params,) = _checked(driver.cuGraphMemsetNodeGetParams(node))
            words = (Word("destination", int(params.dst), is_address=True),)
            yield GraphNode("memset", "memset", words)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver.cuGraphChildGraphNodeGetGraph(node))
            yield from _nodes(child)
        else:
            name = str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            yield GraphNode(name, name)


def _kernel(node: Any) -> GraphNode:
    (params,) = _checked(driver.cuGraphKernelNodeGetParams(node))
    # A node has a function, or a kernel that is not loaded for a context yet.
    if int(params.func):
        handle, name_of, info = params.func, driver.cuFuncGetName, driver.cuFuncGetParamInfo
    else:
        handle, name_of, info = params.kern, driver.cuKernelGetName, driver.cuKernelGetParamInfo
    (name,) = _checked(name_of(handle))
    layout: list[tuple[int, int]] = []
    while True:
        status, offset, size = info(handle, len(layout))
        if int(status) != 0:
            break  # there is no further parameter
        layout.append((int(offset), int(size)))
    return kernel_node(compat.demangle(name.decode()), _parameters(params, layout))


def _parameters(params: Any, layout: list[tuple[int, int]]) -> list[Parameter]:
    """The bytes of a kernel's parameters, which are one by one or, as cuBLASLt passes them, in one
    buffer."""
    if not layout:
        return []
    if int(params.kernelParams):
        each = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
        return [
            Parameter(offset, ctypes.string_at(address, size))
            for address, (offset, size) in zip(each, layout, strict=True)
            if address
        ]
    if not int(params.extra):
        return []
    tagged = (ctypes.c_void_p * 4).from_address(int(params.extra))
    buffers = {tagged[0]: tagged[1], tagged[2]: tagged[3]}
    size_at, start = buffers.get(_BUFFER_SIZE), buffers.get(_BUFFER)
    if not size_at or not start:
        return []
    data = ctypes.string_at(start, ctypes.c_size_t.from_address(size_at).value)
    return [Parameter(offset, data[offset : offset + size]) for offset, size in layout]


def _memcpy(node: Any) -> GraphNode:
    (params,) = _checked(driver.cuGraphMemcpyNodeGetParams(node))
    words = (
        *_end_of_copy("source", params.srcMemoryType, params.srcDevice, params.srcHost),
        *_end_of_copy("destination", params.dstMemoryType, params.dstDevice, params.dstHost),
    )
    return GraphNode("memcpy", f"memcpy of {int(params.WidthInBytes):,} bytes a row", words)


def _end_of_copy(where: str, kind: Any, device: Any, host: Any) -> Iterator[Word]:
    types = driver.CUmemorytype
    if kind == types.CU_MEMORYTYPE_HOST:
        yield Word(f"{where} (host)", int(host or 0))
    elif kind != types.CU_MEMORYTYPE_ARRAY:
        yield Word(where, int(device), is_address=True)


def mapped_memory(address: int) -> MemoryRange | None:
    """The allocation that the driver knows at ``address``, also outside torch."""
    if driver is None:
        return None
    names = driver.CUpointer_attribute
    found = []
    for name in (
        names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        names.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ):
        status, value = driver.cuPointerGetAttribute(name, address)
        if int(status) != 0:
            return None
        found.append(int(value))
    start, size = found
    if not start <= address < start + size:
        return None
    return MemoryRange(start, start + size, RangeKind.OUTSIDE_TORCH)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise CaptureError(f"CUDA cannot read a captured graph: {status}")
    return tuple(values)
