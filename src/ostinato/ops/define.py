"""How an operator of ours is made known to torch.

Each takes the tensors it writes into and returns nothing, and reads its integers when it runs, so a
graph replays it with new contents. ``Library`` costs a few microseconds a call less than
``torch.library.custom_op``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake

from ostinato.compat import OpOverload
from ostinato.graphs.backends.python_kernels import replay_by_calling, replay_by_preparing

# An operator is there for as long as the library object is.
_LIBRARY = Library("ostinato", "FRAGMENT")


def define(schema: str, *, cpu: Callable[..., None], cuda: Callable[..., None]) -> OpOverload:
    """The operator ``ostinato::name`` of ``schema`` (``name(Tensor a, Tensor(x!) out) -> ()``)."""
    operator = _define(schema, CPU=cpu, CUDA=cuda)
    replay_by_calling(operator, cpu)
    return operator


def define_for_cpu(schema: str, *, prepare: Callable[..., Callable[[], object]]) -> OpOverload:
    """The same for an operator that runs on the CPU alone, by what ``prepare`` makes of its
    arguments: a call that reads and writes them, which replays repeat."""

    def run(*args: Any) -> None:
        prepare(*args)()

    operator = _define(schema, CPU=run)
    replay_by_preparing(operator, prepare)
    return operator


def _define(schema: str, **kernels: Callable[..., None]) -> OpOverload:
    name = schema[: schema.index("(")].strip()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, device)
    register_fake(f"ostinato::{name}", _nothing_to_infer, lib=_LIBRARY)
    operator: OpOverload = getattr(torch.ops.ostinato, name).default
    return operator


def _nothing_to_infer(*_: object) -> None:
    """The operator under torch.compile: it makes no tensors, it writes into those it is given."""
