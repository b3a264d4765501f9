"""Walks nested arguments and outputs: dicts, lists, tuples, named tuples and dataclasses.

torch's pytree does not enter dataclasses unless each is registered, and its names of leaves read
badly in error messages.

Attributes of a container, such as those that ``__post_init__`` sets, are part of it, after its
fields or items. What a ``cached_property`` keeps is not: it is computed from the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch

from ostinato.errors import BatchError
from ostinato.quoting import said

T = TypeVar("T")

# Types that are leaves without further checks.
_SCALARS: frozenset[type] = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device}
)
_PLAIN: set[type] = {*_SCALARS}

_SEQUENCES = (list, tuple)


def holds_no_tensors(plain: type[T]) -> type[T]:
    """A decorator for a class whose objects are leaves, though they look like containers.

    Captures walk the arguments of every eager break, and skip the contents of these objects.
    """
    _PLAIN.add(plain)
    return plain


def leaves_with_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of ``value`` with the expression that reaches it, like ``batch['ids'][0]``."""
    paths: list[str] = []
    leaves: list[Any] = []
    flatten(value, path, paths, leaves, [])
    return zip(paths, leaves, strict=True)


def flatten(
    value: Any, path: str, paths: list[str], leaves: list[Any], containers: list[type]
) -> None:
    """Append every leaf of ``value`` and its path, and the type of every container.

    What a container does may depend on its type.
    """
    # Not a generator, and the common types first: every call of a graphed callable comes here.
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _SCALARS:
        paths.append(path)
        leaves.append(value)
        return
    containers.append(kind)
    if kind in _SEQUENCES:
        for index, item in enumerate(value):
            flatten(item, f"{path}[{index}]", paths, leaves, containers)
    elif kind is dict:
        for key, item in value.items():
            flatten(item, f"{path}[{key!r}]", paths, leaves, containers)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = _stored(value, field.name)
            flatten(item, f"{path}.{field.name}", paths, leaves, containers)
        _flatten_attributes(value, path, paths, leaves, containers)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            flatten(item, f"{path}[{key!r}]", paths, leaves, containers)
        _flatten_attributes(value, path, paths, leaves, containers)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            flatten(item, f"{path}[{index}]", paths, leaves, containers)
        _flatten_attributes(value, path, paths, leaves, containers)
    else:
        containers.pop()
        paths.append(path)
        leaves.append(value)


def _flatten_attributes(
    value: Any, path: str, paths: list[str], leaves: list[Any], containers: list[type]
) -> None:
    for name, item in _attributes(value):
        flatten(item, f"{path}.{name}", paths, leaves, containers)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in order."""
    # Not built on leaves_with_path: a capture calls this for every operator, and paths are slow.
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in _SEQUENCES:  # the most common case, and slow to detect below
        for item in value:
            yield from tensors_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from tensors_in(item)
    elif type(value) in _PLAIN:
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(_stored(value, field.name))
        yield from _tensors_in_attributes(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
        yield from _tensors_in_attributes(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
        yield from _tensors_in_attributes(value)


def _stored(value: Any, field: str) -> Any:
    """A dataclass's field, even if asking for it raises: configs of transformers refuse some."""
    try:
        return object.__getattribute__(value, field)
    except AttributeError:
        return getattr(value, field)


def _tensors_in_attributes(value: Any) -> Iterator[torch.Tensor]:
    for _, item in _attributes(value):
        yield from tensors_in(item)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes of a dataclass beside its fields, or of a subclass of dict, list or tuple."""
    found = _attributes_beside_fields(value)
    if not found:
        return []
    if isinstance(value, Mapping) and (
        dataclasses.is_dataclass(value) or not isinstance(value, dict)
    ):
        return []  # transformers' outputs have their items as attributes
    return [(name, item) for name, item in found if not _is_cached_property(value, name)]


def _attributes_beside_fields(value: Any) -> list[tuple[str, Any]]:
    own = getattr(value, "__dict__", None)
    if not own or own is value:
        return []
    kind: Any = type(value)
    fields = _field_names(kind)
    if own.keys() <= fields:  # most dataclasses
        return []
    return [(name, item) for name, item in own.items() if name not in fields]


@functools.lru_cache(maxsize=256)
def _field_names(kind: type) -> frozenset[str]:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return frozenset(field.name for field in fields)


def _is_cached_property(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


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
            field.name: _map(function, _stored(value, field.name))
            for field in dataclasses.fields(value)
        }
        if isinstance(value, Mapping):  # transformers' outputs: their items must match the fields
            return dataclasses.replace(value, **fields)
        rebuilt = copy.copy(value)
        for name, mapped in fields.items():
            object.__setattr__(rebuilt, name, mapped)  # frozen ones too
        return _with_attributes(function, value, rebuilt)
    if isinstance(value, Mapping):
        items = {key: _map(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        if isinstance(value, MutableMapping):
            copied = copy.copy(value)
            copied.update(items)
            return _with_attributes(function, value, copied)
        return _made_of(items, type(value))
    if isinstance(value, (list, tuple)):
        parts = [_map(function, item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return _with_attributes(function, value, _made_of(parts, type(value)))
    return value


def _made_of(contents: Any, kind: type) -> Any:
    try:
        return kind(contents)
    except TypeError as error:
        raise BatchError(
            f"a {kind.__name__} cannot be rebuilt from its items ({said(error)}); use a plain "
            "dict, list or tuple, a named tuple, or a dataclass"
        ) from error


def check_distinct(paths: Iterable[str]) -> None:
    """Raise if two leaves have one path: it could not tell which is which in another call."""
    for path, count in Counter(paths).items():
        if count > 1:
            raise BatchError(
                f"there are {count} arguments {path!r}: keys of a dict look alike; use keys whose "
                "repr() differs"
            )


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor among the arguments of a call."""
    try:
        return list(tensors_in((args, kwargs)))
    except RecursionError:
        raise nested_too_deeply("an argument") from None


def nested_too_deeply(argument: str) -> BatchError:
    """The error for an argument that no walk gets to the end of."""
    return BatchError(
        f"{argument} contains itself, or is nested too deeply; pass its tensors in plain dicts, "
        "lists, tuples or dataclasses"
    )


def _with_attributes(function: Callable[[torch.Tensor], Any], value: Any, rebuilt: Any) -> Any:
    """``rebuilt``, a copy of ``value``, with its attributes mapped too, and its caches dropped."""
    for name, item in _attributes(value):
        object.__setattr__(rebuilt, name, _map(function, item))
    for name, _ in _attributes_beside_fields(value):
        if _is_cached_property(value, name):
            rebuilt.__dict__.pop(name, None)
    return rebuilt


def without_padding(output: Any, size: int, num_tokens: int) -> Any:
    """``output`` with the first ``num_tokens`` rows of each tensor that has ``size`` rows."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:num_tokens] if tensor.dim() and tensor.shape[0] == size else tensor

    return map_tensors(cut, output)
