"""``AdapterSlots``: which adapter is in which slot, by name. Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ostinato.errors import ConfigError, RequestError
from ostinato.quoting import listed, shown


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter in a slot. ``number`` counts the loads of an engine.

    ``cache_salt`` keeps its blocks of the KV cache apart from those of all others, including an
    earlier adapter of the same name.
    """

    name: str
    slot: int
    number: int

    @property
    def cache_salt(self) -> bytes:
        return b"adapter %d" % self.number


class AdapterSlots:
    """The names of loaded adapters. A slot is free if it has no name and no request uses it."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._loaded: dict[str, LoadedAdapter] = {}
        self._num_loads = 0

    @property
    def names(self) -> list[str]:
        """In the order of loading."""
        return list(self._loaded)

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of this name; raises ``RequestError`` if there is none."""
        if name not in self._loaded:
            loaded = f"loaded are {listed(self.names)}" if self._loaded else "none is loaded"
            raise RequestError(
                f"there is no adapter {shown(name)} ({loaded}); load it with load_adapter(name, "
                "path)"
            )
        return self._loaded[name]

    def choose(self, name: str, in_use: Collection[int]) -> int:
        """A slot for a new adapter ``name``; changes nothing.

        ``in_use``: the slots of unfinished requests. An adapter of the same name is replaced in its
        own slot, unless a request still uses it.
        """
        previous = self._loaded.get(name)
        if previous is not None and previous.slot not in in_use:
            return previous.slot
        named = {adapter.slot for adapter in self._loaded.values()}
        for slot in range(self._max_loras):
            if slot not in named and slot not in in_use:
                return slot
        leaving = len(set(in_use) - named)
        raise ConfigError(
            f"adapter {shown(name)} cannot be loaded: all {self._max_loras} slots are taken, by "
            f"{listed(self.names) if self._loaded else 'none'}"
            + (f" and by {leaving} unloaded ones that requests still use" if leaving else "")
            + (f"; requests still use the {shown(name)} to be replaced" if previous else "")
            + "; unload one (unload_adapter), or build the LLM with a larger max_loras"
        )

    def vacate(self, slot: int) -> None:
        """Take the name of the adapter in ``slot`` away, if it has one."""
        for name, adapter in list(self._loaded.items()):
            if adapter.slot == slot:
                del self._loaded[name]

    def add(self, name: str, slot: int) -> LoadedAdapter:
        """Give ``slot`` the name, which any earlier adapter of that name loses."""
        self._num_loads += 1
        self._loaded.pop(name, None)
        adapter = self._loaded[name] = LoadedAdapter(name=name, slot=slot, number=self._num_loads)
        return adapter

    def remove(self, name: str) -> None:
        """Take the name away; requests that use the adapter keep its slot until they end."""
        self.find(name)
        del self._loaded[name]
