"""Collectives in graphs: each replay communicates, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from test_parallel_loopback import config_for, generate, tokens_alone
from workers import GlooPool

from ostinato import GraphConfig, GraphPool
from ostinato.errors import ClosedError
from ostinato.parallel.comm import Comm, NoComm
from ostinato.parallel.distributed import DistributedComm
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.rank_exchange import TensorExchange
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder
from ostinato.runner import startup
from ostinato.testing.recording_comm import RecordingComm

ORDER = (2, 0, 3, 1)  # differs from torch's


def work(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    """Every collective, with torch operators in between."""
    total = comm.all_reduce(x * 2)
    gathered = comm.all_gather(total + x, dim=1)
    wide = comm.all_to_all(gathered.contiguous(), split_dim=1, concat_dim=0)
    narrow = comm.all_to_all(wide + 1, split_dim=0, concat_dim=1)
    return comm.all_gather(narrow.cos())


def replays(comm: Comm, device: torch.device) -> int:
    """Capture, then replay on other data, comparing with eager. Returns the number of nodes."""
    with GraphPool(device, lazy_capture=True) as pool:
        x = torch.randn(4, 8, device=device) + dist.get_rank()
        expected = work(comm, x)
        captured = pool.capture(lambda: work(comm, x))
        assert torch.equal(captured.output, expected)
        for step in range(3):
            x.copy_(torch.randn(4, 8, device=device) * (step + 1) - dist.get_rank())
            expected = work(comm, x)
            captured.output.fill_(float("nan"))
            pool.replay(captured.tape)
            assert torch.equal(captured.output, expected), step
        return captured.tape.num_nodes or 0


@pytest.fixture
def world_of_one(device: torch.device) -> Iterator[DistributedComm]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with DistributedComm((0,), device) as comm:
            yield comm
    finally:
        dist.destroy_process_group()


def test_a_world_of_one(world_of_one: DistributedComm, device: torch.device) -> None:
    assert replays(world_of_one, device) > 0


def test_a_graph_whose_group_was_closed_says_so(
    world_of_one: DistributedComm, device: torch.device, pool: GraphPool
) -> None:
    if device.type == "cuda":
        pytest.skip("a CUDA graph calls no Python, and must be gone before its group is closed")
    x = torch.ones(4)
    captured = pool.capture(lambda: world_of_one.all_reduce(x))
    world_of_one.close()
    with pytest.raises(ClosedError, match="on a group of ranks that was closed"):
        pool.replay(captured.tape)


class AlwaysSummed(TensorExchange):
    """Sums over the group even if it has one member."""

    sums = True


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "FULL_AND_FULL"])
def test_a_runner_with_collectives_in_its_graphs(
    world_of_one: DistributedComm, device: torch.device, mode: str
) -> None:
    """All steps of a model whose layers communicate, in FULL graphs and in pieces."""
    expected = tokens_alone(device, {})
    config = config_for(device, graphs=GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 32]))
    rank_context = RankContext(
        layout=config.layout,
        rank=0,
        device=device,
        comm_of=lambda ranks: world_of_one,
        everyone=NoComm(),
    )
    loaded = startup.load(config, rank_context)
    calls = RecordingComm(world_of_one)
    assert isinstance(loaded.model, ShardedDecoder)
    for layer in loaded.model.decoder_layers():
        layer.exchange = AlwaysSummed(calls)
    runner, _ = startup.build_runner(config, loaded, rank_context)
    num_calls = len(calls.calls)
    assert num_calls > 0
    assert generate(runner) == expected
    eager = runner.stats.misses
    assert len(calls.calls) - num_calls == eager * 4  # two sums per layer; replays call no Python
    assert runner.stats.hits > 10
    runner.close()


def on_every_rank(ranks: tuple[int, ...]) -> int:
    torch.manual_seed(dist.get_rank())
    with DistributedComm(ranks, "cpu") as comm:
        return replays(comm, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), ORDER])
def test_over_processes(gloo_pool: GlooPool, ranks: tuple[int, ...]) -> None:
    nodes = gloo_pool.run(on_every_rank, ranks, world_size=len(ranks))
    assert len(set(nodes)) == 1
    assert nodes[0] >= 5  # the collectives at least are operators of the graph
