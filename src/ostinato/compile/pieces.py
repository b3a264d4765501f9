"""A piece as a callable: compiled by inductor, or run operator by operator as it was traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx

from ostinato.compile.split import Piece
from ostinato.compile.trace import any_size
from ostinato.errors import CaptureError
from ostinato.graphs.counters import compilation_counter
from ostinato.graphs.segments import is_recording

logger = logging.getLogger(__name__)

Compiler = Literal["inductor", "eager"]


def compile_piece(
    piece: Piece, compiler: Compiler, *, eager_fallback: bool, record_operators: bool
) -> Callable[..., Any]:
    """The piece, compiled, as a function of the inputs that are not bound to it.

    ``record_operators``: inside a recording run it operator by operator; for the CPU, where
    compiled code calls no operators and would be missing from the recording.
    """
    compilation_counter.num_backend_compilations += 1
    if compiler == "inductor":
        try:
            compiled = _with_inductor(piece)
        except Exception as error:
            _explain_failure(piece, error, eager_fallback=eager_fallback)
        else:
            compilation_counter.num_inductor_compiles += 1
            run = bind(piece, compiled)
            return _recordable(run, bind(piece, piece.module.forward)) if record_operators else run
    compilation_counter.num_eager_compiles += 1
    return bind(piece, piece.module.forward)


def bind(piece: Piece, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the piece's weights in their places, as a function of the rest."""
    if not piece.bound:
        return run
    count = len(piece.module.graph.find_nodes(op="placeholder"))
    template = [piece.bound.get(position) for position in range(count)]
    free = [position for position in range(count) if position not in piece.bound]

    def bound(*inputs: Any) -> Any:
        args: list[Any] = template.copy()
        for position, value in zip(free, inputs, strict=True):
            args[position] = value
        return run(*args)

    return bound


def _recordable(run: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    def recordable(*inputs: Any) -> Any:
        return (eager if is_recording() else run)(*inputs)

    return recordable


def _with_inductor(piece: Piece) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    # Its passes change the graph they are given; ours may still be needed to run eagerly.
    graph = fx.Graph()
    graph.output(graph.graph_copy(piece.module.graph, {}))
    with any_size(), torch.inference_mode(False), torch.no_grad():
        compiled: Any = compile_fx(fx.GraphModule(piece.module, graph), piece.example_inputs)
    return compiled  # type: ignore[no-any-return]


def _explain_failure(piece: Piece, error: Exception, *, eager_fallback: bool) -> None:
    operators = piece.operators
    shown = ", ".join(
        operators if len(operators) <= 6 else [*operators[:3], "...", *operators[-2:]]
    )
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    what = f"piece {piece.name} ({shown}) could not be compiled by inductor: {reason}"
    if not eager_fallback:
        raise CaptureError(
            f"{what}; compile with compiler='eager', or allow eager_fallback to run such pieces "
            "operator by operator"
        ) from error
    logger.warning("%s; it runs operator by operator", what)
