"""Many prompts, many completions, many stop strings, long texts: bounded in time and memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import save_talking

from ostinato import LLM, ConfigError, GraphConfig, RequestError, SamplingParams, sampling_params

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
MAX_MODEL_LEN = 64
ROWS = 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = save_talking(tmp_path_factory.mktemp("talking"), "{{ messages[0]['content'] }}")
    with LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes="4M",
        show_progress=False,
        graphs=GraphConfig(mode="NONE"),
    ) as llm:
        yield llm


def prompts(count: int) -> list[list[int]]:
    return [[number % 40 + 1] for number in range(count)]


# --- prompts and completions ----------------------------------------------------------------------


def seconds_for(llm: LLM, count: int, *, stream: bool) -> float:
    start = time.perf_counter()
    if stream:
        assert sum(1 for _ in llm.stream(prompts(count), ONE_TOKEN)) == count
    else:
        outputs = llm.generate(prompts(count), ONE_TOKEN)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * count
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["generate", "stream"])
def test_time_is_linear_in_prompts(llm: LLM, stream: bool) -> None:
    seconds_for(llm, 100, stream=stream)
    few, many = (seconds_for(llm, count, stream=stream) for count in (500, 10_000))
    assert many < 80 * few  # 20 times the prompts; each scanned for each would be 400


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    alone = [llm.generate([prompt], ONE_TOKEN)[0].outputs[0].token_ids for prompt in prompts(40)]
    together = llm.generate(prompts(100), ONE_TOKEN)
    for number, output in enumerate(together):
        assert output.prompt_token_ids == prompts(100)[number]
        assert output.outputs[0].token_ids == alone[number % 40]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["generate", "stream"])
def test_completions_are_made_as_they_start(llm: LLM, stream: bool) -> None:
    params = SamplingParams(n=500, max_tokens=2, ignore_eos=True, seed=1)
    most, run = 0, llm.engine.runner.run

    def watching(plan: Any) -> Any:
        nonlocal most
        scheduler = llm.engine.scheduler
        most = max(most, scheduler.num_waiting + scheduler.num_running)
        return run(plan)

    llm.engine.runner.run = watching  # type: ignore[method-assign]
    try:
        if stream:
            deltas = list(llm.stream([[1], [2]], params))
            counts = {(delta.prompt_index, delta.index) for delta in deltas if delta.finish_reason}
            assert counts == {(prompt, index) for prompt in (0, 1) for index in range(500)}
        else:
            for output in llm.generate([[1], [2]], params):
                assert [each.index for each in output.outputs] == list(range(500))
                assert all(len(each.token_ids) == 2 for each in output.outputs)
    finally:
        llm.engine.runner.run = run  # type: ignore[method-assign]
    assert ROWS <= most <= 4 * ROWS


def test_a_stream_left_among_many_prompts_leaves_nothing(llm: LLM) -> None:
    with llm.stream(prompts(1000), ONE_TOKEN) as stream:
        next(stream)
    assert not llm.engine.has_unfinished
    assert len(llm.generate(prompts(20), ONE_TOKEN)) == 20


def test_a_generate_inside_a_stream_takes_nothing_from_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts(30), params)]
    got: list[list[int]] = [[] for _ in range(30)]
    for number, delta in enumerate(llm.stream(prompts(30), params)):
        got[delta.prompt_index] += delta.token_ids
        if number % 7 == 0:
            assert len(llm.generate(prompts(3), params)) == 3
    assert got == expected


# --- seeds ----------------------------------------------------------------------------------------


def sampled(llm: LLM, seed: int, n: int) -> list[list[int]]:
    params = SamplingParams(n=n, seed=seed, max_tokens=12, ignore_eos=True)
    return [output.token_ids for output in llm.generate([[1, 2, 3]], params)[0].outputs]


def test_each_completion_has_random_numbers_of_its_own(llm: LLM) -> None:
    by_seed = {seed: sampled(llm, seed, 4) for seed in range(20)}
    everything = [tuple(tokens) for each in by_seed.values() for tokens in each]
    assert len(set(everything)) == len(everything)
    assert sampled(llm, 5, 4) == by_seed[5]
    assert sampled(llm, 5, 1) == by_seed[5][:1]  # however many there are


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strings",
    [
        [f"never {number}" for number in range(10_000)],
        ["x" * 32_000],
        ["ab" * 16_000, "a" * 16_000],
        [f"w{number} w" * 2 for number in range(1000)],
    ],
    ids=["many", "long", "long and alike", "nearly"],
)
def test_stop_strings_do_not_hold_up_the_engine(llm: LLM, strings: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=strings)
    start = time.perf_counter()
    outputs = llm.generate(prompts(8), params)
    assert time.perf_counter() - start < 20
    free = llm.generate(prompts(8), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for output, expected in zip(outputs, free, strict=True):
        ends = [expected.outputs[0].text.find(string) for string in strings]
        first = min((end for end in ends if end >= 0), default=len(expected.outputs[0].text))
        assert output.outputs[0].text == expected.outputs[0].text[:first]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": sampling_params.MAX_N + 1}, "n must be at most"),
        ({"n": 10**9}, "n must be at most"),
        ({"stop": ["a"] * (sampling_params.MAX_STOP_STRINGS + 1)}, "stop may have at most"),
        ({"stop": "a" * (sampling_params.MAX_STOP_CHARACTERS + 1)}, "characters together, got"),
        ({"stop": itertools.repeat("a")}, "stop may have at most"),
        ({"stop_token_ids": itertools.count()}, "stop_token_ids may have at most"),
        ({"stop": ["\ud800" * 10_000]}, "lone surrogates"),
        ({"temperature": "x" * 10_000}, "temperature must be a number"),
        ({"stop_token_ids": ["x" * 10_000]}, "stop_token_ids must be token ids"),
    ],
)
def test_limits_are_said_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SamplingParams(**options)
    assert len(str(raised.value)) < 400


# --- long texts -----------------------------------------------------------------------------------


def test_long_texts_are_refused_before_all_of_them_is_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = type(llm.tokenizer).encode

    def recording(self: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(llm.tokenizer), "encode", recording)
    with pytest.raises(RequestError, match=r"prompts\[1\] has 3000000 characters, and the first"):
        llm.generate(["w1 w2", "w1 " * 1_000_000], ONE_TOKEN)
    with pytest.raises(RequestError, match=r"messages has 3000000 characters, and the first"):
        llm.chat([{"role": "user", "content": "w1 " * 1_000_000}], ONE_TOKEN)
    assert max(lengths) <= 32 * MAX_MODEL_LEN


def test_a_text_of_few_tokens_may_have_many_characters(llm: LLM) -> None:
    spread = "w1 " + " " * 20_000 + "w2"
    assert llm.tokenizer.encode(spread) == llm.tokenizer.encode("w1 w2")
    (output,) = llm.generate([spread], ONE_TOKEN)
    assert output.prompt == spread
    assert output.outputs[0].token_ids == llm.generate(["w1 w2"], ONE_TOKEN)[0].outputs[0].token_ids


def test_a_text_just_too_long_is_counted(llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"has {MAX_MODEL_LEN} tokens, but a sequence has"):
        llm.generate(["w1 " * MAX_MODEL_LEN], ONE_TOKEN)
