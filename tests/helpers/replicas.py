"""A checkpoint with adapters, and requests that arrive at random: for tests of several replicas."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import save_adapter
from parallel_llm import VOCAB_SIZE
from sharded_steps import config_of
from transformers import AutoModelForCausalLM

from ostinato import LLM, SamplingParams
from ostinato.engine.requests.completion import Completion

NAMES = (None, "first", "second")


def save_llama(path: Path, num_kv_heads: int = 4) -> Path:
    """A checkpoint whose greedy output varies, without an end-of-sequence token."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of("llama", num_kv_heads))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(path)
    return path


def load_adapters(llm: LLM, checkpoint: Path) -> None:
    """Load an adapter for each of ``NAMES``."""
    for seed, name in enumerate(NAMES[1:], start=1):
        path = save_adapter(checkpoint.parent / str(name), checkpoint, seed=seed)
        llm.load_adapter(str(name), path)


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
        start = [rng.randrange(2)] * rng.choice((1, 8, 24))
        prompt = start + [rng.randrange(VOCAB_SIZE) for _ in range(3)]
        aborted_at = step + rng.randrange(8) if rng.random() < 0.2 else None
        found.append(Arrival(step, prompt, sampling, rng.choice(NAMES), aborted_at))
    return found


def serve(llm: LLM, arrivals: list[Arrival]) -> list[Completion]:
    """Step until all requests that arrive have ended."""
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


def check_same(
    arrivals: list[Arrival], served: list[Completion], expected: list[Completion]
) -> None:
    """The same tokens, ends and logprobs; of aborted requests one beginning of the same tokens."""
    for arrival, ours, theirs in zip(arrivals, served, expected, strict=True):
        ours_out, theirs_out = ours.output, theirs.output
        if arrival.aborted_at is not None:  # the number of steps may differ
            shorter = sorted((ours_out.token_ids, theirs_out.token_ids), key=len)
            assert shorter[1][: len(shorter[0])] == shorter[0]
            continue
        assert ours_out.token_ids == theirs_out.token_ids
        assert ours_out.finish_reason == theirs_out.finish_reason == "length"
        if theirs_out.logprobs is None:
            continue
        assert ours_out.logprobs is not None
        for got, want in zip(ours_out.logprobs, theirs_out.logprobs, strict=True):
            assert {token: each.logprob for token, each in got.items()} == pytest.approx(
                {token: each.logprob for token, each in want.items()}, abs=1e-4
            )


def tokens_of(outputs: Any) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]
