"""Names the memory at an address, for reports."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.graphs.capture.buffers import spanned_bytes
from ostinato.graphs.trust.ledger.owners import NamedMemory, owner_label


def name_among(named: Iterable[NamedMemory], address: int) -> str | None:
    """The owner of the tensor that contains ``address``; None if it has none."""
    for kind, name, tensor in named:
        start = tensor.data_ptr()
        if start <= address < start + spanned_bytes(tensor):
            return owner_label(kind.value, name)
    return None
