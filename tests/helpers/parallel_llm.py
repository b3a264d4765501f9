"""``LLM`` as one rank of several: what the tests run in the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ostinato import LLM, GraphConfig, SamplingParams

# More requests than run at once, lengths that no number of ranks divides, prompts longer than a
# chunk, and few blocks: requests wait, are admitted in the middle, and are preempted.
LENGTHS = (1, 5, 23, 40, 9, 2)
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 33,
    "max_model_len": 64,
    "long_prefill_token_threshold": 15,
    "block_size": 4,
    "show_progress": False,
}
SIZES = (1, 2, 4, 12)
VOCAB_SIZE = 97


def prompts() -> list[list[int]]:
    return [[(n * 31 + i * 7) % VOCAB_SIZE for i in range(n)] for n in LENGTHS]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=14),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3),
        SamplingParams(max_tokens=9, temperature=0.7, top_k=5, seed=4, logprobs=2),
        SamplingParams(max_tokens=16, repetition_penalty=1.3),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=18, min_tokens=4, stop_token_ids=[5]),
    ]


@dataclass
class Outcome:
    """Tokens and reasons by request, and how the steps ran: (base or shift model, mode)."""

    tokens: list[list[int]]
    reasons: list[str | None]
    steps: set[tuple[str, str]]
    num_graphs: int
    num_preemptions: int  # known to rank 0


def run_llm(path: str, mode: str, **options: Any) -> Outcome:
    """On every rank: the same calls, the same results."""
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else SIZES)
    with LLM(path, graphs=graphs, **(LIMITS | options)) as llm:
        runner = llm.engine.runner
        poison(runner)
        steps = spy_on(runner)
        run, preempted = runner.run, []

        def counted(plan: Any) -> Any:
            preempted.extend(plan.preempted)
            return run(plan)

        runner.run = counted  # type: ignore[method-assign]
        outputs = llm.generate(prompts(), params())
        assert_block_0_untouched(runner)
        completions = [output.outputs[0] for output in outputs]
        return Outcome(
            [completion.token_ids for completion in completions],
            [completion.finish_reason for completion in completions],
            steps,
            runner.capture_report.num_graphs,
            len(preempted),
        )


def poison(runner: Any) -> None:
    for layer in runner.kv_cache.layers:
        for cache in layer:
            cache.fill_(float("nan"))


def assert_block_0_untouched(runner: Any) -> None:
    """It belongs to no request: writes by padding would show here."""
    for layer in runner.kv_cache.layers:
        for cache in layer:
            assert cache[0].isnan().all(), "padding was written to the KV cache"


def spy_on(runner: Any) -> set[tuple[str, str]]:
    steps: set[tuple[str, str]] = set()
    dispatch = runner.dispatch

    def recorded(shape: Any) -> Any:
        choice = dispatch(shape)
        small = shape.num_tokens <= runner.small_threshold
        steps.add(("shift" if small else "base", choice.mode.name))
        return choice

    runner.dispatch = recorded
    return steps


def blocks_of(num_blocks: int, *, num_kv_heads: int, head_dim: int, num_layers: int) -> int:
    """Bytes of KV cache for this many blocks in float32."""
    per_token = 2 * num_kv_heads * head_dim * num_layers * torch.float32.itemsize
    return num_blocks * LIMITS["block_size"] * per_token
