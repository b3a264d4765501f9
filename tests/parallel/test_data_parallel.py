"""Loopback runners that step together: each with its own requests, all with the same graphs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from parallel_llm import assert_block_0_untouched, poison

from ostinato import GraphConfig, ReplayedDrafts, SamplingParams
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.config import EngineConfig
from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.parallel.agreed_dispatch import AgreedDispatch
from ostinato.parallel.comm import NoComm
from ostinato.runner import startup
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.small_batch_model import SmallBatchModel
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import Request
from ostinato.scheduling.scheduler import Scheduler
from ostinato.testing.loopback import LoopbackWorld
from ostinato.testing.recording_comm import RecordingComm

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)


def config_for(mode: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        attention="torch",  # which is watched
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        block_size=4,
        kv_cache_memory_bytes=2**18,
        show_progress=False,
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else SIZES),
        **options,
    )


def build(config: EngineConfig, **options: Any) -> ModelRunner:
    make = partial(ModelRunner, **options)
    return startup.build_runner(config, startup.load(config), make=make)[0]


def scheduler_of(
    runner: ModelRunner, requests: Sequence[Request], num_drafts: Sequence[int] = ()
) -> Scheduler:
    cache = runner.cache
    scheduler = Scheduler(
        BlockAllocator(cache.num_blocks, cache.block_size, enable_prefix_caching=True),
        max_num_seqs=runner.plan.max_num_seqs,
        max_num_batched_tokens=runner.plan.max_num_batched_tokens,
        max_model_len=cache.max_model_len,
        num_drafts=num_drafts,
    )
    for request in requests:
        scheduler.add(request)
    return scheduler


def requests_of(*lengths: int) -> list[Request]:
    return [
        Request(
            request_id=str(length),
            prompt_token_ids=[(length * 31 + i * 7) % 512 for i in range(length)],
            params=SamplingParams(temperature=0.7 * (length % 2)),
            max_total_tokens=length + 4 + length % 5,
            seed=length,
        )
        for length in lengths
    ]


@torch.inference_mode()
def alone(*lengths: int) -> list[list[int]]:
    runner, requests = build(config_for("NONE")), requests_of(*lengths)
    scheduler = scheduler_of(runner, requests)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.run(plan).token_ids())
    runner.close()
    return [request.output_token_ids for request in requests]


Call = tuple[str, int, torch.Tensor | None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Call]]:
    """By thread: mode, tokens, and the tokens of all ranks by the context, at each attention."""
    calls: dict[int, list[Call]] = defaultdict(list)
    forward = TorchPagedAttention.forward

    def spy(self: Any, spec: Any, query: torch.Tensor, *rest: Any) -> None:
        context = get_forward_context()
        call = (context.cudagraph_runtime_mode.name, query.shape[0], context.num_tokens_across_dp)
        calls[threading.get_ident()].append(call)
        forward(self, spec, query, *rest)

    monkeypatch.setattr(TorchPagedAttention, "forward", spy)
    return calls


def listed(calls: list[Call]) -> list[tuple[str, int, list[int]]]:
    """Inside a capture, tensors cannot be read."""
    return [(how, count, [] if t is None else t.tolist()) for how, count, t in calls]


def run_together(
    mode: str, lengths: Sequence[Sequence[int]], seen: Any, **options: Any
) -> list[Any]:
    """Of every rank: tokens, choices of its steps (None: idle), what attention saw, the stats."""
    config = config_for(mode, **options)
    world = LoopbackWorld(len(lengths))

    @torch.inference_mode()
    def one_rank(rank: int) -> Any:
        comm = RecordingComm(world.comm(range(world.world_size), rank))
        runner = build(config, agreement=comm)
        # Without the eager step that measures memory, which each rank runs by itself.
        captured = [
            call for call in listed(seen.pop(threading.get_ident(), [])) if call[0] != "NONE"
        ]
        assert not comm.calls, "a capture needs no agreement"
        poison(runner)
        requests = requests_of(*lengths[rank])
        num_drafts = config.num_drafts(torch.device("cpu"))
        scheduler, steps = scheduler_of(runner, requests, num_drafts), 0
        while True:
            if scheduler.has_unfinished:
                plan = scheduler.schedule()
                scheduler.commit(plan, runner.run(plan).token_ids())
            elif not runner.run_idle():
                break
            steps += 1
        assert [call.name for call in comm.calls] == ["all_reduce"] * (steps + 1)
        assert_block_0_untouched(runner)
        runner.close()
        tokens = [request.output_token_ids for request in requests]
        return tokens, captured, listed(seen[threading.get_ident()]), runner.stats, steps

    return world.run(one_rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
)
@pytest.mark.parametrize("swiftkv_layers", [None, 1])
def test_tokens_are_those_of_each_rank_alone(
    seen: Any, mode: str, swiftkv_layers: int | None
) -> None:
    """One token per rank, prompts, many tokens, and a rank that never has work."""
    lengths = [(3, 17), (1, 5, 6, 2, 9), (), (40,)]
    results = run_together(mode, lengths, seen, swiftkv_layers=swiftkv_layers)
    assert len({steps for *_, steps in results}) == 1
    for rank, (tokens, captured, calls, _, _) in enumerate(results):
        assert tokens == alone(*lengths[rank])
        assert bool(captured) == (mode != "NONE")
        for _, num_tokens, across in captured:
            if swiftkv_layers is None:
                assert across == [num_tokens] * len(lengths)
        for how, num_tokens, across in calls:
            assert len(across) == len(lengths)
            assert how == "NONE" or len(set(across)) == 1
            if swiftkv_layers is None:
                assert across[rank] == num_tokens
    modes = [[how for how, *_ in calls] for _, _, calls, _, _ in results]
    assert modes[0]
    assert all(its == modes[0] for its in modes)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_drafts_beside_prompts_and_other_numbers_of_drafts(seen: Any, mode: str) -> None:
    lengths = [(3, 17), (1, 5, 6), ()]
    outputs = [alone(*its) if its else [] for its in lengths]
    texts = [
        request.prompt_token_ids + output
        for its, own in zip(lengths, outputs, strict=True)
        for request, output in zip(requests_of(*its), own, strict=True)
    ]
    drafts = ReplayedDrafts(texts=texts, num_tokens={1: 3, 2: 2, 3: 1}, acceptance=0.7)
    results = run_together(mode, lengths, seen, speculative=drafts)
    for rank, (tokens, _, calls, _, steps) in enumerate(results):
        assert tokens == outputs[rank]
        assert steps == results[0][-1]
        for how, num_tokens, across in calls:
            assert how == "NONE" or len(set(across)) == 1
            assert across[rank] == num_tokens


def test_one_eager_rank_makes_all_eager(seen: Any) -> None:
    """A prompt larger than every size: the others would have had graphs, and report why not."""
    results = run_together("FULL_AND_PIECEWISE", [(1,), (20,), ()], seen)
    first, second, idle = (stats for *_, stats, _ in results)
    assert first.eager == {Reason.EAGER_ON_ANOTHER_RANK: 1}
    assert second.eager == {Reason.TOO_LARGE: 1}
    assert not idle.eager
    assert first.hits > 1
    for rank, (_, _, calls, _, _) in enumerate(results):
        how, num_tokens, across = calls[0]
        assert (how, num_tokens, across) == ("NONE", (1, 20, 1)[rank], [1, 20, 1])


def test_no_work_anywhere_is_no_step(seen: Any) -> None:
    for tokens, _, calls, _, steps in run_together("FULL", [(), ()], seen):
        assert (tokens, calls, steps) == ([], [], 0)


# --- the rule on one plan ------------------------------------------------------------------------


def agreed(mode: CUDAGraphMode, *shapes: BatchShape | None) -> list[Choice]:
    world = LoopbackWorld(len(shapes))
    plan = CapturePlan.build(mode, SIZES, max_num_seqs=4, max_num_batched_tokens=32)

    def one_rank(rank: int) -> Choice:
        dispatcher, shape = Dispatcher(plan), shapes[rank]
        for entry in plan.entries:
            dispatcher.mark_captured(entry)
        comm = world.comm(range(len(shapes)), rank)
        step = AgreedDispatch(comm, plan, dispatcher.dispatch).step(shape)
        assert step is not None
        return step.choice

    return world.run(one_rank)


def test_decode_beside_a_prompt_runs_in_pieces() -> None:
    decode, prompt = BatchShape(1, 1, 1), BatchShape(6, 2, 5)
    first, second, idle = agreed(CUDAGraphMode.FULL_AND_PIECEWISE, decode, prompt, None)
    pieces = BatchDescriptor(8)
    assert first == Choice(mode=PIECEWISE, descriptor=pieces, reason=Reason.PIECES_ON_ANOTHER_RANK)
    assert second == idle == Choice(mode=PIECEWISE, descriptor=pieces, reason=Reason.MIXED)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL])
def test_decode_of_all_ranks_takes_the_largest_size(mode: CUDAGraphMode) -> None:
    choices = agreed(mode, BatchShape(1, 1, 1), BatchShape(3, 3, 1), None)
    assert {(choice.mode, choice.padded_num_tokens) for choice in choices} == {(FULL, 4)}
    assert len({choice.descriptor for choice in choices}) == 1
    assert not any(choice.reason.is_eager for choice in choices)


def test_one_token_in_pieces_is_not_the_decode_graph_of_one() -> None:
    chunk = BatchShape(1, 1, 1, has_prompts=True)
    (choice,) = agreed(CUDAGraphMode.FULL_AND_PIECEWISE, chunk)
    assert (choice.mode, choice.descriptor) == (PIECEWISE, BatchDescriptor(1))
    both = agreed(CUDAGraphMode.FULL_AND_PIECEWISE, chunk, BatchShape(1, 1, 1))
    assert {choice.descriptor for choice in both} == {BatchDescriptor(1)}


def test_a_rank_that_lacks_the_graph_says_so() -> None:
    world = LoopbackWorld(2)
    plan = CapturePlan.build(PIECEWISE, SIZES, max_num_seqs=4, max_num_batched_tokens=32)

    def one_rank(rank: int) -> None:
        dispatcher = Dispatcher(plan)
        for entry in plan.entries:
            if rank == 0 or entry.descriptor.num_tokens != 8:
                dispatcher.mark_captured(entry)
        comm = world.comm((0, 1), rank)
        shape = BatchShape(6 if rank == 0 else 2, 1, 2)
        AgreedDispatch(comm, plan, dispatcher.dispatch).step(shape)

    with pytest.raises(BatchError, match=r"PIECEWISE graph of 8 tokens, but rank 1 of 2 has"):
        world.run(one_rank)


def test_what_is_refused() -> None:
    config = config_for("NONE")
    with pytest.raises(ConfigError, match="run_idle is for ranks that step together"):
        build(config).run_idle()
    fallback = GraphConfig(mode="NONE", eager_fallback=True)
    loaded = startup.load(config)
    runner = build(config)
    with pytest.raises(ConfigError, match="eager_fallback does not work with 1 ranks"):
        ModelRunner(
            loaded.model,
            runner.plan,
            graphs=fallback,
            cache=runner.cache,
            backend=runner.backend,
            agreement=NoComm(),
        )
    small = SmallBatchModel(model=loaded.model, plan=runner.plan, threshold=2, name="shift model")
    with pytest.raises(
        ConfigError, match="a shift model for small batches does not work with 1 ranks"
    ):
        ModelRunner(
            loaded.model,
            runner.plan,
            graphs=GraphConfig(mode="NONE"),
            cache=runner.cache,
            backend=runner.backend,
            small=small,
            agreement=NoComm(),
        )
