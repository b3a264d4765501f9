"""Operators whose kernel on the CPU is a Python function, and those functions.

A replay calls such a function itself. The way through the dispatcher and back into Python would
lead to the same place, some twenty microseconds later when a model's weights have just passed
through the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ostinato.compat import OpOverload, record_function

# Makes the call that repeats an operator with these arguments.
_Prepare = Callable[..., Callable[[], object]]

_PREPARED: dict[OpOverload, _Prepare] = {
    # Not a kernel, but the shortest way to one; norms make this call (see ``bindings``).
    torch.ops.aten.rsqrt_.default: partial(partial, torch.Tensor.rsqrt_),
}


def replay_by_calling(operator: OpOverload, kernel: Callable[..., object]) -> None:
    """Have replays on the CPU call ``kernel`` for ``operator``.

    ``kernel`` must be what the operator runs on the CPU and take its arguments by position. Its
    results go into tensors that it is given; what it returns is dropped.
    """
    _PREPARED[operator] = partial(partial, kernel)


def replay_by_preparing(operator: OpOverload, prepare: _Prepare) -> None:
    """The same for a kernel that wants to look at its arguments once, and not at every replay.

    ``prepare`` takes the operator's arguments and returns the call to repeat. The tensors stay
    where they are, as they are shaped; what is in them may only be read by the call.
    """
    _PREPARED[operator] = prepare


def replay_step(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], object]:
    """What a replay calls for ``operator``: its Python kernel, or the operator itself."""
    prepare = _PREPARED.get(operator)
    if prepare is None:
        return partial(operator, *args, **kwargs)
    call = prepare(*args, **kwargs)
    return call if operator.namespace == "aten" else _Named(operator.name(), call)


class _Named:
    """A call that profilers see, as they would see the operator."""

    __slots__ = ("_name", "call")

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self.call = call

    def __call__(self) -> None:
        # A third of a microsecond when nobody profiles; torch.profiler's own takes ten.
        with record_function(self._name):
            self.call()
