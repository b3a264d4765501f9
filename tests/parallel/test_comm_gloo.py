"""DistributedComm and the watchdog between processes, on gloo; and the pool that runs them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import GlooPool, WorkerDiedError, WorkerTimeoutError, rendezvous_store

from ostinato.errors import ClosedError, ConfigError, RankFailedError
from ostinato.parallel.comm import Comm
from ostinato.parallel.distributed import DistributedComm
from ostinato.ranks.watch.watchdog import Watchdog

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
UNSORTED = (0, 2, 1, 3)


def tensor_of(rank: int, dtype: torch.dtype, *, strided: bool) -> torch.Tensor:
    """[12, 24, 3] small integers, so that sums are exact in bfloat16; they differ by rank."""
    numbers = (torch.arange(864) * 7 + rank * 31) % 61
    if strided:
        return numbers.view(3, 24, 12).transpose(0, 2).to(dtype)
    return numbers.view(12, 24, 3).to(dtype)


def expected(ranks: tuple[int, ...], index: int, dtype: torch.dtype, *, strided: bool) -> Any:
    """What the collectives of ``collectives`` return, computed from all ranks' tensors."""
    tensors = [tensor_of(rank, dtype, strided=strided) for rank in ranks]
    size = len(ranks)
    return [
        torch.stack(tensors).sum(0),
        torch.cat(tensors, 0),
        torch.cat(tensors, -1),
        torch.cat([each.chunk(size, 1)[index] for each in tensors], 0),
        torch.cat([each.chunk(size, 0)[index] for each in tensors], 1),
        torch.cat([each.chunk(size, 0)[index] for each in tensors], 0),
        torch.cat([each.chunk(size, 1)[index] for each in tensors], -1),
    ]


def collectives(comm: Comm, dtype: torch.dtype, *, strided: bool) -> list[torch.Tensor]:
    tensor = tensor_of(dist.get_rank(), dtype, strided=strided)
    assert tensor.is_contiguous() is not strided
    results = [
        comm.all_gather(tensor),
        comm.all_gather(tensor, -1),
        comm.all_to_all(tensor, 1, 0),
        comm.all_to_all(tensor, 0, 1),
        comm.all_to_all(tensor, 0, 0),
        comm.all_to_all(tensor, -2, -1),
    ]
    assert torch.equal(tensor, tensor_of(dist.get_rank(), dtype, strided=strided))
    assert comm.all_reduce(tensor) is tensor
    return [tensor, *results]


def all_collectives(groups: tuple[tuple[int, ...], ...]) -> int:
    """Every collective, dtype and layout in this rank's group, against plain torch."""
    ranks = next(group for group in groups if dist.get_rank() in group)
    compared = 0
    with DistributedComm(ranks, "cpu") as comm:
        assert (comm.size, ranks[comm.index]) == (len(ranks), dist.get_rank())
        for dtype in DTYPES:
            for strided in (False, True):
                found = collectives(comm, dtype, strided=strided)
                wanted = expected(ranks, comm.index, dtype, strided=strided)
                for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
                    assert got.dtype == dtype
                    assert torch.equal(got, want), (ranks, dtype, strided, number)
                    compared += 1
    return compared


@pytest.mark.sweep
@pytest.mark.parametrize(
    "groups",
    [(UNSORTED,), ((3, 1, 0, 2),), ((0, 1, 2, 3),), ((2, 0), (1, 3)), ((3, 0, 1), (2,))],
)
def test_collectives_follow_the_order_given(gloo_pool: GlooPool, groups: Any) -> None:
    assert gloo_pool.run(all_collectives, groups, world_size=4) == [42] * 4


def test_two_ranks_reversed(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(all_collectives, ((1, 0),), world_size=2) == [42] * 2


def wrong_without_the_permutation() -> list[bool]:
    comm = DistributedComm(UNSORTED, "cpu")
    comm._places = tuple(range(4))  # torch's order instead of ours
    found = collectives(comm, torch.float32, strided=False)
    wanted = expected(UNSORTED, comm.index, torch.float32, strided=False)
    return [torch.equal(got, want) for got, want in zip(found, wanted, strict=True)]


def test_negative_control_torch_sorts_the_ranks(gloo_pool: GlooPool) -> None:
    for same in gloo_pool.run(wrong_without_the_permutation, world_size=4):
        assert same == [True, *[False] * 6]  # a sum does not depend on order; the others do


def empty_tensors() -> list[tuple[int, ...]]:
    comm = DistributedComm((1, 0), "cpu")
    empty = torch.empty(0, 4)
    results = (comm.all_reduce(empty), comm.all_gather(empty, 1), comm.all_to_all(empty, 1, 0))
    return [tuple(result.shape) for result in results]


def test_empty_tensors(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(empty_tensors, world_size=2) == [[(0, 4), (0, 8), (0, 2)]] * 2


def refused(given: list[tuple[int, ...]]) -> str:
    with pytest.raises(ConfigError) as caught:
        DistributedComm(given[dist.get_rank()], "cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(0, 1), (1, 0)], r"rank 0 gave the group \(0, 1\) and rank 1 gave \(1, 0\)"),
        ([(0, 1), (1,)], r"rank 0 gave the group \(0, 1\) and rank 1 gave \(1,\)"),
        ([(0,), (0,)], r"rank 1 gave the group \(0,\)"),
        ([(0, 1, 1), (0, 1, 1)], "lists each of its ranks once"),
        ([(0, 1, 2), (0, 1, 2)], "the world has only ranks 0 to 1"),
    ],
)
def test_ranks_that_disagree_are_all_told(gloo_pool: GlooPool, given: Any, message: str) -> None:
    texts = gloo_pool.run(refused, given, world_size=2)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(texts[0])


def use_after_close() -> None:
    comm = DistributedComm((0, 1), "cpu")
    comm.close()
    comm.close()
    comm.all_reduce(torch.ones(1))


def test_closed(gloo_pool: GlooPool) -> None:
    with pytest.raises(ClosedError, match=r"the group of ranks \(0, 1\) was closed"):
        gloo_pool.run(use_after_close)


def test_not_initialised() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        DistributedComm((0,), "cpu")


# --- the pool ------------------------------------------------------------------------------------


def where() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def fails_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ConfigError("a setting of this rank")
    dist.barrier()


def sleeps() -> None:
    time.sleep(60)


def test_pool_switches_world_sizes(gloo_pool: GlooPool) -> None:
    for size in (4, 2, 1, 4):
        assert gloo_pool.run(where, world_size=size) == [(rank, size) for rank in range(size)]


def test_pool_raises_the_error_of_a_rank_with_its_traceback(gloo_pool: GlooPool) -> None:
    with pytest.raises(ConfigError, match="a setting of this rank") as caught:
        gloo_pool.run(fails_on_one, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    assert "in fails_on_one" in caught.value.__notes__[0]
    assert gloo_pool.run(where) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_pool_does_not_hang(gloo_pool: GlooPool) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"ranks \[0\] did not finish sleeps in 0.5 s"):
        gloo_pool.run(sleeps, world_size=1, timeout_s=0.5)


# --- the watchdog --------------------------------------------------------------------------------

TIMEOUT_S = 2.0


def one_dies() -> tuple[int | None, str, float]:
    """Rank 1 exits silently; rank 0 returns whom it blames, and after how long."""
    with Watchdog(TIMEOUT_S, dist.get_rank(), rendezvous_store(), world_size=2) as watchdog:
        time.sleep(2 * TIMEOUT_S)
        watchdog.check()  # two healthy ranks outlive the timeout
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(7)
        died = time.monotonic()
        while True:
            try:
                watchdog.check()
            except RankFailedError as error:
                return error.rank, str(error), time.monotonic() - died
            time.sleep(0.01)


@pytest.mark.slow
def test_a_dead_rank_is_named_and_replaced(gloo_pool: GlooPool) -> None:
    with pytest.raises(WorkerDiedError, match=r"rank 1 died in one_dies \(exit code 7\)") as caught:
        gloo_pool.run(one_dies)
    rank, message, seconds = caught.value.results[0]
    assert (caught.value.rank, rank) == (1, 1)
    assert "rank 1 stopped beating" in message
    # timeout + interval, plus a second for a busy machine.
    assert TIMEOUT_S / 2 < seconds < TIMEOUT_S * 1.1 + 1
    assert gloo_pool.run(where) == [(0, 2), (1, 2)]
