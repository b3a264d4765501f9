"""Defines operators with a kernel for each device, and how CPU replays run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ostinato.compat import OpOverload
from ostinato.compile.operators import define_operator
from ostinato.graphs.backends.python_kernels import replay_by_calling, replay_by_preparing


def define(
    schema: str,
    *,
    cpu: Callable[..., None],
    cuda: Callable[..., None],
    pack: Callable[..., tuple[Any, ...]] | None = None,
) -> OpOverload:
    """Define the operator ``ostinato::name`` from ``schema`` (``name(Tensor a, ...) -> ()``).

    A schema has plain values only. ``pack`` turns them into the arguments of the kernels, such as
    structs; CPU replays do so once.
    """
    if pack is None:
        operator = define_operator(schema, CPU=cpu, CUDA=cuda)
        replay_by_calling(operator, cpu)
        return operator

    def over(kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: kernel(*pack(*args))

    operator = define_operator(schema, CPU=over(cpu), CUDA=over(cuda))
    replay_by_preparing(operator, lambda *args: partial(cpu, *pack(*args)))
    return operator


def define_for_cpu(schema: str, *, prepare: Callable[..., Callable[[], object]]) -> OpOverload:
    """Define an operator that runs on the CPU alone.

    ``prepare`` turns its arguments into a call that reads and writes them; replays repeat the call.
    """

    def run(*args: Any) -> None:
        prepare(*args)()

    operator = define_operator(schema, CPU=run)
    replay_by_preparing(operator, prepare)
    return operator
