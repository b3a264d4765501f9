"""Operators that stay whole under torch.compile, so that a traced model can be split at them.

A function that reads the forward context, or launches what no graph can hold, cannot be traced. Its
operator can: the compiler sees a name and what it writes to. A split model calls the function
itself, not the operator, so that a recording sees what is inside.

Not for operators that make tensors: a splitting operator writes into tensors it is given, which the
piece before allocates and the piece after reads, at one address, with no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake

_NAMESPACE = "ostinato"
# The operators are there for as long as this object is.
_LIBRARY = Library(_NAMESPACE, "FRAGMENT")
_functions: dict[Any, Callable[..., None]] = {}


def splitting_operator(schema: str, function: Callable[..., None]) -> Any:
    """Define ``ostinato::<name>`` by its schema; a call of it runs ``function``.

    The schema returns nothing: ``name(Tensor x, Tensor(a!) out, int layer) -> ()``.
    """
    name = schema.split("(", 1)[0].strip()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    register_fake(f"{_NAMESPACE}::{name}", _nothing_to_infer, lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _functions[operator] = function
    return operator


def function_of(target: Any) -> Any:
    """What a split model calls in place of ``target``: the operator's function, if it has one."""
    return _functions.get(target, target)


def _nothing_to_infer(*_: object) -> None:
    """The operator under torch.compile: it makes no tensors, it writes into those it is given."""
