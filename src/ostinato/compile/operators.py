"""Registers Ostinato's operators with torch; splitting operators stay whole under torch.compile.

Each operator takes the tensors it writes to and returns nothing, and reads its integers when it
runs, so a graph replays it with new contents. ``Library`` costs a few microseconds less per call
than ``torch.library.custom_op``.

A function that reads the forward context, or launches what no graph can hold, cannot be traced. Its
splitting operator can: the compiler sees its name and what it writes. A model is split there, and
calls the function itself, not the operator, so that a recording sees the function's operators. The
piece before it allocates the outputs, and the piece after reads them at the same address, without a
copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake

from ostinato.compat import OpOverload

_NAMESPACE = "ostinato"
# The operators exist as long as this object does.
_LIBRARY = Library(_NAMESPACE, "FRAGMENT")
_functions: dict[Any, Callable[..., None]] = {}


def define_operator(schema: str, **kernels: Callable[..., None]) -> OpOverload:
    """Define the operator ``ostinato::name`` of ``schema``, with a kernel per dispatch key.

    The schema returns nothing: ``name(Tensor x, Tensor(a!) out, int layer) -> ()``.
    """
    name = schema.split("(", 1)[0].strip()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, key)
    register_fake(f"{_NAMESPACE}::{name}", _nothing_to_infer, lib=_LIBRARY)
    operator: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def splitting_operator(schema: str, function: Callable[..., None]) -> OpOverload:
    """Define an operator that runs ``function`` and at which a traced model is split."""
    operator = define_operator(schema, CompositeExplicitAutograd=function)
    _functions[operator] = function
    return operator


def function_of(target: Any) -> Any:
    """What a split model calls in place of ``target``: the operator's function, if it has one."""
    return _functions.get(target, target)


def _nothing_to_infer(*_: object) -> None:
    """The operator's fake kernel: it creates no tensors and only writes to its arguments."""
