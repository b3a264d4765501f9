"""Names for memory: parameters, buffers, a KV cache, input buffers.

Whatever has memory that graphs refer to names it in one place, as an object with
``named_memory()``. Modules, tensors and containers of tensors name themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from ostinato.errors import ConfigError
from ostinato.graphs.capture.buffers import spanned_bytes
from ostinato.graphs.tree import leaves_with_path
from ostinato.graphs.trust.ledger.regions import Region
from ostinato.graphs.trust.state_walk import is_tensor


class MemoryKind(Enum):
    """What the memory that a graph holds is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    KV_CACHE = "KV cache"
    INPUT = "input buffer"
    OUTPUT = "output buffer"
    STATE = "state"  # whatever else a callable or a runner refers to; its name says what it is
    POOL = "pool"
    WORKSPACE = "workspace"
    UNKNOWN = "unknown"


class NamedMemory(NamedTuple):
    """A tensor with a fixed address, what it is for, and the name to show for it.

    ``kind``, ``name``, ``tensor``. Names are unique within a kind.
    """

    kind: MemoryKind
    name: str
    tensor: torch.Tensor


@runtime_checkable
class NamesMemory(Protocol):
    """An object that names its memory. Called again whenever a ledger is checked."""

    def named_memory(self) -> Iterable[NamedMemory]:
        """Every tensor that graphs may refer to, as it is now."""


Resolve = Callable[[], Iterable[NamedMemory]]


def by_name(owners: Mapping[str, Any] | NamesMemory) -> dict[str, Any]:
    """The owners that a user gave, each under its name; one that names its memory under ``""``."""
    if isinstance(owners, NamesMemory):
        return {"": owners}
    if not isinstance(owners, Mapping):
        raise ConfigError(
            f"owners is a {type(owners).__name__}; pass a dict that names modules, tensors or "
            "containers of tensors, such as {'model': model}, or an object with named_memory()"
        )
    return dict(owners)


def memory_of(owners: Mapping[str, Any]) -> Iterator[NamedMemory]:
    """The memory of ``owners``: modules, tensors, containers of tensors, ``NamesMemory``."""
    for key, owner in owners.items():
        if isinstance(owner, NamesMemory):
            yield from owner.named_memory()
        elif isinstance(owner, nn.Module):
            yield from module_memory(owner, f"{key}.")
        else:
            leaves = [*leaves_with_path(owner, key)]
            if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
                raise ConfigError(
                    f"owners[{key!r}] is a {type(owner).__name__} without tensors; pass a module, "
                    "a tensor, a list or dict of tensors, or an object with named_memory()"
                )
            for path, leaf in leaves:
                if isinstance(leaf, nn.Parameter):
                    yield NamedMemory(MemoryKind.PARAMETER, path, leaf)
                elif isinstance(leaf, torch.Tensor):
                    yield NamedMemory(MemoryKind.STATE, f"tensor {path!r}", leaf)


def module_memory(module: nn.Module, prefix: str = "") -> Iterator[NamedMemory]:
    """The parameters and buffers of a module, by qualified name."""
    for name, parameter in module.named_parameters():
        yield NamedMemory(MemoryKind.PARAMETER, f"{prefix}{name}", parameter)
    for name, buffer in module.named_buffers():
        yield NamedMemory(MemoryKind.BUFFER, f"{prefix}{name}", buffer)


def state_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[NamedMemory]:
    """What a walk over a callable's state found: "parameter 'weight'", "global 'table'", ..."""
    for name, tensor in tensors:
        kind, _, quoted = name.partition(" ")
        if kind in ("parameter", "buffer"):
            yield NamedMemory(MemoryKind(kind), quoted[1:-1], tensor)
        else:
            yield NamedMemory(MemoryKind.STATE, name, tensor)


def owner_label(kind: str, name: str) -> str:
    """An owner as messages show it."""
    if kind == MemoryKind.STATE.value:
        return name
    return f"{kind} {name!r}" if name else f"{kind} memory"


class OwnedMemory:
    """Where named memory was when graphs were captured, and where it is now.

    ``resolve`` names the memory as it is at the moment; ``then``, if given, as it was at capture.
    Keeps no memory alive.
    """

    def __init__(self, resolve: Resolve, then: Iterable[NamedMemory] | None = None) -> None:
        self._resolve = resolve
        self.regions = tuple(_regions(resolve() if then is None else then))

    def moved(self) -> dict[Region, str]:
        """The regions whose owners are no longer there, and where these are instead."""
        now: dict[object, list[Region]] = {}
        for region in _regions(self._resolve()):
            now.setdefault(region.owner, []).append(region)
        found = {}
        for region in self.regions:
            # Two managers in a pool have buffers of the same names.
            places = now.get(region.owner, [])
            place = next((each for each in places if each.start == region.start), None)
            place = place or next(iter(places), None)
            if place is None:
                found[region] = "gone"
            elif place.start != region.start:
                found[region] = f"now at {place.start:#x}"
            elif place.end < region.end:
                found[region] = f"now smaller ({place.end - place.start:,} bytes)"
        return found

    def same_as(self, other: OwnedMemory) -> bool:
        """Whether both found the same memory, and ask the same owners."""
        return self._resolve is other._resolve and self.regions == other.regions


def _regions(named: Iterable[NamedMemory]) -> Iterator[Region]:
    for kind, name, tensor in named:
        if is_tensor(tensor) and tensor.numel():
            start = tensor.data_ptr()
            yield Region(start, start + spanned_bytes(tensor), kind.value, name)
