"""The engine from the outside: what comes back, what is refused, and what is left behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import (
    LLM,
    ClosedError,
    ConfigError,
    GraphConfig,
    RequestError,
    SamplingParams,
    compilation_counter,
)
from ostinato.attention.base import AttentionBackend
from ostinato.engine.engine import Engine
from ostinato.outputs import CompletionOutput
from ostinato.runner.model_graphs import ModelGraphs

PROMPTS = [[1, 2, 3], list(range(10, 45)), [7], [100, 90, 80, 70, 60, 50]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
NAN = float("nan")
MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]


def open_tiny(device: torch.device, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "random_weights": True,
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "16M",
        "show_progress": False,
    }
    return LLM("tiny", device=str(device), **{**options, **settings})


def tokens_of(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def free_blocks(llm: LLM) -> int:
    return llm.engine.scheduler.allocator.num_free_blocks


@pytest.fixture(params=[False, True], ids=["in-step", "overlap"])
def llm(device: torch.device, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Takes in each step's tokens before the next one starts, or one step later."""
    with open_tiny(device, async_scheduling=request.param) as llm:
        yield llm


@pytest.fixture
def expected(device: torch.device) -> list[list[int]]:
    return alone_and_eagerly(device)


@cache
def alone_and_eagerly(device: torch.device) -> list[list[int]]:
    """The tokens of ``PROMPTS``, each generated alone without graphs."""
    with open_tiny(device, graphs=GraphConfig(mode="NONE"), enable_prefix_caching=False) as llm:
        return [tokens_of(llm, prompt)[0] for prompt in PROMPTS]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_tokens_do_not_depend_on_the_mode(
    mode: str, device: torch.device, expected: list[list[int]]
) -> None:
    graphs = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 64])
    with open_tiny(device, graphs=graphs) as llm:
        assert tokens_of(llm, PROMPTS) == expected
        stats = llm.engine.runner.stats
        assert (stats.hits > 0) == (mode != "NONE")
        if mode not in ("NONE", "FULL_DECODE_ONLY"):
            assert stats.misses == 0


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL", "FULL_AND_FULL"])
def test_prompts_around_the_captured_sizes(mode: str, device: torch.device) -> None:
    """Size 1, one under, exactly, one over, and more than the largest."""
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 8, 9, 20, 31, 32, 33, 50)]
    with open_tiny(device, graphs=GraphConfig(mode="NONE"), enable_prefix_caching=False) as llm:
        alone = [tokens_of(llm, [prompt])[0] for prompt in prompts]
    graphs = GraphConfig(mode=mode, capture_sizes=[8, 32])
    with open_tiny(device, graphs=graphs, enable_prefix_caching=False) as llm:
        for prompt, expected_tokens in zip(prompts, alone, strict=True):
            before = llm.engine.runner.stats.misses
            assert tokens_of(llm, [prompt])[0] == expected_tokens
            assert llm.engine.runner.stats.misses - before == (len(prompt) > 32)
        reasons = {reason.name for reason in llm.engine.runner.stats.eager}
        assert reasons == {"TOO_LARGE"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 1},
        {"long_prefill_token_threshold": 7},
        {"long_prefill_token_threshold": 64},
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 1},
        {"block_size": 1},
        {"block_size": 5},
        {"graphs": GraphConfig(mode="FULL", capture_sizes=[3, 17])},
        {"graphs": GraphConfig(mode="FULL", capture_sizes=[64], num_warmups=0)},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_scheduling(
    settings: dict[str, Any], device: torch.device, expected: list[list[int]]
) -> None:
    with open_tiny(device, **settings) as llm:
        for _ in range(2):  # the second time, prefixes are found in the cache
            assert tokens_of(llm, PROMPTS) == expected


def test_preempted_requests_get_the_same_tokens(
    device: torch.device, expected: list[list[int]]
) -> None:
    with open_tiny(device, block_size=4, kv_cache_memory_bytes=None) as llm:
        per_block = sum(k[0].nbytes + v[0].nbytes for k, v in llm.engine.runner.kv_cache.layers)
    # One request of the longest length, and hardly more.
    with open_tiny(device, block_size=4, kv_cache_memory_bytes=per_block * 18) as llm:
        results = [llm.engine.prepare_request(prompt, GREEDY)[0] for prompt in PROMPTS]
        for completion in results:
            llm.engine.add(completion)
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [completion.output.token_ids for completion in results] == expected
        assert sum(completion.request.num_preemptions for completion in results) > 0
        assert free_blocks(llm) == 17


def test_a_cached_prefix_is_reused(llm: LLM) -> None:
    prompt = list(range(1, 41))
    first = llm.generate([prompt], GREEDY)[0]
    second = llm.generate([prompt], GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_padding_never_reaches_the_cache(device: torch.device, expected: list[list[int]]) -> None:
    """Everything that belongs to no request is NaN before the run, and still is after it."""
    with open_tiny(device, graphs=GraphConfig(mode="FULL", capture_sizes=[64])) as llm:
        layers = llm.engine.runner.kv_cache.layers
        for keys, values in layers:
            keys.fill_(NAN)
            values.fill_(NAN)
        assert tokens_of(llm, PROMPTS) == expected
        written = sum(-(-(len(p) + GREEDY.max_tokens - 1) // 16) for p in PROMPTS)
        for cache in (tensor for layer in layers for tensor in layer):
            touched = (~cache.isnan()).flatten(1).any(1)
            assert not touched[0]
            assert int(touched.sum()) == written


def test_streaming_gives_the_same(llm: LLM, expected: list[list[int]]) -> None:
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    reasons = {}
    for delta in llm.stream(PROMPTS, GREEDY):
        streamed[delta.prompt_index] += delta.token_ids
        reasons[delta.prompt_index] = delta.finish_reason
    assert streamed == expected
    assert set(reasons.values()) == {"length"}


def test_leaving_a_stream_aborts_it(llm: LLM, expected: list[list[int]]) -> None:
    before = free_blocks(llm)
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert free_blocks(llm) == before
    assert tokens_of(llm, PROMPTS) == expected


def test_generating_while_a_stream_is_open(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[:1], GREEDY)
    streamed = list(next(stream).token_ids)
    assert tokens_of(llm, PROMPTS[1:]) == expected[1:]
    for delta in stream:
        streamed += delta.token_ids
    assert streamed == expected[0]


def test_several_completions_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    (result,) = llm.generate([1, 2, 3], params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    (again,) = llm.generate([1, 2, 3], params)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_fixes_the_tokens(mode: str, device: torch.device) -> None:
    """Whatever else is in the batch, and in every mode."""
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=10)
    with open_tiny(device, graphs=GraphConfig(mode="NONE")) as llm:
        alone = tokens_of(llm, [[1, 2, 3]], params)[0]
    others = [SamplingParams(temperature=t, seed=s) for t, s in ((0.0, 1), (1.5, 2), (0.7, None))]
    with open_tiny(device, graphs=GraphConfig(mode=mode)) as llm:
        prompts = [PROMPTS[1], PROMPTS[2], [1, 2, 3], PROMPTS[3]]
        assert tokens_of(llm, prompts, [*others[:2], params, others[2]])[2] == alone


def test_stop_tokens_end_a_request(llm: LLM, expected: list[list[int]]) -> None:
    stop = expected[0][4]
    first = expected[0].index(stop)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    (result,) = llm.generate([PROMPTS[0]], params)
    output = result.outputs[0]
    assert output.token_ids == expected[0][: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_holds_off_the_stop(llm: LLM, expected: list[list[int]]) -> None:
    stop = expected[0][0]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], min_tokens=6)
    (result,) = llm.generate([PROMPTS[0]], params)
    assert len(result.outputs[0].token_ids) >= 6
    assert stop not in result.outputs[0].token_ids[:5]


@torch.inference_mode()
def logits_of(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """The logits after ``tokens``, given as a prompt: no decode step has a part in them."""
    seen: list[torch.Tensor] = []
    model, compute_logits = llm.engine.model, llm.engine.model.compute_logits
    model.compute_logits = lambda hidden: seen.append(compute_logits(hidden)) or seen[-1]  # type: ignore[method-assign]
    llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1))
    model.compute_logits = compute_logits  # type: ignore[method-assign]
    return seen[0][0]


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    plain = SamplingParams(temperature=0, max_tokens=4)
    # Between requests that ask for none, so that rows must not be mixed up.
    batch = [PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    result = llm.generate(batch, [plain, params, plain])[1]
    output = result.outputs[0]
    assert output.logprobs is not None
    total = 0.0
    for place, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        want = logits_of(llm, [*PROMPTS[0], *output.token_ids[:place]]).log_softmax(0)
        best = want.topk(3).indices.tolist()
        assert set(row) == {token, *best}
        for candidate, logprob in row.items():
            assert logprob.logprob == pytest.approx(want[candidate].item(), abs=1e-5)
        total += row[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_overlap_changes_nothing(mode: str, device: torch.device) -> None:
    """Seeds, filters, penalties, log-probabilities and stops, in batches that shrink and grow."""
    graphs = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 64])
    plain = SamplingParams(temperature=0, max_tokens=12)
    results = []
    for overlap in (False, True):
        with open_tiny(device, graphs=graphs, async_scheduling=overlap, max_num_seqs=6) as llm:
            stop = llm.generate([PROMPTS[1]], plain)[0].outputs[0].token_ids[5]
            params = [
                plain,
                SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]),
                SamplingParams(temperature=0.9, seed=7, max_tokens=9),
                SamplingParams(temperature=0.9, seed=8, max_tokens=15, top_k=9, top_p=0.8),
                SamplingParams(temperature=0, max_tokens=7, logprobs=3),
                SamplingParams(temperature=0.7, seed=9, max_tokens=8, logprobs=0, min_p=0.1),
                SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.5),
                SamplingParams(temperature=0, max_tokens=10, presence_penalty=1, min_tokens=4),
                SamplingParams(temperature=1.1, seed=3, n=2, logit_bias={5: 4.0}, max_tokens=1),
            ]
            prompts = [PROMPTS[i % 4] for i in range(len(params))]
            outputs = llm.generate(prompts, params)
            assert outputs[1].outputs[0].token_ids[-1] == stop
            assert outputs[1].outputs[0].finish_reason == "stop"
            assert llm.engine.scheduler.num_running == 0
            results.append([output for result in outputs for output in result.outputs])
    for one, other in zip(*results, strict=True):
        assert_same_output(one, other)


def assert_same_output(one: CompletionOutput, other: CompletionOutput) -> None:
    """Everything is equal, logprobs nearly: a product of five rows rounds unlike one of six, and a
    request that ends stays for a step more where steps overlap."""
    assert (one.logprobs is None) == (other.logprobs is None)
    for left, right in zip(one.logprobs or [], other.logprobs or [], strict=True):
        assert {token: each.decoded_token for token, each in left.items()} == {
            token: each.decoded_token for token, each in right.items()
        }
        for token, each in left.items():
            assert each.logprob == pytest.approx(right[token].logprob, abs=1e-5)
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
    plain = [replace(each, logprobs=None, cumulative_logprob=None) for each in (one, other)]
    assert plain[0] == plain[1]


def test_the_length_limit_ends_a_request(llm: LLM) -> None:
    (result,) = llm.generate([[1] * 60], SamplingParams(temperature=0, max_tokens=None))
    assert len(result.outputs[0].token_ids) == 4
    assert result.outputs[0].finish_reason == "length"


# --- joining and leaving --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[Engine, dict[tuple[int, ...], list[int]]]]:
    with open_tiny(
        torch.device("cpu"), max_num_seqs=4, block_size=4, kv_cache_memory_bytes=2**17
    ) as llm:
        yield llm.engine, {}


@pytest.mark.slow
@given(data=st.data())
def test_requests_join_and_leave(
    busy: tuple[Engine, dict[tuple[int, ...], list[int]]], data: st.DataObject
) -> None:
    engine, alone = busy
    prompt = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(tuple)
    events = data.draw(st.lists(st.tuples(st.integers(0, 4), prompt, st.booleans()), max_size=8))
    params = SamplingParams(temperature=0, max_tokens=9)

    def run(completions: list[Any]) -> None:
        while engine.has_unfinished:
            engine.step()
        assert all(completion.finished for completion in completions)

    for _, tokens, _ in events:
        if tokens not in alone:
            (completion,) = engine.prepare_request(tokens, params)
            engine.add(completion)
            run([completion])
            alone[tokens] = completion.output.token_ids
    started = []
    for wait, tokens, leaves in events:
        (completion,) = engine.prepare_request(tokens, params)
        engine.add(completion)
        started.append((completion, tokens, leaves))
        for _ in range(wait):
            if engine.has_unfinished:
                engine.step()
        if leaves:
            engine.abort(completion)
    run([completion for completion, _, _ in started])
    for completion, tokens, leaves in started:
        got = completion.output.token_ids
        assert got == alone[tokens][: len(got)]
        assert leaves or len(got) == 9
    allocator = engine.scheduler.allocator
    assert allocator.num_free_blocks == engine.runner.cache.num_blocks - 1


# --- bad input ------------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[Any, Any, str]] = [
    ([[]], GREEDY, "is empty; give at least one token"),
    ([], GREEDY, "no prompts"),
    ([[1] * 64], GREEDY, r"64 tokens.*at most 64 \(max_model_len\)"),
    ([[1, 512]], GREEDY, "contains 512; token ids are integers from 0 to 511"),
    ([[1, -1]], GREEDY, "contains -1"),
    ([[1, 2.5]], GREEDY, "contains 2.5"),
    ("text", GREEDY, "no tokenizer"),
    ({"prompt_tokens": [1]}, GREEDY, "one of the keys 'prompt' and 'prompt_token_ids'"),
    (7, GREEDY, "text or token ids"),
    ([[1], 7], GREEDY, r"prompts\[.\] is 7; a prompt is text or a list of token ids"),
    ([[1], [2]], [GREEDY], "1 SamplingParams for 2 prompts"),
    ([[1]], {"temperature": 0}, "one SamplingParams, or a list with one per prompt"),
    ([[1]], SamplingParams(stop="x"), "need a tokenizer"),
    ([[1]], SamplingParams(stop_token_ids=[512]), "stop_token_ids names token 512"),
    ([[1]], SamplingParams(logit_bias={600: 1.0}), "logit_bias names token 600"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), BAD_REQUESTS)
def test_bad_requests_are_refused_before_any_work(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    before = free_blocks(llm)
    good_and_bad = [[1, 2], *prompts] if isinstance(prompts, list) and prompts else prompts
    for tried in (prompts, good_and_bad):
        if tried is good_and_bad and params is not GREEDY:
            continue
        with pytest.raises(RequestError, match=message):
            llm.generate(tried, params)
        with pytest.raises(RequestError, match=message):
            llm.stream(tried, params)
    assert not llm.engine.has_unfinished
    assert free_blocks(llm) == before
    assert len(tokens_of(llm, [[1, 2]])[0]) == 12


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
    ({"max_model_len": 100_000}, "100000 tokens"),
    ({"kv_cache_memory_bytes": 1000}, "KV cache has 1,000 bytes"),
    ({"kv_cache_memory_bytes": "lots"}, "not an amount of memory: 'lots'"),
    ({"max_num_batched_tokens": 4}, "max_num_batched_tokens 4 is below max_num_seqs 8"),
    ({"device": "tpu"}, "tpu"),
    ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ({"gpu_memory_utilization": 2.0}, "gpu_memory_utilization"),
    ({"block_size": 0}, "block_size"),
    ({"attention": "flash"}, "unknown attention 'flash'; choose one of auto, torch, triton"),
    ({"attention": "triton"}, "needs a CUDA device"),
    ({"seed": -1}, "seed"),
    ({"graphs": GraphConfig(capture_sizes=[128])}, "128"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tiny(torch.device("cpu"), **settings) if "device" not in settings else LLM(
            "tiny", random_weights=True, **settings
        )


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seq"):
        LLM("tiny", random_weights=True, max_num_seq=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown graph mode 'fullish'"):
        GraphConfig(mode="fullish")


def test_a_length_that_was_not_asked_for_is_cut_to_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_tiny(torch.device("cpu"), max_model_len=None, kv_cache_memory_bytes=2**17) as llm:
        length = llm.engine.max_model_len
        assert 0 < length < llm.engine.model.max_position
        assert f"max_model_len is {length}" in caplog.text
        (result,) = llm.generate([[1] * (length - 1)], SamplingParams(temperature=0))
        assert len(result.outputs[0].token_ids) == 1


def test_each_sequence_comes_once_and_in_order(llm: LLM) -> None:
    """Also of requests that the engine hears of with every token."""
    params = [
        SamplingParams(n=n, max_tokens=5, ignore_eos=True, logprobs=logprobs, seed=1)
        for n, logprobs in ((1, None), (3, 1), (2, None))
    ]
    results = llm.generate(PROMPTS[:3], params)
    assert [[o.index for o in result.outputs] for result in results] == [[0], [0, 1, 2], [0, 1]]
    assert {len(o.token_ids) for result in results for o in result.outputs} == {5}


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["dispatch", "send", "run"])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_interrupted_step_leaves_the_engine_usable(
    llm: LLM, expected: list[list[int]], failure: type[BaseException], where: str, step: int
) -> None:
    runner: Any = llm.engine.runner
    if where == "send":
        runner = runner.results
    original = getattr(runner, where)
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args)
        if calls == step + 1:
            raise failure("injected")
        return result

    setattr(runner, where, broken)
    before = free_blocks(llm)
    with pytest.raises(failure, match="injected"):
        llm.generate(PROMPTS, GREEDY)
    setattr(runner, where, original)
    assert calls == step + 1
    assert not llm.engine.has_unfinished
    assert free_blocks(llm) == before
    assert tokens_of(llm, PROMPTS) == expected


def test_a_failed_step_loses_no_token(llm: LLM, expected: list[list[int]]) -> None:
    """The engine itself goes on where it was: the batch is computed again."""
    completions = [llm.engine.prepare_request(prompt, GREEDY)[0] for prompt in PROMPTS]
    for completion in completions:
        llm.engine.add(completion)
    run, steps, failures = llm.engine.runner.run, 0, 0
    while llm.engine.has_unfinished:
        steps += 1
        if steps % 3 == 0:
            llm.engine.runner.run = lambda plan: 1 / 0  # type: ignore[assignment,return-value]
        try:
            llm.engine.step()
        except ZeroDivisionError:
            failures += 1
        llm.engine.runner.run = run  # type: ignore[method-assign]
    assert failures > 2
    assert [completion.output.token_ids for completion in completions] == expected


def test_an_end_that_was_interrupted_is_an_end(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are there, and no call waits for more."""
    engine = llm.engine
    completions = [engine.prepare_request(prompt, GREEDY)[0] for prompt in PROMPTS]
    for completion in completions:
        engine.add(completion)
    finish = engine.scheduler.finish

    def interrupted(*arguments: Any) -> None:
        finish(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    def drain() -> None:
        while engine.has_unfinished:
            engine.step()

    monkeypatch.setattr(engine.scheduler, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drain()
    drain()
    assert all(completion.finished for completion in completions)
    assert [completion.output.token_ids for completion in completions] == expected


def test_after_close(device: torch.device) -> None:
    llm = open_tiny(device)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[1]], GREEDY), llm.expert_load):
        with pytest.raises(ClosedError, match="closed"):
            call()


# --- capture_model --------------------------------------------------------------------------------


def twelve_layers(directory: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("mode", "triggers", "graphs"),
    [
        ("NONE", 0, 0),
        ("FULL_DECODE_ONLY", 1, 1),
        ("FULL", 1, 1),
        ("PIECEWISE", 1, 13),
        ("FULL_AND_PIECEWISE", 1, 14),
        ("FULL_AND_FULL", 1, 2),
    ],
)
def test_counters(mode: str, triggers: int, graphs: int, tmp_path: Path) -> None:
    with compilation_counter.expect(
        num_gpu_runner_capture_triggers=triggers, num_cudagraph_captured=graphs
    ):
        llm = LLM(
            twelve_layers(tmp_path),
            device="cpu",
            random_weights=True,
            max_num_seqs=128,
            max_num_batched_tokens=128,
            graphs=GraphConfig(mode=mode, capture_sizes=[100]),
            show_progress=False,
        )
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [False, "eager"])
def test_warming_up_with_few_layers_leaves_the_model_whole(
    compiler: Any, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = twelve_layers(tmp_path), [[1, 2, 3], [5] * 7]
    settings: dict[str, Any] = {
        "device": device.type,
        "dtype": "float32",
        "random_weights": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "show_progress": False,
    }
    with LLM(path, graphs=GraphConfig(mode="NONE"), **settings) as plain:
        expected = tokens_of(plain, prompts)
    if device.type == "cuda":  # only there can a warm-up be where the model is traced
        monkeypatch.setattr(ModelGraphs, "compile", lambda self: None)
    graphs = GraphConfig(capture_sizes=[1, 2, 8], num_warmups=1, compile=compiler)
    with LLM(path, graphs=graphs, **settings) as llm:
        assert tokens_of(llm, prompts) == expected


def test_nothing_to_capture_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with open_tiny(torch.device("cpu"), graphs=GraphConfig(mode="NONE")) as llm:
        caplog.clear()
        with compilation_counter.expect(num_gpu_runner_capture_triggers=0):
            assert llm.engine.runner.capture_model() == 0
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "GraphConfig.mode) is NONE" in record.message


def test_capture_returns_and_logs_what_it_took(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tiny(device) as llm, caplog.at_level(logging.INFO):
        runner = llm.engine.runner
        llm.clear_graphs()
        taken = runner.capture_model()
        assert taken == runner.capture_bytes > 0
        assert f"captured {runner.capture_report.num_graphs} graphs in" in caplog.text
        assert str(llm.graph_memory.taken) in caplog.text


def test_tokens_are_right_after_capturing_again(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens_of(llm, PROMPTS) == expected
    llm.engine.runner.graphs.clear_graphs()
    assert tokens_of(llm, PROMPTS) == expected
    llm.engine.runner.capture_model()
    assert tokens_of(llm, PROMPTS) == expected
    assert llm.engine.runner.stats.eager  # the middle run


def test_attention_between_pieces_costs_no_copy(device: torch.device) -> None:
    """It writes where the next piece reads: at the same address in every replay of a size."""
    graphs = GraphConfig(mode="PIECEWISE", capture_sizes=[8, 64])
    with open_tiny(device, graphs=graphs, enable_prefix_caching=False) as llm:
        runner = llm.engine.runner
        written: list[tuple[int, int, int]] = []
        # Queries, keys and values, or all of them in one tensor to be rotated.
        own = type(runner.backend).forward_qkv is not AttentionBackend.forward_qkv
        name = "forward_qkv" if own else "forward"
        forward = getattr(runner.backend, name)

        def recorded(spec: Any, *arguments: Any) -> None:
            out = next(a for a in reversed(arguments) if isinstance(a, torch.Tensor))
            written.append((len(out), spec.layer, out.data_ptr()))
            forward(spec, *arguments)

        setattr(runner.backend, name, recorded)
        tokens_of(llm, PROMPTS)
        tapes = [
            entry.tape for entry in runner.graphs.piecewise.concrete_cudagraph_entries.values()
        ]
        assert [tape.num_copies for tape in tapes] == [0, 0]
        layers = len(llm.engine.model.attention_specs)
        assert len(set(written)) == 2 * layers < len(written)
