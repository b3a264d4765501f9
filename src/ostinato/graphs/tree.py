"""Walks nested arguments and outputs: dicts, lists, tuples, named tuples and dataclasses.

torch's pytree does not enter dataclasses unless each is registered, and its names of leaves read
badly in error messages.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")

# Types that are leaves without further checks.
_PLAIN: set[type] = {int, float, bool, str, type(None), torch.dtype, torch.device}

_SEQUENCES = (list, tuple)


def holds_no_tensors(plain: type[T]) -> type[T]:
    """A decorator for a class whose objects are leaves, though they look like containers.

    Captures walk the arguments of every eager break, and skip the contents of these objects.
    """
    _PLAIN.add(plain)
    return plain


def leaves_with_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of ``value`` with the expression that reaches it, like ``batch['ids'][0]``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_with_path(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_with_path(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves_with_path(item, f"{path}[{index}]")
    else:
        yield path, value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in order."""
    # Not built on leaves_with_path: a capture calls this for every operator, and paths are slow.
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in _SEQUENCES:  # the most common case, and slow to detect below
        for item in value:
            yield from tensors_in(item)
    elif type(value) in _PLAIN:
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def map_tensors(function: Callable[[torch.Tensor], Any], value: T) -> T:
    """``value`` rebuilt with ``function`` applied to every tensor; other leaves stay as they are.

    Tensors are visited in the order of ``tensors_in``.
    """
    return cast(T, _map(function, value))


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in _PLAIN:
        return value
    if type(value) in _SEQUENCES:
        return type(value)([_map(function, item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _map(function, getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        if isinstance(value, Mapping):  # transformers' outputs: their items must match the fields
            return dataclasses.replace(value, **fields)
        rebuilt = copy.copy(value)
        for name, mapped in fields.items():
            object.__setattr__(rebuilt, name, mapped)  # frozen ones too
        return rebuilt
    if isinstance(value, Mapping):
        items = {key: _map(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        if isinstance(value, MutableMapping):
            copied = copy.copy(value)
            copied.update(items)
            return copied
        return type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        parts = [_map(function, item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return parts if type(value) is list else type(value)(parts)
    return value
