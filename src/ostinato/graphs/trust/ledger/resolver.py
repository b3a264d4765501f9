"""Finds the owner of every address in a graph: the two sources of the ledger, joined.

Nodes read from a device give the addresses among their bytes; the log of the capture gives the
operators, the memory they were given, and which nodes they made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Protocol

from ostinato.graphs.backends.graph_node import GraphNode, MemoryRange, RangeKind, Word
from ostinato.graphs.backends.operator_log import LoggedCall, OperatorLog, Touched
from ostinato.graphs.trust.ledger.owners import MemoryKind, OwnedMemory
from ostinato.graphs.trust.ledger.records import HeldAddress, NodeRecord
from ostinato.graphs.trust.ledger.regions import Region, RegionMap

FREED = "freed"
_UNMAPPED = "not mapped any more"
_GIVEN = "given to the operator"
_OF_POOLS = (RangeKind.POOL, RangeKind.OTHER_POOL)


class DeviceMemory(Protocol):
    """Knows the memory of a device; every ``GraphBackend`` does."""

    def memory_ranges(self) -> list[MemoryRange]: ...

    def find_memory(self, address: int) -> MemoryRange | None: ...


class ReadableGraph(Protocol):
    """A graph as far as a ledger reads it; every ``Graph`` is one."""

    log: OperatorLog

    def nodes(self) -> Sequence[GraphNode] | None: ...


class Resolver:
    """Owners of addresses, as they were at capture (``owned``) and are in ``memory`` now."""

    def __init__(self, owned: OwnedMemory, memory: DeviceMemory) -> None:
        self.moved = owned.moved()
        self._owned = RegionMap(owned.regions)
        ranges = memory.memory_ranges()
        self._kinds = {each.kind.value: each.kind for each in ranges}
        self._ranges = RegionMap(Region(*each[:2], each.kind.value, "") for each in ranges)
        self._find_memory = cache(memory.find_memory)  # nodes repeat the same values

    def region_of(self, address: int) -> Region | None:
        """The named memory around an address."""
        return self._owned.find(address)

    def word(self, word: Word) -> HeldAddress | None:
        """What a node's eight bytes refer to; None if they are not a known address."""
        found = self._named(word.value, word.where)
        if found is not None:
            return found
        kind = self._range_kind(word.value)
        if kind is None and self._find_memory(word.value) is not None:
            kind = RangeKind.OUTSIDE_TORCH
        if kind is None and not word.is_address:
            return None
        stale = {None: _UNMAPPED, RangeKind.FREE: FREED}.get(kind)
        return HeldAddress(word.value, word.where, _memory_kind(kind), stale=stale)

    def touched(self, touched: Touched) -> HeldAddress:
        """Whose memory an operator was given."""
        found = self._named(touched.address, _GIVEN)
        if found is not None:
            return found
        kind = _memory_kind(self._range_kind(touched.address))
        stale = FREED if kind is MemoryKind.UNKNOWN and touched.freed else None
        return HeldAddress(touched.address, _GIVEN, kind, stale=stale)

    def _named(self, address: int, where: str) -> HeldAddress | None:
        region = self._owned.find(address)
        if region is None:
            return None
        kind = MemoryKind(region.kind)
        return HeldAddress(address, where, kind, region.name, self.moved.get(region))

    def _range_kind(self, address: int) -> RangeKind | None:
        found = self._ranges.find(address)
        return None if found is None else self._kinds[found.kind]


def _memory_kind(kind: RangeKind | None) -> MemoryKind:
    if kind in _OF_POOLS:
        return MemoryKind.POOL
    return MemoryKind.WORKSPACE if kind is RangeKind.WORKSPACE else MemoryKind.UNKNOWN


def node_records(graph: ReadableGraph, resolver: Resolver) -> list[NodeRecord]:
    """The nodes of one captured graph, with all addresses that either source shows."""
    nodes = graph.nodes()
    if nodes is None:
        return [_of_call(call, resolver) for call in graph.log.calls]
    return [*_joined(nodes, graph.log, resolver)]


def _joined(
    nodes: Sequence[GraphNode], log: OperatorLog, resolver: Resolver
) -> Iterator[NodeRecord]:
    makers = _makers(log.calls)
    held = [[*filter(None, map(resolver.word, node.words))] for node in nodes]
    for call in log.calls:
        first, end = call.first_node, call.end_node
        if first is None or end is None or first >= len(nodes):
            yield _of_call(call, resolver)
            continue
        shown = {each.address for node in held[first:end] for each in node}
        # What the call's nodes do not show: behind tensor maps, or at an offset of the address.
        hidden = [each for each in call.touched if each.address not in shown]
        held[first] += [*map(resolver.touched, dict.fromkeys(hidden))]
    for index, (node, addresses) in enumerate(zip(nodes, held, strict=True)):
        yield NodeRecord(
            index, node.kind, node.name, makers.get(index), tuple(addresses), node.hides_addresses
        )


def _of_call(call: LoggedCall, resolver: Resolver) -> NodeRecord:
    addresses = tuple(map(resolver.touched, dict.fromkeys(call.touched)))
    return NodeRecord(call.first_node, "operator", call.operator, call.operator, addresses)


def _makers(calls: Sequence[LoggedCall]) -> dict[int, str]:
    """The operator of each node: of several, the outermost, which was logged last."""
    return {
        node: call.operator
        for call in calls
        if call.first_node is not None and call.end_node is not None
        for node in range(call.first_node, call.end_node)
    }
