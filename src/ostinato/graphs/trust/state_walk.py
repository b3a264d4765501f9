"""Finds the state that a callable refers to: names that lead to tensors, values and objects.

The walk starts at the callable and follows modules and their hooks, closures, globals, classes,
bound objects and containers. It does not enter library functions or large containers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ostinato.compat import forward_hooks
from ostinato.errors import CaptureError
from ostinato.graphs.capture.segments import is_eager_break
from ostinato.graphs.trust.state_views import CONTAINERS, Cell, Length, Raw, Read, SlotsOf

# Types that are compared by value.
SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# Attributes that nn.Module keeps about itself.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
# Packages whose objects are not entered. A logger's level, for one, affects nothing in a graph.
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "builtins", "logging", "ostinato"})
_LIBRARIES_OF_FUNCTIONS = _LIBRARIES | sys.stdlib_module_names | {"transformers"}
_MODULE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DEEPEST = 6
_MOST_ITEMS = 1000  # larger containers are not entered


class Slot(NamedTuple):
    """One name that refers to something. ``often``: check it on every call."""

    name: str
    container: Any
    key: Any
    often: bool = True

    def read(self) -> Any:
        return self.container[self.key]

    def write(self, value: Any) -> None:
        if not isinstance(self.container, (tuple, types.MappingProxyType)):
            self.container[self.key] = value


def is_tensor(value: Any) -> bool:
    """Whether the value is a tensor that has an address."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type != "meta"
    )


class StateWalk:
    """Collects a callable's slots, its modules and their tables, each once."""

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], *, in_breaks: bool
    ) -> None:
        """``arguments``: arguments that refer to further state, by name."""
        self._in_breaks = in_breaks
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self.modules: list[tuple[str, nn.Module]] = []  # with the prefix of their members' names
        self.tables: list[dict[str, Any]] = []  # compared as wholes
        self.slots = list(self._enter(function, "", 0))
        for name, argument in arguments.items():
            self.slots += self._enter(argument, name, 0)
        if self.modules:
            for hooks in forward_hooks:
                self.slots += self._hooks("all modules", hooks, 0)

    def _slot(self, name: str, container: Any, key: Any, path: str, depth: int) -> Iterator[Slot]:
        """A slot, and what its value refers to. ``path``: the value's name in code."""
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
        elif isinstance(value, CONTAINERS) and not isinstance(value, torch.Size):
            yield from self._items(value, path, depth)
        elif _is_bound_method(value):
            yield from self._enter(value.__self__, path or "self", depth)
            yield from self._enter(value.__func__, path, depth)
        elif isinstance(value, functools.partial):
            yield from self._enter(value.func, path, depth)
            yield from self._items(value.args, f"{path or 'partial'}.args", depth)
            yield from self._items(value.keywords, f"{path or 'partial'}.keywords", depth)
        elif isinstance(value, (set, frozenset)):
            yield from self._items_of_set(value, path, depth)
        elif isinstance(value, weakref.ref):
            yield from self._slot(f"what {path} refers to", Read(value), "value", path, depth)
        elif isinstance(value, contextvars.ContextVar):
            read = functools.partial(value.get, None)
            name = f"context variable {value.name!r}"
            yield from self._slot(name, Read(read), "value", value.name, depth)
        elif (contents := _bytes_of(value)) is not None:
            yield Slot(f"contents of {path}", Read(contents), "value")
        elif isinstance(value, type):
            yield from self._class(value, depth)
        elif _is_object(value):
            prefix = f"{path}." if path else ""
            if hasattr(value, "__dict__"):
                yield from self._attributes(value.__dict__, prefix, depth)
            # Slots of standard library objects, such as Path, hold caches.
            if _package(type(value)) not in sys.stdlib_module_names and (slots := SlotsOf(value)):
                yield from self._attributes(slots, prefix, depth)
            yield from self._class(type(value), depth)

    def _module(self, module: nn.Module, prefix: str, depth: int) -> Iterator[Slot]:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{f'module {prefix[:-1]!r}' if prefix else 'the callable'} is a TorchScript "
                "module, whose attributes cannot be watched for changes; graph the module that it "
                "was made from, or pass check_state_every=0"
            )
        stock = type(module).__module__.startswith("torch.nn")
        self.modules.append((prefix, module))
        where = f"'{prefix[:-1]}'" if prefix else "the module"
        for kind, entries in (
            ("parameter", module._parameters),
            ("buffer", module._buffers),
            ("module", module._modules),
        ):
            yield from (Slot(f"{kind} '{prefix}{key}'", entries, key) for key in entries)
            # An empty container runs its first module; another module of torch's does not.
            is_container = kind == "module" and isinstance(module, _MODULE_CONTAINERS)
            if entries or is_container:
                self.tables.append(entries)
            if entries or is_container or not stock:
                yield Slot(f"the number of {kind}s of {where}", Length(entries), "length", False)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            yield from self._hooks(where, hooks, depth, often=bool(hooks) or not stock)
        own = [key for key in module.__dict__ if key not in _MODULE_INTERNALS]
        if stock:
            yield from (
                Slot(f"attribute '{prefix}{key}'", module.__dict__, key, False) for key in own
            )
            attributes = Length(module.__dict__)
            yield Slot(f"the number of attributes of {where}", attributes, "length", False)
            yield from self._enter(module.__dict__.get("forward"), f"{prefix}forward", depth + 1)
        else:
            yield from self._attributes(module.__dict__, prefix, depth, own)
            yield from self._class(type(module), depth)
        for key, child in module._modules.items():
            if child is not None and id(child) not in self._seen:
                self._seen.add(id(child))
                yield from self._module(child, f"{prefix}{key}.", depth)

    def _hooks(
        self, where: str, hooks: dict[int, Any], depth: int, *, often: bool = True
    ) -> Iterator[Slot]:
        yield Slot(f"the number of forward hooks of {where}", Length(hooks), "length", often)
        for key, hook in hooks.items():
            yield Slot(f"a forward hook of {where}", hooks, key)
            yield from self._enter(hook, "hook", depth + 1)

    def _class(self, cls: type, depth: int) -> Iterator[Slot]:
        """Methods and attributes of a class and its base classes."""
        for base in cls.__mro__:
            if base in self._classes or _package(base) in _LIBRARIES_OF_FUNCTIONS:
                continue
            self._classes.add(base)
            for key, value in vars(base).items():
                name = f"{base.__name__}.{key}"
                if isinstance(value, types.FunctionType):
                    yield Slot(f"method '{name}'", vars(base), key)
                    yield from self._enter(value, "", depth + 1)
                elif isinstance(value, (staticmethod, classmethod)):
                    yield Slot(f"method '{name}'", vars(base), key)
                    yield from self._enter(value.__func__, "", depth + 1)
                elif isinstance(value, property):
                    yield from self._enter(value.fget, "", depth + 1)
                elif not key.startswith("__") and not isinstance(value, type):
                    yield from self._slot(f"attribute '{name}'", vars(base), key, name, depth)

    def _attributes(
        self,
        values: MutableMapping[str, Any],
        prefix: str,
        depth: int,
        keys: Sequence[str] | None = None,
    ) -> Iterator[Slot]:
        for key in list(values) if keys is None else keys:
            path = f"{prefix}{key}"
            yield from self._slot(f"attribute {path!r}", values, key, path, depth)
        where = f" of '{prefix[:-1]}'" if prefix else ""
        yield Slot(f"the number of attributes{where}", Length(values), "length")

    def _items(self, container: Any, path: str, depth: int) -> Iterator[Slot]:
        fixed = isinstance(container, tuple)
        container = Raw.of(container)
        keyed = isinstance(container, (Mapping, types.MappingProxyType))
        keys = list(container) if keyed else range(len(container))
        if len(keys) <= _MOST_ITEMS:
            for key in keys:
                name = f"{path}[{key!r}]"
                yield from self._slot(name, container, key, name, depth)
        if not fixed:
            yield Slot(f"the number of items in {path}", Length(container), "length")

    def _items_of_set(self, items: Any, path: str, depth: int) -> Iterator[Slot]:
        if len(items) > _MOST_ITEMS:
            yield Slot(f"the number of items in {path}", Length(items), "length")
            return
        if not isinstance(items, frozenset):
            yield Slot(f"the set of items in {path}", Read(lambda: frozenset(items)), "value")
        for item in items:
            if not isinstance(item, SCALARS):
                yield from self._enter(item, f"an item of {path}", depth + 1)

    def _code(self, function: types.FunctionType, depth: int) -> Iterator[Slot]:
        """A function's closure, defaults, attributes, and the globals that its code names."""
        if _package(function) in _LIBRARIES_OF_FUNCTIONS:
            return
        code, qualname = function.__code__, function.__qualname__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variable = f"variable {name!r} of {qualname}"
            with contextlib.suppress(ValueError):  # not set yet
                yield from self._slot(variable, Cell(cell), "contents", name, depth)
        yield from self._globals(function.__globals__, "", _global_names(code), depth)
        yield from self._items(function.__defaults__ or (), f"defaults of {qualname}", depth)
        if function.__kwdefaults__:
            yield from self._items(function.__kwdefaults__, f"defaults of {qualname}", depth)
        if function.__dict__:
            yield from self._attributes(function.__dict__, f"{qualname}.", depth)

    def _globals(
        self, values: dict[str, Any], prefix: str, names: Sequence[str], depth: int
    ) -> Iterator[Slot]:
        """The globals with these names, following attribute access on Python modules."""
        for name in names:
            if name in values:
                path, value = f"{prefix}{name}", values[name]
                yield from self._slot(f"global {path!r}", values, name, path, depth)
                if _is_own_python_module(value) and depth < _DEEPEST:
                    yield from self._globals(vars(value), f"{path}.", names, depth + 1)


def _bytes_of(value: Any) -> Callable[[], bytes] | None:
    """Reads the bytes of a small array: NumPy's, ``array.array``, ``bytearray``."""
    if isinstance(value, (bytes, torch.Tensor)):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return (lambda: memoryview(value).tobytes()) if view.nbytes <= 8 * _MOST_ITEMS else None


def _is_bound_method(value: Any) -> bool:
    try:
        return hasattr(value, "__self__") and hasattr(value, "__func__")
    except Exception:  # from a custom __getattr__
        return False


def _is_object(value: Any) -> bool:
    if isinstance(value, (types.ModuleType, torch.Tensor)):
        return False
    if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        return False
    return _package(type(value)) not in _LIBRARIES


def _is_own_python_module(value: Any) -> bool:
    if not isinstance(value, types.ModuleType):
        return False
    return value.__name__.partition(".")[0] not in _LIBRARIES_OF_FUNCTIONS


def _package(thing: Any) -> str:
    """The top-level package that defines a class or function."""
    return (thing.__module__ or "").partition(".")[0]


def _global_names(code: types.CodeType) -> list[str]:
    """Names that a function's code, including nested functions, may look up globally."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)
