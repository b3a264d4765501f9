"""Graphs as pictures: their nodes in groups, by layer or between eager breaks.

Which layer a node belongs to is read from the names of the memory that it holds: the weights of
``layers.3``, the KV cache of layer 3. Nodes that hold no such memory follow the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.ledger.owners import MemoryKind
from ostinato.graphs.trust.ledger.records import GraphRecord, NodeRecord
from ostinato.report.records import Picture, PictureGroup, PictureNode, Pictures

_LAYER = re.compile(r"\b(?:layers?|blocks|h)[ .](\d+)\b")
_OUTSIDE = "outside the layers"
# The first that matches a node's operator or name decides.
_ROLES = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("attention", r"attention|attn|flash|fmha|paged"),
        ("norm", r"norm"),
        ("sampling", r"sampl|argmax|top_?k|logprob|best_of"),
        ("gemm", r"gemm|linear|matmul|\b(?:add|b)?mm\b|nvjet|cutlass|cublas|split_?k|experts"),
        ("copy", r"mem(?:cpy|set)|copy|fill|load_|store_|embedding|gather|index"),
    )
)


def draw_graphs(ledger: Ledger) -> Pictures:
    """All graphs of a ledger. Reads all their nodes, which is slow."""
    nodes: dict[NodeKey, int] = {}
    named = groupby(ledger.graphs(), key=lambda record: record.name)
    graphs = [_picture(name, list(records), nodes) for name, records in named]
    return Pictures(nodes=[_as_node(key) for key in nodes], graphs=graphs)


# Kind, name, operator, and the named memory of a node.
NodeKey = tuple[str, str, str | None, tuple[str, ...]]


def _picture(name: str, records: Sequence[GraphRecord], known: dict[NodeKey, int]) -> Picture:
    """The picture of one key. The pieces of a compiled model are records of the same name."""
    pieces = [node.piece for record in records for node in record.nodes]
    is_split = len(records) > 1 or any(piece is not None for piece in pieces)
    titled = _by_piece(records) if is_split else _by_layer(records[0].nodes)
    groups: list[tuple[str, list[int], list[NodeKey]]] = []
    for title, nodes in titled:
        keys = [_key(node) for node in nodes]
        groups.append((title, [known.setdefault(key, len(known)) for key in keys], keys))
    return Picture(
        name=name,
        num_nodes=sum(len(numbers) for _, numbers, _ in groups),
        is_split=is_split,
        groups=list(_collapsed(groups)),
    )


def _by_piece(records: Sequence[GraphRecord]) -> Iterator[tuple[str, list[NodeRecord]]]:
    number = 0
    for record in records:
        for _, nodes in groupby(record.nodes, key=lambda node: node.piece):
            yield f"piece {number}", list(nodes)
            number += 1


def _by_layer(nodes: Iterable[NodeRecord]) -> Iterator[tuple[str, list[NodeRecord]]]:
    title = _OUTSIDE

    def follow(node: NodeRecord) -> str:
        nonlocal title
        title = _title_of(node) or title
        return title

    for found, its_nodes in groupby(nodes, key=follow):
        yield found, list(its_nodes)


def _title_of(node: NodeRecord) -> str | None:
    """The group that a node's memory names; None if it could be in any."""
    of_layer = [_LAYER.search(each.name) for each in node.addresses]
    for found in of_layer:
        if found is not None:
            return f"layer {found[1]}"
    kinds = {each.kind for each in node.addresses}
    return _OUTSIDE if kinds & {MemoryKind.PARAMETER, MemoryKind.OUTPUT} else None


def _collapsed(groups: list[tuple[str, list[int], list[NodeKey]]]) -> Iterator[PictureGroup]:
    """Groups in a row with the same kernels, as one."""
    for _, same in groupby(groups, key=lambda group: [key[:3] for key in group[2]]):
        first, *others = same
        title = first[0]
        if others:
            noun, start = title.rsplit(" ", 1)
            title = f"{noun}s {start}\N{EN DASH}{others[-1][0].rsplit(' ', 1)[-1]}"
        yield PictureGroup(title=title, repeat=1 + len(others), nodes=first[1])


def _key(node: NodeRecord) -> NodeKey:
    owners = dict.fromkeys(each.owner for each in node.addresses if each.name)
    return node.kind, node.name, node.operator, tuple(owners)


def _as_node(key: NodeKey) -> PictureNode:
    kind, name, operator, owners = key
    return PictureNode(
        kind=kind,
        name=name,
        label=label_of(name),
        operator=operator if operator != name else None,
        role=role_of(key),
        owners=list(owners),
    )


def role_of(key: NodeKey) -> str:
    """What a node does, by its names; if they do not say, by the memory that it holds."""
    kind, name, operator, owners = key
    text = f"{kind} {operator or ''} {name}".replace(".", " ")
    for role, pattern in _ROLES:
        if pattern.search(text):
            return role
    if any(owner.startswith(MemoryKind.KV_CACHE.value) for owner in owners):
        return "attention"
    is_weight = (owner.startswith(MemoryKind.PARAMETER.value) for owner in owners)
    return "gemm" if any(is_weight) else "other"


def label_of(name: str) -> str:
    """A short name: no namespaces, no template arguments, no overload."""
    short = re.sub(r"<.*", "", name.removeprefix("void ")).split("(")[0]
    short = short.rsplit("::", 1)[-1].strip()
    parts = short.split(".")
    return (parts[1] if len(parts) == 3 else short) or name
