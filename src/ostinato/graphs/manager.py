"""``CudaGraphManager``: captures the plan of one forward, and replays its FULL graphs.

The manager is generic over the forward function. It knows batches of tokens and their padded
shapes, not models: ``prepare`` creates the inputs of one entry, ``forward`` runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, cast

from ostinato.errors import BatchError, CaptureError, CaptureOutOfMemoryError, ClosedError
from ostinato.graphs.capture.capture_loop import CaptureLoop, CaptureReport
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.output_buffers import OutputBuffers
from ostinato.graphs.capture.pool import GraphPool, check_pool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.manager_shadow import BatchRun, BothWays, ManagerShadow, VerifyOptions
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.prepared_batch import Inputs, Output, PreparedBatch, prepared, run_prepared
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.graphs.tree import without_padding
from ostinato.graphs.trust.ambient_state import autocast_dtype, check_autocast, is_autocast_enabled
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.ledger.owners import MemoryKind, NamedMemory, NamesMemory
from ostinato.graphs.trust.ledger.sources import pool_ledger
from ostinato.graphs.trust.shadow.report import VerifyReport


@dataclass(frozen=True, kw_only=True)
class FullGraph:
    """A captured FULL graph: the tape to replay, and its output.

    ``output`` is an alias that reserves no memory; None if the graph copies it to the buffers.
    ``autocast``: the dtype of torch's autocast at capture; None: off.
    """

    tape: Tape
    output: Any
    autocast: object = None


class CudaGraphManager(Generic[Inputs, Output]):
    """Owns the FULL graphs of one forward, and the dispatch over its whole plan.

    PIECEWISE entries are captured by running the forward under a PIECEWISE context, so that the
    wrappers inside it capture; the manager only records that they exist. FULL graphs copy their
    outputs, inside the graph, into buffers that are allocated once and do not move, unless outputs
    stay in place (``PreparedBatch``); ``run_fullgraph`` returns views, valid until the next replay.

    Every entry is prepared outside the graphs, once for its warm-ups and again for its capture,
    because values that a forward caches on first use of its inputs must be computed inside the
    graph. The forward warms up ``num_warmups`` times, and the capture checks each operator for
    operations that a graph cannot contain. ``kernel_class`` returns equal values for entries of one
    phase that run the same kernels: only the first of them is warmed up. If it is set, operators
    that one size may capture are assumed legal for others: of each mode, only the first uniform
    and the first other entry are checked. One that fails is tried again with warm-up and checks.

    ``plan``: the graphs to capture. ``pool``: the memory they use. ``dispatcher``: one shared with
    other managers; None: a new one. ``eager_fallback``: entries whose capture fails run eagerly.
    ``name``: the model's name in progress bars (``show_progress``). ``verify``: which graphs, and
    batches of ``run``, are compared with eager runs; a policy, or ``VerifyOptions`` with one.
    """

    def __init__(
        self,
        plan: CapturePlan,
        pool: GraphPool,
        *,
        dispatcher: Dispatcher | None = None,
        num_warmups: int = 1,
        kernel_class: Callable[[PlanEntry], Hashable] | None = None,
        eager_fallback: bool = False,
        show_progress: bool = True,
        name: str = "model",
        verify: str | VerifyOptions = "off",
    ) -> None:
        check_pool(pool)
        self.plan, self.pool, self._device_type = plan, pool, pool.device.type
        self.dispatcher = Dispatcher(plan) if dispatcher is None else dispatcher
        self.dispatcher.check_has(plan)
        self._num_warmups = num_warmups
        self._kernel_class = kernel_class
        # Kernel classes, and kinds of entries, with at least one capture.
        self._seen: set[Hashable] = set()
        self._eager_fallback = eager_fallback
        self._show_progress = show_progress
        self._name = name
        self._graphs: dict[BatchDescriptor, FullGraph] = {}
        self._captured: list[range] = []  # serials of all captures for this plan
        full = [e.descriptor.num_tokens for e in plan.entries if e.mode is CUDAGraphMode.FULL]
        self._outputs = OutputBuffers(max_rows=max(full, default=0), device=pool.device)
        self._shadow = ManagerShadow.of(verify, self.dispatcher, pool)
        pool.register(self)

    # --- dispatch ------------------------------------------------------------------------------

    def dispatch(self, shape: BatchShape) -> Choice:
        """How a batch of ``shape`` runs: ``Dispatcher.dispatch``."""
        return self.dispatcher.dispatch(shape)

    def get_cudagraph_size(self, num_tokens: int, uniform_decode: bool = False) -> int | None:
        """The padded size of a batch, or None if it runs eagerly.

        ``uniform_decode``: the batch consists of ``num_tokens`` in requests of the plan's (first)
        decode query length.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            raise BatchError(
                f"num_tokens must be a positive integer, got {num_tokens!r}; skip batches without "
                "tokens"
            )
        query_len = self.plan.decode_query_lens[0]
        num_reqs = -(-num_tokens // query_len)
        if not uniform_decode:
            shape = BatchShape(num_tokens, 1, num_tokens, has_prompts=True)
        elif self.plan.mode.separate_routine():
            shape = BatchShape(num_reqs * query_len, num_reqs, query_len)
        else:  # decode batches use the mixed graphs, which are found by number of tokens
            shape = BatchShape(num_reqs * query_len, 1, num_reqs * query_len)
        choice = self.dispatch(shape)
        return None if choice.mode is CUDAGraphMode.NONE else choice.padded_num_tokens

    def get_cudagraph_runtime_mode(
        self, num_reqs: int, num_tokens: int, max_query_len: int, *, has_prompts: bool = False
    ) -> tuple[CUDAGraphMode, int | None]:
        """The runtime mode of a batch, and its padded size (None for eager).

        ``num_reqs``, ``num_tokens``, ``max_query_len``, ``has_prompts``: as in ``BatchShape``.
        """
        shape = BatchShape(num_tokens, num_reqs, max_query_len, has_prompts=has_prompts)
        choice = self.dispatch(shape)
        if choice.mode is CUDAGraphMode.NONE:
            return choice.mode, None
        return choice.mode, choice.padded_num_tokens

    # --- capture -------------------------------------------------------------------------------

    def needs_capture(self) -> bool:
        """Whether some entry of the plan is neither captured nor failed."""
        return bool(self._missing())

    def capture(
        self,
        forward: Callable[[Inputs], Output],
        prepare: Callable[[PlanEntry], PreparedBatch[Inputs]],
        *,
        warm_up: Callable[[Inputs], Output] | None = None,
    ) -> CaptureReport:
        """Capture missing entries of the plan. ``prepare`` runs outside the graphs.

        ``warm_up`` replaces ``forward`` in warm-ups: it launches the same kernels and returns a
        result of the same shape, but may do less.

        For start-up: it frees the memory of warm-ups at the end (``GraphPool.release_unused``).
        """
        return self._capture_each(self._missing(), forward, prepare, warm_up or forward)

    def capture_graph(
        self,
        entry: PlanEntry,
        forward: Callable[[Inputs], Output],
        prepare: Callable[[PlanEntry], PreparedBatch[Inputs]],
        *,
        warm_up: Callable[[Inputs], Output] | None = None,
    ) -> CaptureReport:
        """Capture one entry of the plan, unless it is captured already.

        ``forward``, ``prepare`` and ``warm_up`` are as in ``capture``.
        """
        if entry not in self.plan.entries:
            raise CaptureError(
                f"{entry} is not in the plan, so dispatch can never choose it; capture one of "
                "plan.entries"
            )
        entries = [entry] if self.dispatcher.is_open(entry) else []
        return self._capture_each(entries, forward, prepare, warm_up or forward)

    @leaving_as_found
    def _capture_each(
        self,
        entries: list[PlanEntry],
        forward: Callable[[Inputs], Output],
        prepare: Callable[[PlanEntry], PreparedBatch[Inputs]],
        warm_up: Callable[[Inputs], Output],
    ) -> CaptureReport:
        loop = CaptureLoop(
            self.pool,
            self.dispatcher,
            eager_fallback=self._eager_fallback,
            show_progress=self._show_progress,
            name=self._name,
        )
        with loop:
            for entry in loop.over(entries):
                try:
                    self._capture(entry, forward, warm_up, prepare)
                except BaseException as error:
                    loop.failed(entry, error)
                else:
                    loop.succeeded(entry)
        self.pool.release_unused()
        if self._shadow is not None:
            self._shadow.try_graphs(entries, forward, prepare, self._both_ways)
        loop.report.buffer_bytes = sum(each.tensor.nbytes for each in self.named_memory())
        return loop.report

    def _missing(self) -> list[PlanEntry]:
        return [entry for entry in self.plan.entries if self.dispatcher.is_open(entry)]

    def _capture(
        self,
        entry: PlanEntry,
        forward: Callable[[Inputs], Output],
        warm_up: Callable[[Inputs], Output],
        prepare: Callable[[PlanEntry], PreparedBatch[Inputs]],
    ) -> None:
        """Capture one entry, with checks and warm-ups unless a similar one had them."""
        before = self.pool.serial
        num_warmups, kind, kernels = self._num_warmups, None, None
        if self._kernel_class is not None:
            kind = (entry.mode, entry.descriptor.uniform)
            # A decode step samples, so it launches other kernels than a mixed batch of its size.
            kernels = (*kind, self._kernel_class(entry))
            num_warmups = 0 if kernels in self._seen else num_warmups
        callables = forward, warm_up, prepare
        if kind not in self._seen:
            self._capture_entry(entry, *callables, num_warmups=num_warmups)
        else:
            try:
                with self.pool.backend.unguarded():
                    self._capture_entry(entry, *callables, num_warmups=num_warmups)
            except CaptureOutOfMemoryError:
                raise
            except CaptureError:
                # It differs from the others: try again with checks, if only for a better error.
                self._capture_entry(entry, *callables, num_warmups=self._num_warmups)
        if kind is not None:  # an entry that failed says nothing about others
            self._seen |= {kind, kernels}
        self._captured.append(range(before + 1, self.pool.serial + 1))

    def _capture_entry(
        self,
        entry: PlanEntry,
        forward: Callable[[Inputs], Output],
        warm_up: Callable[[Inputs], Output],
        prepare: Callable[[PlanEntry], PreparedBatch[Inputs]],
        *,
        num_warmups: int,
    ) -> None:
        scope, num_tokens = self.pool.backend.capture_scope, entry.descriptor.num_tokens
        batch = prepared(prepare, entry)
        copies = entry.mode is CUDAGraphMode.FULL and not batch.output_in_place
        needs_buffers = copies and not self._outputs.allocated
        if num_warmups or needs_buffers:
            with scope():
                for _ in range(max(num_warmups, 1)):
                    output = run_prepared(warm_up, batch, entry, CUDAGraphMode.NONE)
                if needs_buffers:
                    self._outputs.allocate(output, num_tokens)
            del output, batch  # free their memory before the capture allocates
            batch = prepared(prepare, entry)
        if entry.mode is CUDAGraphMode.PIECEWISE:
            with scope():
                run_prepared(forward, batch, entry, CUDAGraphMode.PIECEWISE)
            return

        def full_forward() -> Any:
            output = run_prepared(forward, batch, entry, CUDAGraphMode.FULL)
            return self._outputs.copy_in(output, num_tokens) if copies else output

        captured = self.pool.capture(full_forward)
        # Weak, so that other graphs may use the memory; it is read before the next replay.
        output = self.pool.weak(captured.output)
        autocast = autocast_dtype(self._device_type)
        graph = FullGraph(tape=captured.tape, output=output, autocast=autocast)
        self._graphs[entry.descriptor] = graph

    # --- replay --------------------------------------------------------------------------------

    def full_graph(self, descriptor: BatchDescriptor) -> FullGraph:
        """The FULL graph of ``descriptor``, for callers that replay it repeatedly themselves."""
        if self.pool.closed:
            raise ClosedError(f"cannot replay {descriptor}: the graph pool is closed")
        graph = self._graphs.get(descriptor)
        if graph is None:
            raise BatchError(
                f"no FULL graph was captured for {descriptor}; pass a descriptor from dispatch()"
            )
        return graph

    def run_fullgraph(
        self, descriptor: BatchDescriptor | int, num_tokens: int | None = None
    ) -> Output:
        """Replay a FULL graph; return views of the first ``num_tokens`` output rows (None: all).

        ``descriptor`` may be the padded number of tokens, if only one graph has it.
        """
        key = self._key_of(descriptor) if isinstance(descriptor, int) else descriptor
        rows = key.num_tokens if num_tokens is None else num_tokens
        if not 1 <= rows <= key.num_tokens:
            BatchRun.check_rows(rows, key.num_tokens)
        graph = self.full_graph(key)
        if is_autocast_enabled(self._device_type) or graph.autocast is not None:
            check_autocast(graph.autocast, self._device_type)
        self.pool.replay(graph.tape)
        output: Any = (
            self._outputs.views(rows)
            if graph.output is None
            else without_padding(graph.output, key.num_tokens, rows)
        )
        return cast(Output, output)

    def run(
        self,
        forward: Callable[[Inputs], Output],
        batch: PreparedBatch[Inputs],
        choice: Choice,
        num_tokens: int,
    ) -> Output:
        """Run a ``batch`` as ``choice`` says: by its FULL graph, or ``forward`` under its context.

        Returns the first ``num_tokens`` rows. A batch that ``verify`` picks runs both ways.
        """
        entry = PlanEntry(mode=choice.mode, descriptor=choice.descriptor)
        run = BatchRun(forward=forward, entry=entry, batch=batch, num_tokens=num_tokens)
        if self._shadow is not None and self._shadow.takes(entry):
            return cast(Output, self._shadow.run(self._both_ways(run)))
        return self._run(run)

    def _run(self, run: BatchRun) -> Output:
        if run.is_full:
            return self.run_fullgraph(run.entry.descriptor, run.num_tokens)
        return cast(Output, run.under(run.entry.mode))

    def _both_ways(self, run: BatchRun) -> BothWays:
        graph = self.full_graph(run.entry.descriptor) if run.is_full else None
        return BothWays(
            run=run,
            replay=partial(self._run, run),
            tape=run.tape if graph is None else graph.tape,
            buffers=self._outputs if graph is not None and graph.output is None else None,
        )

    @property
    def verification(self) -> VerifyReport:
        """What ``verify`` compared, and what differed; empty with "off"."""
        return VerifyReport() if self._shadow is None else self._shadow.report

    def _key_of(self, num_tokens: int) -> BatchDescriptor:
        keys = [key for key in self._graphs if key.num_tokens == num_tokens]
        if len(keys) != 1:
            sizes = sorted({key.num_tokens for key in self._graphs})
            found = f"{len(keys)} FULL graphs have" if keys else "no FULL graph has"
            raise BatchError(
                f"{found} {num_tokens} tokens; pass the descriptor that dispatch() chose "
                f"(captured sizes: {sizes})"
            )
        return keys[0]

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """Nodes of an entry's FULL graph: operators on the CPU, kernels and copies on CUDA."""
        graph = self._graphs.get(entry.descriptor)
        return None if graph is None else graph.tape.num_nodes

    # --- ownership -----------------------------------------------------------------------------

    def tapes(self) -> list[tuple[str, Tape]]:
        """The FULL graphs, by name."""
        return [(f"FULL, {key.describe()}", graph.tape) for key, graph in self._graphs.items()]

    def named_memory(self) -> Iterator[NamedMemory]:
        """The buffers that FULL graphs copy their outputs to."""
        for name, buffer in self._outputs.named_tensors():
            yield NamedMemory(MemoryKind.OUTPUT, name, buffer)

    def ledger(self, owners: Mapping[str, Any] | NamesMemory) -> Ledger:
        """The ledger of all graphs in its pool. ``owners``: what the forward uses, by name."""
        return pool_ledger(self.pool, owners)

    def discard(self, serials: range) -> None:
        """Drop the FULL graphs whose tapes have these ``serials``."""
        for descriptor, graph in list(self._graphs.items()):
            if graph.tape.serial in serials:
                self._graphs.pop(descriptor).tape.close()

    def clear_graphs(self) -> None:
        """Drop all graphs of the plan, wrappers' included; batches run eagerly until recaptured."""
        try:
            close_each(partial(self.pool.discard, serials) for serials in self._captured)
        finally:
            self._captured.clear()
            self._outputs.clear()
            self.dispatcher.reset()
