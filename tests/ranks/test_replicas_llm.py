"""``LLM`` with several replicas against ``LLM`` with one: the same tokens, wherever they run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import save_adapter
from parallel_llm import LIMITS, assert_block_0_untouched, blocks_of, params, poison, prompts
from sharded_steps import config_of
from transformers import AutoModelForCausalLM, GPT2Config
from workers import GlooPool

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.engine.completion import Completion
from ostinato.engine.replica_engine import ReplicaEngine
from ostinato.engine.replica_stats import ReplicaStats
from ostinato.errors import ConfigError, RequestError, SchedulingError

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {**LIMITS, "enable_lora": True, "max_loras": 2, "rank_timeout_s": 20.0}
GRAPHS = GraphConfig(capture_sizes=[1, 2, 4, 12])
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SEEDED = [replace(each, seed=seed) for seed, each in enumerate(params())]
NAMES = (None, "first", "second")


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("replicas") / "model"
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of("llama", 4))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(path)
    return path


def load_adapters(llm: LLM, checkpoint: Path) -> None:
    for seed, name in enumerate(NAMES[1:], start=1):
        path = save_adapter(checkpoint.parent / str(name), checkpoint, seed=seed)
        llm.load_adapter(str(name), path)


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


def tokens_of(outputs: Any) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


# --- one process starts the others ---------------------------------------------------------------


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    adapter: str | None
    aborted_at: int | None


def arrivals_of(seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    found = []
    for _ in range(14):
        step = rng.randrange(25)
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 15),
            temperature=rng.choice((0.0, 0.9)),
            top_k=rng.choice((0, 5)),
            logprobs=rng.choice((None, 2)),
            seed=rng.randrange(100),
        )
        # Some prompts begin alike; some are longer than a chunk.
        prompt = [rng.randrange(2)] * rng.choice((1, 8, 24)) + [rng.randrange(97) for _ in range(3)]
        aborted_at = step + rng.randrange(8) if rng.random() < 0.2 else None
        found.append(Arrival(step, prompt, sampling, rng.choice(NAMES), aborted_at))
    return found


def serve(llm: LLM, arrivals: list[Arrival]) -> list[Completion]:
    engine, step = llm.engine, 0
    completions = [
        engine.check_request(each.prompt, each.params, adapter=each.adapter).completion(0)
        for each in arrivals
    ]
    while step < 40 or engine.has_unfinished:
        for each, completion in zip(arrivals, completions, strict=True):
            if each.step == step:
                engine.add(completion)
            if each.aborted_at == step:
                engine.abort(completion)
        engine.step()
        step += 1
    return completions


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals(pair: LLM, alone: LLM, seed: int) -> None:
    arrivals = arrivals_of(seed)
    served, expected = serve(pair, arrivals), serve(alone, arrivals)
    assert {completion.request.replica for completion in served} == {0, 1}
    for arrival, ours, theirs in zip(arrivals, served, expected, strict=True):
        ours_out, theirs_out = ours.output, theirs.output
        if arrival.aborted_at is not None:  # the number of steps may differ
            shorter = sorted((ours_out.token_ids, theirs_out.token_ids), key=len)
            assert shorter[1][: len(shorter[0])] == shorter[0]
            continue
        assert ours_out.token_ids == theirs_out.token_ids
        assert ours_out.finish_reason == theirs_out.finish_reason == "length"
        if theirs_out.logprobs is not None:
            assert ours_out.logprobs is not None
            for got, want in zip(ours_out.logprobs, theirs_out.logprobs, strict=True):
                assert {t: p.logprob for t, p in got.items()} == pytest.approx(
                    {t: p.logprob for t, p in want.items()}, abs=1e-4
                )


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


def test_a_stream_left_half_way_and_a_refused_request(pair: LLM, alone: LLM) -> None:
    for number, _ in enumerate(pair.stream(prompts(), SamplingParams(max_tokens=20))):
        if number == 9:
            break
    with pytest.raises(RequestError, match="token ids are integers"):
        pair.generate([[1], [10**6]])
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
        preempted: list[Any] = []
        for scheduler in engine.schedulers:
            scheduler._preempt = _counted(scheduler._preempt, preempted)  # type: ignore[method-assign]
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
            len(preempted),
            modes,
            engine.replica_stats(),
        )


def _counted(function: Any, calls: list[Any]) -> Any:
    return lambda request: (calls.append(request), function(request))


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
