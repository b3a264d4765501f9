"""Piecewise graphs with torch.compile.

A model is traced once, with a symbol for the number of tokens. The trace is split at attention (and
at any other named operator), and each piece in between is compiled and wrapped in a PIECEWISE
``CUDAGraphWrapper``. The result is called like the model, without Dynamo: nothing is traced or
compiled again. A FULL wrapper may enclose the whole.

The alternative for piecewise graphs, ``graphs.segments``, traces nothing and generates no code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ostinato.compile.cache import CompileCache
from ostinato.compile.pieces import CompiledPiece, Compiler, bind, compile_piece
from ostinato.compile.split import Piece, SplitModel, split
from ostinato.compile.tracing import Trace, name_of, trace
from ostinato.errors import BatchError, CaptureError, ConfigError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import is_recording
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper

logger = logging.getLogger(__name__)

# A prime, so that it does not match a dimension of the model by accident; a guard that compares the
# two would tie the number of tokens to it.
_EXAMPLE_SIZE = 127


@dataclass(kw_only=True, eq=False)
class _BuiltModel:
    """``run`` takes the model's arguments with these indices and calls all pieces in order."""

    run: Callable[..., Any]
    arguments: list[int]
    compiled: list[CompiledPiece]


@dataclass(kw_only=True, eq=False)
class _Variant:
    """One trace, ready to run, and the argument layouts that it was made for."""

    trace: Trace
    layouts: list[tuple[Any, ...]]
    model: _BuiltModel
    sizes: dict[int, bool]  # cached answers

    def serves(self, layouts: list[tuple[Any, ...]], num_tokens: int) -> bool:
        if layouts != self.layouts:
            return False
        served = self.sizes.get(num_tokens)
        if served is None:
            served = self.trace.serves(num_tokens) and all(
                piece.serves(num_tokens) for piece in self.model.compiled
            )
            self.sizes[num_tokens] = served
        return served


class PiecewiseModel:
    """A split and compiled model: see ``compile_piecewise``. Called with the model's arguments.

    ``num_recompiles`` counts traces after the first; each is also logged as a warning.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        pool: GraphPool,
        splitting_ops: tuple[str, ...],
        compiler: Compiler,
        eager_fallback: bool,
        cache: CompileCache | None,
    ) -> None:
        self.function = function
        self.pool = pool
        self.pieces: list[Piece] = []
        self.wrappers: list[CUDAGraphWrapper[Any]] = []
        self.num_recompiles = 0
        self._splitting_ops = splitting_ops
        self._compiler: Compiler = compiler
        self._eager_fallback = eager_fallback
        self._cache = cache
        self._variants: list[_Variant] = []

    def __call__(self, *args: torch.Tensor) -> Any:
        variant = self._variant_for(args)
        model = variant.model
        outputs = model.run(*[args[index] for index in model.arguments])
        return variant.trace.result(outputs, args)

    def trace(self, *args: torch.Tensor) -> None:
        """Trace and compile without running anything, unless that was already done.

        Required before a FULL capture if the model has not run yet.
        """
        self._variant_for(args)

    def clear_graphs(self) -> None:
        """Drop the graphs of all pieces; compiled code stays."""
        for wrapper in self.wrappers:
            wrapper.clear_graphs()

    def _variant_for(self, args: Sequence[torch.Tensor]) -> _Variant:
        num_tokens = args[0].shape[0] if args else 0
        layouts = [(arg.dtype, arg.device, arg.shape[1:]) for arg in args]
        for variant in self._variants:
            if variant.serves(layouts, num_tokens):
                break
        else:
            variant = self._compile(args, layouts, num_tokens)
        for index, arg in enumerate(args):
            if arg.shape[0] != num_tokens or not arg.is_contiguous():
                raise BatchError(
                    f"argument {index} has shape {tuple(arg.shape)} and strides {arg.stride()}; a "
                    f"compiled model takes contiguous tensors, here with {num_tokens} rows each"
                )
        return variant

    def _compile(
        self, args: Sequence[torch.Tensor], layouts: list[tuple[Any, ...]], num_tokens: int
    ) -> _Variant:
        if not args or not all(arg.dim() for arg in args):
            raise BatchError("a compiled model takes tensors with one row per token, by position")
        if is_recording():
            raise CaptureError(
                f"a batch of {num_tokens} tokens would have to be traced inside a capture, where "
                "torch.compile cannot run; call trace() with such arguments first"
            )
        known = [variant for variant in self._variants if variant.layouts == layouts]
        if self._variants:
            self._report_recompile(num_tokens, layouts, known)
        else:
            compilation_counter.num_models_seen += 1
        made = [self._compile_size(args, layouts, num_tokens if known else _EXAMPLE_SIZE)]
        if not known and not made[0].trace.serves(1):
            # Decided during tracing, by the model's own code or by torch for its operators.
            logger.info("a single token gets a separate trace; the other is %s", made[0].trace)
            made.append(self._compile_size(args, layouts, 1, fixed=True))
        if not any(variant.serves(layouts, num_tokens) for variant in made):
            # The model's own code tells sizes apart, and takes another way for this one.
            made.append(self._compile_size(args, layouts, num_tokens))
        for variant in made:
            if variant.serves(layouts, num_tokens):
                self._variants.extend(made)
                return variant
        raise CaptureError(
            f"the model cannot be traced for {num_tokens} tokens; tracing gave {made[0].trace}"
        )

    def _report_recompile(
        self, num_tokens: int, layouts: list[tuple[Any, ...]], known: list[_Variant]
    ) -> None:
        self.num_recompiles += 1
        reason = (
            f"the existing trace is {known[-1].trace}"
            if known
            else f"it was traced for arguments {self._variants[-1].layouts}, not {layouts}"
        )
        logger.warning(
            "the model is compiled again (recompile %d) for %d tokens: %s",
            self.num_recompiles,
            num_tokens,
            reason,
        )

    def _compile_size(
        self,
        args: Sequence[torch.Tensor],
        layouts: list[tuple[Any, ...]],
        size: int,
        *,
        fixed: bool = False,
    ) -> _Variant:
        traced = trace(self.function, args, size=size, fixed=fixed)
        compilation_counter.num_graphs_seen += 1
        with self._cache.in_use() if self._cache else nullcontext():
            model = self._build(split(traced, self._splitting_ops))
        return _Variant(trace=traced, layouts=layouts, model=model, sizes={})

    def _build(self, model: SplitModel) -> _BuiltModel:
        """Compile and wrap the pieces, and insert them into the model."""
        if model.missing_ops:
            logger.warning(
                "the model is not split at %s, which it never calls", ", ".join(model.missing_ops)
            )
        capturable = [piece for piece in model.pieces if not piece.is_splitting]
        compilation_counter.num_piecewise_graphs_seen += len(model.pieces)
        compilation_counter.num_piecewise_capturable_graphs_seen += len(capturable)
        callables: dict[str, Callable[..., Any]] = {}
        compiled_pieces: list[CompiledPiece] = []
        for piece in model.pieces:
            if piece.is_splitting:
                callables[piece.name] = bind(piece, piece.module.forward)
                continue
            compiled = compile_piece(
                piece,
                self._compiler,
                eager_fallback=self._eager_fallback,
                record_operators=self.pool.device.type == "cpu",
            )
            compiled_pieces.append(compiled)
            callables[piece.name] = self._wrap(
                compiled.run, first=piece is capturable[0], last=piece is model.pieces[-1]
            )
        for name, run in callables.items():
            delattr(model.caller, name)
            # No longer a module: the caller finds it as a plain attribute.
            model.caller.__dict__[name] = run
        self.wrappers.extend(run for run in callables.values() if isinstance(run, CUDAGraphWrapper))
        self.pieces.extend(model.pieces)
        return _BuiltModel(
            run=model.caller.forward, arguments=model.arguments, compiled=compiled_pieces
        )

    def _wrap(
        self, compiled: Callable[..., Any], *, first: bool, last: bool
    ) -> CUDAGraphWrapper[Any]:
        options = CUDAGraphOptions(
            debug_log_enable=first, gc_disable=not first, weak_ref_output=last
        )
        return CUDAGraphWrapper(
            compiled, CUDAGraphMode.PIECEWISE, pool=self.pool, cudagraph_options=options
        )


def compile_piecewise(
    function: Callable[..., Any],
    *,
    pool: GraphPool,
    splitting_ops: Sequence[str] = ("ostinato::attend",),
    compiler: Compiler = "inductor",
    eager_fallback: bool = False,
    cache_dir: Path | None = None,
    model_key: str | None = None,
) -> PiecewiseModel:
    """Compile ``function`` (a model or its forward) as pieces around ``splitting_ops``.

    The result takes tensors with one row per token. Under PIECEWISE each piece is captured and
    replayed; under NONE the pieces run as compiled; under FULL the enclosing graph holds what they
    run. ``compiler``: "inductor" generates code, "eager" runs the traced operators. On the CPU
    graphs hold operators in either case.

    Tracing happens on the first call, or in ``trace()``. A model that cannot be traced as one graph
    raises ``CaptureError`` with its line. A piece that inductor fails on raises too, unless
    ``eager_fallback`` lets it run uncompiled. Compiled code is cached below ``cache_dir`` for the
    next run with the same ``model_key``, versions and settings; None uses torch's own cache.
    """
    if compiler not in get_args(Compiler):
        raise ConfigError(f"unknown compiler {compiler!r}; known: {', '.join(get_args(Compiler))}")
    if isinstance(splitting_ops, str):
        raise ConfigError(f"splitting_ops must be a list of names, got {splitting_ops!r}")
    cache = None
    if cache_dir is not None and compiler == "inductor":
        name = model_key or name_of(function)
        settings = {"splitting_ops": list(splitting_ops), "device": pool.device.type}
        cache = CompileCache(cache_dir, model=name, settings=settings)
    return PiecewiseModel(
        function,
        pool=pool,
        splitting_ops=tuple(splitting_ops),
        compiler=compiler,
        eager_fallback=eager_fallback,
        cache=cache,
    )
