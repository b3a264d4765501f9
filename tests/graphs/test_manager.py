"""CudaGraphManager: captures a plan for a forward, and runs what dispatch chose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ostinato import (
    AttentionCGSupport,
    BatchDescriptor,
    BatchShape,
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    Reason,
    compilation_counter,
    eager_break,
    get_forward_context,
    resolve_mode,
    set_forward_context,
)
from ostinato.errors import BatchError, CaptureError, CaptureOutOfMemoryError, ConfigError
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.prepared_batch import PreparedBatch

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
WHOLE = CUDAGraphMode.FULL_AND_FULL
WIDTH = 8


@eager_break
def attention(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.cumsum(0))


class Decoder(nn.Module):
    """Layers with attention between them; ``aux`` returns every layer's output as well."""

    def __init__(self, layers: int = 2, *, aux: bool = False) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.aux = aux
        self.modes: list[CUDAGraphMode] = []

    def forward(self, x: torch.Tensor):
        self.modes.append(get_forward_context().cudagraph_runtime_mode)
        hidden = []
        for linear in self.linears:
            out = torch.empty_like(x)
            attention(torch.tanh(linear(x)), out)
            x = x + out
            hidden.append(x)
        return (x, hidden) if self.aux else x


class Engine:
    """The least that a runner has around a manager: buffers, a model, a plan."""

    def __init__(
        self,
        pool: GraphPool,
        mode: CUDAGraphMode,
        sizes: list[int],
        *,
        layers: int = 2,
        aux: bool = False,
        max_num_seqs: int = 16,
        query_len: int = 1,
        **options: object,
    ) -> None:
        self.model = Decoder(layers, aux=aux).to(pool.device).requires_grad_(False)
        self.piecewise = CUDAGraphWrapper(self.model, PIECEWISE, pool=pool, split_at_breaks=True)
        self.buffer = torch.zeros(128, WIDTH, device=pool.device)
        self.plan = CapturePlan.build(
            mode,
            sizes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=128,
            decode_query_lens=(query_len,),
        )
        self.manager: CudaGraphManager[torch.Tensor, Any] = CudaGraphManager(
            self.plan, pool, show_progress=False, **options
        )
        self.prepared: list[PlanEntry] = []

    def prepare(self, entry: PlanEntry) -> PreparedBatch[torch.Tensor]:
        self.prepared.append(entry)
        rows = entry.descriptor.num_tokens
        return PreparedBatch(inputs=self.buffer[:rows], attn_metadata=rows)

    def capture(self, forward: Callable | None = None):
        return self.manager.capture(forward or self.piecewise, self.prepare)

    def eager(self, rows: int):
        with set_forward_context(NONE):
            return self.model(self.buffer[:rows])


# --- capture ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "triggered", "graphs"),
    [(NONE, False, 0), (DECODE_ONLY, True, 1), (PIECEWISE, True, 13), (BOTH, True, 14)],
)
def test_graphs_of_a_twelve_layer_decoder(
    pool: GraphPool, mode: CUDAGraphMode, triggered: bool, graphs: int
) -> None:
    engine = Engine(pool, mode, [100], layers=12, max_num_seqs=128)
    assert engine.manager.needs_capture() is triggered
    with compilation_counter.expect(num_cudagraph_captured=graphs):
        report = engine.capture()
    assert report.num_graphs == graphs
    assert not engine.manager.needs_capture()


def test_two_attention_calls_and_two_sizes_capture_six_pieces(pool: GraphPool) -> None:
    engine = Engine(pool, PIECEWISE, [1, 2])
    with compilation_counter.expect(num_cudagraph_captured=6):
        engine.capture()


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE, BOTH, FULL])
def test_dispatch_has_its_tables_when_the_capture_ends(
    pool: GraphPool, mode: CUDAGraphMode
) -> None:
    engine = Engine(pool, mode, [1, 2, 4, 8, 16])
    engine.capture()

    def num_calls(shape: BatchShape) -> int:
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
        try:
            engine.manager.dispatch(shape)
        finally:
            sys.setprofile(None)
        return len(calls)

    # The first batch of all is answered by a look-up, as every other.
    first = num_calls(BatchShape(3, 3, 1))
    assert first == num_calls(BatchShape(3, 3, 1)) <= 4


def test_a_report_counts_the_graphs_of_its_own_pool(pool: GraphPool, device: torch.device) -> None:
    """What is captured meanwhile in other pools, as by an engine in another thread, is theirs."""
    engine, x = Engine(pool, PIECEWISE, [1, 2]), torch.ones(2, device=device)
    with GraphPool(device, lazy_capture=True) as other:

        def prepare(entry: PlanEntry) -> PreparedBatch[torch.Tensor]:
            other.capture(lambda: x * 2)
            return engine.prepare(entry)

        report = engine.manager.capture(engine.piecewise, prepare)
    assert [entry.num_graphs for entry in report.entries] == [3, 3]


def test_warm_ups_run_under_none_before_each_capture(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [4], num_warmups=2)
    engine.capture()
    assert engine.model.modes == [NONE, NONE, PIECEWISE, NONE, NONE, FULL]


def test_sizes_with_the_same_kernels_are_warmed_up_once_per_mode(pool: GraphPool) -> None:
    def kernels(entry: PlanEntry) -> bool:
        return entry.descriptor.num_tokens > 2

    engine = Engine(pool, BOTH, [1, 2, 3, 4], kernel_class=kernels)
    engine.capture()
    piecewise = [NONE, PIECEWISE, PIECEWISE]
    full = [NONE, FULL, FULL]
    assert engine.model.modes == [*piecewise, *piecewise, *full, *full]


def test_decode_graphs_have_other_kernels_than_mixed_graphs_of_their_size(pool: GraphPool) -> None:
    engine = Engine(pool, WHOLE, [1, 2], kernel_class=lambda entry: 0)
    engine.capture()
    assert engine.model.modes == [NONE, FULL, FULL] * 2


def test_of_a_kind_only_the_first_entry_is_watched(
    pool: GraphPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = []

    @contextmanager
    def unguarded() -> Iterator[None]:
        trusted.append(True)
        yield

    monkeypatch.setattr(pool.backend, "unguarded", unguarded)
    entries = 8  # four sizes in two modes
    Engine(pool, BOTH, [1, 2, 3, 4]).capture()
    assert not trusted, "nothing is known of the forward"
    Engine(pool, BOTH, [1, 2, 3, 4], kernel_class=lambda entry: entry.descriptor).capture()
    assert len(trusted) == entries - 2


def test_a_first_entry_that_failed_does_not_speak_for_others(
    pool: GraphPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []
    unguarded = pool.backend.unguarded

    @contextmanager
    def trusted() -> Iterator[None]:
        watched.append(-1)
        with unguarded():
            yield

    monkeypatch.setattr(pool.backend, "unguarded", trusted)
    engine = Engine(pool, PIECEWISE, [1, 2, 3], kernel_class=lambda entry: 0, eager_fallback=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise CaptureOutOfMemoryError("the largest does not fit")
        return engine.piecewise(x)

    report = engine.capture(forward)
    assert [entry.error is None for entry in report.entries] == [False, True, True]
    assert engine.model.modes == [NONE, PIECEWISE, PIECEWISE], "size 2 is warmed up, 1 is like it"
    assert watched == [-1], "so is size 1 alone not watched"


def test_a_size_that_turns_out_different_is_captured_with_all_care(pool: GraphPool) -> None:
    engine = Engine(pool, PIECEWISE, [1, 2], kernel_class=lambda entry: 0)
    failures = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        mode = get_forward_context().cudagraph_runtime_mode
        if len(x) == 1 and mode is PIECEWISE and not failures:
            failures.append(mode)
            raise CaptureError("needs a warm-up")
        return engine.piecewise(x)

    report = engine.capture(forward)
    assert [entry.error for entry in report.entries] == [None, None]
    assert failures
    assert engine.model.modes == [NONE, PIECEWISE, NONE, PIECEWISE]


def test_entries_are_captured_in_plan_order(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [1, 4, 2])
    report = engine.capture()
    assert list(dict.fromkeys(engine.prepared)) == list(engine.plan.entries)
    assert [entry.entry for entry in report.entries] == list(engine.plan.entries)
    assert report.seconds > 0


def test_metadata_reaches_the_forward(pool: GraphPool) -> None:
    seen = []
    engine = Engine(pool, DECODE_ONLY, [2, 4])

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(get_forward_context().attn_metadata)
        return engine.model(x)

    engine.capture(forward)
    assert seen == [4, 4, 2, 2]


def test_capturing_again_does_nothing(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [2])
    engine.capture()
    with compilation_counter.expect(num_cudagraph_captured=0):
        assert engine.capture().entries == []


def test_a_forward_without_pieces_is_an_error_at_start_up(pool: GraphPool) -> None:
    engine = Engine(pool, PIECEWISE, [2])
    with pytest.raises(CaptureError, match="nothing in it is wrapped for PIECEWISE"):
        engine.capture(engine.model)


# --- dispatch -----------------------------------------------------------------------------------


def test_dispatch_before_capture_is_eager(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [4])
    choice = engine.manager.dispatch(BatchShape(3, 3, 1))
    assert (choice.mode, choice.reason) == (NONE, Reason.NOT_CAPTURED)
    assert engine.manager.get_cudagraph_size(3) is None
    assert engine.manager.get_cudagraph_runtime_mode(3, 3, 1) == (NONE, None)


def test_sizes_and_modes_after_capture(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [2, 4, 64], query_len=1)
    engine.capture()
    manager = engine.manager
    assert manager.get_cudagraph_size(3, uniform_decode=True) == 4
    assert manager.get_cudagraph_size(3) == 4
    assert manager.get_cudagraph_size(65) is None
    assert manager.get_cudagraph_runtime_mode(3, 3, 1) == (FULL, 4)
    assert manager.get_cudagraph_runtime_mode(2, 3, 2) == (PIECEWISE, 4)
    # More requests than max_num_seqs allows a decode graph for, but the pieces still fit.
    assert manager.get_cudagraph_runtime_mode(16, 16, 1) == (PIECEWISE, 64)


@pytest.mark.parametrize("query_len", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH])
def test_any_number_of_tokens_has_an_answer(
    pool: GraphPool, mode: CUDAGraphMode, query_len: int
) -> None:
    """A uniform batch has as many whole requests as hold the tokens, even too many for the plan."""
    engine = Engine(pool, mode, [2, 4, 9], query_len=query_len, max_num_seqs=3)
    for entry in engine.plan.entries:
        engine.manager.dispatcher.mark_captured(entry)
    mixed = [] if mode in (NONE, DECODE_ONLY) else [2, 4, 9]
    decode = engine.plan.decode_sizes_for(query_len) if mode in (DECODE_ONLY, BOTH) else ()
    for num_tokens in range(1, 40):
        whole = -(-num_tokens // query_len) * query_len
        own = [size for size in decode if size >= whole]
        shared = [size for size in mixed if size >= whole]
        expected = min(own, default=min(shared, default=None))
        assert engine.manager.get_cudagraph_size(num_tokens, uniform_decode=True) == expected
        expected = min((size for size in mixed if size >= num_tokens), default=None)
        assert engine.manager.get_cudagraph_size(num_tokens) == expected


@pytest.mark.parametrize("uniform_decode", [False, True])
@pytest.mark.parametrize("num_tokens", [0, -1, 2.0, True, None, "3"])
def test_what_is_no_number_of_tokens_is_refused(
    pool: GraphPool, num_tokens: object, uniform_decode: bool
) -> None:
    engine = Engine(pool, BOTH, [4])
    with pytest.raises(BatchError, match=rf"must be a positive integer, got {num_tokens!r}"):
        engine.manager.get_cudagraph_size(num_tokens, uniform_decode)


def test_chunks_of_prompts_have_no_decode_graph(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [4])
    engine.capture()
    assert engine.manager.get_cudagraph_runtime_mode(3, 3, 1) == (FULL, 4)
    chunks = engine.manager.get_cudagraph_runtime_mode(3, 3, 1, has_prompts=True)
    assert chunks == (PIECEWISE, 4)


# --- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [FULL, DECODE_ONLY, BOTH])
def test_full_graph_equals_eager_on_padded_inputs(pool: GraphPool, mode: CUDAGraphMode) -> None:
    engine = Engine(pool, mode, [2, 4, 8])
    engine.capture()
    for rows in (1, 2, 3, 5, 8):
        engine.buffer.fill_(float("nan"))  # poison: padding must not reach real rows
        engine.buffer[:rows].normal_()
        choice = engine.manager.dispatch(BatchShape(rows, rows, 1))
        assert choice.mode is FULL
        expected = engine.eager(choice.padded_num_tokens)[:rows]
        output = engine.manager.run_fullgraph(choice.descriptor, rows)
        assert output.shape == (rows, WIDTH)
        assert torch.equal(output, expected)
        assert not output.isnan().any()


def test_piecewise_equals_eager_on_padded_inputs(pool: GraphPool) -> None:
    engine = Engine(pool, PIECEWISE, [2, 4, 8])
    engine.capture()
    for rows in (1, 3, 8):
        engine.buffer.normal_()
        choice = engine.manager.dispatch(BatchShape(rows, 1, rows))
        with set_forward_context(choice.mode, choice.descriptor):
            output = engine.piecewise(engine.buffer[: choice.padded_num_tokens])
        assert torch.equal(output, engine.eager(choice.padded_num_tokens))


def test_auxiliary_hidden_states(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4], aux=True)
    engine.capture()
    engine.buffer.normal_()
    hidden, aux = engine.manager.run_fullgraph(BatchDescriptor(4, num_reqs=4, uniform=True), 3)
    expected, expected_aux = engine.eager(4)
    assert torch.equal(hidden, expected[:3])
    assert len(aux) == 2
    assert all(torch.equal(a, b[:3]) for a, b in zip(aux, expected_aux, strict=True))


def test_outputs_stay_at_one_address_for_all_sizes(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4])
    engine.capture()
    keys = [BatchDescriptor(n, num_reqs=n, uniform=True) for n in (2, 4)]
    addresses = {engine.manager.run_fullgraph(key).data_ptr() for key in keys}
    assert len(addresses) == 1


def test_running_what_was_not_captured_says_so(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [4])
    key = BatchDescriptor(4, num_reqs=4, uniform=True)
    with pytest.raises(BatchError, match="no FULL graph was captured"):
        engine.manager.run_fullgraph(key)
    engine.capture()
    with pytest.raises(BatchError, match="5 rows were requested from a graph of 4"):
        engine.manager.run_fullgraph(key, 5)


def test_clear_graphs_makes_everything_eager_again(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [4])
    engine.capture()
    engine.manager.clear_graphs()
    assert engine.manager.needs_capture()
    assert engine.manager.dispatch(BatchShape(3, 3, 1)).reason is Reason.NOT_CAPTURED


# --- failures -----------------------------------------------------------------------------------


def failing_forward(engine: Engine, tokens: int, error: Exception) -> Callable:
    """Fails inside the capture of one size, having computed something first."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = engine.piecewise(x)
        if x.shape[0] == tokens and get_forward_context().cudagraph_runtime_mode is not NONE:
            raise error
        return y

    return forward


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE, BOTH])
@pytest.mark.parametrize("failing", [8, 4, 2])
def test_a_failure_leaves_the_entries_before_it_usable(
    pool: GraphPool, mode: CUDAGraphMode, failing: int
) -> None:
    engine = Engine(pool, mode, [2, 4, 8])
    forward = failing_forward(engine, failing, ValueError("broken weights"))
    with pytest.raises(CaptureError, match=rf"num_tokens={failing}.*broken weights") as error:
        engine.capture(forward)
    assert isinstance(error.value.__cause__, ValueError)
    first_mode = engine.plan.entries[0].mode
    captured = {entry.descriptor.num_tokens for entry in engine.manager.dispatcher.captured}
    assert captured == {size for size in (8, 4, 2) if size > failing}
    for size in captured:
        engine.buffer.normal_()
        shape = BatchShape(size, size, 1) if first_mode is FULL else BatchShape(size, 1, size)
        choice = engine.manager.dispatch(shape)
        assert choice.mode is first_mode
    assert engine.manager.needs_capture()
    engine.capture()  # with the cause gone, the rest is captured
    assert not engine.manager.needs_capture()


def test_out_of_memory_names_the_entry_and_what_it_needed(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [2, 4])
    with pytest.raises(CaptureOutOfMemoryError, match=r"num_tokens=4.*9\.00 GiB"):
        engine.capture(failing_forward(engine, 4, OUT_OF_MEMORY))
    assert engine.manager.dispatcher.captured == frozenset()
    assert engine.piecewise.concrete_cudagraph_entries == {}


@pytest.mark.parametrize("error", [ValueError("broken"), OUT_OF_MEMORY])
def test_with_eager_fallback_the_walk_goes_on(pool: GraphPool, error: Exception) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4, 8], eager_fallback=True)
    report = engine.capture(failing_forward(engine, 4, error))
    assert [entry.error is None for entry in report.entries] == [True, False, True]
    assert not engine.manager.needs_capture()
    choice = engine.manager.dispatch(BatchShape(3, 3, 1))
    assert (choice.mode, choice.reason) == (NONE, Reason.CAPTURE_FAILED)
    assert engine.manager.dispatch(BatchShape(2, 2, 1)).mode is FULL


def test_a_failed_entry_gives_its_memory_back(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2])
    engine.capture()
    before = pool.num_bytes
    big = Engine(pool, DECODE_ONLY, [16])

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = big.model(x)
        if get_forward_context().cudagraph_runtime_mode is FULL:
            parts = [torch.ones(1 << 20, device=pool.device) for _ in range(4)]
            raise ValueError(f"{len(parts)} parts")
        return y

    with pytest.raises(CaptureError, match="4 parts"):
        big.capture(forward)
    if pool.device.type == "cpu":  # torch frees CUDA pool memory only with the whole pool
        assert pool.num_bytes == before


def test_full_with_attention_that_is_never_capturable_is_refused() -> None:
    with pytest.raises(ConfigError, match="NEVER"):
        resolve_mode(FULL, AttentionCGSupport.NEVER, piecewise_available=True)


# --- weight offload -----------------------------------------------------------------------------


class CallLog:
    """Stands in for a weight offloader: writes down when it was asked for what."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sync_prev_onload(self) -> None:
        self.calls.append("sync")

    def join_after_forward(self) -> None:
        self.calls.append("join")


def test_offloader_is_synchronised_around_captures_and_replays(device: torch.device) -> None:
    log = CallLog()
    with GraphPool(device, lazy_capture=True, offloader=log) as pool:
        engine = Engine(pool, DECODE_ONLY, [4])

        def forward(x: torch.Tensor) -> torch.Tensor:
            log.calls.append(get_forward_context().cudagraph_runtime_mode.name)
            return engine.model(x)

        engine.capture(forward)
        assert log.calls == ["NONE", "sync", "FULL", "join"]
        log.calls.clear()
        engine.manager.run_fullgraph(BatchDescriptor(4, num_reqs=4, uniform=True))
        assert log.calls == ["sync"]


def test_one_entry_is_captured_by_itself(pool: GraphPool) -> None:
    engine = Engine(pool, CUDAGraphMode.FULL_DECODE_ONLY, [1, 2, 4])
    small, middle = sorted(engine.plan.entries, key=lambda entry: entry.descriptor.num_tokens)[:2]
    report = engine.manager.capture_graph(middle, engine.piecewise, engine.prepare)
    assert [each.entry for each in report.entries] == [middle]
    assert engine.manager.get_cudagraph_size(1, uniform_decode=True) is None
    assert engine.manager.get_cudagraph_size(2, uniform_decode=True) == 2
    again = engine.manager.capture_graph(middle, engine.piecewise, engine.prepare)
    assert again.entries == []
    assert engine.manager.needs_capture()
    engine.capture()
    assert engine.manager.get_cudagraph_size(1, uniform_decode=True) == 1
    assert not engine.manager.needs_capture()
    odd = replace(small, descriptor=BatchDescriptor(3, num_reqs=3, uniform=True))
    with pytest.raises(CaptureError, match=r"not in the plan, so dispatch can never choose it"):
        engine.manager.capture_graph(odd, engine.piecewise, engine.prepare)


def test_a_full_graph_is_run_by_its_number_of_tokens(pool: GraphPool) -> None:
    engine = Engine(pool, CUDAGraphMode.FULL_DECODE_ONLY, [2, 4])
    engine.capture()
    engine.buffer.copy_(torch.randn(128, WIDTH))
    expected = engine.eager(4)
    torch.testing.assert_close(engine.manager.run_fullgraph(4), expected)
    torch.testing.assert_close(engine.manager.run_fullgraph(4, 3), expected[:3])
    with pytest.raises(BatchError, match=r"no FULL graph has 3 tokens.*captured sizes: \[2, 4\]"):
        engine.manager.run_fullgraph(3)
