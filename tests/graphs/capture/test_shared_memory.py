"""Graphs of a pool share memory: what would read or write the wrong bytes is refused or handled."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    compilation_counter,
    eager_break,
    graphed,
    set_forward_context,
)
from ostinato.errors import CaptureError, ConcurrentUseError, ReplayMismatchError
from ostinato.graphs.capture.segments import is_recording
from ostinato.graphs.prepared_batch import PreparedBatch
from ostinato.graphs.tree import map_tensors

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
KEY = BatchDescriptor(4)


# --- the pieces of one forward ------------------------------------------------------------------


class ThreePieces:
    """a = x + 1; b = 4a + 1; a + b: the last piece reads the first one's result."""

    def __init__(self, pool: GraphPool) -> None:
        self.broken: Exception | type[BaseException] | None = None
        functions = (lambda x: x + 1, self._middle, lambda a, b: a + b)
        self.pieces = [CUDAGraphWrapper(f, PIECEWISE, pool=pool) for f in functions]

    def _middle(self, a: torch.Tensor) -> torch.Tensor:
        b = a * 4
        if self.broken is not None and is_recording():
            raise self.broken
        return b + 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.pieces
        a = first(x)
        return third(a, second(a))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        with set_forward_context(PIECEWISE, KEY):
            return self(x)


def test_a_forward_whose_middle_failed_is_captured_anew_as_a_whole(pool: GraphPool) -> None:
    forward, x = ThreePieces(pool), torch.ones(64, device=pool.device)
    forward.broken = ValueError("once")
    with pytest.raises(ValueError, match="once"):
        forward.run(x)
    assert all(not piece.concrete_cudagraph_entries for piece in forward.pieces)
    forward.broken = None
    for _ in range(3):
        assert torch.equal(forward.run(x), torch.full_like(x, 11))


def test_capturing_after_a_replay_in_one_forward_is_refused(pool: GraphPool) -> None:
    forward, x = ThreePieces(pool), torch.ones(64, device=pool.device)
    forward.run(x)
    forward.pieces[1].clear_graphs()
    forward.pieces[2].clear_graphs()
    with pytest.raises(CaptureError, match="must be captured together"):
        forward.run(x)
    for piece in forward.pieces:
        piece.clear_graphs()
    for _ in range(2):
        assert torch.equal(forward.run(x), torch.full_like(x, 11))


def make_manager(pool: GraphPool, mode: CUDAGraphMode, forward, sizes=(4,), **options):
    plan = CapturePlan.build(mode, sizes, max_num_seqs=8, max_num_batched_tokens=8)
    manager = CudaGraphManager(plan, pool, show_progress=False, **options)
    buffer = torch.ones(8, 16, device=pool.device)

    def prepare(entry):
        return PreparedBatch(inputs=buffer[: entry.descriptor.num_tokens])

    return manager, lambda: manager.capture(forward, prepare), buffer


def test_an_interrupted_start_up_can_be_repeated(pool: GraphPool) -> None:
    forward = ThreePieces(pool)
    _, capture, x = make_manager(pool, PIECEWISE, forward)
    forward.broken = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        capture()
    assert all(not piece.concrete_cudagraph_entries for piece in forward.pieces)
    forward.broken = None
    capture()
    assert torch.equal(forward.run(x[:4]), torch.full_like(x[:4], 11))


def test_a_manager_can_be_cleared_and_captured_again(pool: GraphPool) -> None:
    forward = ThreePieces(pool)
    manager, capture, x = make_manager(pool, CUDAGraphMode.FULL_AND_PIECEWISE, forward)
    for _ in range(2):
        with compilation_counter.expect(num_cudagraph_captured=4):
            capture()
        assert torch.equal(forward.run(x[:4]), torch.full_like(x[:4], 11))
        manager.clear_graphs()
        assert all(not piece.concrete_cudagraph_entries for piece in forward.pieces)


def test_a_failure_leaves_other_owners_of_the_pool_alone(pool: GraphPool) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 2:
            x.sum().item()
        return x * 3

    good = graphed(lambda x: x * 2, sizes=[2, 4], pool=pool)
    bad = graphed(picky, sizes=[2, 4], pool=pool, eager_fallback=True)
    x = torch.randn(2, device=pool.device)
    good(x)
    assert torch.equal(bad(x), x * 3)
    assert torch.equal(good(x), x * 2)
    assert good.stats().graphs == 2
    assert bad.stats().graphs == 1


def test_failed_captures_are_not_counted(pool: GraphPool) -> None:
    broken = eager_break(lambda x: x * 2)
    wrapper = CUDAGraphWrapper(
        lambda x: broken(x + 1).sum().item(), PIECEWISE, pool=pool, split_at_breaks=True
    )
    with (
        set_forward_context(PIECEWISE, KEY),
        compilation_counter.expect(num_cudagraph_captured=0),
        pytest.raises(CaptureError),
    ):
        wrapper(torch.ones(4, device=pool.device))


# --- arguments ----------------------------------------------------------------------------------


def test_results_of_one_graph_as_arguments_of_another(pool: GraphPool) -> None:
    first = graphed(lambda x: x + 1, sizes=[4], pool=pool)
    second = graphed(lambda x: x * 2, sizes=[4], pool=pool)
    x = torch.ones(4, device=pool.device)
    for _ in range(3):
        assert torch.equal(second(first(x)), torch.full_like(x, 4))


def test_lazily_captured_on_its_own_result(device: torch.device) -> None:
    with graphed(lambda x: x * 3 + 1, sizes=[1, 4], lazy=True) as fast:
        y = fast(torch.ones(4, device=device))
        assert fast(y[1:2]).tolist() == [13.0]


def test_lazy_captures_between_replays_in_one_context(device: torch.device) -> None:
    with graphed(lambda x: x * 3, sizes=[1, 2, 4], lazy=True) as fast, set_forward_context():
        for rows in (4, 4, 1, 2, 1):
            assert fast(torch.ones(rows, device=device)).tolist() == [3.0] * rows


def test_captures_run_on_padding_only(device: torch.device) -> None:
    cache = torch.zeros(9, device=device)  # the last row takes what padding writes

    def add(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.index_add_(0, slots, x)
        return x

    options = {"batch_dims": {"cache": "static"}, "padding": {"slots": 8}, "lazy": True}
    with graphed(add, sizes=[1, 4], **options) as fast:
        for rows in (4, 1):
            fast(torch.ones(rows, device=device), torch.arange(rows, device=device), cache)
        assert cache[:4].tolist() == [2.0, 1.0, 1.0, 1.0]


def test_padding_survives_a_graph_that_writes_to_it(device: torch.device) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        result = x.sum(0).expand(x.shape[0]).clone()
        x.add_(1)
        return result

    with graphed(total, sizes=[4], padding={"x": 0}) as fast:
        for _ in range(3):
            assert fast(torch.ones(2, device=device)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("opaque", [SimpleNamespace(scale=2), {1, 2}, bytearray(b"x")])
def test_arguments_with_hidden_contents_are_refused(pool: GraphPool, opaque: object) -> None:
    x = torch.ones(4, device=pool.device)
    wrapper = CUDAGraphWrapper(lambda x, extra: x * 2, FULL, pool=pool)
    with (
        set_forward_context(FULL, KEY),
        pytest.raises(CaptureError, match=f"'extra' is a {type(opaque).__name__}, whose contents"),
    ):
        wrapper(x, opaque)
    with pytest.raises(CaptureError, match="'extra' is a"):
        graphed(lambda x, extra: x * 2, sizes=[4])(x, opaque)


def test_conjugated_arguments_are_told_apart(pool: GraphPool) -> None:
    x = torch.tensor([1 + 2j], device=pool.device)
    wrapper = CUDAGraphWrapper(lambda x: x * 1, FULL, pool=pool)
    with set_forward_context(FULL, KEY):
        wrapper(x)
        with pytest.raises(ReplayMismatchError, match="conjugated True"):
            wrapper(x.conj())


# --- results ------------------------------------------------------------------------------------


def test_changing_a_result_container_does_not_change_later_results(pool: GraphPool) -> None:
    x = torch.ones(4, device=pool.device)
    wrapper = CUDAGraphWrapper(lambda x: {"a": [x * 2]}, FULL, pool=pool)
    fast = graphed(lambda x: {"a": [x * 2]}, sizes=[4], pool=pool)
    fast(x)
    with set_forward_context(FULL, KEY):
        wrapper(x)
        for run in (wrapper, fast):
            run(x)["a"].append("junk")
            assert len(run(x)["a"]) == 1


@dataclass
class Output(OrderedDict):
    """A dataclass that is a mapping too, as the outputs of transformers' models are."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_results_that_are_dataclass_and_mapping(device: torch.device) -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, Output(torch.zeros(1)))
    assert mapped.logits.item() == mapped["logits"].item() == 1
    with graphed(lambda x: Output(x * 2), sizes=[4]) as fast:
        result = fast(torch.ones(2, device=device))
        assert result["logits"].shape == result.logits.shape == (2,)


# --- eager breaks -------------------------------------------------------------------------------


def run_twice(function, pool: GraphPool) -> torch.Tensor:
    wrapper = CUDAGraphWrapper(function, PIECEWISE, pool=pool, split_at_breaks=True)
    x = torch.ones(4, 2, device=pool.device)
    with set_forward_context(PIECEWISE, KEY):
        wrapper(x)
        state["later"] = True
        return wrapper(x.fill_(2))


state = {"later": False}
CHANGING = {
    "argument_or_new": lambda x: x * 10 if state["later"] else x,
    "another_view": lambda x: x[:, int(state["later"])],
    "host_value": lambda x: (x, x.max().item()),
    "structure": lambda x: (x, x) if state["later"] else x,
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_break_that_returns_something_else_is_noticed(pool: GraphPool, name: str) -> None:
    state["later"] = False
    broken = eager_break(CHANGING[name])

    def function(x: torch.Tensor) -> torch.Tensor:
        result = broken(x + 1)
        return (result[0] if isinstance(result, tuple) else result) * 1

    with pytest.raises(ReplayMismatchError, match="eager break"):
        run_twice(function, pool)


def test_another_graph_of_the_pool_inside_a_break_is_refused(pool: GraphPool) -> None:
    inner = graphed(lambda x: x * 4 + 1, sizes=[4], pool=pool)
    broken = eager_break(lambda x: inner(x).clone())
    outer = graphed(lambda x: x + broken(x), sizes=[4], mode="piecewise", pool=pool)
    with pytest.raises(CaptureError, match="a separate pool"):
        outer(torch.ones(4, device=pool.device))


def test_a_graph_of_another_pool_inside_a_break(pool: GraphPool) -> None:
    inner = graphed(lambda x: x * 4 + 1, sizes=[4])
    broken = eager_break(lambda x: inner(x).clone())
    outer = graphed(lambda x: x + broken(x), sizes=[4], mode="piecewise", pool=pool)
    for _ in range(3):
        assert outer(torch.full((4,), 2.0, device=pool.device)).tolist() == [11.0] * 4


def test_breaks_build_no_autograd_graph(pool: GraphPool) -> None:
    weight = torch.ones(4, device=pool.device, requires_grad=True)
    seen = []

    @eager_break
    def scale(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * weight)
        seen.append(out.requires_grad)

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scale(x, out)
        return out + 1

    run = CUDAGraphWrapper(function, PIECEWISE, pool=pool, split_at_breaks=True)
    with set_forward_context(PIECEWISE, KEY):
        x = torch.ones(4, device=pool.device)
        for _ in range(3):
            run(x)
    assert seen == [False] * 3


# --- threads and models -------------------------------------------------------------------------


def test_two_threads_on_the_first_call(device: torch.device) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go.wait(timeout=30)
        return x + 1

    x, results = torch.ones(2, device=device), []
    with graphed(slow, sizes=[2]) as fast:
        first = threading.Thread(target=lambda: results.append(fast(x).clone()))
        first.start()
        assert inside.wait(timeout=30)
        with pytest.raises(ConcurrentUseError):
            fast(x)
        go.set()
        first.join(timeout=30)
        assert torch.equal(results[0], x + 1)


def test_changing_the_model_keeps_the_graphs_up_to_date(device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).to(device)
    fast = graphed(model, sizes=[4])
    x = torch.ones(4, 2, device=device)
    fast(x)
    assert fast.eval() is fast
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        assert fast.double() is fast
        assert fast(x.double()).dtype is torch.float64


def test_garbage_is_left_alone_while_any_thread_captures() -> None:
    """Two captures that overlap: the end of one must not switch the collector on for the other."""
    inner_done, seen = threading.Event(), []

    def outer() -> None:
        with GraphPool("cpu") as pool, pool.capturing():
            started.set()
            inner_done.wait(30)
            seen.append(gc.isenabled())

    started = threading.Event()
    thread = threading.Thread(target=outer)
    thread.start()
    assert started.wait(30)
    with GraphPool("cpu") as pool, pool.capturing():
        assert not gc.isenabled()
    inner_done.set()
    thread.join()
    assert seen == [False]
    assert gc.isenabled()
