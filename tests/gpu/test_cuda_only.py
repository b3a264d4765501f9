"""What only a real GPU can show. All other tests that take a device run on CUDA as well."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    graphed,
    set_forward_context,
)
from ostinato.errors import BatchError, CaptureError, CaptureOutOfMemoryError, ConfigError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FULL = CUDAGraphMode.FULL
CUDA = torch.device("cuda", 0)


@pytest.fixture
def pool():
    torch.manual_seed(0)
    with GraphPool(CUDA, lazy_capture=True) as pool:
        yield pool


def captured_double(pool: GraphPool, x: torch.Tensor):
    return pool.capture(lambda: x * 2)


def check_healthy(pool: GraphPool) -> None:
    """Everything that a broken capture is known to break in torch."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(8, device=CUDA).unique().numel() == 8  # generator out of capture mode
    x = torch.randn(64, 64, device=CUDA)
    noisy = pool.capture(lambda: x @ x + torch.rand_like(x))
    first = noisy.output.clone()
    pool.replay(noisy.tape)
    assert not torch.equal(first, noisy.output)
    big = torch.randn(1 << 22, device=CUDA)
    assert big.sum().isfinite()
    torch.cuda.synchronize()


@pytest.mark.parametrize("repeat", [1, 3])
def test_an_invalidated_capture_is_healed(pool: GraphPool, repeat: int) -> None:
    """A host synchronisation is no operator: the guard cannot see it, and CUDA gives up."""
    x = torch.randn(4, device=CUDA)
    before = captured_double(pool, x)

    def synchronises() -> torch.Tensor:
        y = x * 3
        torch.cuda.synchronize()
        return y

    for _ in range(repeat):
        with pytest.raises(CaptureError, match="the capture was broken") as error:
            pool.capture(synchronises)
        assert "torch.cuda.synchronize()" in str(error.value.source)
        assert error.value.operator == "aten.mul.Tensor"
        check_healthy(pool)
    x.normal_()
    pool.replay(before.tape)
    assert torch.equal(before.output, x * 2)
    # Its memory is still the pool's: the next replay overwrites it.
    assert pool.kept(before.output).data_ptr() != before.output.data_ptr()


@pytest.mark.parametrize(
    "illegal",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1.0, 2.0], device=CUDA),
        lambda x: torch.empty(4).copy_(x),
    ],
)
def test_copies_across_the_border_are_refused(pool: GraphPool, illegal) -> None:
    x = torch.randn(4, device=CUDA)
    with pytest.raises(CaptureError):
        pool.capture(lambda: illegal(x))
    check_healthy(pool)


def test_copies_to_pinned_memory_are_captured(pool: GraphPool) -> None:
    x = torch.randn(4, device=CUDA)
    host = torch.empty(4, pin_memory=True)
    captured = pool.capture(lambda: host.copy_(x * 2, non_blocking=True))
    x.normal_()
    pool.replay(captured.tape)
    torch.cuda.synchronize()
    assert torch.equal(host, x.cpu() * 2)


def test_reading_a_cpu_tensor_inside_a_capture_is_harmless(pool: GraphPool) -> None:
    x, scale = torch.randn(4, device=CUDA), torch.tensor([3.0])
    captured = pool.capture(lambda: x * scale.item())
    assert torch.equal(captured.output, x * 3)


@pytest.mark.alone  # others would find no memory
def test_real_out_of_memory(pool: GraphPool) -> None:
    free, _ = torch.cuda.mem_get_info()
    x = torch.randn(4, device=CUDA)

    def too_much() -> torch.Tensor:
        parts = [torch.empty(free // 3, dtype=torch.uint8, device=CUDA) for _ in range(4)]
        return parts[0][:4] + x

    with pytest.raises(CaptureOutOfMemoryError, match="Tried to allocate") as error:
        pool.capture(too_much)
    del error
    gc.collect()
    pool.release_unused()
    assert torch.cuda.mem_get_info()[0] > free * 0.9  # what the failed capture took is back
    check_healthy(pool)


def test_nodes_are_counted(pool: GraphPool) -> None:
    x = torch.randn(4, device=CUDA)
    assert pool.capture(lambda: (x * 2 + 1).relu()).tape.num_nodes == 3


def test_compiled_functions_stay_compiled(pool: GraphPool) -> None:
    """The guard must not make torch.compile fall back to eager kernels inside a capture."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2 + 1).sin() * 3).cos() - 1

    compiled = torch.compile(function)
    x = torch.randn(64, 64, device=CUDA)
    compiled(x)
    captured = pool.capture(lambda: compiled(x))
    assert captured.tape.num_nodes == 1
    x.normal_()
    pool.replay(captured.tape)
    torch.testing.assert_close(captured.output, function(x))


def test_compiled_functions_with_graph_breaks(pool: GraphPool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2 + 1).sin()
        torch._dynamo.graph_break()
        return (y * 3).cos() - 1

    compiled = torch.compile(function)
    x = torch.randn(64, 64, device=CUDA)
    compiled(x)
    captured = pool.capture(lambda: compiled(x))
    assert captured.tape.num_nodes == 2
    x.normal_()
    pool.replay(captured.tape)
    torch.testing.assert_close(captured.output, function(x))


def test_sizes_share_the_memory_of_the_largest() -> None:
    """Activations of 64 MiB, eight sizes: the pool is that of one size, not the sum."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x) + 1
        return x

    def pool_bytes(sizes: list[int]) -> int:
        with graphed(forward, sizes=sizes) as fast:
            fast.capture(torch.zeros(1, 1 << 18, device=CUDA))
            return fast.stats().pool_bytes

    assert pool_bytes([64, 56, 48, 40, 32, 24, 16, 8]) <= pool_bytes([64]) * 1.3


def test_captures_share_a_reserved_piece(pool: GraphPool) -> None:
    """Pieces taken as they are needed would add up: small ones first, then the largest."""
    x = torch.ones(1024, device=CUDA)
    pool.reserve(64 * 2**20)
    reserved = pool.num_bytes
    assert reserved >= 64 * 2**20
    for megabytes in (12, 24, 48):
        captured = pool.capture(lambda n=megabytes: x.repeat(n * 256).sum())
        pool.replay(captured.tape)
        assert captured.output.item() == megabytes * 256 * 1024
    assert pool.num_bytes <= reserved + 4 * 2**20  # small tensors have pieces of their own


def test_closing_gives_the_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fast = graphed(lambda x: torch.tanh(x) + 1, sizes=[64])
    fast(torch.zeros(64, 1 << 18, device=CUDA))
    assert torch.cuda.memory_reserved() > before + (64 << 20)
    fast.close()
    del fast
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def test_a_pool_can_be_emptied_and_used_again(pool: GraphPool) -> None:
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, pool=pool)
    x = torch.randn(4, device=CUDA)
    for _ in range(3):
        with set_forward_context(FULL, BatchDescriptor(4)):
            wrapper(x)
            x.normal_()
            assert torch.equal(wrapper(x), x * 2)
        wrapper.clear_graphs()
        gc.collect()


def test_replay_on_the_callers_stream(pool: GraphPool) -> None:
    x = torch.randn(1 << 20, device=CUDA)
    captured = captured_double(pool, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.normal_()
        pool.replay(captured.tape)
        result = captured.output.clone()
    stream.synchronize()
    assert torch.equal(result, x * 2)


def test_capture_from_a_side_stream(pool: GraphPool) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1 << 20, device=CUDA)
        captured = captured_double(pool, x)
        assert torch.equal(captured.output, x * 2)
    stream.synchronize()


def test_other_threads_may_allocate_during_a_capture(pool: GraphPool) -> None:
    x = torch.randn(4, device=CUDA)
    failures: list[BaseException] = []

    def allocate() -> None:
        try:
            torch.empty(1 << 28, device=CUDA).fill_(1)
        except BaseException as error:
            failures.append(error)

    def forward() -> torch.Tensor:
        y = x * 2
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        return y + 1

    captured = pool.capture(forward)
    assert failures == []
    assert torch.equal(captured.output, x * 2 + 1)


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="cuda:99 does not exist"):
        GraphPool("cuda:99")


def test_arguments_on_another_device_are_refused() -> None:
    with graphed(lambda x: x * 2, sizes=[2]) as fast:
        x = torch.randn(2, device=CUDA)
        fast(x)
        with pytest.raises(BatchError, match="'x' has device cpu"):
            fast(x.cpu())
        assert torch.equal(fast(x), x * 2)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="on cpu, cuda:0"):
        graphed(model, sizes=[1])(torch.ones(1, 2, device=CUDA))


def test_capture_inside_somebody_elses_capture(pool: GraphPool) -> None:
    x = torch.randn(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    refused: list[BaseException] = []
    with torch.cuda.graph(graph):
        y = x + 1
        try:
            pool.capture(lambda: x * 2)
        except CaptureError as error:
            refused.append(error)
    assert "other code is capturing" in str(refused[0])
    graph.replay()
    assert torch.equal(y, x + 1)
    check_healthy(pool)
