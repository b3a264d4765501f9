"""Random mixed workloads: through graphs with poisoned padding, and eagerly; the same tokens.

Requests of any length join at any step, some are aborted. Before every step all input buffers are
filled with garbage and the cache starts as NaN, so that anything a step reads without having
written it shows. The eager engine takes in each step's tokens at once, the other one step late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import CompletionOutput, GraphConfig, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.requests.completion import Completion
from ostinato.graphs.policy.modes import ModeName
from ostinato.speculative.options import ReplayedDrafts
from ostinato.speculative.replayed import ReplayProposer

MAX_MODEL_LEN = 128
ENGINES: list[tuple[str, ModeName | None]] = [
    ("cpu", "FULL_AND_PIECEWISE"),
    ("cpu", "FULL_AND_FULL"),
    *([("cuda", None)] if torch.cuda.is_available() else []),
]
SPECULATING: list[tuple[str, ModeName | None]] = [*ENGINES, ("cpu", "PIECEWISE"), ("cpu", "FULL")]
pytestmark = pytest.mark.gpu
GARBAGE = 2**30  # no token, position, block or slot
EXAMPLES = 200 if torch.cuda.is_available() else 60


@dataclass(frozen=True)
class Arrival:
    """A request: joins after ``after`` steps, and is aborted ``patience`` steps later."""

    prompt: tuple[int, ...]
    params: SamplingParams
    after: int
    patience: int | None


arrivals = st.builds(
    Arrival,
    prompt=st.integers(1, 90).flatmap(
        lambda length: st.integers(0, 400).map(lambda seed: prompt_of(length, seed))
    ),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        seed=st.integers(0, 5),
        max_tokens=st.integers(1, 24),
        top_k=st.sampled_from([-1, -1, 5]),
        top_p=st.sampled_from([1.0, 1.0, 0.7]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.4]),
        logit_bias=st.sampled_from([None, None, None, {7: 4.0, 9: -100.0}]),
        logprobs=st.sampled_from([None, None, 0, 3]),
        stop_token_ids=st.sampled_from([(), tuple(range(0, 512, 9))]),
    ),
    after=st.integers(0, 20),
    patience=st.none() | st.integers(1, 12),
)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """Few different beginnings, so that prefixes are often shared."""
    return tuple((seed % 3 * 17 + i * 7 + (seed if i > 20 else 0)) % 512 for i in range(length))


def open_engine(device: str, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            model="tiny",
            random_weights=True,
            device=device,
            dtype="float32",
            max_num_seqs=10,
            max_num_batched_tokens=96,
            max_model_len=MAX_MODEL_LEN,
            block_size=8,
            kv_cache_memory_bytes=2**19,
            show_progress=False,
            **settings,
        )
    )


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    device, mode = request.param
    graphs = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 64])
    with (
        open_engine(device, graphs=graphs, async_scheduling=True) as replaying,
        open_engine(device, graphs=GraphConfig(mode="NONE"), async_scheduling=False) as eager,
    ):
        poison_every_step(replaying)
        yield replaying, eager


@pytest.fixture(scope="module", params=SPECULATING, ids=str)
def speculating(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Engine, ReplayProposer, Engine]]:
    """With drafts of which six in ten are right, once it knows the texts; and without graphs."""
    device, mode = request.param
    drafts = ReplayedDrafts(num_tokens={2: 5, 5: 3, 7: 0, 10: 1}, acceptance=0.6)
    graphs = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 64])
    with (
        open_engine(device, graphs=graphs, async_scheduling=True, speculative=drafts) as engine,
        open_engine(device, graphs=GraphConfig(mode="NONE"), async_scheduling=False) as eager,
    ):
        poison_every_step(engine)
        proposer = engine.runner.memory.proposer
        assert isinstance(proposer, ReplayProposer)
        yield engine, proposer, eager


def poison_every_step(engine: Engine) -> None:
    runner, run = engine.runner, engine.runner.run
    buffers = runner.buffers

    def run_poisoned(plan: Any) -> Any:
        runner.forget_rows()
        for buffer in (
            buffers.req_indices,
            buffers.query_lens,
            buffers.sampled,
            buffers.draft_req_indices,
            buffers.draft_lengths,
            buffers.accepted,
            buffers.logits_indices,
            buffers.input_ids,
            buffers.tokens.positions,
            buffers.tokens.seq_lens,
            buffers.tokens.query_start_loc[1:],
            buffers.tokens.slot_mappings,
            *buffers.tokens.block_tables,
        ):
            buffer.fill_(GARBAGE)
        return run(plan)

    runner.run = run_poisoned  # type: ignore[method-assign]


def run_workload(engine: Engine, workload: list[Arrival]) -> list[Completion]:
    engine.scheduler.allocator.reset_prefix_cache()
    for layer in engine.runner.kv_cache.layers:
        for cache in layer:
            cache.fill_(float("nan"))
    completions = [
        engine.prepare_request(arrival.prompt, arrival.params)[0] for arrival in workload
    ]
    step = 0
    while step <= 32 or engine.has_unfinished:
        for arrival, completion in zip(workload, completions, strict=True):
            if arrival.after == step:
                engine.add(completion)
            if arrival.patience is not None and arrival.after + arrival.patience == step:
                engine.abort(completion)
        engine.step()
        step += 1
    assert engine.scheduler.allocator.num_free_blocks == engine.runner.cache.num_blocks - 1
    return completions


@pytest.mark.slow
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=st.lists(arrivals, min_size=1, max_size=14))
def test_graphs_give_the_tokens_of_eager(
    engines: tuple[Engine, Engine], workload: list[Arrival]
) -> None:
    replaying, eager = engines
    ours, expected = run_workload(replaying, workload), run_workload(eager, workload)
    for arrival, one, other in zip(workload, ours, expected, strict=True):
        output, eager_output = one.output, other.output
        shorter = min(len(output.token_ids), len(eager_output.token_ids))
        if arrival.patience is None:
            assert output.finish_reason == eager_output.finish_reason
            assert shorter == max(len(output.token_ids), len(eager_output.token_ids))
        # Otherwise, where it was cut off depends on when tokens were taken in.
        assert output.token_ids[:shorter] == eager_output.token_ids[:shorter]
        assert_same_logprobs(output, eager_output, shorter)


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=st.lists(arrivals, min_size=1, max_size=12))
def test_drafts_do_not_change_the_tokens(
    speculating: tuple[Engine, ReplayProposer, Engine], workload: list[Arrival]
) -> None:
    engine, proposer, eager = speculating
    expected = run_workload(eager, workload)
    proposer.texts = [each.request.all_token_ids for each in expected]
    ours = run_workload(engine, workload)
    for arrival, one, other in zip(workload, ours, expected, strict=True):
        output, plain = one.output, other.output
        shorter = min(len(output.token_ids), len(plain.token_ids))
        if arrival.patience is None:
            assert output.finish_reason == plain.finish_reason
            assert shorter == max(len(output.token_ids), len(plain.token_ids))
        assert output.token_ids[:shorter] == plain.token_ids[:shorter]
        assert_same_logprobs(output, plain, shorter)


def assert_same_logprobs(one: CompletionOutput, other: CompletionOutput, num_tokens: int) -> None:
    """Nearly: a step with other requests has another batch size, and rounds differently."""
    assert (one.logprobs is None) == (other.logprobs is None)
    if one.logprobs is None or other.logprobs is None:
        return
    for row, other_row in zip(one.logprobs[:num_tokens], other.logprobs[:num_tokens], strict=True):
        values = {token: each.logprob for token, each in row.items()}
        expected = {token: each.logprob for token, each in other_row.items()}
        assert values == pytest.approx(expected, abs=1e-4)


def test_the_workloads_replay_graphs(engines: tuple[Engine, Engine]) -> None:
    replaying, eager = engines
    workload = [Arrival(prompt_of(n, n), SamplingParams(max_tokens=9), 0, None) for n in (3, 50)]
    before = replaying.runner.stats.hits  # of the workloads above, if they ran in this process
    run_workload(replaying, workload)
    run_workload(eager, workload)
    assert replaying.runner.stats.hits >= before + 9
    assert eager.runner.stats.hits == 0


def test_the_workloads_replay_the_full_sampler(engines: tuple[Engine, Engine]) -> None:
    replaying, _ = engines
    params = SamplingParams(max_tokens=9, top_k=5, repetition_penalty=1.4, logprobs=3)
    workload = [Arrival(prompt_of(n, n), params, 0, None) for n in (3, 50)]
    before = replaying.runner.samplers.stats.replays
    run_workload(replaying, workload)
    assert replaying.runner.samplers.stats.replays >= before + 6


@pytest.mark.slow
def test_preempted_requests_are_sampled_as_others(engines: tuple[Engine, Engine]) -> None:
    common: dict[str, Any] = {"max_tokens": 40, "top_k": 5, "repetition_penalty": 1.3}
    workload = [
        Arrival(prompt_of(80, 31 * n), SamplingParams(seed=n, **common), n % 3, None)
        for n in range(10)
    ]
    ours, expected = (run_workload(engine, workload) for engine in engines)
    assert any(completion.request.num_preemptions for completion in ours)
    for one, other in zip(ours, expected, strict=True):
        assert one.output.token_ids == other.output.token_ids


@pytest.mark.slow
@pytest.mark.sweep
def test_drafts_of_preempted_requests(speculating: tuple[Engine, ReplayProposer, Engine]) -> None:
    """The cache holds fewer requests than run at first."""
    engine, proposer, eager = speculating
    workload = [
        Arrival(prompt_of(80, 31 * n), SamplingParams(temperature=0, max_tokens=40), n % 3, None)
        for n in range(10)
    ]
    expected = run_workload(eager, workload)
    proposer.texts = [each.request.all_token_ids for each in expected]
    engine.scheduler.drafts.stats.reset()
    ours = run_workload(engine, workload)
    assert [each.output.token_ids for each in ours] == [each.output.token_ids for each in expected]
    assert any(each.request.num_preemptions for each in ours)
    assert engine.scheduler.drafts.stats.num_accepted > 50
