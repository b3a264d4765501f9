"""Walking a plan: how a failed capture is named, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import (
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    GraphPool,
    get_forward_context,
)
from ostinato.errors import CaptureError, CaptureOutOfMemoryError
from ostinato.graphs.capture.capture_loop import CaptureLoop, CaptureReport
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.prepared_batch import PreparedBatch


def walk(
    pool: GraphPool,
    capture: Callable[[PlanEntry], None],
    *,
    eager_fallback: bool = False,
    **options: Callable[[PlanEntry], str],
) -> CaptureReport:
    plan = CapturePlan.build(CUDAGraphMode.FULL, [4], max_num_seqs=8, max_num_batched_tokens=8)
    loop = CaptureLoop(
        pool,
        Dispatcher(plan),
        eager_fallback=eager_fallback,
        show_progress=False,
        name="model",
        **options,
    )
    with loop:
        for entry in loop.over(plan.entries):
            try:
                capture(entry)
            except BaseException as error:
                loop.failed(entry, error)
            else:
                loop.succeeded(entry)
    return loop.report


def raising(error: Exception) -> Callable[[PlanEntry], None]:
    def capture(entry: PlanEntry) -> None:
        raise error

    return capture


def test_an_error_that_is_its_own_cause(pool: GraphPool) -> None:
    error = ValueError("mine")
    error.__cause__ = error  # as `raise error from error` leaves it
    with pytest.raises(CaptureError, match="failed: ValueError: mine"):
        walk(pool, raising(error))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("broken weights"), "failed: ValueError: broken weights"),
        (KeyError("q_proj"), "failed: KeyError: 'q_proj'"),
        (AssertionError(), "failed: AssertionError"),
        (CaptureError("no such thing"), "failed: no such thing"),
    ],
)
def test_a_failure_names_the_type_of_an_error_that_is_not_ours(
    pool: GraphPool, error: Exception, text: str
) -> None:
    with pytest.raises(CaptureError) as raised:
        walk(pool, raising(error))
    descriptor = (
        "BatchDescriptor(num_tokens=4, num_reqs=4, uniform=False, has_lora=False, "
        "num_active_loras=0, query_len=None)"
    )
    assert str(raised.value) == f"capturing {descriptor} (mixed, FULL) {text}"


def test_an_entry_is_named_in_the_callers_words(pool: GraphPool) -> None:
    with pytest.raises(CaptureError, match=r"^capturing size 4 failed: ValueError: broken"):
        walk(
            pool,
            raising(ValueError("broken")),
            describe=lambda entry: f"size {entry.descriptor.num_tokens}",
        )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("no room"),
        CaptureOutOfMemoryError("no room"),
    ],
)
def test_out_of_memory_says_what_to_do(pool: GraphPool, error: Exception) -> None:
    with pytest.raises(CaptureOutOfMemoryError, match=r"no room\. .*capture smaller sizes"):
        walk(pool, raising(error))


def test_with_eager_fallback_the_report_has_the_text(pool: GraphPool) -> None:
    report = walk(pool, raising(ValueError("broken")), eager_fallback=True)
    assert report.entries[0].error is not None
    assert report.entries[0].error.endswith("failed: ValueError: broken")
    assert report.num_graphs == 0


def test_an_interrupt_passes_as_it_is_and_leaves_no_graph(pool: GraphPool) -> None:
    plan = CapturePlan.build(CUDAGraphMode.FULL, [4], max_num_seqs=8, max_num_batched_tokens=8)
    manager: CudaGraphManager[torch.Tensor, Any] = CudaGraphManager(plan, pool, show_progress=False)
    x = torch.ones(4, 2, device=pool.device)
    interrupted = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return x + 1

    with pytest.raises(KeyboardInterrupt):
        manager.capture(forward, lambda entry: PreparedBatch(inputs=x))
    assert manager.needs_capture()
    manager.capture(forward, lambda entry: PreparedBatch(inputs=x))
    assert not manager.needs_capture()


def test_operator_and_source_of_the_failure_are_kept(pool: GraphPool) -> None:
    error = CaptureError("refused", operator="aten::item", source="model.py:3")
    with pytest.raises(CaptureError) as raised:
        walk(pool, raising(error))
    assert (raised.value.operator, raised.value.source) == ("aten::item", "model.py:3")


@pytest.mark.parametrize(("rank", "shown"), [(None, True), (0, True), (1, False)])
def test_progress_names_the_model_and_the_phase_on_the_first_rank_only(
    pool: GraphPool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    shown: bool,
) -> None:
    if rank is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    plan = CapturePlan.build(mode, [2, 4], max_num_seqs=4, max_num_batched_tokens=8)
    x = torch.ones(4, 2, device=pool.device)
    for show_progress in (True, False):
        manager: CudaGraphManager[torch.Tensor, Any] = CudaGraphManager(
            plan, pool, show_progress=show_progress, name="base model"
        )
        manager.capture(
            lambda x: x + 1,
            lambda entry: PreparedBatch(inputs=x[: entry.descriptor.num_tokens]),
        )
        bar = capsys.readouterr().err
        assert ("base model: decode, FULL" in bar) == ("2/2" in bar) == (shown and show_progress)
