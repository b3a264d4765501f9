"""Random requests, sensible and not: refused by an error of ours, or answered; none leaks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tiny_models import save_talking

from ostinato import LLM, GraphConfig, RequestOutput, SamplingParams
from ostinato.errors import OstinatoError

VOCABULARY = 64
MAX_MODEL_LEN = 48


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = save_talking(tmp_path_factory.mktemp("talking"), None)
    with LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes="1M",
        show_progress=False,
        graphs=GraphConfig(capture_sizes=[1, 4]),
    ) as llm:
        yield llm


# --- what is sent ---------------------------------------------------------------------------------

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(
        [[], {}, (), object(), [[]], 10**5000, np.float32(1), np.int64(3), 1j, "\ud800"]
    ),
    st.just("x" * 100_000),
)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 80),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "logit_bias": st.dictionaries(
        st.integers(0, VOCABULARY), st.floats(-100, 100) | ODD, max_size=3
    ),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "max_tokens": st.none() | st.integers(1, 60),
    "min_tokens": st.integers(0, 6),
    "stop": st.lists(st.sampled_from(["w", "w1", "w1 w2", "3 w", "never"]), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, VOCABULARY), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.none() | st.integers(0, 5),
}


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Most of them sensible: of many odd ones, only the first would ever be looked at."""
    names = draw(st.lists(st.sampled_from(list(SENSIBLE)), unique=True, max_size=8))
    chosen = {name: draw(SENSIBLE[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        chosen[draw(st.sampled_from(list(SENSIBLE)))] = draw(ODD)
    return chosen


TOKENS = st.integers(0, VOCABULARY - 1)
IDS = st.lists(TOKENS, min_size=1, max_size=30)
PROMPTS: st.SearchStrategy[Any] = st.one_of(
    IDS,
    IDS.map(np.array),
    IDS.map(torch.tensor),
    IDS.map(lambda ids: " ".join(f"w{token}" for token in ids)),
)
ODD_PROMPTS: st.SearchStrategy[Any] = st.one_of(
    st.text(max_size=20),
    st.lists(st.integers(-(2**70), 2**70), max_size=60),
    st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x"]), ODD, max_size=2),
    ODD,
)


@st.composite
def some_prompts(draw: st.DrawFn) -> list[Any]:
    prompts = draw(st.lists(PROMPTS, max_size=4))
    if draw(st.integers(0, 3)) == 0:
        prompts.insert(draw(st.integers(0, len(prompts))), draw(ODD_PROMPTS))
    return prompts


HARMLESS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def check_answer(output: RequestOutput, params: SamplingParams) -> None:
    assert [each.index for each in output.outputs] == list(range(params.n))
    room = MAX_MODEL_LEN - len(output.prompt_token_ids)
    longest = room if params.max_tokens is None else min(room, params.max_tokens)
    for each in output.outputs:
        tokens = each.token_ids
        assert all(0 <= token < VOCABULARY for token in tokens)
        assert 1 <= len(tokens) <= longest
        if each.finish_reason == "length":
            assert len(tokens) == longest
        else:
            assert each.finish_reason == "stop"
            assert len(tokens) >= params.min_tokens
            assert each.stop_reason in (*params.stop, *params.stop_token_ids, None)
        if params.logprobs is not None:
            assert each.logprobs is not None
            assert len(each.logprobs) == len(tokens)
            for token, row in zip(tokens, each.logprobs, strict=True):
                assert params.logprobs <= len(row) <= params.logprobs + 1
                assert not math.isnan(row[token].logprob)
                assert row[token].logprob <= 1e-6


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=HARMLESS)
@given(prompts=some_prompts(), chosen=options(), stream=st.booleans())
def test_random_requests(
    llm: LLM, prompts: list[Any], chosen: dict[str, Any], stream: bool
) -> None:
    free, message = llm.engine.scheduler.allocator.num_free_blocks, ""
    try:
        params = SamplingParams(**chosen)
        if stream:
            for _ in llm.stream(prompts, params):
                pass
        else:
            for output in llm.generate(prompts, params):
                check_answer(output, params)
    except OstinatoError as error:
        message = str(error)
    assert len(message) < 1000, "it quotes the input at length"
    event("refused" if message else "answered")
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.allocator.num_free_blocks == free
