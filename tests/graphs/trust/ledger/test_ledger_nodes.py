"""From the bytes of nodes, and what is known of memory, to addresses with owners: no device."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import Ledger, MemoryKind, NamedMemory
from ostinato.graphs.backends.graph_node import (
    GraphNode,
    MemoryRange,
    Parameter,
    RangeKind,
    Word,
    kernel_node,
    pointer_words,
)
from ostinato.graphs.backends.operator_log import OperatorLog
from ostinato.graphs.trust.ledger.ledger import HeldGraph
from ostinato.graphs.trust.ledger.owners import OwnedMemory
from ostinato.graphs.trust.ledger.records import GraphRecord
from ostinato.graphs.trust.ledger.regions import Region, RegionMap

ADDRESSES = st.integers(0, 120)


# --- which region an address is in ----------------------------------------------------------------


@given(st.lists(st.tuples(ADDRESSES, st.integers(0, 40)), max_size=12), ADDRESSES)
def test_the_smallest_region_around_an_address_is_found(
    spans: list[tuple[int, int]], address: int
) -> None:
    regions = [Region(start, start + size, "k", str(i)) for i, (start, size) in enumerate(spans)]
    around = [each for each in regions if each.start <= address < each.end]
    expected = min(around, key=lambda each: each.end - each.start, default=None)
    assert RegionMap(regions).find(address) == expected  # min() returns the first, too


# --- which bytes may be addresses -----------------------------------------------------------------


@given(st.integers(0, 40), st.binary(max_size=80))
def test_every_aligned_word_of_a_parameter_is_read_and_no_other(offset: int, data: bytes) -> None:
    buffer = bytes(offset) + data  # as the kernel sees its parameters
    expected = [
        struct.unpack_from("<Q", buffer, at)[0]
        for at in range(0, len(buffer) - 7, 8)
        if at >= offset
    ]
    words = list(pointer_words(3, Parameter(offset, data)))
    assert [word.value for word in words] == [value for value in expected if value]
    assert all(word.where.startswith("parameter 3") and not word.is_address for word in words)


@given(st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=5), st.integers(0, 3))
def test_a_pointer_inside_a_struct_is_found(pointers: list[int], number: int) -> None:
    data = b"".join(struct.pack("<iiQ", 1, 2, each) for each in pointers)
    found = [word.value for word in pointer_words(number, Parameter(16, data))]
    assert set(pointers) <= set(found)


def test_parameters_that_may_be_tensor_maps_are_pointed_out() -> None:
    assert kernel_node("k", [Parameter(64, bytes(128))]).hides_addresses
    assert not kernel_node(
        "k", [Parameter(72, bytes(128)), Parameter(0, bytes(64))]
    ).hides_addresses


# --- addresses with owners ------------------------------------------------------------------------


class FakeGraph:
    """A graph that is its capture, its only piece, and the memory of its device."""

    def __init__(
        self,
        nodes: Sequence[GraphNode] | None,
        calls: Sequence[tuple[str, list[torch.Tensor]]] = (),
        *,
        complete: bool = True,
        ranges: Sequence[MemoryRange] = (),
        mapped: Sequence[int] = (),
    ) -> None:
        self._nodes, self._ranges, self._mapped = nodes, list(ranges), mapped
        at = 0
        self.log = OperatorLog("cpu", complete=complete, count_nodes=lambda: at)
        for at, (operator, arguments) in enumerate(calls, start=1):
            self.log.note(operator, arguments, at - 1)
        self.log.finish()
        self.refused: str | None = None

    @property
    def graphs(self) -> list[FakeGraph]:
        return [self]

    def nodes(self) -> Sequence[GraphNode] | None:
        return self._nodes

    def refuse(self, why: str | None, by: object) -> None:
        self.refused = why

    def memory_ranges(self) -> list[MemoryRange]:
        return self._ranges

    def find_memory(self, address: int) -> MemoryRange | None:
        if address not in self._mapped:
            return None
        return MemoryRange(address, address + 1, RangeKind.OUTSIDE_TORCH)


def ledger_of(*graphs: FakeGraph, owned: OwnedMemory | None = None) -> Ledger:
    around = owned or OwnedMemory(tuple)
    held = [
        HeldGraph(name=f"graph {number}", capture=graph, owned=around, memory=graph)
        for number, graph in enumerate(graphs)
    ]
    return Ledger(lambda: held)


def only(ledger: Ledger) -> GraphRecord:
    (record,) = ledger.graphs()
    return record


def kernel(*values: int) -> GraphNode:
    return kernel_node("k", [Parameter(0, struct.pack(f"<{len(values)}Q", *values))])


RANGES = [
    MemoryRange(0x1000, 0x2000, RangeKind.POOL),
    MemoryRange(0x2000, 0x3000, RangeKind.WORKSPACE),
    MemoryRange(0x3000, 0x4000, RangeKind.ALLOCATED),
    MemoryRange(0x4000, 0x5000, RangeKind.FREE),
    MemoryRange(0x5000, 0x6000, RangeKind.OTHER_POOL),
]


@given(st.lists(st.integers(1, 0x7000), min_size=1, max_size=8), st.integers(1, 0x7000))
def test_values_outside_all_memory_are_no_addresses(values: list[int], mapped: int) -> None:
    graph = FakeGraph([kernel(*values)], ranges=RANGES, mapped=[mapped])
    held = {each.address: each for each in only(ledger_of(graph)).nodes[0].addresses}
    assert set(held) == {v for v in values if 0x1000 <= v < 0x6000 or v == mapped}
    for value, each in held.items():
        kind = {1: MemoryKind.POOL, 2: MemoryKind.WORKSPACE, 5: MemoryKind.POOL}
        assert each.kind is kind.get(value >> 12, MemoryKind.UNKNOWN)
        assert each.stale == ("freed" if value >> 12 == 4 else None)


def test_a_copy_to_memory_that_is_gone_is_stale() -> None:
    node = GraphNode("memset", "memset", (Word("destination", 0x9000, is_address=True),))
    graph = FakeGraph([node], ranges=RANGES)
    (stale,) = ledger_of(graph).stale()
    assert "node 0 (memset)" in str(stale)
    assert str(stale).endswith("unknown memory at 0x9000 is not mapped any more")


def test_both_sources_are_joined_by_node() -> None:
    """Node 0 belongs to an operator whose second argument none of its parameters shows."""
    shown, hidden = torch.zeros(4), torch.zeros(4)
    calls = [("aten.mm.default", [shown, hidden])]
    named = [
        NamedMemory(MemoryKind.PARAMETER, name, tensor)
        for name, tensor in (("shown", shown), ("hidden", hidden))
    ]
    graph = FakeGraph([kernel(shown.data_ptr()), kernel(7)], calls)
    first, second = only(ledger_of(graph, owned=OwnedMemory(lambda: named))).nodes
    assert (second.operator, second.addresses) == (None, ())
    assert first.operator == "aten.mm.default"
    assert [(each.name, each.where) for each in first.addresses] == [
        ("shown", "parameter 0"),
        ("hidden", "given to the operator"),
    ]


def test_memory_that_an_operator_was_given_and_is_freed_is_stale() -> None:
    gone, kept = torch.zeros(4), torch.zeros(4)
    graph = FakeGraph(None, [("op", [gone, kept])])
    ledger = ledger_of(graph)
    assert ledger.stale(thorough=False) == []
    address = gone.data_ptr()
    del gone
    (stale,) = ledger.stale(thorough=False)
    assert (stale.address, stale.why, stale.owner) == (address, "freed", "unknown memory")


class Box:
    """Owns a tensor that may move."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(8)

    def named_memory(self) -> list[NamedMemory]:
        return [NamedMemory(MemoryKind.KV_CACHE, "layer 0", self.tensor)]


def test_moved_memory_behind_tensor_maps_is_inferred_from_graphs_that_were_watched() -> None:
    box = Box()
    owned = OwnedMemory(box.named_memory)
    watched = FakeGraph([kernel(7)], [("attend", [box.tensor])])
    unwatched = FakeGraph([kernel(8)], complete=False)
    ledger = ledger_of(watched, unwatched, owned=owned)
    assert ledger.stale() == []
    kept, box.tensor = box.tensor, torch.zeros(8)
    seen, inferred = ledger.stale()
    assert (seen.graph, inferred.graph, inferred.node) == ("graph 0", "graph 1", None)
    assert "graph 1, a node that cannot be read: KV cache 'layer 0'" in str(inferred)
    assert kept is not None


def test_moved_memory_is_not_inferred_where_all_nodes_can_be_read() -> None:
    box = Box()
    owned = OwnedMemory(box.named_memory)
    readable = FakeGraph([kernel(8)], complete=False)
    opaque = FakeGraph([kernel_node("k", [Parameter(0, bytes(128))])], complete=False)
    box.tensor = torch.zeros(16)
    assert ledger_of(readable, owned=owned).stale() == []
    (stale,) = ledger_of(opaque, owned=owned).stale()
    assert stale.owner == "KV cache 'layer 0'"
