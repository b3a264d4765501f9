"""Comms within one process: the group of one, the loop-back world, the recorder, the watchdog."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    set_forward_context,
)
from ostinato.errors import BatchError, CaptureError, CollectiveError, ConfigError, RankFailedError
from ostinato.parallel.comm import Comm, NoComm
from ostinato.ranks.watch.watchdog import Watchdog
from ostinato.testing.loopback import LoopbackWorld
from ostinato.testing.recording_comm import RecordingComm


def run_with_comms(world_size: int, function: Callable[[Comm], Any]) -> list[Any]:
    world = LoopbackWorld(world_size)
    return world.run(lambda rank: function(world.comm(range(world_size), rank)))


# --- the collectives -----------------------------------------------------------------------------


@given(data=st.data())
def test_loopback_collectives_equal_plain_torch(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(size)))
    dims = data.draw(st.integers(1, 3))
    shape = [size * data.draw(st.integers(0, 2)) for _ in range(dims)]
    split, concat = (data.draw(st.integers(-dims, dims - 1)) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    stored = [torch.randint(-50, 50, shape[::-1]).to(dtype) for _ in range(size)]
    before = [tensor.permute(*reversed(range(dims))).clone() for tensor in stored]
    world = LoopbackWorld(size)

    def rank_function(rank: int) -> tuple[int, list[torch.Tensor]]:
        comm = world.comm(order, rank)
        tensor = stored[rank].permute(*reversed(range(dims)))
        results = [comm.all_gather(tensor, concat), comm.all_to_all(tensor, split, concat)]
        for result in results:
            result += 0  # must not be shared memory
        assert comm.all_reduce(tensor) is tensor
        return comm.index, [*results, tensor]

    ordered = [before[rank] for rank in order]
    for rank, (index, (gathered, traded, total)) in enumerate(world.run(rank_function)):
        assert order[index] == rank
        assert torch.equal(gathered, torch.cat(ordered, concat))
        step = shape[split] // size
        parts = [tensor.narrow(split, index * step, step) for tensor in ordered]
        assert torch.equal(traded, torch.cat(parts, concat))
        assert torch.equal(total, torch.stack(ordered).sum(0).to(dtype))


def test_results_are_nobody_elses_memory(device: torch.device) -> None:
    """Each rank overwrites what it sent and received while others have yet to read it."""

    def spoil(comm: Comm) -> list[list[float]]:
        seen = []
        for call in (
            lambda tensor: comm.all_gather(tensor),
            lambda tensor: comm.all_to_all(tensor, 0, 0),
            comm.all_reduce,
        ):
            tensor = torch.full((3,), float(comm.index), device=device)
            result = call(tensor)
            seen.append(result.tolist())
            tensor.fill_(torch.nan)
            result.fill_(torch.nan)
        return seen

    for gathered, traded, total in run_with_comms(3, spoil):
        assert gathered == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert traded == [0, 1, 2]
        assert total == [3, 3, 3]


@pytest.mark.gpu
def test_ranks_on_streams_of_their_own() -> None:
    if not torch.cuda.is_available():
        pytest.skip("streams need a GPU")

    def slow(comm: Comm) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.ones(1, device="cuda")
            torch.cuda._sleep(20_000_000)
            tensor += comm.index
            return float(comm.all_gather(tensor).sum() + comm.all_reduce(tensor).sum())

    assert run_with_comms(3, slow) == [12.0] * 3


def test_disjoint_and_overlapping_groups() -> None:
    world = LoopbackWorld(4)

    def rank_function(rank: int) -> list[int]:
        mine = torch.tensor([rank])
        rows = world.comm([(0, 1), (2, 3)][rank // 2], rank)
        columns = world.comm([(2, 0), (3, 1)][rank % 2], rank)
        everyone = world.comm((3, 1, 0, 2), rank)
        return torch.cat([comm.all_gather(mine) for comm in (rows, columns, everyone)]).tolist()

    assert world.run(rank_function) == [
        [0, 1, 2, 0, 3, 1, 0, 2],
        [0, 1, 3, 1, 3, 1, 0, 2],
        [2, 3, 2, 0, 3, 1, 0, 2],
        [2, 3, 3, 1, 3, 1, 0, 2],
    ]


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(BatchError, match=r"dimension 1 .* \[2, 5\] into 3 .* 5 is not a multiple"):
        run_with_comms(3, lambda comm: comm.all_to_all(torch.zeros(2, 5), 1, 0))


# --- the world -----------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_the_first_error_is_raised_and_nobody_hangs(failing: int) -> None:
    world = LoopbackWorld(4)
    released: list[int] = []

    def rank_function(rank: int) -> None:
        comm = world.comm(range(4), rank)
        comm.all_reduce(torch.ones(1))
        if rank == failing:
            raise ValueError(f"rank {rank} broke")
        try:
            comm.all_reduce(torch.ones(1))
        finally:
            released.append(rank)

    with pytest.raises(ValueError, match=f"rank {failing} broke") as caught:
        world.run(rank_function)
    assert caught.value.__notes__ == [f"raised on rank {failing} of a LoopbackWorld"]
    waited = [rank for rank in range(4) if rank != failing]
    assert set(released) <= set(waited)
    assert not [t for t in threading.enumerate() if t.name.startswith("loopback")]
    assert world.run(lambda rank: rank) == [0, 1, 2, 3]  # the world is still usable


def test_released_ranks_do_not_go_on() -> None:
    world = LoopbackWorld(2)
    went_on = []

    def rank_function(rank: int) -> None:
        if rank == 1:
            raise ValueError("broke")
        try:
            world.comm((0, 1), rank).all_reduce(torch.ones(1))
        except Exception:
            went_on.append("the release was caught")
        went_on.append("passed the collective")

    with pytest.raises(ValueError, match="broke"):
        world.run(rank_function)
    assert went_on == []


def test_a_rank_that_never_comes_is_an_error_not_a_hang() -> None:
    def rank_function(comm: Comm) -> None:
        if comm.index != 1:
            comm.all_gather(torch.zeros(2, 3))

    with pytest.raises(CollectiveError, match=r"rank 0 in all_gather.*\[2, 3\].*; rank 2 in"):
        run_with_comms(3, rank_function)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            (lambda c: c.all_reduce(torch.ones(2)), lambda c: c.all_reduce(torch.ones(3))),
            r"rank 0: all_reduce of a torch.float32 \[2\].*rank 1: all_reduce.*\[3\]",
        ),
        (
            (lambda c: c.all_reduce(torch.ones(2)), lambda c: c.all_gather(torch.ones(2))),
            r"rank 0: all_reduce .*rank 1: all_gather\(dim=0\)",
        ),
    ],
)
def test_collectives_that_do_not_fit(calls: Any, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        run_with_comms(2, lambda comm: calls[comm.index](comm))


def test_one_rank_runs_at_a_time_in_order() -> None:
    log: list[int] = []

    def rank_function(comm: Comm) -> None:
        for _ in range(3):
            log.append(comm.index)
            time.sleep(0.001)  # would let the others run, if they could
            log.append(comm.index)
            comm.all_reduce(torch.ones(1))

    run_with_comms(3, rank_function)
    assert log[::2] == log[1::2]
    first = log[:]
    log.clear()
    run_with_comms(3, rank_function)
    assert log == first


def test_ranks_have_the_callers_torch_state() -> None:
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        with mode:
            here = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
            assert run_with_comms(
                2, lambda _: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
            ) == [here, here]


def test_misuse_of_the_world() -> None:
    world = LoopbackWorld(2)
    comms = [world.comm((0, 1), rank) for rank in range(2)]
    with pytest.raises(CollectiveError, match="outside its own thread"):
        comms[0].all_reduce(torch.ones(1))
    with pytest.raises(CollectiveError, match="rank 1 called all_reduce outside its own thread"):
        world.run(lambda rank: comms[1 - rank].all_reduce(torch.ones(1)))
    with pytest.raises(CollectiveError, match="already running"):
        world.run(lambda rank: world.run(lambda rank: rank))
    with pytest.raises(ConfigError, match=r"rank 1 is not in the group \(0,\)"):
        world.comm((0,), 1)
    for group in ((0, 0), (0, 2)):
        with pytest.raises(ConfigError, match="different ranks from 0 to 1"):
            world.comm(group, 0)
    with pytest.raises(ConfigError, match="world_size must be at least 1, got 0"):
        LoopbackWorld(0)


# --- in graphs -----------------------------------------------------------------------------------


class RankOfGraphs:
    """One rank's forward, with a collective in the middle, captured once and replayed."""

    def __init__(self, comm: Comm, device: torch.device, mode: CUDAGraphMode) -> None:
        self.comm, self.mode = comm, mode
        self.pool = GraphPool(device, lazy_capture=True)
        self.wrapper = CUDAGraphWrapper(
            self.forward, mode, pool=self.pool, split_at_breaks=mode is CUDAGraphMode.PIECEWISE
        )
        self.x = torch.zeros(4, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(self.comm.all_reduce(x * 2) + self.comm.index) - 1

    def step(self, value: float) -> list[float]:
        self.x.fill_(value)
        with set_forward_context(self.mode, BatchDescriptor(4)), torch.no_grad():
            return self.wrapper(self.x)[::4].tolist()


def test_loopback_between_the_segments_of_piecewise_graphs(device: torch.device) -> None:
    world = LoopbackWorld(2)
    ranks = [
        RankOfGraphs(world.comm((0, 1), rank), device, CUDAGraphMode.PIECEWISE) for rank in range(2)
    ]
    if device.type == "cuda":  # threads capture one at a time
        with pytest.raises(CaptureError, match="wait in all_reduce for ranks that wait to capture"):
            world.run(lambda rank: ranks[rank].step(1.0))
        return
    for step in range(3):  # a capture and two replays, with different numbers
        total = 2.0 * (step + 1 + step + 2)
        results = world.run(lambda rank, step=step: ranks[rank].step(step + 1.0 + rank))
        assert results == [[total - 1, total]] * 2
    for rank in ranks:
        rank.pool.close()


def test_loopback_inside_a_full_graph_is_refused(device: torch.device) -> None:
    world = LoopbackWorld(2)
    ranks = [
        RankOfGraphs(world.comm((0, 1), rank), device, CUDAGraphMode.FULL) for rank in range(2)
    ]
    with pytest.raises(CaptureError, match=r"all_reduce of a LoopbackWorld cannot be part of a"):
        world.run(lambda rank: ranks[rank].step(1.0))
    for rank in ranks:
        rank.pool.close()


# --- the group of one, and the recorder ----------------------------------------------------------


def test_no_comm_returns_its_argument() -> None:
    comm: Comm = NoComm()
    tensor = torch.randn(2, 3)
    assert (comm.size, comm.index) == (1, 0)
    assert comm.all_reduce(tensor) is tensor
    assert comm.all_gather(tensor, 1) is tensor
    assert comm.all_to_all(tensor, 0, 1) is tensor


def test_recorder_lists_the_calls_and_changes_nothing() -> None:
    def rank_function(comm: Comm) -> tuple[list[Any], list[Any]]:
        recorder = RecordingComm(comm)
        assert (recorder.size, recorder.index) == (comm.size, comm.index)
        mine = torch.arange(4).view(2, 2) + 10 * comm.index
        results = [
            recorder.all_to_all(mine, 1, 0).tolist(),
            recorder.all_gather(mine.bool(), 1).tolist(),
            recorder.all_reduce(mine.to(torch.bfloat16)).tolist(),
        ]
        return recorder.calls, results

    for index, (calls, results) in enumerate(run_with_comms(2, rank_function)):
        assert calls == [
            ("all_to_all", (2, 2), torch.int64),
            ("all_gather", (2, 2), torch.bool),
            ("all_reduce", (2, 2), torch.bfloat16),
        ]
        assert results == [
            [[index], [2 + index], [10 + index], [12 + index]],
            [[False, True, True, True], [True, True, True, True]],
            [[10.0, 12.0], [14.0, 16.0]],
        ]


# --- the watchdog --------------------------------------------------------------------------------

TIMEOUT_S = 0.8


class MemoryStore:
    """A store in memory that can be lost or stop answering like one on another machine."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.frozen: set[int] = set()  # ranks whose beats no longer arrive
        self.lost = False
        self.answering = threading.Event()
        self.answering.set()

    def _reach(self) -> None:
        self.answering.wait()
        if self.lost:
            raise ConnectionError("connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._reach()
        if int(key.rsplit("/", 1)[1]) not in self.frozen:
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)


def wait_for_failure(watchdog: Watchdog) -> RankFailedError:
    """What check() raises, within ten times the stated time (the machine may be busy)."""
    deadline = time.monotonic() + 10 * TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            watchdog.check()
        except RankFailedError as error:
            return error
        time.sleep(0.005)
    pytest.fail("no failure was seen")


@pytest.mark.slow
def test_watchdog_names_the_rank_that_stops_beating() -> None:
    store = MemoryStore()
    told: list[RankFailedError] = []
    dogs = [
        Watchdog(TIMEOUT_S, rank, store, world_size=3, on_failure=told.append) for rank in range(3)
    ]
    time.sleep(2 * TIMEOUT_S)
    for dog in dogs:
        dog.check()
    store.frozen.add(1)
    for dog in (dogs[0], dogs[2]):
        error = wait_for_failure(dog)
        assert error.rank == 1
        assert "rank 1 stopped beating" in str(error)
        assert f"the timeout is {TIMEOUT_S} s" in str(error)
    for dog in dogs:
        dog.close()
    assert [error.rank for error in told[:2]] == [1, 1]


def test_watchdog_names_the_rank_that_never_came() -> None:
    with Watchdog(TIMEOUT_S, 0, MemoryStore(), world_size=2) as dog:
        assert "rank 1 never started beating" in str(wait_for_failure(dog))


def test_watchdog_passes_an_error_on() -> None:
    store = MemoryStore()
    dog = Watchdog(TIMEOUT_S, 0, store, world_size=2)

    def fail() -> None:
        with Watchdog(TIMEOUT_S, 1, store, world_size=2):
            raise ValueError("weights differ")

    with pytest.raises(ValueError, match="weights differ"):
        fail()
    error = wait_for_failure(dog)
    assert (str(error), error.rank) == ("rank 1 failed: ValueError: weights differ", 1)
    dog.close()


@pytest.mark.slow
def test_watchdog_lets_a_rank_leave() -> None:
    store = MemoryStore()
    with Watchdog(TIMEOUT_S, 0, store, world_size=2) as dog:
        with Watchdog(TIMEOUT_S, 1, store, world_size=2):
            pass
        time.sleep(2 * TIMEOUT_S)
        dog.check()


@pytest.mark.slow
def test_watchdog_forgives_a_beat_that_there_was_no_memory_for() -> None:
    store = MemoryStore()
    told: list[RankFailedError] = []
    beats = 0

    class Short(MemoryStore):
        def set(self, key: str, value: str) -> None:
            nonlocal beats
            beats += 1
            if 2 <= beats <= 4:
                raise MemoryError
            store.set(key, value)

        get, check = store.get, store.check

    with (
        Watchdog(TIMEOUT_S, 0, Short(), world_size=2, on_failure=told.append) as dog,
        Watchdog(TIMEOUT_S, 1, store, world_size=2, on_failure=told.append) as other,
    ):
        time.sleep(2 * TIMEOUT_S)
        dog.check()
        other.check()
    assert beats > 4
    assert not told


def test_watchdog_names_the_host_of_a_store_that_is_gone() -> None:
    store = MemoryStore()
    dog = Watchdog(TIMEOUT_S, 1, store, world_size=2, store_rank=0)
    store.lost = True
    error = wait_for_failure(dog)
    assert error.rank == 0
    assert "which rank 0 hosts, failed (connection reset by peer)" in str(error)


def test_watchdog_sees_a_store_that_does_not_answer() -> None:
    store = MemoryStore()
    dog = Watchdog(TIMEOUT_S, 1, store, world_size=2, store_rank=0)
    store.answering.clear()
    assert "which rank 0 hosts, has not answered for" in str(wait_for_failure(dog))
    store.answering.set()
    dog.close()


@pytest.mark.slow
def test_watchdog_forgives_a_pause_of_all() -> None:
    store = MemoryStore()
    dogs = [Watchdog(TIMEOUT_S, rank, store, world_size=4) for rank in range(4)]
    store.answering.clear()
    time.sleep(2 * TIMEOUT_S)
    store.answering.set()
    time.sleep(TIMEOUT_S / 2)
    for dog in dogs:
        dog.check()
        dog.close()


def test_watchdog_refuses_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"interval_s is 1 and timeout_s is 2"):
        Watchdog(2, 0, MemoryStore(), world_size=2, interval_s=1)
    with pytest.raises(ConfigError, match="rank 2 is not in the range 0 to 1"):
        Watchdog(2, 2, MemoryStore(), world_size=2)
