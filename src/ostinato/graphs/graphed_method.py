"""Graphed methods: each object gets its own graphs, which live as long as the object."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ostinato.errors import ConfigError

T = TypeVar("T")


class BoundMethods(Generic[T]):
    """The graphed form of a decorated method for each object; dropped with its object."""

    def __init__(self) -> None:
        self._made: dict[int, T] = {}

    def of(self, instance: Any, make: Callable[[WeakMethod], T], function: Callable[..., Any]) -> T:
        """The graphed form of ``function`` for ``instance``, created on first use."""
        key = id(instance)  # not the object: equal objects differ
        if key not in self._made:
            try:
                weakref.finalize(instance, self._made.pop, key, None).atexit = False
            except TypeError as error:
                raise ConfigError(
                    f"a graphed method needs objects that support weak references, and "
                    f"{type(instance).__name__} does not; add '__weakref__' to its __slots__"
                ) from error
            self._made[key] = make(WeakMethod(function, instance))
        return self._made[key]


def callable_name(function: Callable[..., Any]) -> str:
    """Its name, or its type's."""
    try:
        return str(function.__name__)
    except Exception:  # it has none; a custom __getattr__ may raise anything
        return type(function).__name__


class WeakMethod:
    """A bound method that does not keep its object alive; the caller must."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self.__func__ = function
        self._instance = weakref.ref(instance)
        self.__name__ = callable_name(function)
        _, *others = inspect.signature(function).parameters.values()
        self.__signature__ = inspect.Signature(others)

    @property
    def __self__(self) -> Any:
        return self._instance()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._instance(), *args, **kwargs)
