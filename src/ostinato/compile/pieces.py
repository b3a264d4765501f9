"""Turns a piece into a callable: compiled by inductor, or run operator by operator as traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ostinato import compat
from ostinato.compile.split import Piece
from ostinato.compile.tracing import Conditions, any_size
from ostinato.errors import CaptureError
from ostinato.graphs.capture.segments import is_recording
from ostinato.graphs.policy.counters import compilation_counter

logger = logging.getLogger(__name__)

Compiler = Literal["inductor", "eager"]


@dataclass(kw_only=True, eq=False)
class CompiledPiece:
    """A function of the piece's unbound inputs, and the sizes that it serves."""

    run: Callable[..., Any]
    conditions: Conditions | None = None

    def serves(self, num_tokens: int) -> bool:
        # Compiling fixes strides, and then requires a size other than 1. The strides of a
        # dimension of size 1 do not matter, and the model's own conditions are in the trace.
        return self.conditions is None or num_tokens == 1 or self.conditions.hold(num_tokens)


def compile_piece(
    piece: Piece, compiler: Compiler, *, eager_fallback: bool, record_operators: bool
) -> CompiledPiece:
    """Compile the piece for all sizes.

    ``record_operators``: inside a recording, run it operator by operator. This is for the CPU,
    where compiled code calls no operators and would be missing from the recording.
    """
    compilation_counter.num_backend_compilations += 1
    eager = bind(piece, piece.module.forward)
    if compiler == "inductor":
        try:
            compiled, conditions = _with_inductor(piece)
        except Exception as error:
            _explain_failure(piece, error, eager_fallback=eager_fallback)
        else:
            compilation_counter.num_inductor_compiles += 1
            run = bind(piece, compiled)
            run = _recordable(run, eager) if record_operators else run
            return CompiledPiece(run=run, conditions=conditions)
    compilation_counter.num_eager_compiles += 1
    return CompiledPiece(run=eager)


def bind(piece: Piece, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the piece's weights filled in, as a function of the other inputs."""
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


def _with_inductor(piece: Piece) -> tuple[Callable[..., Any], Conditions]:
    compile_fx = compat.compile_fx.demand()
    # Its passes modify the graph, which we may still need to run eagerly.
    graph = fx.Graph()
    with any_size(), torch.inference_mode(False), torch.no_grad():
        inputs, shape_env = _own_examples(piece)
        place = _place_of_size(inputs)
        if place is not None:
            # Inductor's cache can only look up sizes that are separate inputs.
            graph.placeholder("num_tokens")
            inputs.insert(0, inputs[place[0]].shape[place[1]])
        graph.output(graph.graph_copy(piece.module.graph, {}))
        compiled: Any = compile_fx(fx.GraphModule(piece.module, graph), inputs)
    run = compiled if place is None else _with_size(compiled, *place)
    return run, Conditions(shape_env)


def _place_of_size(inputs: list[Any]) -> tuple[int, int] | None:
    """The position of an input, and its dimension, that equals the number of tokens."""
    for position, value in enumerate(inputs):
        shape: Any = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                return position, dim
    return None


def _with_size(run: Callable[..., Any], position: int, dim: int) -> Callable[..., Any]:
    def with_size(*inputs: Any) -> Any:
        return run(inputs[position].shape[dim], *inputs)

    return with_size


def _own_examples(piece: Piece) -> tuple[list[Any], Any]:
    """Fake inputs with one symbol that belongs to this piece alone.

    The trace has a symbol per argument, and learns during tracing that they are equal. Inductor's
    cache would store that with every piece, in terms of arguments that the piece does not have.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    source_of = compat.constant_source.demand()
    env: Any = ShapeEnv()
    mode = compat.fake_tensor_mode.demand()(shape_env=env)
    symbols: dict[int, Any] = {}  # by example; all symbols of the trace share one example

    def own(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression: Any = size.node.expr
        for symbol in expression.free_symbols:
            example = _example_of(size.node.shape_env, symbol)
            if example not in symbols:
                source = source_of(f"num_tokens_{example}")
                symbols[example] = env.create_symbol(
                    example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
                )
            expression = expression.xreplace({symbol: symbols[example]})
        return env.create_symintnode(expression, hint=size.node.hint)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return own(value)
        shape, strides = map(own, value.shape), map(own, value.stride())
        return torch.empty_strided(
            tuple(shape), tuple(strides), dtype=value.dtype, device=value.device
        )

    with mode:
        return [fake(value) for value in piece.example_inputs], env


def _example_of(shape_env: Any, symbol: Any) -> int:
    known = getattr(shape_env, "backed_var_to_val", None)  # var_to_val in older torch
    return int((shape_env.var_to_val if known is None else known)[symbol])


def _explain_failure(piece: Piece, error: Exception, *, eager_fallback: bool) -> None:
    operators = piece.operators
    shown = ", ".join(
        operators if len(operators) <= 6 else [*operators[:3], "...", *operators[-2:]]
    )
    message = str(error).strip().split("\n", 1)[0]
    reason = f"{type(error).__name__}: {message}"
    what = f"piece {piece.name} ({shown}) could not be compiled by inductor: {reason}"
    if not eager_fallback:
        raise CaptureError(
            f"{what}; use compiler='eager', or set eager_fallback to run such pieces operator by "
            "operator"
        ) from error
    logger.warning("%s; it runs operator by operator", what)
