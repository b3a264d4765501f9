"""``LLM`` with several replicas against ``LLM`` with one: the same tokens, wherever they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import save_adapter
from parallel_llm import LIMITS, assert_block_0_untouched, blocks_of, params, poison, prompts
from replicas import NAMES, arrivals_of, check_same, load_adapters, save_llama, serve, tokens_of
from transformers import AutoModelForCausalLM, GPT2Config
from workers import GlooPool

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.engine.replica_engine import ReplicaEngine
from ostinato.engine.replica_stats import ReplicaStats
from ostinato.errors import ConfigError, RequestError, SchedulingError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

LORA: dict[str, Any] = {**LIMITS, "enable_lora": True, "max_loras": 2, "rank_timeout_s": 20.0}
GRAPHS = GraphConfig(capture_sizes=[1, 2, 4, 12])
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SEEDED = [replace(each, seed=seed) for seed, each in enumerate(params())]


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("replicas") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **LORA, graphs=GraphConfig(mode="NONE")) as llm:
        load_adapters(llm, checkpoint)
        yield llm


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[LLM]:
    """Two replicas in lockstep, with adapters; one process starts the other."""
    options = {**LORA, "data_parallel_size": 2, "data_parallel_lockstep": True, "graphs": GRAPHS}
    with LLM(checkpoint, **options, async_scheduling=True) as llm:
        load_adapters(llm, checkpoint)
        yield llm


# --- one process starts the others ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals(pair: LLM, alone: LLM, seed: int) -> None:
    arrivals = arrivals_of(seed)
    served, expected = serve(pair, arrivals), serve(alone, arrivals)
    assert {completion.request.replica for completion in served} == {0, 1}
    check_same(arrivals, served, expected)


def test_greedy_tokens_are_those_of_transformers(pair: LLM, checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
        for prompt in prompts()
    ]
    for _ in range(2):
        outputs = pair.generate(prompts(), GREEDY)
        found = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
        assert found == expected


def test_one_request_leaves_a_replica_idle(pair: LLM, alone: LLM) -> None:
    before = pair.engine.replica_stats()
    for prompt, name in zip(prompts(), [*NAMES, *NAMES], strict=True):
        assert tokens_of(pair.generate([prompt], GREEDY, adapter=name)) == tokens_of(
            alone.generate([prompt], GREEDY, adapter=name)
        )
    after = pair.engine.replica_stats()
    assert sum(after).num_replays > sum(before).num_replays


def test_a_prefix_is_found_again_in_its_replica(pair: LLM) -> None:
    shared = [[n] * 20 for n in (50, 51)]  # one goes to each
    pair.generate(shared, GREEDY)
    before = pair.engine.replica_stats()
    outputs = pair.generate([[*prompt, 3] for prompt in shared], GREEDY)
    after = pair.engine.replica_stats()
    assert [output.num_cached_tokens for output in outputs] == [20, 20]
    found = [b.prefix_hit_tokens - a.prefix_hit_tokens for a, b in zip(before, after, strict=True)]
    assert found == [20, 20]
    total = sum(after)
    assert total.prefix_hit_tokens == sum(each.prefix_hit_tokens for each in after)
    assert (total.num_running, total.num_waiting) == (0, 0)
    assert all(each.num_replays > 5 for each in after)


def test_prefixes_of_all_replicas_are_forgotten(pair: LLM) -> None:
    shared = [[n] * 20 for n in (60, 61)]  # one goes to each
    pair.generate(shared, GREEDY)
    pair.reset_prefix_cache()
    outputs = pair.generate(shared, GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_a_stream_left_half_way_and_a_refused_request(pair: LLM, alone: LLM) -> None:
    for number, _ in enumerate(pair.stream(prompts(), SamplingParams(max_tokens=20))):
        if number == 9:
            break
    with pytest.raises(RequestError, match="token ids are integers"):
        pair.generate([[1], [10**6]])
    with pytest.raises(RequestError, match="this engine has 2 ranks, and masks are not sent"):
        pair.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}))
    assert sum(pair.engine.replica_stats()).num_running == 0
    assert tokens_of(pair.generate(prompts(), SEEDED)) == tokens_of(
        alone.generate(prompts(), SEEDED)
    )


def test_results_of_interrupted_steps_are_dropped(pair: LLM, alone: LLM) -> None:
    """Whether they were started, one after another, or read."""
    engine = pair.engine
    assert isinstance(engine, ReplicaEngine)
    scheduler, runner = engine.schedulers[1], engine._leader()
    commit, run, calls = scheduler.commit, runner.run_replicas, 0

    def interrupted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args)
            if calls in (4, 5, 6, 7, 8, 14):
                raise KeyboardInterrupt
            return result

        return call

    stream = pair.stream(prompts(), SEEDED)
    runner.run_replicas = interrupted(run)  # type: ignore[method-assign]
    for completion in engine.prepare_request([1, 2, 3], GREEDY):
        engine.add(completion)

    def keep_stepping() -> None:
        while True:
            engine.step()

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            keep_stepping()
    scheduler.commit = interrupted(commit)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    del scheduler.commit, runner.run_replicas  # type: ignore[attr-defined]
    assert tokens_of(pair.generate(prompts(), SEEDED)) == tokens_of(
        alone.generate(prompts(), SEEDED)
    )


def test_a_replaced_adapter_is_replaced_on_all(pair: LLM, alone: LLM, checkpoint: Path) -> None:
    batch, names = [[5, 6, 7], [5, 6, 7, 8]], ["second", "second"]
    before = tokens_of(pair.generate(batch, GREEDY, adapter=names))
    try:
        path = save_adapter(checkpoint.parent / "third", checkpoint, seed=3)
        for llm in (pair, alone):
            llm.load_adapter("second", path)
        after = tokens_of(pair.generate(batch, GREEDY, adapter=names))
        assert after == tokens_of(alone.generate(batch, GREEDY, adapter=names))
        assert all(a != b for a, b in zip(after, before, strict=True))
    finally:
        for llm in (pair, alone):
            load_adapters(llm, checkpoint)


# --- all ranks run the script --------------------------------------------------------------------


@dataclass
class Outcome:
    tokens: list[list[int]]
    reasons: list[str | None]
    num_preempted: int
    modes: set[str]
    stats: list[ReplicaStats]


def run_replicas(path: str, options: dict[str, Any]) -> Outcome:
    with LLM(path, **(LIMITS | {"rank_timeout_s": 20.0} | options)) as llm:
        engine = llm.engine
        assert isinstance(engine, ReplicaEngine)
        poison(engine.runner)
        modes: set[str] = set()
        record = engine.runner.stats.record
        engine.runner.stats.record = lambda choice, n: (  # type: ignore[assignment,method-assign]
            modes.add(choice.mode.name),
            record(choice, n),
        )
        outputs = llm.generate(prompts() * 2, params() * 2)
        assert_block_0_untouched(engine.runner)
        if dist.get_rank() > 0:
            (completion,) = engine.prepare_request([1], GREEDY)
            engine.add(completion)
            with pytest.raises(SchedulingError, match="only rank 0 takes requests; call generate"):
                engine.step()
            engine.abort(completion)
        completions = [output.outputs[0] for output in outputs]
        return Outcome(
            [completion.token_ids for completion in completions],
            [completion.finish_reason for completion in completions],
            sum(scheduler.num_preemptions for scheduler in engine.schedulers),
            modes,
            engine.replica_stats(),
        )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with LLM(checkpoint, **LIMITS, graphs=GraphConfig(mode="NONE")) as llm:
        return tokens_of(llm.generate(prompts() * 2, params() * 2))


@pytest.mark.parametrize(
    ("replicas", "tp", "options"),
    [
        (2, 1, {"async_scheduling": True}),
        (2, 2, {"data_parallel_lockstep": True, "async_scheduling": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_every_rank_gets_the_tokens_of_one_process(
    gloo_pool: GlooPool,
    checkpoint: Path,
    expected: list[list[int]],
    replicas: int,
    tp: int,
    options: dict[str, Any],
) -> None:
    few = blocks_of(20, num_kv_heads=4 // tp, head_dim=8, num_layers=2)
    options = {
        **options,
        "graphs": GRAPHS,
        "data_parallel_size": replicas,
        "tensor_parallel_size": tp,
        "kv_cache_memory_bytes": few,
    }
    outcomes = gloo_pool.run(run_replicas, str(checkpoint), options, world_size=replicas * tp)
    for outcome in outcomes:
        assert outcome.tokens == expected
        assert {"FULL", "PIECEWISE"} <= outcome.modes
        assert outcome.stats == outcomes[0].stats
        assert all(each.num_replays > 5 for each in outcome.stats)
    if replicas == 2:
        assert outcomes[0].num_preempted > 0


def generic_model(path: str, replicas: int) -> list[list[int]]:
    options: dict[str, Any] = {**LIMITS, "random_weights": True, "graphs": GRAPHS}
    with LLM(path, **options, data_parallel_size=replicas) as llm:
        return tokens_of(llm.generate(prompts(), GREEDY))


def test_any_model_has_replicas(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Also one that runs through transformers' modules, which cannot be split."""
    GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64).save_pretrained(
        tmp_path
    )
    expected = generic_model(str(tmp_path), 1)
    assert gloo_pool.run(generic_model, str(tmp_path), 2) == [expected] * 2


def in_lockstep(path: str) -> list[tuple[str, list[int]]]:
    """The mode of each step on this rank, idle ones included, and the sizes on all."""
    options = {"data_parallel_size": 2, "data_parallel_lockstep": True, "graphs": GRAPHS}
    with LLM(path, **(LIMITS | {"rank_timeout_s": 20.0} | options)) as llm:
        agreed: Any = llm.engine.runner._agreed
        step, steps = agreed.step, []

        def recorded(shape: Any) -> Any:
            made = step(shape)
            sizes = made.num_tokens_across_dp.tolist()
            assert made.choice.padded_num_tokens == sizes[dist.get_rank()]
            steps.append((made.choice.mode.name, sizes))
            return made

        agreed.step = recorded
        llm.generate([prompts()[0]], GREEDY)  # the other replica has none
        llm.generate(prompts(), params())
        return steps


def test_all_replicas_run_the_same_graphs(gloo_pool: GlooPool, checkpoint: Path) -> None:
    first, second = gloo_pool.run(in_lockstep, str(checkpoint))
    assert first == second
    graphs = [sizes for mode, sizes in first if mode != "NONE"]
    assert all(sizes[0] == sizes[1] for sizes in graphs)
    assert len(graphs) > 15


# --- what is refused -----------------------------------------------------------------------------


def refused(path: str, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(path, **(LIMITS | {"rank_timeout_s": 20.0} | options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 3},
            "tensor_parallel_size 1 x ulysses_sequence_parallel_size 1 x data_parallel_size 3 "
            "needs 3 ranks, but this world has 2",
        ),
        (
            {"data_parallel_size": 2, "enable_lora": True},
            "enable_lora needs ranks that LLM starts itself",
        ),
    ],
)
def test_refused_under_torchrun(
    gloo_pool: GlooPool, checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    for text in gloo_pool.run(refused, str(checkpoint), options):
        assert text.startswith(message)
