"""The full sampler of decode steps: captured when it is needed, replayed from then on."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import save_talking
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import LLM, GraphConfig, GraphPool, SamplingParams, compilation_counter
from ostinato.errors import CaptureOutOfMemoryError
from ostinato.runner.sampling.sampler_graphs import SamplerLaunch

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
NUM_TOKENS = 10
KINDS: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 7, "top_p": 0.9},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "filters and logprobs": {"min_p": 0.05, "logprobs": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {3: 4.0}},
    "min_tokens": {"min_tokens": NUM_TOKENS, "stop_token_ids": list(range(0, 512, 5))},
    "everything": {"top_k": 9, "presence_penalty": 1.0, "logit_bias": {5: 2.0}, "logprobs": 5},
}


def open_llm(device: torch.device, mode: str = "FULL_DECODE_ONLY", **options: Any) -> LLM:
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [1, 2, 4])
    return LLM(
        options.pop("model", "tiny"),
        random_weights=options.pop("random_weights", True),
        device=device,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        async_scheduling=False,
        show_progress=False,
        graphs=graphs,
        **options,
    )


def params_of(kind: str, **options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": NUM_TOKENS, **KINDS[kind], **options})


def tokens_of(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]


class Operators(TorchDispatchMode):
    """Counts the operators of ours that are launched inside, not those in replayed graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "ostinato":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_step_is_captured_and_all_later_ones_are_replayed(
    kind: str, device: torch.device
) -> None:
    with open_llm(device) as llm:
        stats = llm.engine.runner.samplers.stats
        with compilation_counter.expect(num_cudagraph_captured=1):
            first = tokens_of(llm, params_of(kind))
        # The first token of each request comes from a step with its prompt.
        assert stats.launches[SamplerLaunch.NOT_CAPTURED] == stats.captures == 1
        assert stats.launches[SamplerLaunch.NO_DECODE_GRAPH] == 1
        assert stats.replays == NUM_TOKENS - 3
        stats.reset()
        with compilation_counter.expect(num_cudagraph_captured=0), Operators() as operators:
            assert tokens_of(llm, params_of(kind)) == first
        assert stats.replays == NUM_TOKENS - 1
        assert stats.captures == 0
        assert stats.launches == {SamplerLaunch.NO_DECODE_GRAPH: 1}
        assert operators.counts["resample_rows"] == 0
        assert operators.counts["write_requested_logprobs"] == 0
        assert operators.counts["sample_filtered"] == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_with_a_temperature_alone_need_no_sampler_graph(
    temperature: float, device: torch.device
) -> None:
    with open_llm(device) as llm, compilation_counter.expect(num_cudagraph_captured=0):
        tokens_of(llm, SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS))
        samplers = llm.engine.runner.samplers
        assert samplers.num_bytes == 0
        assert (samplers.stats.replays, samplers.stats.captures) == (0, 0)
        assert not samplers.stats.launches


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_modes_without_decode_graphs_launch_it_and_say_so(mode: str, device: torch.device) -> None:
    with open_llm(device, mode) as llm:
        tokens_of(llm, params_of("filters"))
        stats = llm.engine.runner.samplers.stats
        assert (stats.replays, stats.captures) == (0, 0)
        assert stats.launches == {SamplerLaunch.NO_DECODE_GRAPH: NUM_TOKENS}


@pytest.mark.slow
def test_every_mix_of_kinds_gives_the_tokens_of_eager(device: torch.device) -> None:
    """Three rows and one of padding; requests leave one by one, so smaller sizes follow."""
    names = [*KINDS, "plain"]
    with open_llm(device) as llm, open_llm(device, "NONE") as eager:
        for index in range(len(names)):
            chosen = [names[(index + step) % len(names)] for step in (0, 1, 3)]
            params = [
                SamplingParams(seed=row, max_tokens=NUM_TOKENS)
                if name == "plain"
                else params_of(name, seed=row, max_tokens=NUM_TOKENS + 4 * row)
                for row, name in enumerate(chosen)
            ]
            ours, expected = llm.generate(PROMPTS, params), eager.generate(PROMPTS, params)
            for one, other in zip(ours, expected, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                for row, theirs in zip(
                    one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True
                ):
                    values = {token: each.logprob for token, each in row.items()}
                    assert values == pytest.approx(
                        {token: each.logprob for token, each in theirs.items()}, abs=1e-5
                    )
        assert llm.engine.runner.samplers.stats.replays > 50
        assert llm.engine.runner.samplers.stats.captures <= 3 * 4  # sizes and kinds


@pytest.mark.slow
def test_penalties_and_logprobs_are_those_of_transformers(
    device: torch.device, tmp_path: Path
) -> None:
    path = save_talking(tmp_path, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.4, logprobs=3, max_tokens=20, ignore_eos=True
    )
    with open_llm(device, model=str(path), random_weights=False) as llm:
        results = llm.generate(PROMPTS, params)
        assert llm.engine.runner.samplers.stats.replays == 17
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
            repetition_penalty=1.4, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        tokens, rows = result.outputs[0].token_ids, result.outputs[0].logprobs
        assert tokens == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = theirs(expected).logits[0, len(prompt) - 1 : -1]
        assert rows is not None
        for token, row, exact in zip(tokens, rows, logits.log_softmax(dim=-1), strict=True):
            top = exact.topk(3).indices.tolist()
            assert set(row) == {token, *top}
            for each, logprob in row.items():
                assert logprob.logprob == pytest.approx(exact[each].item(), abs=1e-4)


def test_a_capture_that_fails_leaves_the_steps_launched_and_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(pool: GraphPool, num_bytes: int) -> None:
        raise CaptureOutOfMemoryError("there is no more")

    with open_llm(device) as llm:
        expected = tokens_of(llm, params_of("filters"))
    with open_llm(device) as llm, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(GraphPool, "reserve", no_memory)
        assert tokens_of(llm, params_of("filters")) == expected
        assert tokens_of(llm, params_of("filters")) == expected
        stats = llm.engine.runner.samplers.stats
        assert (stats.replays, stats.captures) == (0, 0)
        assert stats.launches[SamplerLaunch.NOT_CAPTURED] == 1
        assert stats.launches[SamplerLaunch.CAPTURE_FAILED] == 2 * NUM_TOKENS - 3
    warnings = [record.message for record in caplog.records if "sampler" in record.message]
    assert warnings == [
        "the sampler of 4 rows is launched instead of replayed, because its capture failed: there "
        "is no more"
    ]


def test_decode_graphs_that_are_captured_again_get_new_samplers(device: torch.device) -> None:
    with open_llm(device) as llm:
        runner, params = llm.engine.runner, params_of("everything")
        expected = tokens_of(llm, params)
        runner.graphs.clear_graphs()
        assert tokens_of(llm, params) == expected
        runner.capture_model()
        assert tokens_of(llm, params) == expected
        assert runner.samplers.stats.captures == 2
