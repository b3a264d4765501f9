"""``batch_invariant``: a request's logits, to the bit, in every batch, chunking and graph mode."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.runner.step_result import SampledLogits

TINY = {**TINY_NATIVE, **TINY_GENERIC, **TINY_MIXTURES}
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL")
SHARED = list(range(3, 50))
PROMPTS = [[5], [7, 8, 9], [*SHARED, 60, 61], [*SHARED, 70], [11, 12, 13, 14, 15]]
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "presence_penalty": 0.5, "logprobs": 0},
)
PARAMS = [
    SamplingParams(seed=i, max_tokens=5, ignore_eos=True, **sampler)
    for i, sampler in enumerate(SAMPLERS)
]

Answers = list[tuple[torch.Tensor, tuple[int, ...], str]]


def open_llm(device: torch.device, mode: str = "NONE", **options: Any) -> LLM:
    sizes = None if mode == "NONE" else [8, 64]  # no batch is as large: all are padded
    options = {"model": "tiny", "random_weights": True, **options}
    return LLM(
        device=str(device),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=96,
        kv_cache_memory_bytes="4M",
        graphs=GraphConfig(mode=mode, capture_sizes=sizes),
        show_progress=False,
        batch_invariant=True,
        **options,
    )


def answers(llm: LLM, which: list[int]) -> Answers:
    """Logits, tokens and log-probabilities of some of the requests, run together."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        for name, row in zip(sampled.request_ids, sampled.logits.clone(), strict=True):
            rows[name].append(row)

    llm.engine.runner.on_logits = record
    results = llm.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which])
    return [
        (
            torch.stack(rows[f"{result.request_id}.0"]),
            tuple(result.outputs[0].token_ids),
            repr(result.outputs[0].logprobs),
        )
        for result in results
    ]


def assert_equal(got: Answers, want: Answers) -> None:
    for (logits, *said), (wanted_logits, *wanted) in zip(got, want, strict=True):
        assert torch.equal(logits, wanted_logits)  # NaN would differ from itself
        assert said == wanted


ALL = list(range(len(PROMPTS)))


def alone(device: torch.device, **options: Any) -> Answers:
    with open_llm(device, enable_prefix_caching=False, **options) as llm:
        return [answer for i in ALL for answer in answers(llm, [i])]


@pytest.fixture(scope="module")
def alone_by_device() -> dict[str, Answers]:
    return {}


@pytest.fixture
def reference(device: torch.device, alone_by_device: dict[str, Answers]) -> Answers:
    if device.type not in alone_by_device:
        alone_by_device[device.type] = alone(device)
    return alone_by_device[device.type]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_batches_and_prefixes_change_no_bit(
    device: torch.device, reference: Answers, mode: str
) -> None:
    with open_llm(device, mode) as llm:
        assert_equal(answers(llm, ALL), reference)
        # Prompts are in the prefix cache now.
        assert_equal(answers(llm, ALL[::-1]), reference[::-1])
        assert_equal(answers(llm, [2]), [reference[2]])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 33])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_chunks_of_prompts_change_no_bit(
    device: torch.device, reference: Answers, mode: str, chunk: int
) -> None:
    with open_llm(device, mode, long_prefill_token_threshold=chunk) as llm:
        assert_equal(answers(llm, ALL), reference)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "olmo2", "starcoder2", "qwen3"])
def test_other_families(device: torch.device, tmp_path: Path, family: str) -> None:
    """Norms of heads and after sublayers, LayerNorm, soft caps, windows, MLPs without a gate."""
    options = {"model": str(save_tiny(TINY[family](), tmp_path)), "random_weights": False}
    if device.type == "cuda":
        options["dtype"] = "bfloat16"
    want = alone(device, **options)
    with open_llm(device, "FULL_AND_PIECEWISE", **options) as llm:
        assert_equal(answers(llm, ALL), want)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mixtral", "does not support this model: it has a mixture of experts, whose kernels"),
        ("gpt2", r"this model: the native decoder does not run it \(.*\); leave it out"),
    ],
)
def test_models_without_such_kernels_are_refused(tmp_path: Path, family: str, message: str) -> None:
    model = str(save_tiny(TINY[family](), tmp_path))
    with pytest.raises(ConfigError, match=message):
        open_llm(torch.device("cpu"), model=model, random_weights=False)


@pytest.mark.slow
def test_verify_compares_to_the_bit(device: torch.device, reference: Answers) -> None:
    with open_llm(device, "FULL_AND_PIECEWISE", verify="capture,sample:1.0") as llm:
        assert_equal(answers(llm, ALL), reference)
        assert llm.verification.num_compared > 0
        assert not llm.verification.mismatches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "torch"}, "batch_invariant has its own attention, not 'torch'; leave"),
        (
            {"ulysses_sequence_parallel_size": 2},
            "batch_invariant does not support ulysses_sequence_parallel_size, whose kernels",
        ),
        ({"speculative": "ngram"}, "batch_invariant does not support speculative, whose kernels"),
        ({"enable_lora": True}, "batch_invariant does not support enable_lora, whose kernels"),
        ({"swiftkv_layers": 1}, "batch_invariant does not support swiftkv_layers, whose"),
    ],
)
def test_options_without_such_kernels_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("tiny", random_weights=True, batch_invariant=True, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_change_no_bit_for_a_fixed_degree() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=5)
    prompts = [PROMPTS[i] for i in (1, 2, 4)]
    with open_llm(torch.device("cpu"), tensor_parallel_size=2) as llm:
        single = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
        together = [result.outputs[0] for result in llm.generate(prompts, params)]
    for got, want in zip(together, single, strict=True):
        assert got.token_ids == want.token_ids
        assert repr(got.logprobs) == repr(want.logprobs)
