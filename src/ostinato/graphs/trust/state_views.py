"""Mappings that read and write one place where a callable keeps state: a closure variable, the
slots of an object, what a container holds, ...
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

CONTAINERS = (OrderedDict, dict, types.MappingProxyType, list, tuple, deque)


class Cell(MutableMapping[str, Any]):
    """A closure variable, as a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(("contents",))

    def __len__(self) -> int:
        return 1


class SlotsOf(MutableMapping[str, Any]):
    """The attributes of an object with ``__slots__``, as a mapping."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        declared = [vars(cls).get("__slots__", ()) for cls in type(thing).__mro__]
        names = [name for slots in declared for name in ([slots] if type(slots) is str else slots)]
        self._names = [name for name in names if name not in ("__dict__", "__weakref__")]

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self._thing, key)
        except AttributeError as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._thing, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self._thing, key)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._thing, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Raw(Mapping[Any, Any]):
    """What a container holds, if its class makes other things of that when they are read."""

    def __init__(self, kind: type, container: Any) -> None:
        self._kind: Any = kind
        self._container = container

    @classmethod
    def of(cls, container: Any) -> Any:
        """The container itself if it is read as a plain one."""
        kind: Any = next(base for base in type(container).__mro__ if base in CONTAINERS)
        plain = type(container).__getitem__ is kind.__getitem__
        return container if plain else cls(kind, container)

    def __getitem__(self, key: Any) -> Any:
        return self._kind.__getitem__(self._container, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._kind is not tuple:
            self._kind.__setitem__(self._container, key, value)

    def __iter__(self) -> Iterator[Any]:
        if issubclass(self._kind, dict):
            return iter(self._kind.__iter__(self._container))
        return iter(range(len(self)))

    def __len__(self) -> int:
        return int(self._kind.__len__(self._container))


class Read(Mapping[str, Any]):
    """What a call returns, as a mapping: what a weak reference refers to, a copy of a set, ..."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._last: Any = None

    def __getitem__(self, key: str) -> Any:
        value = self._read()
        # A copy of unchanged contents is the same object each time: values are compared by id.
        if type(value) not in (bytes, frozenset) or value != self._last:
            self._last = value
        return self._last

    def __setitem__(self, key: str, value: Any) -> None:
        """Does nothing: what a run put there cannot be taken back."""

    def __iter__(self) -> Iterator[str]:
        return iter(("value",))

    def __len__(self) -> int:
        return 1


class Length(Mapping[str, int]):
    """The length of a container, as a mapping."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __getitem__(self, key: str) -> int:
        return len(self.container)

    def __setitem__(self, key: str, length: int) -> None:
        """Does nothing: items that a run added cannot be told from earlier ones."""

    def __iter__(self) -> Iterator[str]:
        return iter(("length",))

    def __len__(self) -> int:
        return 1
