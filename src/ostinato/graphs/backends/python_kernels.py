"""Python functions that serve as CPU kernels, called directly by a replay.

Going through the dispatcher and back into Python would run the same function, about twenty
microseconds later when a model's weights have just flushed the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ostinato.compat import OpOverload, record_function

# Builds the call that repeats an operator with these arguments.
_Prepare = Callable[..., Callable[[], object]]

_PREPARED: dict[OpOverload, _Prepare] = {
    # Not a kernel, but the shortest path to one; norms make this call (see ``bindings``).
    torch.ops.aten.rsqrt_.default: partial(partial, torch.Tensor.rsqrt_),
}


def replay_by_calling(operator: OpOverload, kernel: Callable[..., object]) -> None:
    """Make CPU replays call ``kernel`` for ``operator``.

    ``kernel`` must be the function that the operator runs on the CPU, and take its arguments by
    position. It writes its results into given tensors; its return value is ignored.
    """
    _PREPARED[operator] = partial(partial, kernel)


def replay_by_preparing(operator: OpOverload, prepare: _Prepare) -> None:
    """Like ``replay_by_calling``, for a kernel that inspects its arguments once, not per replay.

    ``prepare`` takes the operator's arguments and returns the call to repeat. The tensors keep
    their addresses and shapes; only the call may read their contents.
    """
    _PREPARED[operator] = prepare


def replay_step(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], object]:
    """The call that a replay makes for ``operator``: its Python kernel, or the operator itself."""
    prepare = _PREPARED.get(operator)
    if prepare is None:
        return partial(operator, *args, **kwargs)
    call = prepare(*args, **kwargs)
    return call if operator.namespace == "aten" else _Named(operator.name(), call)


class _Named:
    """A call that shows up in profilers under the operator's name."""

    __slots__ = ("_name", "call")

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self.call = call

    def __call__(self) -> None:
        # A third of a microsecond without a profiler; torch.profiler's own function takes ten.
        with record_function(self._name):
            self.call()
