"""Finding what a callable refers to: names that lead to tensors, values and objects.

The walk begins at the callable and goes through modules, closures, globals, bound objects and
containers. Libraries' own functions are not looked into, nor are containers of many items.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ostinato.graphs.segments import is_eager_break

# Compared by value.
SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# What nn.Module keeps about itself.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_LIBRARIES = ("torch", "numpy", "builtins", "ostinato.")
_LIBRARIES_OF_FUNCTIONS = (*_LIBRARIES, "transformers")
_DEEPEST = 6
_MOST_ITEMS = 1000  # of a container that is looked into


class Slot(NamedTuple):
    """One name that refers to something. ``often``: it is to be looked at on every call."""

    name: str
    container: Any
    key: Any
    often: bool = True

    def read(self) -> Any:
        return self.container[self.key]

    def write(self, value: Any) -> None:
        if not isinstance(self.container, (tuple, types.MappingProxyType)):
            self.container[self.key] = value


class _Cell(MutableMapping[str, Any]):
    """A closure's variable, in the form of a container."""

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


class Length(Mapping[str, int]):
    """How many items a container has, in the form of a container."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __getitem__(self, key: str) -> int:
        return len(self.container)

    def __setitem__(self, key: str, length: int) -> None:
        """What a run put in stays: it cannot be told from what was there."""

    def __iter__(self) -> Iterator[str]:
        return iter(("length",))

    def __len__(self) -> int:
        return 1


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor at an address."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type != "meta"
    )


class StateWalk:
    """Finds the slots of a callable, its modules and their tables, each once."""

    def __init__(self, function: Callable[..., Any], *, in_breaks: bool) -> None:
        self._in_breaks = in_breaks
        self._seen: set[int] = set()
        self.modules: list[tuple[str, nn.Module]] = []  # with the prefix of what they hold
        self.tables: list[dict[str, Any]] = []
        self.slots = list(self._enter(function, "", 0))

    def _slot(self, name: str, container: Any, key: Any, path: str, depth: int) -> Iterator[Slot]:
        """A slot, and what the value in it refers to. ``path``: how that is called, in code."""
        value = container[key]
        yield Slot(name, container, key)
        if not isinstance(value, SCALARS) and not is_tensor(value):
            yield from self._enter(value, path, depth + 1)

    def _enter(self, value: Any, path: str, depth: int) -> Iterator[Slot]:
        if depth > _DEEPEST or id(value) in self._seen:
            return
        if not self._in_breaks and is_eager_break(value):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from self._module(value, f"{path}." if path else "", depth)
        elif isinstance(value, types.FunctionType):
            yield from self._code(value, depth)
        elif hasattr(value, "__self__") and hasattr(value, "__func__"):  # a bound method
            yield from self._enter(value.__self__, path or "self", depth)
            yield from self._enter(value.__func__, path, depth)
        elif isinstance(value, functools.partial):
            yield from self._enter(value.func, path, depth)
            yield from self._items(value.args, f"{path or 'partial'}.args", depth)
            yield from self._items(value.keywords, f"{path or 'partial'}.keywords", depth)
        elif isinstance(value, (dict, list)) or type(value) is tuple:
            yield from self._items(value, path, depth)
        elif _is_object(value):
            yield from self._attributes(value.__dict__, f"{path}." if path else "", depth)
            yield from self._class(type(value), depth)

    def _module(self, module: nn.Module, prefix: str, depth: int) -> Iterator[Slot]:
        stock = type(module).__module__.startswith("torch.nn")
        self.modules.append((prefix, module))
        self.tables += [module._parameters, module._buffers, module._modules]
        for kind, entries in (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
            ("module", module._modules),
        ):
            yield from (Slot(f"{kind} '{prefix}{key}'", entries, key) for key in entries)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            where = f" of '{prefix[:-1]}'" if prefix else ""
            yield Slot(f"the number of forward hooks{where}", Length(hooks), "length", not stock)
        own = [key for key in module.__dict__ if key not in _MODULE_INTERNALS]
        if stock:
            yield from (
                Slot(f"attribute '{prefix}{key}'", module.__dict__, key, False) for key in own
            )
        else:
            yield from self._attributes(module.__dict__, prefix, depth, own)
            yield from self._class(type(module), depth)
        for key, child in module._modules.items():
            if child is not None and id(child) not in self._seen:
                self._seen.add(id(child))
                yield from self._module(child, f"{prefix}{key}.", depth)

    def _class(self, cls: type, depth: int) -> Iterator[Slot]:
        """Methods and defaults of a class, and of those it is derived from."""
        for base in cls.__mro__:
            if id(base) in self._seen or base.__module__.startswith(_LIBRARIES_OF_FUNCTIONS):
                continue
            self._seen.add(id(base))
            for key, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    yield Slot(f"method '{base.__name__}.{key}'", vars(base), key)
                    yield from self._enter(value, "", depth + 1)
                elif not key.startswith("__") and (isinstance(value, SCALARS) or is_tensor(value)):
                    yield Slot(f"attribute '{base.__name__}.{key}'", vars(base), key)

    def _attributes(
        self, values: dict[str, Any], prefix: str, depth: int, keys: Sequence[str] | None = None
    ) -> Iterator[Slot]:
        for key in list(values) if keys is None else keys:
            path = f"{prefix}{key}"
            yield from self._slot(f"attribute {path!r}", values, key, path, depth)
        where = f" of '{prefix[:-1]}'" if prefix else ""
        yield Slot(f"the number of attributes{where}", Length(values), "length")

    def _items(self, container: Any, path: str, depth: int) -> Iterator[Slot]:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        if len(keys) <= _MOST_ITEMS:
            for key in keys:
                name = f"{path}[{key!r}]"
                yield from self._slot(name, container, key, name, depth)
        if not isinstance(container, tuple):
            yield Slot(f"the number of items in {path}", Length(container), "length")

    def _code(self, function: types.FunctionType, depth: int) -> Iterator[Slot]:
        """A function's closure, defaults and attributes, and the globals that its code names."""
        if (function.__module__ or "").startswith(_LIBRARIES_OF_FUNCTIONS):
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variable = f"variable {name!r} of {function.__qualname__}"
            with contextlib.suppress(ValueError):  # not set yet
                yield from self._slot(variable, _Cell(cell), "contents", name, depth)
        for name in _global_names(code):
            if name in function.__globals__:
                yield from self._slot(f"global {name!r}", function.__globals__, name, name, depth)
        defaults = function.__defaults__ or ()
        yield from self._items(defaults, f"defaults of {function.__qualname__}", depth)


def _is_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(_LIBRARIES)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that a function's code, and that of functions inside it, may look up globally."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)
