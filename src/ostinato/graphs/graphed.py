"""``graphed()``: CUDA-graph speed for any callable whose batch size changes.

    model = graphed(model, sizes=[1, 2, 4, 8, 16, 32])
    y = model(x)         # pads to the next size, copies in, replays, slices out
    print(model.stats())

The first call looks at its arguments, makes static buffers for them, and captures one graph per
size, largest first, in one shared memory pool. Every later call copies its batch into the buffers
and replays. A batch above the largest size runs eagerly, and the statistics say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

import torch

from ostinato.errors import BatchError, CaptureError, ClosedError, ConfigError
from ostinato.graphs.capture_loop import CaptureReport, capture_entries
from ostinato.graphs.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.graphed_call import BatchDim, CallLayout, OutputLayout
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.plan import CapturePlan, PlanEntry
from ostinato.graphs.pool import ExclusiveUse, GraphPool
from ostinato.graphs.segments import Tape, is_recording
from ostinato.graphs.sizes import default_sizes, validate_sizes
from ostinato.graphs.stats import DispatchStats, GraphedStats
from ostinato.graphs.tree import map_tensors, tensors_in

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT_LARGEST = 64


# Methods of a module that change it in place and return it.
_CHANGES_MODEL = frozenset(
    {"eval", "train", "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "requires_grad_"}
)


@dataclass(frozen=True)
class _SizeGraph:
    tape: Tape
    output: Any


class GraphedCallable(Generic[P, R]):
    """A callable with a graph per batch size. Made by ``graphed()``, which documents the options.

    Owns its buffers and, unless one was passed in, its graph pool: ``close()`` it, or use it in
    ``with``. One thread at a time; a second one gets ``ConcurrentUseError``.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        sizes: Iterable[int] | None = None,
        mode: CUDAGraphMode | str = CUDAGraphMode.FULL,
        batch_dims: Mapping[str, BatchDim] | None = None,
        padding: float | Mapping[str, float] = 0,
        copy_outputs: bool = False,
        num_warmups: int = 1,
        lazy: bool = False,
        eager_fallback: bool = False,
        generators: Sequence[torch.Generator] = (),
        pool: GraphPool | None = None,
        show_progress: bool = False,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"graphed() needs a callable, got {function!r}")
        self._mode = CUDAGraphMode.parse(mode)
        if self._mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ConfigError(
                f"graphed() runs FULL (one graph) or PIECEWISE (split at @eager_break), not "
                f"{self._mode.name}"
            )
        if type(num_warmups) is not int or num_warmups < 0:
            raise ConfigError(f"num_warmups must be 0 or a positive integer, got {num_warmups!r}")
        self._function = function
        self._sizes = None if sizes is None else validate_sizes(sizes, max_num_batched_tokens=None)
        self._batch_dims = dict(batch_dims or {})
        self._padding = padding
        self._copy_outputs = copy_outputs
        self._num_warmups = num_warmups
        self._lazy = lazy
        self._eager_fallback = eager_fallback
        self._generators = generators
        self._pool = pool
        self._owns_pool = pool is None
        self._show_progress = show_progress
        self._closed = False
        self._exclusive_use = ExclusiveUse()
        self._stats = DispatchStats()
        self._report = CaptureReport()
        self._graphs: dict[BatchDescriptor, _SizeGraph] = {}
        # Known once the first call has shown its arguments.
        self._layout: CallLayout | None = None
        self._outputs: OutputLayout | None = None
        self._dispatcher: Dispatcher | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_usable()
        with self._exclusive_use:
            if self._layout is None:
                self._prepare(args, kwargs)
            layout, _, pool = self._parts()
            values = layout.values(args, kwargs)
            rows = layout.batch_size(values)
            with pool.exclusive_use, torch.no_grad():
                choice, values = self._choose(rows, values)
                self._stats.record(choice, rows)
                if choice.mode is CUDAGraphMode.NONE:
                    return self._function(*args, **kwargs)
                return self._replay(choice.descriptor, rows, values)

    def _choose(self, rows: int, values: list[Any]) -> tuple[Choice, list[Any]]:
        """The graph for this many rows, captured now if need be, and the values to give it."""
        _, dispatcher, pool = self._parts()
        shape = BatchShape(rows, rows, 1)
        choice = dispatcher.dispatch(shape)
        if choice.reason is Reason.NOT_CAPTURED:
            # Arguments that are results of other graphs of the pool would not survive the capture.
            values = [_kept(value, pool) for value in values]
            self._capture([self._entry_for(rows)] if self._lazy else self._missing())
            choice = dispatcher.dispatch(shape)
        return choice, values

    def _replay(self, descriptor: BatchDescriptor, rows: int, values: list[Any]) -> R:
        layout, _, pool = self._parts()
        size = descriptor.num_tokens
        layout.fill(values, size)
        graph = self._graphs[descriptor]
        pool.replay(graph.tape)
        assert self._outputs is not None
        output = self._outputs.cut(graph.output, rows, size)
        if self._copy_outputs:
            output = map_tensors(torch.clone, output)
        return cast(R, output)

    # --- set-up --------------------------------------------------------------------------------

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> CaptureReport:
        """Capture all sizes now, from arguments like those of later calls.

        Only their shapes are used: the callable runs on padding.
        """
        self._check_usable()
        with self._exclusive_use:
            if self._layout is None:
                self._prepare(args, kwargs)
            _, _, pool = self._parts()
            with pool.exclusive_use, torch.no_grad():
                self._capture(self._missing())
            return self._report

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make buffers, plan and pool for arguments like these."""
        device = self._common_device(args, kwargs)
        sizes = self._sizes or default_sizes(
            max_num_seqs=_DEFAULT_LARGEST // 2,
            max_num_batched_tokens=_DEFAULT_LARGEST,
            device_type=device.type,
        )
        layout = CallLayout(
            self._function,
            args,
            kwargs,
            max_rows=max(sizes),
            batch_dims=self._batch_dims,
            padding=self._padding,
        )
        plan = CapturePlan.build(
            self._mode, sizes, max_num_seqs=max(sizes), max_num_batched_tokens=max(sizes)
        )
        if self._pool is None:
            self._pool = GraphPool(device, generators=self._generators)
        elif self._pool.device != device:
            raise ConfigError(f"the pool is on {self._pool.device}, the arguments on {device}")
        self._pool.register(self)
        self._dispatcher = Dispatcher(plan)
        self._layout = layout

    def _common_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        tensors = list(tensors_in((args, kwargs)))
        if not tensors:
            raise BatchError(
                "graphed() found no tensor among the arguments, so there is no batch size to see"
            )
        if isinstance(self._function, torch.nn.Module):
            tensors += [*self._function.parameters(), *self._function.buffers()]
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) > 1:
            raise ConfigError(
                f"graphed() works on one device, but the model and its arguments are on "
                f"{', '.join(devices)}; move them to one, or use one graphed() per device"
            )
        return tensors[0].device

    # --- capture -------------------------------------------------------------------------------

    def _missing(self) -> list[PlanEntry]:
        _, dispatcher, _ = self._parts()
        return [entry for entry in dispatcher.plan.entries if dispatcher.is_open(entry)]

    def _entry_for(self, rows: int) -> PlanEntry:
        _, dispatcher, _ = self._parts()
        fitting = [e for e in dispatcher.plan.entries if e.descriptor.num_tokens >= rows]
        return min(fitting, key=lambda entry: entry.descriptor.num_tokens)

    def _capture(self, entries: Sequence[PlanEntry]) -> None:
        layout, dispatcher, pool = self._parts()
        if self._outputs is None and entries:
            size = entries[0].descriptor.num_tokens
            self._outputs = OutputLayout.infer(self._function, layout, size)
        report = capture_entries(
            entries,
            self._capture_one,
            pool=pool,
            dispatcher=dispatcher,
            eager_fallback=self._eager_fallback,
            show_progress=self._show_progress,
            name=getattr(self._function, "__name__", type(self._function).__name__),
        )
        self._report.entries.extend(report.entries)

    def _capture_one(self, entry: PlanEntry) -> None:
        layout, _, pool = self._parts()
        layout.reset()
        args, kwargs = layout.static_call(entry.descriptor.num_tokens)
        with pool.backend.capture_scope():
            for _ in range(self._num_warmups):
                self._function(*args, **kwargs)
        captured = pool.capture(
            lambda: self._function(*args, **kwargs),
            split_at_breaks=self._mode is CUDAGraphMode.PIECEWISE,
        )
        self._graphs[entry.descriptor] = _SizeGraph(captured.tape, pool.weak(captured.output))

    # --- looking, and letting go ---------------------------------------------------------------

    def stats(self) -> GraphedStats:
        stats = self._stats
        return GraphedStats(
            graphs=sum(len(graph.tape.graphs) for graph in self._graphs.values()),
            hits=stats.hits,
            padding_rows=stats.padding_tokens,
            padding_fraction=stats.padding_fraction,
            eager_calls={reason.value: count for reason, count in stats.eager.items()},
            pool_bytes=0 if self._pool is None or self._closed else self._pool.num_bytes,
            buffer_bytes=self._layout.num_bytes if self._layout else 0,
            capture_seconds=self._report.seconds,
        )

    def unwrap(self) -> Callable[P, R]:
        return self._function

    def discard(self, serials: range) -> None:
        """Drop the graphs whose tapes have these numbers."""
        for descriptor, graph in list(self._graphs.items()):
            if graph.tape.serial in serials:
                self._graphs.pop(descriptor).tape.close()

    def clear_graphs(self) -> None:
        """Drop all graphs; the next call captures again."""
        for graph in self._graphs.values():
            graph.tape.close()
        self._graphs.clear()
        if self._dispatcher is not None:
            self._dispatcher.reset()

    def close(self) -> None:
        """Give graphs, buffers and pool back. Outputs returned earlier must not be used any more,
        unless they are copies. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.clear_graphs()
        self._layout = None
        if self._pool is not None and self._owns_pool:
            self._pool.close()

    def __enter__(self) -> GraphedCallable[P, R]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        # What the graphed callable does not have comes from the model: parameters(), config, ...
        function = self.__dict__.get("_function")
        if isinstance(function, torch.nn.Module) and name in _CHANGES_MODEL:
            return partial(self._change_model, name)
        if hasattr(function, name):
            return getattr(function, name)
        raise AttributeError(
            f"neither GraphedCallable nor its {type(function).__name__} has an attribute {name!r}"
        )

    def _change_model(self, method: str, *args: Any, **kwargs: Any) -> GraphedCallable[P, R]:
        """Have the model changed as a whole. Its graphs hold the old state, and go."""
        getattr(self._function, method)(*args, **kwargs)
        self.clear_graphs()
        self._layout = self._outputs = None
        if self._owns_pool and self._pool is not None:
            self._pool.close()  # the model may be on another device now
            self._pool = None
        return self

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this graphed callable is closed; call graphed() again")
        if is_recording():
            raise CaptureError(
                "a graphed callable was called inside another capture; capture the plain function "
                "there (unwrap()), and its work becomes part of that graph"
            )

    def _parts(self) -> tuple[CallLayout, Dispatcher, GraphPool]:
        assert self._layout is not None
        assert self._dispatcher is not None
        assert self._pool is not None
        return self._layout, self._dispatcher, self._pool


def _kept(value: Any, pool: GraphPool) -> Any:
    in_pool = isinstance(value, torch.Tensor) and pool.backend.owns(value)
    return value.clone() if in_pool else value


class GraphedOptions(TypedDict, total=False):
    """The options of ``graphed()``; its docstring says what each one does."""

    sizes: Iterable[int] | None
    mode: CUDAGraphMode | str
    batch_dims: Mapping[str, BatchDim] | None
    padding: float | Mapping[str, float]
    copy_outputs: bool
    num_warmups: int
    lazy: bool
    eager_fallback: bool
    generators: Sequence[torch.Generator]
    pool: GraphPool | None
    show_progress: bool


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
) -> GraphedCallable[..., Any] | Callable[[Callable[..., Any]], GraphedCallable[..., Any]]:
    """Give a function or module with a changing batch size one graph per size.

    Inference only: calls run without autograd. Arguments and results may be nested in dicts, lists,
    tuples and dataclasses. Rows must not depend on each other: a result that is computed across the
    batch (a mean, a loss) would include the padding.

    To capture, the callable is run on padding, twice to see its results' shapes and then
    ``num_warmups + 1`` times per size, with whatever it does to static arguments and to state of
    its own. What it writes into other arguments is lost: it works on copies.

    Args:
        function: The callable; left out, ``graphed`` is a decorator.
        sizes: Batch sizes to capture; a batch is padded to the next one. Default: up to 64
            (16 on the CPU).
        mode: ``"full"``, one graph per size, or ``"piecewise"``, split at ``@eager_break``.
        batch_dims: By argument name, for those whose batch is not dimension 0: another dimension;
            ``None`` for a tensor without one, copied whole on every call; ``"static"`` for a tensor
            that stays where it is and is read in place (a cache, a table), and must not move.
        padding: What padding rows hold; one value, or by argument name.
        copy_outputs: Return copies. By default the result is a view of the graph's own output,
            overwritten by the next call.
        num_warmups: Eager runs before each capture.
        lazy: Capture each size when it is first needed instead of all on the first call.
        eager_fallback: Run sizes eagerly whose capture fails, instead of raising.
        generators: Random generators, other than the default one, that the callable draws from.
        pool: Share the memory of other graphs that never run at the same time.
        show_progress: Show a progress bar while capturing.
    """

    if function is None:
        return lambda decorated: GraphedCallable(decorated, **options)
    return GraphedCallable(function, **options)
