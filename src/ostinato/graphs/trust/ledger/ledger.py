"""``Ledger``: the addresses that graphs hold, their owners, and whether they are still valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ostinato.errors import StaleGraphError
from ostinato.graphs.trust.ledger.owners import MemoryKind, OwnedMemory, owner_label
from ostinato.graphs.trust.ledger.records import GraphRecord, StaleAddress
from ostinato.graphs.trust.ledger.regions import Region
from ostinato.graphs.trust.ledger.resolver import (
    DeviceMemory,
    ReadableGraph,
    Resolver,
    node_records,
)
from ostinato.graphs.trust.ledger.table import ledger_table

_MOST_IN_MESSAGE = 3


class Capture(Protocol):
    """Captured work; a ``Tape`` is one."""

    @property
    def graphs(self) -> Sequence[ReadableGraph]: ...

    def refuse(self, why: str | None, by: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HeldGraph:
    """One capture under a ledger: a ``name`` for people, the work, and the memory around it."""

    name: str
    capture: Capture
    owned: OwnedMemory
    memory: DeviceMemory

    @property
    def is_logged(self) -> bool:
        return all(graph.log.complete for graph in self.capture.graphs)


class Ledger:
    """The memory that graphs hold, by graph, node and owner; ``print(ledger)`` shows a summary.

    It shows the graphs that exist at the moment, and looks memory up every time, so one ledger
    serves as long as the graphs do. It keeps no graph alive, and no memory but that of owners it
    was given; it reads no memory of the device. Use it from the thread that uses the graphs.

    ``list_graphs`` returns the graphs. Ledgers are made by ``graphed(...).ledger()``,
    ``pool_ledger``, ``CudaGraphManager.ledger``, ``LLM.ledger`` and ``inspect_graph``.
    """

    def __init__(self, list_graphs: Callable[[], Iterable[HeldGraph]]) -> None:
        self._list_graphs = list_graphs

    def update(self) -> None:
        """Take note of new graphs now: where their owners' memory is counts as at capture.

        Every other method does so too. Call it after a capture that owners may move soon after.
        """
        for _ in self._list_graphs():
            pass

    def graphs(self) -> list[GraphRecord]:
        """All graphs, their nodes, and the addresses these hold. Reads all nodes, which is slow."""
        return [record for _, record in self._records(list(self._list_graphs()), _Resolvers())]

    def count(self) -> Counter[MemoryKind]:
        """How many addresses the graphs hold, by what they are for; each counts once per graph."""
        return sum((record.count() for record in self.graphs()), Counter[MemoryKind]())

    def stale(self, *, thorough: bool = True) -> list[StaleAddress]:
        """All addresses that must not be used any more.

        Memory with a name is stale if its owner is elsewhere now; any other if it was freed.
        Without ``thorough``, nodes are only read if an owner has moved: freed memory without a name
        is then found only if an operator was seen to use it.
        """
        found = self._stale_by_graph(list(self._list_graphs()), thorough)
        return [address for _, stale in found for address in stale]

    def stale_in(self, capture: object) -> list[StaleAddress]:
        """``stale`` of one ``capture`` alone; none if it is not under this ledger."""
        held = [each for each in self._list_graphs() if each.capture is capture]
        return [address for _, stale in self._stale_by_graph(held, True) for address in stale]

    def _stale_by_graph(
        self, held: list[HeldGraph], thorough: bool
    ) -> Iterator[tuple[HeldGraph, list[StaleAddress]]]:
        resolvers = _Resolvers()
        suspects = held if thorough else [each for each in held if resolvers.suspects(each)]
        for graph, record in self._records(suspects, resolvers):
            found = list(_stale_in(record))
            missing = resolvers.of(graph).moved.keys() - _stale_regions(found, resolvers.of(graph))
            if missing and not graph.is_logged:
                found += _inferred(graph, missing, held, resolvers)
            if found:
                yield graph, found

    def check(self, *, thorough: bool = False) -> None:
        """Raise ``StaleGraphError`` if any address is stale (``stale``), and refuse its graph.

        A refused graph raises on every replay until its owner is back, as a later check finds, or
        the graph is captured again. ``thorough``: as in ``stale``.
        """
        held, stale = list(self._list_graphs()), []
        for graph in held:
            graph.capture.refuse(None, graph.owned)
        for graph, found in self._stale_by_graph(held, thorough):
            graph.capture.refuse(_message(found), graph.owned)
            stale += found
        if stale:
            raise StaleGraphError(_message(stale), stale)

    def __str__(self) -> str:
        return ledger_table(self.graphs())

    def _records(
        self, held: Iterable[HeldGraph], resolvers: _Resolvers
    ) -> Iterator[tuple[HeldGraph, GraphRecord]]:
        for each in held:
            resolver = resolvers.of(each)
            graphs, nodes = each.capture.graphs, []
            for number, graph in enumerate(graphs):
                piece = number if len(graphs) > 1 else None
                nodes += [replace(node, piece=piece) for node in node_records(graph, resolver)]
            yield each, GraphRecord(each.name, tuple(nodes))


class _Resolvers:
    """One resolver for all graphs that have the same memory around them."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Resolver] = {}
        self._moved: dict[int, bool] = {}

    def of(self, held: HeldGraph) -> Resolver:
        key = id(held.owned), id(held.memory)
        if key not in self._found:
            self._found[key] = Resolver(held.owned, held.memory)
        return self._found[key]

    def suspects(self, held: HeldGraph) -> bool:
        """Whether anything around the graph changed, by a quick look."""
        owned = held.owned
        if id(owned) not in self._moved:
            self._moved[id(owned)] = bool(owned.moved())
        return self._moved[id(owned)] or any(g.log.has_freed for g in held.capture.graphs)


def _stale_in(record: GraphRecord) -> Iterator[StaleAddress]:
    for node in record.nodes:
        for held in node.addresses:
            if held.stale is not None:
                yield StaleAddress(record.name, node, held.owner, held.address, held.stale)


def _stale_regions(stale: Iterable[StaleAddress], resolver: Resolver) -> set[Region]:
    found = (resolver.region_of(each.address) for each in stale)
    return {region for region in found if region is not None}


def _inferred(
    graph: HeldGraph, moved: Iterable[Region], held: Iterable[HeldGraph], resolvers: _Resolvers
) -> Iterator[StaleAddress]:
    """Moved memory that the graph may hold where it cannot be read.

    If every operator of other graphs over the same memory was seen, it is what these were given;
    if there are none, it is all.
    """
    others = [each for each in held if each.owned is graph.owned and each.is_logged]
    resolver = resolvers.of(graph)
    touched = {
        resolver.region_of(touched.address)
        for other in others
        for segment in other.capture.graphs
        for call in segment.log.calls
        for touched in call.touched
    }
    if not others and _all_readable(graph):
        return
    for region in moved:
        if region in touched or not others:
            why = resolver.moved[region]
            yield StaleAddress(graph.name, None, owner_label(*region.owner), region.start, why)


def _all_readable(graph: HeldGraph) -> bool:
    nodes = [segment.nodes() for segment in graph.capture.graphs]
    return all(
        each is not None and not any(node.hides_addresses for node in each) for each in nodes
    )


def _message(stale: Sequence[StaleAddress]) -> str:
    shown = "; ".join(map(str, stale[:_MOST_IN_MESSAGE]))
    more = len(stale) - _MOST_IN_MESSAGE
    rest = f"; and {more} more" if more > 0 else ""
    graphs = len({each.graph for each in stale})
    return (
        f"{graphs} {'graph holds' if graphs == 1 else 'graphs hold'} addresses that are no longer "
        f"valid: {shown}{rest}. Write new values in place (copy_, load_state_dict without assign), "
        "or put the old tensors back; otherwise call clear_graphs() and capture again"
    )
