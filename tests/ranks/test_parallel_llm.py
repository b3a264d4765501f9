"""``LLM`` over gloo processes against ``LLM`` in one: the same tokens for every layout."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_llm import LIMITS, Outcome, blocks_of, params, prompts, run_llm
from sharded_steps import config_of
from transformers import AutoModelForCausalLM
from workers import GlooPool

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ConfigError, RankFailedError, RequestError
from ostinato.graphs.policy.counters import compilation_counter

pytestmark = pytest.mark.slow
HEADS = {"head_dim": 8, "num_layers": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, Outcome]]:
    """A checkpoint with this many KV heads, and one process's eager results for it."""
    made: dict[int, tuple[str, Outcome]] = {}

    def make(num_kv_heads: int) -> tuple[str, Outcome]:
        if num_kv_heads not in made:
            torch.manual_seed(num_kv_heads)
            model: Any = AutoModelForCausalLM.from_config(config_of("llama", num_kv_heads))
            for parameter in model.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
            path: Path = tmp_path_factory.mktemp(f"kv-{num_kv_heads}")
            model.generation_config.eos_token_id = None
            model.config.eos_token_id = None
            model.save_pretrained(path)
            made[num_kv_heads] = str(path), run_llm(str(path), "NONE")
        return made[num_kv_heads]

    return make


def few_blocks(num_kv_heads: int, sp: int, tp: int) -> int:
    own = max(1, num_kv_heads // (sp * tp))
    return blocks_of(20, num_kv_heads=own, **HEADS)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_tokens_equal_those_of_one_process(
    gloo_pool: GlooPool, reference: Any, sp: int, tp: int, num_kv_heads: int
) -> None:
    path, expected = reference(num_kv_heads)
    options: dict[str, Any] = {"tensor_parallel_size": tp, "ulysses_sequence_parallel_size": sp}
    options["kv_cache_memory_bytes"] = few_blocks(num_kv_heads, sp, tp)
    outcomes = gloo_pool.run(call, path, "FULL_AND_PIECEWISE", options, world_size=sp * tp)
    for outcome in outcomes:
        assert outcome.tokens == expected.tokens
        assert outcome.reasons == expected.reasons
        assert {("base", "FULL"), ("base", "PIECEWISE")} <= outcome.steps
    assert outcomes[0].num_preemptions > 0


def call(path: str, mode: str, options: dict[str, Any]) -> Outcome:
    return run_llm(path, mode, **options)


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE", "FULL"])
@pytest.mark.parametrize(("sp", "tp"), [(1, 2), (2, 2)])
def test_other_modes(gloo_pool: GlooPool, reference: Any, sp: int, tp: int, mode: str) -> None:
    path, expected = reference(2)
    options = {"tensor_parallel_size": tp, "ulysses_sequence_parallel_size": sp}
    options["max_num_seqs"] = 3  # padded to a multiple of sp: one row more than requests
    outcomes = gloo_pool.run(call, path, mode, options, world_size=sp * tp)
    for outcome in outcomes:
        assert outcome.tokens == expected.tokens
        assert outcome.steps <= {("base", mode), ("base", "NONE")}
        assert ("base", mode) in outcome.steps


def test_whole_graphs_for_all_batches(gloo_pool: GlooPool, reference: Any) -> None:
    """Decode and mixed graphs of one size are different graphs, in the same order on all ranks."""
    path, expected = reference(2)
    options = {"tensor_parallel_size": 2, "ulysses_sequence_parallel_size": 2}
    for outcome in gloo_pool.run(call, path, "FULL_AND_FULL", options, world_size=4):
        assert outcome.tokens == expected.tokens
        assert outcome.steps <= {("base", "FULL"), ("base", "NONE")}
        assert ("base", "FULL") in outcome.steps


@pytest.mark.parametrize(
    ("num_kv_heads", "mode"),
    [(4, "FULL_AND_PIECEWISE"), (1, "FULL_AND_PIECEWISE"), (4, "FULL_AND_FULL")],
)
@pytest.mark.parametrize(("sp", "tp"), [(2, 1), (2, 2)])
def test_shift_in_the_middle_of_requests(
    gloo_pool: GlooPool, reference: Any, sp: int, tp: int, num_kv_heads: int, mode: str
) -> None:
    """Two requests decode on the shift model; a third request or a prompt moves all to the base."""
    path, expected = reference(num_kv_heads)
    options: dict[str, Any] = {"tensor_parallel_size": tp, "ulysses_sequence_parallel_size": sp}
    options["shift_parallel_threshold"] = 2
    options["async_scheduling"] = True  # plans are sent before the previous step's tokens are known
    outcomes = gloo_pool.run(call, path, mode, options, world_size=sp * tp)
    for outcome in outcomes:
        assert outcome.tokens == expected.tokens
        expected_steps = {("base", "FULL"), ("shift", "FULL"), ("base", mode.split("_")[-1])}
        assert expected_steps <= outcome.steps


def captured_plans(path: str) -> tuple[list[list[int]], int, str]:
    """Sizes of both models, triggers, and the progress bars' output."""
    before, bars = compilation_counter.clone(), io.StringIO()
    with (
        contextlib.redirect_stderr(bars),
        LLM(
            path,
            ulysses_sequence_parallel_size=2,
            shift_parallel_threshold=3,
            graphs=GraphConfig(capture_sizes=[1, 2, 4, 12]),
            **(LIMITS | {"show_progress": True}),
        ) as llm,
    ):
        runner = llm.engine.runner
        plans = [graphs.plan for graphs in (runner.graphs, runner.small_graphs)]
        triggers = compilation_counter.num_gpu_runner_capture_triggers
        triggers -= before.num_gpu_runner_capture_triggers
        assert llm.capture_graphs() == 0
        sizes = [sorted({e.descriptor.num_tokens for e in plan.entries}) for plan in plans]
        return sizes, triggers, bars.getvalue()


def test_both_models_are_captured_by_one_trigger(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference(4)
    results = gloo_pool.run(captured_plans, path)
    for sizes, triggers, _ in results:
        assert sizes == [[4, 8, 24], [1, 2, 4]]
        assert triggers == 1
    bars = [bars for _, _, bars in results]
    phases = ["mixed, PIECEWISE: 100%", "decode, FULL: 100%"]
    named = [f"{model} model: {phase}" for model in ("base", "shift") for phase in phases]
    places = [bars[0].find(name) for name in named]
    assert -1 not in places
    assert places == sorted(places)
    assert "model:" not in bars[1]  # only the first rank shows them


# --- the script on every rank --------------------------------------------------------------------


def stream_and_refuse(path: str) -> tuple[list[tuple[int, list[int]]], str, list[int]]:
    """A stream abandoned half-way, a refused request, and a call after both."""
    with LLM(path, tensor_parallel_size=2, **LIMITS) as llm:
        deltas = []
        for delta in llm.stream(prompts()[:2], SamplingParams(max_tokens=30)):
            deltas.append((delta.prompt_index, delta.token_ids))
            if len(deltas) == 7:
                break
        with pytest.raises(RequestError, match="token ids are integers") as caught:
            llm.generate([[10**6]])
        with pytest.raises(RequestError, match="this engine has 2 ranks, and masks are not sent"):
            llm.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}))
        output = llm.generate(prompts()[3], SamplingParams(max_tokens=5, temperature=0))[0]
        return deltas, str(caught.value), output.outputs[0].token_ids


def test_every_rank_gets_the_results(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference(2)
    first, second = gloo_pool.run(stream_and_refuse, path)
    assert first == second
    with LLM(path, **LIMITS) as llm:
        greedy = SamplingParams(max_tokens=5, temperature=0)
        alone = llm.generate(prompts()[3], greedy)[0].outputs[0].token_ids
    assert first[2] == alone
    assert len(first[0]) == 7


def fails_inside_a_call(path: str) -> str:
    with LLM(path, tensor_parallel_size=2, rank_timeout_s=5.0, **LIMITS) as llm:
        if dist.get_rank() == 0:
            llm.engine.scheduler.commit = lambda plan, tokens: 1 / 0  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError) as caught:
            llm.generate([1, 2, 3])
        return str(caught.value)


def test_an_error_of_rank_0_is_everybodys(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference(2)
    assert gloo_pool.run(fails_inside_a_call, path) == ["division by zero"] * 2


# --- what is refused -----------------------------------------------------------------------------


def refused(path: str, options: list[dict[str, Any]]) -> str:
    own = options[dist.get_rank() % len(options)]
    with pytest.raises(ConfigError) as caught:
        LLM(path, **(LIMITS | {"rank_timeout_s": 5.0} | own))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "max_num_seqs": 2}],
            "ranks differ in the setting max_num_seqs: rank 0 has '4'.*rank 1 has '2'",
        ),
        (
            [
                {"tensor_parallel_size": 2, "graphs": GraphConfig(capture_sizes=[1, 2])},
                {"tensor_parallel_size": 2, "graphs": GraphConfig(capture_sizes=[1, 4])},
            ],
            "ranks differ in the setting graphs",
        ),
        (
            [{"tensor_parallel_size": 2, "ulysses_sequence_parallel_size": 2}],
            "tensor_parallel_size 2 x ulysses_sequence_parallel_size 2 needs 4 ranks, but this "
            "world has 2",
        ),
    ],
)
def test_ranks_that_differ_are_all_told(
    gloo_pool: GlooPool, reference: Any, options: list[dict[str, Any]], message: str
) -> None:
    path, _ = reference(2)
    for text in gloo_pool.run(refused, path, options):
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(text)


def with_another_plan(path: str) -> str:
    """The settings are the same, but this rank resolves them differently."""
    from ostinato.graphs.policy.plan import CapturePlan

    if dist.get_rank() == 1:
        whole = CapturePlan.build

        def smaller(mode: Any, sizes: Any, **limits: Any) -> Any:
            return whole(mode, sizes[:-1], **limits)

        CapturePlan.build = smaller  # type: ignore[method-assign,assignment]
        try:
            return refused(path, [{"tensor_parallel_size": 2}])
        finally:
            CapturePlan.build = whole  # type: ignore[method-assign]
    return refused(path, [{"tensor_parallel_size": 2}])


def test_unequal_plans_are_refused(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference(2)
    for text in gloo_pool.run(with_another_plan, path):
        assert text.startswith("ranks differ in the plan of the graphs: rank 0 has '")


def with_other_weights(directory: str, paths: list[str]) -> str:
    """The same name on all ranks, but different files: a stale copy on one machine."""
    own, before = Path(directory, f"rank-{dist.get_rank()}"), Path.cwd()
    own.mkdir()
    (own / "model").symlink_to(paths[dist.get_rank()])
    os.chdir(own)
    try:
        return refused("model", [{"tensor_parallel_size": 2}])
    finally:
        os.chdir(before)


def test_unequal_weights_are_refused(gloo_pool: GlooPool, reference: Any, tmp_path: Path) -> None:
    paths = [reference(2)[0], reference(4)[0]]
    for text in gloo_pool.run(with_other_weights, str(tmp_path), paths):
        assert text.startswith("ranks differ in the weights: rank 0 has '")


def generic_model(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(path, tensor_parallel_size=2, random_weights=True, **LIMITS)
    return str(caught.value)


def test_generic_models_are_refused_by_name(gloo_pool: GlooPool, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64).save_pretrained(
        tmp_path
    )
    for text in gloo_pool.run(generic_model, str(tmp_path)):
        assert "only models of the native decoder run on several ranks" in text
        assert "gpt2" in text


# --- faults --------------------------------------------------------------------------------------


def raises_in_a_step(path: str) -> tuple[type[BaseException], str]:
    with LLM(path, tensor_parallel_size=2, rank_timeout_s=4.0, **LIMITS) as llm:
        runner = llm.engine.runner
        update, steps = runner.state.update, 0

        def fails(plan: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == 4 and dist.get_rank() == 1:
                raise ValueError("a fault of this rank")
            update(plan)

        runner.state.update = fails
        try:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=40))
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("nothing was raised")


def test_an_error_on_one_rank_is_named_on_the_other(gloo_pool: GlooPool, reference: Any) -> None:
    path, _ = reference(2)
    on_0, on_1 = gloo_pool.run(raises_in_a_step, path, timeout_s=30)
    assert on_1 == (ValueError, "a fault of this rank")
    assert on_0 == (RankFailedError, "rank 1 failed: ValueError: a fault of this rank")


def raises_at_start(path: str) -> tuple[type[BaseException], str]:
    from ostinato.runner.model_graphs import ModelGraphs

    capture = ModelGraphs.capture
    if dist.get_rank() == 1:

        def fails(self: Any, *_: Any) -> Any:
            raise ValueError("a fault of this rank")

        ModelGraphs.capture = fails  # type: ignore[method-assign]
    try:
        LLM(path, tensor_parallel_size=2, rank_timeout_s=4.0, **LIMITS)
    except Exception as error:
        return type(error), str(error)
    finally:
        ModelGraphs.capture = capture  # type: ignore[method-assign]
    raise AssertionError("nothing was raised")


def test_an_error_while_capturing_is_named_on_the_other(
    gloo_pool: GlooPool, reference: Any
) -> None:
    path, _ = reference(2)
    on_0, on_1 = gloo_pool.run(raises_at_start, path, timeout_s=30)
    assert on_1 == (ValueError, "a fault of this rank")
    assert on_0 == (RankFailedError, "rank 1 failed: ValueError: a fault of this rank")


def test_params_cover_what_the_sampler_does() -> None:
    assert len(params()) == len(prompts())
