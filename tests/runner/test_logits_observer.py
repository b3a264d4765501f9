"""Watching the logits that a runner samples from: every sampled row, no padding, in every mode."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.runner.step_result import SampledLogits

MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL")
PROMPTS = [[5], [7, 8, 9], list(range(3, 40)), [11, 12, 13, 14, 15]]


def open_llm(device: torch.device, mode: str, **options: object) -> LLM:
    sizes = None if mode == "NONE" else [8, 64]  # no batch is as large: all are padded
    return LLM(
        "tiny",
        random_weights=True,
        device=str(device),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=96,
        long_prefill_token_threshold=16,  # the long prompt takes steps in which it samples nothing
        kv_cache_memory_bytes="4M",
        graphs=GraphConfig(mode=mode, capture_sizes=sizes),
        show_progress=False,
        **options,  # type: ignore[arg-type]
    )


def watch(llm: LLM) -> dict[str, list[torch.Tensor]]:
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        assert sampled.logits.shape == (len(sampled.request_ids), llm.engine.model.vocab_size)
        for name, row in zip(sampled.request_ids, sampled.logits.clone(), strict=True):
            rows[name].append(row)

    llm.engine.runner.on_logits = record
    return rows


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_token_has_the_row_that_it_was_chosen_from(
    device: torch.device, mode: str, overlap: bool
) -> None:
    # With penalties too: those rows are sampled again, and what is shown is what the model said.
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0 if i % 2 else None)
        for i in range(len(PROMPTS))
    ]
    with open_llm(device, mode, async_scheduling=overlap) as llm:
        rows = watch(llm)
        results = llm.generate(PROMPTS, params)
    assert set(rows) == {f"{result.request_id}.0" for result in results}
    for result in results:
        # A step more than the tokens is possible: it was started before the end was seen.
        chosen = [int(row.argmax()) for row in rows[f"{result.request_id}.0"]]
        tokens = result.outputs[0].token_ids
        assert len(tokens) == 6
        assert chosen[:6] == tokens
        assert len(chosen) <= 7


def test_logits_are_shown_as_the_model_made_them(device: torch.device) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1)
    changed = SamplingParams(
        temperature=0.7, top_k=3, seed=1, max_tokens=1, repetition_penalty=1.5, logit_bias={4: 50.0}
    )
    with open_llm(device, "FULL_AND_PIECEWISE") as llm:
        rows = watch(llm)
        first = llm.generate([PROMPTS[1]], plain)[0]
        second = llm.generate([PROMPTS[1]], changed)[0]
    assert torch.equal(rows[f"{first.request_id}.0"][0], rows[f"{second.request_id}.0"][0])


def test_an_observer_can_be_taken_away(device: torch.device) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    with open_llm(device, "FULL_AND_PIECEWISE") as llm:
        rows = watch(llm)
        first = llm.generate([PROMPTS[1]], params)[0].outputs[0].token_ids
        seen = sum(map(len, rows.values()))
        assert seen >= 2
        llm.engine.runner.on_logits = None
        assert llm.generate([PROMPTS[1]], params)[0].outputs[0].token_ids == first
        assert sum(map(len, rows.values())) == seen
