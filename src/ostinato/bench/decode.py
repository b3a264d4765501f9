"""``ostinato bench decode``: time per output token, against our own eager mode and transformers.

The time per output token is (time for a long generation - time for a short one) / the tokens
between them, so prefill and start-up of a call cancel out. What is compared is measured in turns
in one process, on the same weights where there is a checkpoint; tokens are compared first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.measure import machine, synchronize
from ostinato.errors import ConfigError
from ostinato.graphs.sizes import check_positive_int
from ostinato.runtime.config import EngineConfig, GraphConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.sampling_params import SamplingParams

BASELINES = ("eager", "hf")
SHORT = 17
# Generates that many tokens for each prompt; returns them.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def run(
    config: EngineConfig,
    *,
    batches: Sequence[int],
    baselines: Sequence[str],
    prompt_len: int = 128,
    new_tokens: int = 128,
    repeats: int = 3,
) -> dict[str, Any]:
    """Measure every batch size with the graphs and with each baseline, in turns."""
    _check_counts(batches, prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    unknown = sorted(set(baselines) - set(BASELINES))
    if unknown:
        raise ConfigError(f"unknown baselines {unknown}; choose from {list(BASELINES)}")
    config = _with_room(config, num_seqs=max(batches), length=prompt_len + SHORT + new_tokens)
    with ExitStack() as stack:
        llm = stack.enter_context(LLM.from_config(config))
        subjects: dict[str, Generate] = {"ostinato": _engine(llm)}
        if "eager" in baselines:
            eager = replace(config, graphs=GraphConfig(mode="NONE"))
            subjects["eager"] = _engine(stack.enter_context(LLM.from_config(eager)))
        if "hf" in baselines:
            subjects["hf"] = _transformers(llm)
        rows = [
            _measure(subjects, llm.engine.model.vocab_size, batch, prompt_len, new_tokens, repeats)
            for batch in batches
        ]
        if "hf" in subjects and _checkpoint(llm) is None:
            for row in rows:
                row["same_tokens_as"]["hf"] = None  # its weights are others
        model = llm.engine.model
        return {
            "command": "ostinato bench decode",
            "machine": machine(),
            "model": config.model or "SmolLM2-135M-Instruct (embedded)",
            "random_weights": config.random_weights,
            "dtype": str(model.dtype).removeprefix("torch."),
            "mode": llm.engine.resolved_mode.mode.name,
            "prompt_len": prompt_len,
            "new_tokens": new_tokens,
            "repeats": repeats,
            "rows": rows,
        }


def _check_counts(batches: Sequence[int], **counts: int) -> None:
    if not batches:
        raise ConfigError("there are no batch sizes to measure; give at least one")
    for batch in batches:
        check_positive_int("batch size", batch)
    for name, count in counts.items():
        check_positive_int(name, count)


def _with_room(config: EngineConfig, *, num_seqs: int, length: int) -> EngineConfig:
    """The limits that were not given follow from the batches; those that were must hold them."""
    for name, limit, needed in (
        ("max_num_seqs", config.max_num_seqs, num_seqs),
        ("max_model_len", config.max_model_len, length),
    ):
        if limit is not None and limit < needed:
            raise ConfigError(
                f"{name} {limit} is too small to measure this: {needed} are needed (sequences have "
                f"prompt_len + {SHORT} + new_tokens tokens); raise it or measure less"
            )
    return replace(
        config,
        max_num_seqs=config.max_num_seqs or num_seqs,
        max_model_len=config.max_model_len or length,
    )


def _measure(
    subjects: dict[str, Generate],
    vocab_size: int,
    batch: int,
    prompt_len: int,
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    # Other tokens in every repetition: the prefix cache must not save what the baselines compute.
    source = random.Random(batch)

    def prompts() -> list[list[int]]:
        return [[source.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(batch)]

    first = prompts()
    tokens = {name: generate(first, SHORT) for name, generate in subjects.items()}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        ours, theirs = prompts(), prompts()
        for name, generate in subjects.items():
            short = _seconds(generate, ours, SHORT)
            long = _seconds(generate, theirs, SHORT + new_tokens)
            samples[name].append((long - short) / new_tokens)
    times = {name: statistics.median(values) for name, values in samples.items()}
    others = [name for name in subjects if name != "ostinato"]
    return {
        "batch": batch,
        "tpot_ms": {name: seconds * 1e3 for name, seconds in times.items()},
        "tokens_per_s": {name: batch / seconds for name, seconds in times.items()},
        "speedup_over": {name: times[name] / times["ostinato"] for name in others},
        "same_tokens_as": {name: tokens[name] == tokens["ostinato"] for name in others},
    }


def _seconds(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    synchronize()
    start = time.perf_counter()
    generate(prompts, num_tokens)
    synchronize()
    return time.perf_counter() - start


def _engine(llm: LLM) -> Generate:
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]

    return generate


def _checkpoint(llm: LLM) -> Path | None:
    """Where the weights come from; None for random ones."""
    return None if llm.config.random_weights else llm.model_path


def _transformers(llm: LLM) -> Generate:
    """transformers' own ``generate``: same checkpoint, or same shape with weights of its own."""
    from transformers import AutoModelForCausalLM

    ours = llm.engine.model
    if (path := _checkpoint(llm)) is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=ours.dtype)
        model = model.to(ours.device)
    else:
        with ours.device:
            build: Any = AutoModelForCausalLM.from_config
            model = build(llm.engine.model_config, dtype=ours.dtype)
    model.eval()
    model.generation_config.eos_token_id = None  # never stops early

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=ours.device)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return [row[ids.shape[1] :] for row in result.tolist()]

    return generate
