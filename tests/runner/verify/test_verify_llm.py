"""``LLM(verify=...)``: every graph and step is compared; those that differ are quarantined."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_models import deep_model
from spelling_models import save_spelling
from tiny_encoders import PROMPTS, open_encoder, save_encoder

from ostinato import (
    LLM,
    ConfigError,
    DraftModel,
    GraphConfig,
    NgramDrafts,
    OffloadConfig,
    SamplingParams,
    StructuredOutputsParams,
)
from ostinato.graphs.policy.descriptor import Reason
from ostinato.graphs.policy.modes import ModeName
from ostinato.graphs.trust.shadow.report import Cause
from ostinato.runner.sampling.sampler_graphs import SamplerLaunch

PROMPT_IDS = [[(7 * i + j) % 500 for j in range(3 + 4 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=1, top_k=5, seed=1, logprobs=2),
    SamplingParams(max_tokens=6, temperature=0.7, seed=2),
    SamplingParams(max_tokens=8, temperature=1, repetition_penalty=1.2, seed=3),
    SamplingParams(max_tokens=5, temperature=0),
]
LIMITS: dict[str, Any] = {
    "model": "tiny",
    "random_weights": True,
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "block_size": 8,
    "kv_cache_memory_bytes": "1M",
    "show_progress": False,
}
ALWAYS = "capture,sample:1"


def open_llm(device: torch.device | str, mode: ModeName, **options: Any) -> LLM:
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [4, 6, 32])
    return LLM(device=str(device), graphs=graphs, **{**LIMITS, **options})


def tokens(llm: LLM, params: Sequence[SamplingParams] = PARAMS) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPT_IDS, list(params))]


def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="ostinato.graphs.trust.shadow.shadow")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens without graphs, on the CPU."""
    with open_llm("cpu", "NONE") as llm:
        return tokens(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ahead", "drafts"),
    [
        ("FULL_AND_FULL", True, None),
        ("FULL_AND_FULL", False, NgramDrafts(num_tokens=2)),
        ("FULL_AND_PIECEWISE", True, NgramDrafts(num_tokens=2)),
        ("FULL", False, None),
        ("PIECEWISE", True, None),
    ],
    ids=str,
)
def test_every_step_is_compared_and_changes_nothing(
    device: torch.device, mode: ModeName, ahead: bool, drafts: Any, expected: list[list[int]]
) -> None:
    options = {"async_scheduling": ahead, "speculative": drafts}
    with open_llm(device, mode, verify=ALWAYS, **options) as llm:
        at_capture = llm.verification.num_compared
        assert at_capture >= len(llm.engine.runner.plan.entries)
        found = tokens(llm)
        report, runner = llm.verification, llm.engine.runner
        assert [str(each) for each in report.mismatches] == []
        assert report.num_inexact == 0
        replays = runner.stats.hits + runner.samplers.stats.replays
        assert report.num_compared - at_capture == replays
    if device.type == "cpu":
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"swiftkv_layers": 1},
        {"enable_lora": True, "max_loras": 2},
        {"dtype": "bfloat16"},
        {"model": deep_model(), "offload": OffloadConfig(group=2, offloaded=1)},
    ],
    ids=["swiftkv", "lora", "bfloat16", "offload"],
)
def test_other_features_agree_with_eager(device: torch.device, options: dict[str, Any]) -> None:
    options["random_weights"] = "model" not in options
    with open_llm(device, "FULL_AND_PIECEWISE", verify=ALWAYS, **options) as llm:
        prompts = [[token % 100 for token in prompt] for prompt in PROMPT_IDS]
        llm.generate(prompts, PARAMS)
        report = llm.verification
        assert [str(each) for each in report.mismatches] == []
        assert (report.num_inexact, report.num_skipped) == (0, 0)
        assert report.num_compared > 20


def test_a_trial_leaves_nothing_behind(device: torch.device) -> None:
    with open_llm(device, "FULL_AND_FULL", verify="capture") as llm:
        runner = llm.engine.runner
        assert llm.verification.num_compared
        for layer in runner.kv_cache.layers:
            assert all(not tensor.any() for tensor in layer)
        state = runner.state
        assert not state.token_ids[:-1].any()
        assert not state.num_computed.any()
        assert not state.block_table.any()
        assert runner.stats.hits == runner.stats.misses == 0


def test_only_sampled_steps_are_compared(device: torch.device) -> None:
    with open_llm(device, "FULL_AND_FULL", verify="sample:0.5") as llm:
        assert llm.verification.num_compared == 0
        for _ in range(8):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, temperature=0))
        report, hits = llm.verification, llm.engine.runner.stats.hits
        policy = llm.config.verify_policy
        assert report.num_compared == sum(policy.samples(step) for step in range(hits))
        assert 0 < report.num_compared < hits


def test_off_by_default() -> None:
    with open_llm("cpu", "FULL_AND_FULL") as llm:
        tokens(llm)
        assert llm.verification.num_compared == 0
        assert llm.engine.runner.execution.replays_directly


def move_weight(llm: LLM) -> None:
    model: Any = llm.engine.model
    weight = model.layers[1].qkv_proj.weight
    weight.data = weight.data.flip(0).contiguous()


@pytest.mark.slow
def test_a_graph_that_differs_is_quarantined_and_its_step_put_right(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(device, "NONE") as llm:
        move_weight(llm)
        expected = tokens(llm)
    with open_llm(device, "FULL_AND_FULL", verify="sample:1") as llm:
        move_weight(llm)
        found = tokens(llm)
        report, stats = llm.verification, llm.engine.runner.stats
        assert {each.finding.cause for each in report.mismatches} == {Cause.MOVED_MEMORY}
        assert all("layers.1.qkv_proj.weight" in str(each) for each in report.mismatches)
        assert len(report.quarantined) == len(set(report.quarantined))
        assert stats.eager[Reason.QUARANTINED] > 0
        assert set(stats.eager) == {Reason.QUARANTINED}
        # Each graph ran once, and that step was put right.
        assert stats.hits == len(report.mismatches)
        if device.type == "cpu":
            assert found == expected
    assert "it runs eagerly from now on" in caplog.text
    assert re.search(r"'layers\.1\.qkv_proj\.weight',? at 0x", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_FULL"])
def test_samplers_see_the_logits_that_were_put_right(
    caplog: pytest.LogCaptureFixture, mode: ModeName
) -> None:
    """Not those of the replay that looked for the cause."""
    quiet(caplog)
    params = [SamplingParams(max_tokens=8, temperature=0, logprobs=2)] * len(PROMPT_IDS)
    with open_llm("cpu", mode, verify="sample:1") as llm:
        expected = tokens(llm, params)
        weight = llm.engine.model.layers[1].qkv_proj.weight  # type: ignore[attr-defined]
        old, weight.data = weight.data, weight.data.clone()
        old.zero_()
        assert tokens(llm, params) == expected
        assert llm.verification.mismatches


@pytest.mark.slow
def test_after_a_mismatch_every_graph_is_suspect(caplog: pytest.LogCaptureFixture) -> None:
    """The first sampled step finds a moved weight; all other graphs are then compared at once."""
    quiet(caplog)
    with open_llm("cpu", "FULL_AND_FULL", verify="sample:0.02") as llm:
        move_weight(llm)
        for _ in range(12):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0))
        assert llm.verification.mismatches
        hits = llm.engine.runner.stats.hits
        tokens(llm)
        # Every graph that is replayed from now on is compared, and found out.
        later = llm.engine.runner.stats.hits - hits
        graphs = llm.verification.mismatches
        assert 0 < later <= len(graphs)


def test_a_sampler_graph_that_differs_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    quiet(caplog)
    params = SamplingParams(max_tokens=6, temperature=1, top_k=3, seed=1)
    with open_llm("cpu", "FULL_AND_FULL", verify="capture") as llm:
        expected = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
        samplers = llm.engine.runner.samplers
        (graph,) = samplers._graphs.values()
        assert graph.is_compared
        assert graph.tape is not None
        graph.is_compared = False
        graph.tape.graphs[0]._steps.clear()  # type: ignore[attr-defined]
        found = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
        assert found == expected
        assert graph.tape is None
        assert samplers.stats.launches[SamplerLaunch.QUARANTINED] > 0
        (mismatch,) = llm.verification.mismatches
        assert mismatch.graph.startswith("sampler graph of 4 rows (filters)")


@pytest.mark.slow
def test_structured_output_is_compared(device: torch.device, tmp_path: Path) -> None:
    """Masks are written between the step's graph and its sampler's."""
    pytest.importorskip("llguidance")
    options = {"model": str(save_spelling(tmp_path)), "random_weights": False}
    with open_llm(device, "FULL_AND_FULL", verify="sample:1", **options) as llm:
        structure = StructuredOutputsParams(regex="[ab]{12}")
        params = SamplingParams(temperature=3.0, max_tokens=20, structured_outputs=structure)
        for each in llm.generate([[5, 6, 7], [8, 9]], params):
            assert re.fullmatch("[ab]{12}", each.outputs[0].text)
        stats = llm.engine.runner.samplers.stats
        assert stats.replays > 4
        assert not llm.verification.mismatches
        assert llm.verification.num_compared == llm.engine.runner.stats.hits + stats.replays


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_fault_on_one_rank_is_found_by_all(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other rank's results differ too, from the first sum over ranks on."""
    quiet(caplog)
    options = {**LIMITS, "verify": "sample:1", "tensor_parallel_size": 2}
    params = SamplingParams(max_tokens=3, temperature=0)
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=[4])
    with LLM(device="cpu", graphs=graphs, **options) as llm:
        llm.generate([[1, 2, 3]], params)
        assert llm.verification.num_compared == 3
        assert not llm.verification.mismatches
        move_weight(llm)
        llm.generate([[4, 5, 6]], params)
        assert {each.finding.cause for each in llm.verification.mismatches} == {Cause.MOVED_MEMORY}
        assert llm.engine.runner.stats.eager[Reason.QUARANTINED] == 1
    assert "first at ostinato.all_reduce.default" in capfd.readouterr().err


# --- encoders -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_encoders_are_compared(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    quiet(caplog)
    save_encoder(tmp_path, "bert")
    with open_encoder(tmp_path, verify=ALWAYS) as llm:
        at_capture = llm.verification.num_compared
        assert at_capture
        expected = [each.embedding.tolist() for each in llm.embed(PROMPTS)]
        assert llm.verification.num_compared > at_capture
        assert not llm.verification.mismatches
        model: Any = llm.pooling.model
        dense = model.model.encoder.layer[1].output.dense
        dense.weight.data = dense.weight.data.clone()
        dense.weight.data.add_(0.0)
        assert [each.embedding.tolist() for each in llm.embed(PROMPTS)] == expected
        dense.weight.data = -dense.weight.data
        llm.embed(PROMPTS)
        causes = {each.finding.cause for each in llm.verification.mismatches}
        assert causes == {Cause.MOVED_MEMORY}
        assert "encoder.layer.1.output.dense.weight" in str(llm.verification.mismatches[0])
        llm.embed(PROMPTS)
        assert llm.pooling.runner.stats.eager[Reason.QUARANTINED] > 0


@pytest.mark.slow
def test_an_encoders_batch_is_put_right(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    quiet(caplog)
    save_encoder(tmp_path, "bert")
    with open_encoder(tmp_path, verify="sample:1") as llm:
        expected = [each.embedding for each in llm.embed(PROMPTS)]
        weight = llm.pooling.model.model.encoder.layer[1].output.dense.weight  # type: ignore[attr-defined]
        old, weight.data = weight.data, weight.data.clone()
        old.zero_()
        assert_same = partial(torch.testing.assert_close, expected=expected)
        assert_same([each.embedding for each in llm.embed(PROMPTS)])
        assert llm.verification.mismatches
        assert_same([each.embedding for each in llm.embed(PROMPTS)])


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": GraphConfig(mode="NONE")}, "compares graphs, but the graph mode is NONE"),
        ({"graphs": GraphConfig(compile="eager")}, "does not support compile='eager'"),
        ({"data_parallel_size": 2}, "supports one replica, not data_parallel_size=2"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "does not support decode_context_parallel_size=2",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"verify='capture' {message}"):
        LLM(device="cpu", verify="capture", **{**LIMITS, **options})


def test_drafts_with_a_kv_cache_are_refused() -> None:
    drafts = DraftModel(model="tiny", random_weights=True)
    with pytest.raises(ConfigError, match=r"verify='capture' does not support DraftModel, which"):
        open_llm("cpu", "FULL_AND_FULL", verify="capture", speculative=drafts)
