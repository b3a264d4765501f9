"""Drafts on several ranks: the tokens of one process without drafts, wherever a request runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from parallel_llm import (
    LIMITS,
    assert_block_0_untouched,
    blocks_of,
    params,
    poison,
    prompts,
)
from replicas import (
    NAMES,
    Arrival,
    arrivals_of,
    check_same,
    load_adapters,
    save_llama,
    serve,
    tokens_of,
)
from workers import GlooPool

from ostinato import (
    LLM,
    ConfigError,
    DraftModel,
    EagleDrafts,
    GraphConfig,
    ReplayedDrafts,
    SamplingParams,
    Speculation,
    SuffixDrafts,
)
from ostinato.engine.replica_engine import ReplicaEngine
from ostinato.engine.requests.completion import Completion

GRAPHS = GraphConfig(capture_sizes=[4, 8, 12])
LORA: dict[str, Any] = {**LIMITS, "enable_lora": True, "max_loras": 2, "rank_timeout_s": 20.0}
GREEDY = SamplingParams(max_tokens=20, temperature=0)
SEEDED = [replace(each, seed=seed) for seed, each in enumerate(params())]
SEEDS = range(3)
ADAPTED = [*NAMES, *NAMES]  # of ``prompts()``
HEADS = {"head_dim": 8, "num_layers": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("drafts") / "model")


class Expected(NamedTuple):
    """By one process without drafts: requests that arrive, and ``prompts()`` in two ways."""

    arrived: list[list[Completion]]
    greedy: list[list[int]]
    seeded: list[list[int]]


def whole(seed: int) -> list[Arrival]:
    return [replace(each, aborted_at=None) for each in arrivals_of(seed)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Expected:
    with LLM(checkpoint, **LORA, graphs=GraphConfig(mode="NONE")) as llm:
        load_adapters(llm, checkpoint)
        return Expected(
            [serve(llm, whole(seed)) for seed in SEEDS],
            tokens_of(llm.generate(prompts(), GREEDY, adapter=ADAPTED)),
            tokens_of(llm.generate(prompts(), SEEDED)),
        )


def texts_of(outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + output for prompt, output in zip(prompts(), outputs, strict=True)]


# --- one process starts the other ----------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "lockstep"])
def pair(
    request: pytest.FixtureRequest, checkpoint: Path, expected: Expected, forked_ranks: None
) -> Iterator[LLM]:
    """Two replicas with adapters, few blocks, and steps of 1, 2 and 4 tokens per request."""
    arrived = [
        each.request.prompt_token_ids + each.output.token_ids
        for completions in expected.arrived
        for each in completions
    ]
    texts = [*arrived, *texts_of(expected.greedy)]
    with LLM(
        checkpoint,
        **LORA,
        data_parallel_size=2,
        data_parallel_lockstep=request.param,
        async_scheduling=True,
        graphs=GRAPHS,
        kv_cache_memory_bytes=blocks_of(17, num_kv_heads=4, **HEADS),
        speculative=ReplayedDrafts(texts=texts, num_tokens={2: 3, 4: 1}, acceptance=0.8),
    ) as llm:
        load_adapters(llm, checkpoint)
        yield llm


@pytest.mark.slow
def test_random_arrivals(pair: LLM, expected: Expected) -> None:
    """With adapters, sampling, logprobs, aborts and preemptions."""
    pair.speculation.reset()
    num_preemptions = 0
    for seed in SEEDS:
        arrivals = arrivals_of(seed)
        served = serve(pair, arrivals)
        check_same(arrivals, served, expected.arrived[seed])
        assert {completion.request.replica for completion in served} == {0, 1}
        num_preemptions += sum(completion.request.num_preemptions for completion in served)
    assert num_preemptions > 0
    assert pair.speculation.num_runs > 50
    assert pair.speculation.acceptance_length > 1.4


@pytest.mark.slow
def test_one_request_leaves_a_replica_idle(pair: LLM, expected: Expected) -> None:
    for prompt, name, tokens in zip(prompts(), ADAPTED, expected.greedy, strict=True):
        pair.speculation.reset()
        assert tokens_of(pair.generate([prompt], GREEDY, adapter=name)) == [tokens]
        assert pair.speculation.acceptance_length > 2


@pytest.mark.slow
def test_a_stream_left_half_way(pair: LLM, expected: Expected) -> None:
    for number, _ in enumerate(pair.stream(prompts(), GREEDY, adapter=ADAPTED)):
        if number == 9:
            break
    assert sum(pair.engine.replica_stats()).num_running == 0
    assert tokens_of(pair.generate(prompts(), GREEDY, adapter=ADAPTED)) == expected.greedy


@pytest.mark.slow
def test_results_of_interrupted_steps_are_dropped(pair: LLM, expected: Expected) -> None:
    engine = pair.engine
    assert isinstance(engine, ReplicaEngine)
    runner = engine._leader()
    run, num_runs = runner.run_replicas, 0

    def interrupted(plans: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        results = run(plans)
        if num_runs in (5, 6, 12):
            raise KeyboardInterrupt
        return results

    requests = [
        engine.check_request(prompt, GREEDY, adapter=name).completion(0)
        for prompt, name in zip(prompts(), ADAPTED, strict=True)
    ]
    for completion in requests:
        engine.add(completion)
    runner.run_replicas = interrupted  # type: ignore[method-assign]
    num_interrupted = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupted += 1
    del runner.run_replicas  # type: ignore[method-assign]
    assert num_interrupted == 3
    assert [completion.output.token_ids for completion in requests] == expected.greedy


# --- all ranks run the script --------------------------------------------------------------------


def learn(path: str) -> tuple[list[Any], tuple[int, int]]:
    """The same prompt on one replica, then on the other: the outputs, and how many steps each."""
    with LLM(
        path,
        **LIMITS,
        rank_timeout_s=20.0,
        graphs=GRAPHS,
        data_parallel_size=2,
        enable_prefix_caching=False,
        speculative=SuffixDrafts(num_tokens=3),
    ) as llm:
        (tokens,) = tokens_of(llm.generate([prompts()[5]], GREEDY))
        first = tokens.copy()
        tokens.clear()  # as its owner may
        num_runs = llm.speculation.num_runs
        llm.speculation.reset()
        # A long prompt on replica 0, which ends without drafts.
        both = [prompts()[3], prompts()[5]]
        _, again = tokens_of(llm.generate(both, [replace(GREEDY, max_tokens=1), GREEDY]))
        return [first, again], (num_runs, llm.speculation.num_runs)


@pytest.mark.slow
def test_every_replica_drafts_the_output_of_all(gloo_pool: GlooPool, checkpoint: Path) -> None:
    (tokens, num_runs), _ = gloo_pool.run(learn, str(checkpoint))
    assert tokens[0] == tokens[1]
    assert num_runs[0] > 15
    assert num_runs[1] < 9  # 5 if all drafts are right


@dataclass
class Step:
    """What this rank ran: the mode, the query length of its decode graph, all ranks' tokens."""

    has_work: bool
    mode: str
    query_len: int | None
    num_tokens: list[int]


def in_lockstep(path: str, texts: list[list[int]]) -> tuple[Any, list[Step], tuple[int, ...]]:
    """One request, then one on each replica, all of whose drafts are right."""
    with LLM(
        path,
        **LIMITS,
        rank_timeout_s=20.0,
        graphs=GRAPHS,
        data_parallel_size=2,
        data_parallel_lockstep=True,
        speculative=ReplayedDrafts(texts=texts, num_tokens=3),
    ) as llm:
        agreed: Any = llm.engine.runner._agreed
        step, steps = agreed.step, []

        def recorded(shape: Any) -> Any:
            made = step(shape)
            choice, sizes = made.choice, made.num_tokens_across_dp.tolist()
            assert choice.padded_num_tokens == sizes[dist.get_rank()]
            query_len = choice.descriptor.query_len
            steps.append(Step(shape is not None, choice.mode.name, query_len, sizes))
            return made

        agreed.step = recorded
        poison(llm.engine.runner)
        outputs = [*llm.generate(prompts()[:1], GREEDY), *llm.generate(prompts()[:2], GREEDY)]
        assert_block_0_untouched(llm.engine.runner)
        stats = llm.speculation
        counts = (stats.num_runs, stats.num_drafts, stats.num_accepted)
        return tokens_of(outputs), steps, counts


@pytest.mark.slow
def test_an_idle_replica_runs_padding_of_as_many_tokens(
    gloo_pool: GlooPool, checkpoint: Path, plain: list[list[int]]
) -> None:
    """And drafts of all replicas are counted."""
    first, second = gloo_pool.run(in_lockstep, str(checkpoint), texts_of(plain))
    assert first[0] == second[0] == [plain[0], *plain[:2]]
    steps = list(zip(first[1], second[1], strict=True))
    assert all(ours.num_tokens == theirs.num_tokens for ours, theirs in steps)
    idle = [(ours.query_len, theirs.query_len) for ours, theirs in steps if not theirs.has_work]
    assert idle.count((4, 4)) >= 5
    # After a request's first token 19 are left: 4 steps of 4 tokens, and one for the last 3.
    assert first[2] == (15, 45, 45)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[list[int]]:
    with LLM(checkpoint, **LIMITS, graphs=GraphConfig(mode="NONE")) as llm:
        return tokens_of(llm.generate(prompts(), GREEDY))


def on_all_ranks(path: str, options: dict[str, Any]) -> tuple[Any, float]:
    """Twice the same prompts: the second time, their output is known."""
    with LLM(path, **{**LIMITS, "rank_timeout_s": 20.0, **options}) as llm:
        poison(llm.engine.runner)
        found = [tokens_of(llm.generate(prompts(), SEEDED)) for _ in range(2)]
        assert_block_0_untouched(llm.engine.runner)
        return found, llm.speculation.acceptance_length


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tensor_parallel_size": 2, "async_scheduling": True}),
    "shift": (2, {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 6}),
    "dp-tp": (4, {"tensor_parallel_size": 2, "data_parallel_size": 2, "graphs": GRAPHS}),
    "dcp": (2, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_model(
    gloo_pool: GlooPool, tmp_path: Path, checkpoint: Path, expected: Expected, layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    path, tokens = checkpoint, expected.seeded
    drafts: Speculation = SuffixDrafts(num_tokens=3)
    if layout == "dcp":  # splits the keys of ranks that have the same
        path = save_llama(tmp_path / "model", num_kv_heads=1)
        with LLM(path, **LIMITS, graphs=GraphConfig(mode="NONE")) as llm:
            tokens = tokens_of(llm.generate(prompts(), SEEDED))
    if layout in ("shift", "dcp"):
        drafts = ReplayedDrafts(texts=texts_of(tokens), num_tokens={2: 3, 4: 2}, acceptance=0.7)
    options = {"graphs": GRAPHS, **options, "speculative": drafts}
    outcomes = gloo_pool.run(on_all_ranks, str(path), options, world_size=world_size)
    assert all(outcome[0] == [tokens] * 2 for outcome in outcomes)
    assert outcomes[0][1] > 1.3


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafts", [DraftModel(model="tiny"), EagleDrafts(model="head"), Speculation()]
)
def test_drafts_that_may_differ_between_ranks(drafts: Speculation) -> None:
    name = type(drafts).__name__
    with pytest.raises(ConfigError, match=f"{name} supports one rank per replica, not 2: ranks"):
        LLM("tiny", device="cpu", tensor_parallel_size=2, data_parallel_size=2, speculative=drafts)
