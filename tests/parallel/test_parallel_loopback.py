"""Runners of all ranks in one process, on any device: base and shift model through graphs.

The ranks communicate by loopback, which full graphs cannot contain, so on the CPU graphs are
piecewise or none, and on CUDA none. Each rank has its own scheduler; they agree, because all ranks
sample the same tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_llm import assert_block_0_untouched, poison, spy_on

from ostinato import GraphConfig, SamplingParams
from ostinato.config import EngineConfig
from ostinato.errors import CaptureError
from ostinato.parallel.rank_context import RankContext
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder
from ostinato.runner import startup
from ostinato.runner.model_runner import ModelRunner
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import Request
from ostinato.scheduling.scheduler import Scheduler
from ostinato.testing.loopback import LoopbackWorld

LENGTHS = (1, 5, 23, 30)


def config_for(device: torch.device, **options: Any) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        random_weights=True,
        device=device.type,
        dtype="float32",
        max_num_seqs=3,
        max_num_batched_tokens=33,
        max_model_len=64,
        long_prefill_token_threshold=15,
        block_size=4,
        kv_cache_memory_bytes=2**18,
        show_progress=False,
        **options,
    )


@torch.inference_mode()
def generate(runner: ModelRunner) -> list[list[int]]:
    """Some tokens for a few prompts; some greedy, some not."""
    cache = runner.cache
    scheduler = Scheduler(
        BlockAllocator(cache.num_blocks, cache.block_size, enable_prefix_caching=True),
        max_num_seqs=runner.plan.max_num_seqs,
        max_num_batched_tokens=runner.plan.max_num_batched_tokens,
        max_model_len=cache.max_model_len,
        long_prefill_token_threshold=15,
    )
    requests = [
        Request(
            request_id=str(length),
            prompt_token_ids=[(length * 31 + i * 7) % 512 for i in range(length)],
            params=SamplingParams(temperature=0.7 * (length % 2)),
            max_total_tokens=length + 12,
            seed=length,
        )
        for length in LENGTHS
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.run(plan).token_ids())
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    return {}


def tokens_alone(device: torch.device, made: dict[str, list[list[int]]]) -> list[list[int]]:
    if device.type not in made:
        config = config_for(device, graphs=GraphConfig(mode="NONE"))
        runner, _ = startup.build_runner(config, startup.load(config))
        made[device.type] = generate(runner)
        runner.close()
    return made[device.type]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sp", "tp", "mode"), [(1, 2, "PIECEWISE"), (1, 4, "NONE"), (2, 1, "PIECEWISE"), (2, 2, "NONE")]
)
@pytest.mark.parametrize("fused", [False, True])
def test_layers_fused_and_written_out(
    monkeypatch: pytest.MonkeyPatch,
    alone: dict[str, list[list[int]]],
    sp: int,
    tp: int,
    mode: str,
    fused: bool,
) -> None:
    monkeypatch.setattr(ShardedDecoder, "_runs_fused", lambda self, hidden: fused)
    threshold = 2 if sp > 1 else 0
    test_tokens_equal_those_of_one_rank(torch.device("cpu"), alone, sp, tp, threshold, mode)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
@pytest.mark.parametrize(("sp", "tp", "threshold"), [(1, 2, 0), (2, 1, 2), (2, 2, 2), (4, 1, 0)])
def test_tokens_equal_those_of_one_rank(
    device: torch.device,
    alone: dict[str, list[list[int]]],
    sp: int,
    tp: int,
    threshold: int,
    mode: str,
) -> None:
    if device.type == "cuda" and mode != "NONE":
        pytest.skip("a process captures one forward on a GPU at a time")
    expected = tokens_alone(device, alone)
    config = config_for(
        device,
        tensor_parallel_size=tp,
        ulysses_sequence_parallel_size=sp,
        shift_parallel_threshold=threshold or None,
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [1, 2, 4, 8]),
    )
    world = LoopbackWorld(config.layout.world_size)

    def rank_of_world(rank: int) -> tuple[list[list[int]], set[tuple[str, str]]]:
        rank_context = RankContext(
            layout=config.layout,
            rank=rank,
            device=device,
            comm_of=lambda ranks: world.comm(ranks, rank),
            everyone=world.comm(range(world.world_size), rank),
            threshold=threshold,
        )
        runner, _ = startup.build_runner(config, startup.load(config, rank_context), rank_context)
        poison(runner)
        steps = spy_on(runner)
        tokens = generate(runner)
        assert_block_0_untouched(runner)
        runner.close()
        return tokens, steps

    for tokens, steps in world.run(rank_of_world):
        assert tokens == expected
        models = {"base", "shift"} if threshold else {"base"}
        assert {model for model, _ in steps} == models
        assert mode in {how for _, how in steps}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_that_would_wait_for_each_others_captures_are_told() -> None:
    device = torch.device("cuda")
    graphs = GraphConfig(mode="PIECEWISE", capture_sizes=[4])
    config = config_for(device, tensor_parallel_size=2, graphs=graphs)
    world = LoopbackWorld(2)

    def rank_of_world(rank: int) -> None:
        rank_context = RankContext(
            layout=config.layout,
            rank=rank,
            device=device,
            comm_of=lambda ranks: world.comm(ranks, rank),
            everyone=world.comm(range(2), rank),
            threshold=0,
        )
        startup.build_runner(config, startup.load(config, rank_context), rank_context)

    with pytest.raises(CaptureError, match="one forward on a GPU at a time"):
        world.run(rank_of_world)
