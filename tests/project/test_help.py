"""``help()`` of public classes: every method is described, and its parameters are named."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

import ostinato


def public_classes() -> Iterator[str]:
    for name in ostinato.__all__:
        thing = getattr(ostinato, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            yield name


def members(owner: type) -> dict[str, Any]:
    """Its own, and those of its bases here."""
    bases = [each for each in owner.__mro__[1:] if each.__module__.startswith("ostinato.")]
    return {name: each for base in (*reversed(bases), owner) for name, each in vars(base).items()}


def problems(owner: type) -> list[str]:
    """What ``help(owner)`` leaves unsaid; a class may explain parameters for all its methods."""
    found = []
    for name, member in members(owner).items():
        is_property = isinstance(member, (property, cached_property))
        if name.startswith("_") or not (is_property or inspect.isroutine(member)):
            continue
        text = inspect.getdoc(getattr(owner, name)) or ""
        if not text:
            found.append(f"{name} has no docstring")
        elif not is_property:
            known = f"{text} {owner.__doc__}"
            given: Any = inspect.signature(getattr(owner, name)).parameters
            names = [each for each in given if each not in ("self", "args", "kwargs")]
            found += [
                f"{name} does not explain {each}"
                for each in names
                if not re.search(rf"\b{each}\b", known)
            ]
    return found


@pytest.mark.parametrize("name", list(public_classes()))
def test_methods_are_described(name: str) -> None:
    assert not problems(getattr(ostinato, name))


def test_what_is_not_described_is_found() -> None:
    class Owner:
        """An example."""

        def silent(self) -> None:
            pass

        def vague(self, rows: int) -> None:
            """Does something."""

        @property
        def size(self) -> int:
            return 0

    assert problems(Owner) == [
        "silent has no docstring",
        "vague does not explain rows",
        "size has no docstring",
    ]
