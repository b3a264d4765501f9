"""``graphed()``: CUDA-graph speed for any callable whose batch size changes.

    model = graphed(model, sizes=[1, 2, 4, 8, 16, 32])
    y = model(x)         # pads to the next size, copies in, replays, slices out
    print(model.stats())

The first call allocates static buffers for its arguments and captures one graph per size, largest
first, in one shared memory pool. Every later call copies its batch into the buffers and replays. A
batch above the largest size runs eagerly, and the statistics show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch

from ostinato.graphs.graphed_callable import GraphedCallable
from ostinato.graphs.graphed_module import GraphedModule
from ostinato.graphs.graphed_options import GraphedOptions

P = ParamSpec("P")
R = TypeVar("R")


@overload
def graphed(  # type: ignore[overload-overlap]  # a module is a callable too
    function: torch.nn.Module, **options: Unpack[GraphedOptions]
) -> GraphedModule: ...


@overload
def graphed(
    function: Callable[P, R], **options: Unpack[GraphedOptions]
) -> GraphedCallable[P, R]: ...


@overload
def graphed(
    function: None = None, **options: Unpack[GraphedOptions]
) -> Callable[[Callable[P, R]], GraphedCallable[P, R]]: ...


def graphed(
    function: Callable[..., Any] | None = None, **options: Unpack[GraphedOptions]
) -> GraphedCallable[..., Any] | GraphedModule | Callable[[Callable[..., Any]], Any]:
    """Give a function or module with a changing batch size one graph per size.

    Inference only: calls run without autograd. Arguments and results may be nested in dicts, lists,
    tuples and dataclasses. A module returns a module (``GraphedModule``).

    To capture, the callable runs at every size on the rows of the first call, repeated as often as
    needed: once or more to observe its effects, then ``num_warmups + 1`` times. In-place writes
    (to static arguments, or buffers of a module) are undone. The callable must not replace tensors
    or plain values that it refers to: a replay runs no Python, so this raises and names the value.
    The first call with each number of rows also runs eagerly, and the two results are compared; so
    does the next, if the graph was captured with the same batch. Padding rows are computed too, so
    row i of a result must depend on row i alone. Otherwise the call raises and names the output.

    Graphs depend on torch's settings (autocast, default dtype, deterministic algorithms, TF32, and
    so on): each combination gets separate graphs. Graphs read weights at their addresses at
    capture: a call raises if a parameter, buffer or attribute has been replaced since. Arguments
    that the callable writes in place are written back.

    Args:
        function: The callable; without it, ``graphed`` is a decorator.
        sizes: Batch sizes to capture; a batch is padded to the next one. Default: up to 64
            (16 on the CPU).
        mode: ``"full"``, one graph per size, or ``"piecewise"``, split at ``@eager_break``.
        batch_dims: By argument name, for those whose batch is not dimension 0: another dimension;
            ``None`` for a tensor without one, copied whole on every call; ``"static"`` for a tensor
            that stays where it is and is read in place (a cache, a table), and must not move.
        padding: The contents of padding rows; one value, or by argument name. A value given here is
            assumed to have meaning to the callable; elsewhere, results must not depend on it.
        copy_outputs: Return copies. By default the result is a view of the graph's output, which
            the next call overwrites.
        num_warmups: Eager runs before each capture.
        lazy: Capture each size when it is first needed instead of all on the first call.
        eager_fallback: Run sizes whose capture fails eagerly, instead of raising.
        generators: Random generators, besides the default one, that the callable draws from.
        pool: Share the memory of other graphs that never run at the same time.
        verify: Compare the first call with each number of rows with an eager one.
        check_state_every: Check for replaced weights and attributes on every n-th call. 0: never,
            and do not check at capture either whether the callable replaces them itself.
        show_progress: Show a progress bar while capturing.
    """

    def wrap(wrapped: Callable[..., Any]) -> GraphedCallable[..., Any] | GraphedModule:
        graphs = GraphedCallable(wrapped, **options)
        return GraphedModule(graphs) if isinstance(wrapped, torch.nn.Module) else graphs

    return wrap if function is None else wrap(function)


_options = inspect.signature(GraphedCallable).parameters.values()
graphed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [each.replace(default=None) if each.name == "function" else each for each in _options]
)
