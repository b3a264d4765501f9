"""Nodes of a captured graph as bytes, and which of their bytes may be addresses.

Pure Python: what reads the nodes from a device (``cuda.nodes``) is elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_POINTER = struct.Struct("<Q")
# A CUtensorMap: 128 bytes, aligned to 64. It describes a tensor for bulk copies.
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64


class RangeKind(Enum):
    """Who has a range of device memory."""

    POOL = "pool"
    OTHER_POOL = "another pool"
    WORKSPACE = "workspace"
    ALLOCATED = "allocated"
    FREE = "free"
    OUTSIDE_TORCH = "outside torch"


class MemoryRange(NamedTuple):
    """Addresses from ``start`` up to ``end``, and who has them."""

    start: int
    end: int
    kind: RangeKind


class Word(NamedTuple):
    """Eight bytes that may be an address: ``where`` in the node, and their ``value``.

    ``is_address``: they are one for certain, such as the destination of a copy.
    """

    where: str
    value: int
    is_address: bool = False


class Parameter(NamedTuple):
    """One parameter of a kernel: its offset among all parameters, and its bytes."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node: its ``kind`` ("kernel", "memcpy", "memset", ...), a name, and possible addresses.

    ``hides_addresses``: a parameter may be a tensor map, whose address cannot be relied on to be
    readable.
    """

    kind: str
    name: str
    words: tuple[Word, ...] = ()
    hides_addresses: bool = False


def kernel_node(name: str, parameters: Sequence[Parameter]) -> GraphNode:
    """A kernel with these parameters."""
    words = [word for number, each in enumerate(parameters) for word in pointer_words(number, each)]
    hides = any(_may_be_tensor_map(each) for each in parameters)
    return GraphNode("kernel", name, tuple(words), hides)


def pointer_words(number: int, parameter: Parameter) -> Iterator[Word]:
    """All 8-byte values at multiples of 8: structs hold pointers, and C++ aligns those."""
    first = -parameter.offset % 8
    for start in range(first, len(parameter.data) - 7, 8):
        (value,) = _POINTER.unpack_from(parameter.data, start)
        if value:
            inside = f"+{start}" if start or len(parameter.data) > 8 else ""
            yield Word(f"parameter {number}{inside}", value)


def _may_be_tensor_map(parameter: Parameter) -> bool:
    return (
        len(parameter.data) >= _TENSOR_MAP_BYTES and parameter.offset % _TENSOR_MAP_ALIGNMENT == 0
    )
