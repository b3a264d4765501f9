"""Operators with a kernel for each device, and how replays on the CPU run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.compat import OpOverload
from ostinato.compile.operators import define_operator
from ostinato.graphs.backends.python_kernels import replay_by_calling, replay_by_preparing


def define(schema: str, *, cpu: Callable[..., None], cuda: Callable[..., None]) -> OpOverload:
    """The operator ``ostinato::name`` of ``schema`` (``name(Tensor a, Tensor(x!) out) -> ()``)."""
    operator = define_operator(schema, CPU=cpu, CUDA=cuda)
    replay_by_calling(operator, cpu)
    return operator


def define_for_cpu(schema: str, *, prepare: Callable[..., Callable[[], object]]) -> OpOverload:
    """The same for an operator that runs on the CPU alone, by what ``prepare`` makes of its
    arguments: a call that reads and writes them, which replays repeat."""

    def run(*args: Any) -> None:
        prepare(*args)()

    operator = define_operator(schema, CPU=run)
    replay_by_preparing(operator, prepare)
    return operator
