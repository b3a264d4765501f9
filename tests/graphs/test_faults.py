"""Things that go wrong, on purpose: each raises a named error and leaves everything usable."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from interrupts import thread_state

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    eager_break,
    graphed,
    set_forward_context,
)
from ostinato.errors import (
    BatchError,
    CaptureError,
    CaptureOutOfMemoryError,
    ClosedError,
    ConcurrentUseError,
    ConfigError,
    ReplayMismatchError,
)
from ostinato.graphs.capture.segments import is_recording

FULL = CUDAGraphMode.FULL
KEY = BatchDescriptor(4)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# --- a capture that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("failing", [8, 4, 1])
def test_first_middle_and_last_size_may_fail(device: torch.device, failing: int) -> None:
    """Sizes are captured 8, 4, 2, 1; the rest is captured when it is needed and works."""

    def fragile(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if broken and is_recording() and x.shape[0] == failing:
            raise ValueError("broken weights")
        return y

    broken = True
    with graphed(fragile, sizes=[1, 2, 4, 8], check_state_every=0) as fast:
        x = torch.randn(3, device=device)
        with pytest.raises(
            CaptureError, match=rf"capturing size {failing} failed: ValueError: broken weights"
        ):
            fast(x)
        assert fast.stats().graphs == sum(size > failing for size in (8, 4, 2, 1))
        broken = False
        assert torch.equal(fast(x), x * 2)
        one_of_it = torch.randn(failing, device=device)  # needs the size that failed
        assert torch.equal(fast(one_of_it), one_of_it * 2)
        assert fast.stats().graphs == 4


def test_eager_fallback_runs_the_failed_size_eagerly(device: torch.device) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            x.sum().item()
        return x * 2

    with graphed(picky, sizes=[2, 4, 8], eager_fallback=True) as fast:
        for rows in (3, 2, 7):
            x = torch.randn(rows, device=device)
            assert torch.equal(fast(x), x * 2)
        stats = fast.stats()
    assert (stats.graphs, stats.hits) == (2, 2)
    assert stats.eager_calls == {
        "the capture of this size failed and eager fallback was allowed": 1
    }


def test_illegal_operator_is_named_with_its_line(device: torch.device) -> None:
    def reads_back(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    fast = graphed(reads_back, sizes=[2])
    with pytest.raises(CaptureError, match="reads a value back to the host") as error:
        fast(torch.ones(2, device=device))
    assert error.value.operator == "aten._local_scalar_dense.default"
    assert "test_faults.py" in str(error.value.source)
    assert "return x * x.sum().item()" in str(error.value.source)
    assert torch.rand(4, device=device).max() < 1  # generator and stream are as before


def test_injected_out_of_memory(pool: GraphPool) -> None:
    def too_big(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + torch.zeros(1 << 48, dtype=torch.uint8, device=x.device)[0]

    wrapper = CUDAGraphWrapper(too_big, FULL, pool=pool)
    x = torch.ones(4, device=pool.device)
    with set_forward_context(FULL, KEY):
        for _ in range(2):
            with pytest.raises(CaptureOutOfMemoryError, match="out of memory during a capture"):
                wrapper(x)
        assert not wrapper.concrete_cudagraph_entries
        good = CUDAGraphWrapper(double, FULL, pool=pool)
        good(x)
        assert torch.equal(good(x), x * 2)


# --- nesting ------------------------------------------------------------------------------------


def test_capture_inside_a_capture(pool: GraphPool) -> None:
    inner = CUDAGraphWrapper(double, FULL, pool=pool)
    outer = CUDAGraphWrapper(lambda x: inner(x + 1), FULL, pool=pool)
    x = torch.randn(4, device=pool.device)
    with set_forward_context(FULL, KEY):
        with pytest.raises(CaptureError, match="inside another capture"):
            outer(x)
        assert not outer.concrete_cudagraph_entries
        assert not inner.concrete_cudagraph_entries
        inner(x)
        assert torch.equal(inner(x), x * 2)


def test_capture_in_another_pool_inside_a_capture(pool: GraphPool) -> None:
    with GraphPool(pool.device, lazy_capture=True) as other:
        inner = CUDAGraphWrapper(double, FULL, pool=other)
        outer = CUDAGraphWrapper(lambda x: inner(x + 1), FULL, pool=pool)
        with set_forward_context(FULL, KEY), pytest.raises(CaptureError, match="inside another"):
            outer(torch.ones(4, device=pool.device))


def test_replay_inside_a_capture(pool: GraphPool) -> None:
    inner = CUDAGraphWrapper(double, FULL, pool=pool)
    x = torch.randn(4, device=pool.device)
    outer = CUDAGraphWrapper(lambda x: inner(x) + 1, FULL, pool=pool)
    with set_forward_context(FULL, KEY):
        inner(x)
        with pytest.raises(CaptureError, match="replayed inside a capture"):
            outer(x)
        assert torch.equal(inner(x), x * 2)


def test_graphed_inside_a_capture(pool: GraphPool) -> None:
    inner = graphed(double, sizes=[4])
    outer = CUDAGraphWrapper(lambda x: inner(x), FULL, pool=pool)
    with set_forward_context(FULL, KEY), pytest.raises(CaptureError, match=r"unwrap\(\)"):
        outer(torch.ones(4, device=pool.device))


# --- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [-1, 1.5, "64M", None, True])
def test_bytes_to_reserve_are_checked(device: torch.device, num_bytes: object) -> None:
    with GraphPool(device) as pool:
        with pytest.raises(ConfigError, match=re.escape(repr(num_bytes))):
            pool.reserve(num_bytes)  # type: ignore[arg-type]
        pool.reserve(0)
        pool.reserve(1000)


def test_nothing_runs_after_close(device: torch.device) -> None:
    pool = GraphPool(device, lazy_capture=True)
    wrapper = CUDAGraphWrapper(double, FULL, pool=pool)
    x = torch.ones(4, device=device)
    with set_forward_context(FULL, KEY):
        wrapper(x)
        pool.close()
        pool.close()
        with pytest.raises(ClosedError, match=r"cannot run BatchDescriptor.*pool is closed"):
            wrapper(x)
    with pytest.raises(ClosedError, match="closed"), pool.capturing():
        pass
    with pytest.raises(ClosedError, match="closed"):
        pool.capture(lambda: x + 1)
    with pytest.raises(ClosedError, match="closed"):
        pool.reserve(1000)


def test_graphed_after_close(device: torch.device) -> None:
    fast = graphed(double, sizes=[4])
    fast(torch.ones(2, device=device))
    fast.close()
    fast.close()
    with pytest.raises(ClosedError, match=r"graphed\(\) again"):
        fast(torch.ones(2, device=device))
    assert fast.stats().hits == 1


def test_a_tape_of_dropped_graphs_cannot_be_replayed(pool: GraphPool) -> None:
    captured = pool.capture(lambda: torch.ones(2, device=pool.device) + 1)
    captured.tape.close()
    with pytest.raises(ReplayMismatchError, match="was closed"):
        pool.replay(captured.tape)


# --- threads ------------------------------------------------------------------------------------


def in_thread(run: Callable[[], object]) -> BaseException | None:
    """Run in a thread of its own; what it raised, if anything."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, name="other")
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_two_threads_in_one_pool(pool: GraphPool) -> None:
    """The second comes while the first is inside an eager break: no race, an error."""
    x = torch.randn(4, device=pool.device)
    errors: list[BaseException | None] = []

    @eager_break
    def meanwhile(y: torch.Tensor) -> torch.Tensor:
        errors.append(in_thread(lambda: fast(x)))
        return y

    fast = graphed(lambda x: meanwhile(x * 2) + 1, sizes=[4], mode="piecewise", pool=pool)
    for batch in (x, x + 1):
        assert torch.equal(fast(batch), batch * 2 + 1)
    errors.clear()
    assert torch.equal(fast(x), x * 2 + 1)
    assert len(errors) == 1
    assert isinstance(errors[0], ConcurrentUseError)
    assert "thread 'other'" in str(errors[0])
    assert in_thread(lambda: fast(x)) is None  # one after the other is fine


def test_threads_may_capture_at_the_same_time() -> None:
    """Each in its pool. They share torch's random generator, which captures advance."""
    x = torch.randn(2, 3)

    def meanwhile() -> None:
        with graphed(lambda x: x + 1, sizes=[2, 4]) as other:
            assert torch.equal(other(x), x + 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        result = x * 2
        assert in_thread(meanwhile) is None
        return result

    with graphed(function, sizes=[2]) as fast:
        assert torch.equal(fast(x), x * 2)


def test_contexts_of_threads_are_separate(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(double, FULL, pool=pool)
    x = torch.ones(4, device=pool.device)
    with set_forward_context(FULL, KEY):
        assert in_thread(lambda: wrapper(x)) is None
    assert not wrapper.concrete_cudagraph_entries  # the thread had no context, so it only called


# --- wrong devices ------------------------------------------------------------------------------


def test_a_pool_on_a_device_without_graphs() -> None:
    with pytest.raises(ConfigError, match="not on meta"):
        GraphPool("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        GraphPool("cuda")


def test_a_pool_of_another_device(pool: GraphPool) -> None:
    fast = graphed(double, sizes=[2], pool=pool)
    with pytest.raises(ConfigError, match="the arguments on meta"):
        fast(torch.ones(2, device="meta"))


def test_batch_of_nothing(pool: GraphPool) -> None:
    fast = graphed(double, sizes=[2], pool=pool)
    with pytest.raises(BatchError, match="0 rows"):
        fast(torch.ones(0, device=pool.device))


def test_interrupts_leave_graphs_to_other_threads() -> None:
    """A signal handler may raise between any two instructions, those of a lock included."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    x, before = torch.ones(2), thread_state()
    delays, num_interrupted = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    with graphed(lambda x: x + 1, sizes=[2], copy_outputs=True) as fast:
        fast(x)
        try:
            for _ in range(600):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 1e-3))
                    while True:
                        fast(x)
                except KeyboardInterrupt:
                    num_interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        with ThreadPoolExecutor(1) as other:
            assert torch.equal(other.submit(fast, x).result(60), x + 1)
    assert num_interrupted == 600
    assert thread_state() == before
