"""``GraphedCallable``: a callable with its buffers, plan, dispatch and graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

import torch

from ostinato.compat import inside_functorch_transform
from ostinato.errors import CaptureError, ClosedError, ConfigError
from ostinato.graphs.capture.call_layout import BatchDim, CallLayout
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.closing import Owner, close_each
from ostinato.graphs.capture.pool import ExclusiveUse, GraphPool
from ostinato.graphs.capture.segments import is_recording
from ostinato.graphs.graph_set import GraphSet
from ostinato.graphs.graphed_method import BoundMethods, callable_name
from ostinato.graphs.graphed_options import (
    GraphedOptions,
    check_options,
    common_device,
    graph_set_options,
)
from ostinato.graphs.policy.descriptor import Choice, Reason
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode, ModeName
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.policy.sizes import default_sizes, validate_sizes
from ostinato.graphs.policy.stats import GraphedStats
from ostinato.graphs.thread_state import AutogradState, leaving_as_found
from ostinato.graphs.tree import map_tensors
from ostinato.graphs.trust.ambient_state import AmbientState
from ostinato.graphs.trust.ledger.ledger import HeldGraph, Ledger

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT_LARGEST = 64


class GraphedCallable(Owner, Generic[P, R]):
    """A callable with a graph per batch size, created by ``graphed()``; see its options there.

    Owns its buffers and, unless one was passed in, its graph pool: ``close()`` it, or use it in
    ``with``. One thread at a time; a second one gets ``ConcurrentUseError``.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        sizes: Iterable[int] | None = None,
        mode: CUDAGraphMode | ModeName = CUDAGraphMode.FULL,
        batch_dims: Mapping[str, BatchDim] | None = None,
        padding: float | Mapping[str, float] = 0,
        copy_outputs: bool = False,
        num_warmups: int = 1,
        lazy: bool = False,
        eager_fallback: bool = False,
        generators: Sequence[torch.Generator] = (),
        pool: GraphPool | None = None,
        verify: bool = True,
        check_state_every: int = 1,
        show_progress: bool = False,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"graphed() needs a callable, got {function!r}")
        self._options = graph_set_options(
            mode=mode,
            num_warmups=num_warmups,
            eager_fallback=eager_fallback,
            verify=verify,
            check_state_every=check_state_every,
            show_progress=show_progress,
        )
        if sizes is not None:
            sizes = validate_sizes(sizes, max_num_batched_tokens=None)
        self._given = GraphedOptions(
            sizes=sizes,
            mode=mode,
            batch_dims=batch_dims,
            padding=padding,
            copy_outputs=copy_outputs,
            num_warmups=num_warmups,
            lazy=lazy,
            eager_fallback=eager_fallback,
            generators=generators,
            pool=pool,
            verify=verify,
            check_state_every=check_state_every,
            show_progress=show_progress,
        )
        check_options(self._given)
        self._function, self._sizes = function, sizes
        self._batch_dims = dict(batch_dims or {})
        self._padding = padding
        self._copy_outputs = copy_outputs
        self._lazy = lazy
        self._check_state_every = check_state_every
        self._num_calls = 0
        self._generators = generators
        self._pool = pool
        self._owns_pool = pool is None
        self._closed = self._capturing = False
        self._exclusive_use = ExclusiveUse()
        self._stats = DispatchStats()
        # Known once the first call has shown its arguments.
        self._layout: CallLayout | None = None
        self._plan: CapturePlan | None = None
        # Graphs by torch's settings at capture.
        self._ambient: AmbientState | None = None
        self._graph_sets: dict[tuple[Any, ...], GraphSet] = {}
        self._bound: BoundMethods[GraphedCallable[..., Any]] = BoundMethods()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_usable()
        return cast(R, self._exclusive_use.run(self._call, args, kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_not_capturing()
        found = AutogradState()
        try:
            if self._layout is None:
                self._prepare(args, kwargs)
            layout, pool = self._parts()
            values = layout.values(args, kwargs)
            rows = layout.batch_size(values)
            return pool.exclusive_use.run(self._call_in_pool, rows, values, (args, kwargs))
        except BaseException as error:
            found.restore(error)
            self._forget_if_nothing_captured()
            raise

    @torch.no_grad()
    def _call_in_pool(self, rows: int, values: Sequence[Any], call: tuple[Any, Any]) -> Any:
        layout, pool = self._parts()
        args, kwargs = call
        pool.follow_stream()
        graphs = self._graph_set()
        self._check_state(graphs)
        choice = graphs.choose(rows)
        if choice.reason is Reason.NOT_CAPTURED:
            # The capture would overwrite results of other graphs in the pool.
            call = map_tensors(pool.kept, call)
            values = layout.values(*call)
            entries = [graphs.entry_for(rows)] if self._lazy else graphs.missing()
            self._capture_entries(graphs, entries, values)
            choice = graphs.choose(rows)
        if choice.mode is CUDAGraphMode.NONE:
            self._stats.record(choice, rows)
            before = graphs.changed_values()
            result = self._function(*args, **kwargs)
            graphs.note_own_changes(before)
            return result
        return self._run(graphs, choice, rows, values, call)

    def _run(
        self,
        graphs: GraphSet,
        choice: Choice,
        rows: int,
        values: Sequence[Any],
        call: tuple[Any, Any],
    ) -> Any:
        output, choice = graphs.run(choice, rows, values, call)
        self._stats.record(choice, rows)
        if self._copy_outputs:
            output = map_tensors(torch.clone, output)
        return output

    def _check_state(self, graphs: GraphSet) -> None:
        every = self._check_state_every
        if every and self._num_calls % every == 0:
            graphs.check_state()
        self._num_calls += 1

    # --- set-up --------------------------------------------------------------------------------

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> CaptureReport:
        """Capture all sizes now, with arguments like those of later calls.

        The callable runs on their rows, repeated as often as a size needs; its in-place writes are
        undone afterwards.
        """
        self._check_usable()
        return self._exclusive_use.run(self._capture, args, kwargs)

    @leaving_as_found
    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureReport:
        self._check_not_capturing()
        try:
            if self._layout is None:
                self._prepare(args, kwargs)
            layout, pool = self._parts()
            values = layout.values(*map_tensors(pool.kept, (args, kwargs)))
            layout.batch_size(values)
            return pool.exclusive_use.run(self._capture_in_pool, values)
        except BaseException:
            self._forget_if_nothing_captured()
            raise

    @torch.no_grad()
    def _capture_in_pool(self, values: Sequence[Any]) -> CaptureReport:
        self._parts()[1].follow_stream()
        graphs = self._graph_set()
        self._capture_entries(graphs, graphs.missing(), values)
        return graphs.report

    @leaving_as_found
    def _capture_entries(
        self, graphs: GraphSet, entries: Sequence[PlanEntry], values: Sequence[Any]
    ) -> None:
        self._capturing = True
        try:
            graphs.capture(entries, values, self._name)
        finally:
            self._capturing = False

    def _graph_set(self) -> GraphSet:
        """The graphs for torch's current settings."""
        assert self._ambient is not None
        assert self._plan is not None
        key = self._ambient.read()
        found = self._graph_sets.get(key)
        if found is None:
            layout, pool = self._parts()
            found = GraphSet(self._function, layout, pool, self._plan, self._options)
            self._graph_sets[key] = found
        return found

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Create buffers, plan and pool for arguments like these."""
        device = common_device(self._function, args, kwargs)
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
        if self._pool is None:
            self._pool = GraphPool(device, generators=self._generators)
        elif self._pool.device != device:
            raise ConfigError(
                f"the pool is on {self._pool.device}, the arguments on {device}; pass one of theirs"
            )
        self._plan = CapturePlan.build(
            self._options.mode, sizes, max_num_seqs=max(sizes), max_num_batched_tokens=max(sizes)
        )
        self._ambient = AmbientState(device.type)
        self._layout = layout

    # --- statistics and closing ----------------------------------------------------------------

    def stats(self) -> GraphedStats:
        """Counts since it was made: graphs, calls, padding, and eager calls by reason."""
        stats, graph_sets = self._stats, self._graph_sets.values()
        return GraphedStats(
            graphs=sum(graphs.num_graphs for graphs in graph_sets),
            hits=stats.hits,
            padding_rows=stats.padding_tokens,
            padding_fraction=stats.padding_fraction,
            eager_calls={reason.value: count for reason, count in stats.eager.items()},
            pool_bytes=0 if self._pool is None or self._closed else self._pool.num_bytes,
            buffer_bytes=self._layout.num_bytes if self._layout else 0,
            capture_seconds=sum(graphs.report.seconds for graphs in graph_sets),
        )

    def ledger(self) -> Ledger:
        """Every address that the graphs hold, its owner, and whether it is still valid.

        Without graphs it is empty; it shows those captured later too.
        """
        mine = weakref.ref(self)

        def list_graphs() -> list[HeldGraph]:
            me = mine()
            sets = () if me is None else me._graph_sets.values()
            return [each for graphs in sets for each in graphs.held_graphs()]

        return Ledger(list_graphs)

    def unwrap(self) -> Callable[P, R]:
        """The function that was given to ``graphed()``."""
        return self._function

    def clear_graphs(self) -> None:
        """Drop all graphs; the next call captures again."""
        close_each(graphs.clear_graphs for graphs in self._graph_sets.values())

    def close(self) -> None:
        """Free the graphs, the buffers and the pool. Closing twice is harmless.

        Outputs returned earlier must not be used any more, unless they are copies.
        """
        if self._closed:
            return
        self._closed = True
        # Not self.forget(): with a __getattr__, that makes an object, and there may be no memory
        # left for one.
        GraphedCallable.forget(self)

    def forget(self) -> None:
        """Drop graphs, buffers and, if it is ours, the pool; the next call starts from scratch."""
        pool = self._pool if self._owns_pool else None
        try:
            if pool is not None:
                pool.free_spare()
            self.clear_graphs()
        finally:
            self._graph_sets.clear()
            self._layout = None
            if pool is not None:
                self._pool = None
                pool.close()

    def _forget_if_nothing_captured(self) -> None:
        """After a failed call, forget its arguments if no graph was captured with them."""
        if self._layout is not None and not any(g.num_graphs for g in self._graph_sets.values()):
            self.forget()

    def __get__(self, instance: Any, owner: type | None = None) -> GraphedCallable[..., Any]:
        """Bind a decorated method to its object. Each object has separate state, so it gets
        separate graphs, which live as long as it does.
        """
        if instance is None:
            return self
        return self._bound.of(
            instance, lambda method: GraphedCallable(method, **self._given), self._function
        )

    def __getattr__(self, name: str) -> Any:
        # Attributes that the graphed callable lacks come from the function: __name__, ...
        function = self.__dict__.get("_function")
        if hasattr(function, name):
            return getattr(function, name)
        raise AttributeError(
            f"neither GraphedCallable nor its {type(function).__name__} has an attribute {name!r}"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _not_copied()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_copied()

    @property
    def _name(self) -> str:
        return callable_name(self._function)

    def _check_usable(self) -> None:
        if torch.compiler.is_compiling():
            raise CaptureError(
                "torch.compile cannot look into a graphed callable; compile the model first and "
                "graph the result: graphed(torch.compile(model))"
            )
        if inside_functorch_transform():
            raise CaptureError(
                "a graphed callable was called inside a transform of torch.func (vmap, grad, ...), "
                "which cannot look into graphs; transform the plain function (unwrap()) and graph "
                "the result: graphed(torch.vmap(function))"
            )
        if self._closed:
            raise ClosedError("this graphed callable is closed; call graphed() again")
        if is_recording():
            raise CaptureError(
                "a graphed callable was called inside another capture; capture the plain function "
                "there (unwrap()), and its work becomes part of that graph"
            )

    def _check_not_capturing(self) -> None:
        if self._capturing:
            raise CaptureError("a graphed callable calls itself; call unwrap()'s result inside it")

    def _parts(self) -> tuple[CallLayout, GraphPool]:
        assert self._layout is not None
        assert self._pool is not None
        return self._layout, self._pool


def _not_copied() -> ConfigError:
    return ConfigError(
        "a graphed callable cannot be copied or pickled, since its graphs hold addresses of this "
        "process; copy what unwrap() returns, and call graphed() on the copy"
    )
