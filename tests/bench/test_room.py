"""Benchmarks that open several engines leave room for all: each caches what it is measured with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ostinato import LLM, ConfigError, GraphConfig, OffloadConfig
from ostinato.bench import decode, lora, offload, prefill, spec
from ostinato.config import EngineConfig
from ostinato.scheduling.draft_steps import DraftSteps

BLOCK = 4
CONFIG = EngineConfig(
    "tiny",
    random_weights=True,
    device="cpu",
    block_size=BLOCK,
    show_progress=False,
    graphs=GraphConfig(capture_sizes=[4]),
)
WINDOW: dict[str, Any] = {"batches": [1, 3], "prompt_len": 5, "new_tokens": 9, "repeats": 1}
OF_WINDOW = 3 * (5 + decode.SHORT + 9)
OFFLOAD = OffloadConfig(group=1, offloaded=1, prefetch=1)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens in the KV cache of each engine that is opened."""
    tokens: list[int] = []
    start = LLM.__init__

    def recorded(llm: LLM, *args: Any, **options: Any) -> None:
        start(llm, *args, **options)
        cache = llm.engine.runner.cache
        tokens.append((cache.num_blocks - 1) * cache.block_size)

    monkeypatch.setattr(LLM, "__init__", recorded)
    return tokens


@pytest.mark.parametrize(
    ("run", "num_engines", "needed"),
    [
        (lambda c: prefill.run(c, lengths=[7, 30], modes=["PIECEWISE"], repeats=1), 2, 31),
        pytest.param(
            lambda c: decode.run(c, baselines=["eager"], **WINDOW),
            *(2, OF_WINDOW),
            marks=pytest.mark.slow,
        ),
        (lambda c: lora.run(c, adapters=1, rank=1, **WINDOW), 2, OF_WINDOW),
        (lambda c: offload.run(c, offload=OFFLOAD, **WINDOW), 2, OF_WINDOW),
    ],
    ids=["prefill", "decode", "lora", "offload"],
)
def test_the_kv_cache_holds_what_is_measured(
    run: Any, num_engines: int, needed: int, opened: list[int]
) -> None:
    run(CONFIG)
    assert len(opened) == num_engines
    assert all(needed <= tokens <= needed + 3 * 4 * BLOCK for tokens in opened), opened


def test_a_size_that_was_given_is_kept(opened: list[int]) -> None:
    prefill.run(replace(CONFIG, kv_cache_tokens=100), lengths=[7], modes=["FULL"], repeats=1)
    assert opened == [100, 100]


def test_prompts_that_do_not_fit_are_an_error_before_anything_is_opened(opened: list[int]) -> None:
    config = replace(CONFIG, max_model_len=8)
    with pytest.raises(ConfigError, match=r"max_model_len 8 is too small .* needs 10"):
        prefill.run(config, lengths=[9], modes=["FULL"], repeats=1)
    assert not opened


@pytest.mark.slow
def test_no_step_of_bench_spec_lacks_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the last ones: the speed-up is that of steps with drafts."""
    drafts: list[tuple[int, int]] = []
    add_to = DraftSteps.add_to

    def recorded(steps: DraftSteps, rows: Any) -> int:
        wanted = steps.num_drafts[len(rows)]
        drafts.append((wanted, add_to(steps, rows)))
        return drafts[-1][1]

    monkeypatch.setattr(DraftSteps, "add_to", recorded)
    config = replace(CONFIG, block_size=16)
    spec.run(config, batches=[2], num_tokens=3, prompt_len=8, new_tokens=8, repeats=1)
    assert (3, 3) in drafts
    assert all(wanted == got for wanted, got in drafts)
