"""``ostinato bench decode``: time per output token, next to the floor and the baselines.

The time per output token is (time for a long generation - time for a short one) / the tokens
between them, so prefill and start-up of a call cancel out. Subjects are measured in turns in one
process, on the same weights if there is a checkpoint; their tokens are compared too. The bandwidth
behind the floor is measured in the same process. A baseline that fails, or a measurement that noise
exceeds (``tpot``), is reported with its reason, and the rest continues.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.timing.baselines import (
    Generate,
    check_names,
    checkpoint,
    from_engine,
    open_baselines,
    reason,
)
from ostinato.bench.timing.floor import kv_bytes, measure_bandwidth, weight_bytes
from ostinato.bench.timing.measure import about, timed
from ostinato.bench.timing.profile import check_path, longest_for, profile_decode
from ostinato.bench.timing.room import with_kv_cache_for, with_room
from ostinato.bench.timing.tpot import Record, evaluate
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.llm import LLM
from ostinato.progress import ProgressBar

SHORT = 17
CUDA_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CPU_BATCHES = (1, 8)
OURS = "ostinato"


@dataclass(frozen=True, kw_only=True)
class Window:
    """The measured part of each sequence: the tokens after the first ``SHORT``."""

    prompt_len: int
    new_tokens: int
    repeats: int

    @property
    def longest(self) -> int:
        return self.prompt_len + SHORT + self.new_tokens

    @property
    def why(self) -> str:
        """Where the length comes from, in an error."""
        return f"sequences have prompt_len + {SHORT} + new_tokens tokens, or more for a profile"

    @property
    def context(self) -> range:
        """The number of keys that each measured step attends to: all tokens so far."""
        return range(self.prompt_len + SHORT, self.longest)

    @property
    def middle(self) -> int:
        return self.context[len(self.context) // 2]


def run(
    config: EngineConfig,
    *,
    batches: Sequence[int] | None = None,
    baselines: Sequence[str] = (),
    prompt_len: int = 128,
    new_tokens: int = 128,
    repeats: int = 3,
    profile: Path | None = None,
    profile_batches: Sequence[int] | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure every batch size with the graphs and with each baseline, in turns.

    ``batches`` None: the device's defaults. ``profile``: where to write Chrome traces, one for each
    of ``profile_batches`` (None: all batches). Progress goes to stderr.
    """
    device = config.torch_device()
    if batches is None:
        batches = CUDA_BATCHES if device.type == "cuda" else CPU_BATCHES
    check_counts(batches, prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    check_names(baselines)
    window = Window(prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    longest = window.longest
    profiled = _profiled(batches, profile, profile_batches)
    if profiled:
        _, budget = config.batch_limits(device)
        needed = longest_for(window.middle, batch=max(batches), max_num_batched_tokens=budget)
        longest = max(longest, needed)
    config = with_room(config, num_seqs=max(batches), length=longest, why=window.why)
    config = with_kv_cache_for(config, num_seqs=max(batches), length=longest)
    bandwidth = measure_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # before the engine checks free memory
    with ExitStack() as stack:
        llm = stack.enter_context(LLM.from_config(config))
        others, failed = open_baselines(llm, baselines, stack, longest=longest)
        subjects = {OURS: from_engine(llm), **others}
        vocab_size, runs = llm.engine.model.vocab_size, len(subjects) * (repeats + 1)
        with ProgressBar(total=len(batches) * runs, disable=not show_progress) as bar:
            rows = [measure_batch(subjects, vocab_size, batch, window, bar) for batch in batches]
        if checkpoint(llm) is None:  # transformers' model has other weights
            for row in rows:
                for same in (row["same_tokens_as"], row["agreement"]):
                    same.update({name: None for name in same if name.startswith("hf")})
        for row in rows:
            row["failed"] = {**failed, **row["failed"]}
        return {
            **_about(llm, window),
            **_floors(rows, llm, window, bandwidth),
            "rows": rows,
            "profiles": [
                profile_decode(llm, batch, context=window.middle, path=path)
                for batch, path in profiled
            ],
        }


def check_counts(batches: Sequence[int], **counts: int) -> None:
    """Raise unless all are positive, and there are batches."""
    if not batches:
        raise ConfigError("no batch sizes to measure; give at least one")
    for batch in batches:
        check_positive_int("batch size", batch)
    for name, count in counts.items():
        check_positive_int(name, count)


def _profiled(
    batches: Sequence[int], path: Path | None, chosen: Sequence[int] | None
) -> list[tuple[int, Path]]:
    """The batches to profile, and where to write each trace."""
    if path is None:
        if chosen is not None:
            raise ConfigError(f"no trace file for profiling batches {list(chosen)}; give --profile")
        return []
    check_path(path)
    unknown = sorted(set(chosen or ()) - set(batches))
    if unknown:
        raise ConfigError(f"batches {unknown} are profiled but not measured; add them to --batch")
    return [(batch, path) for batch in (batches if chosen is None else chosen)]


def _about(llm: LLM, window: Window) -> dict[str, Any]:
    return {
        **about("decode", llm),
        "prompt_len": window.prompt_len,
        "new_tokens": window.new_tokens,
        "repeats": window.repeats,
    }


def _floors(
    rows: list[dict[str, Any]], llm: LLM, window: Window, bandwidth: dict[str, Any]
) -> dict[str, Any]:
    """Add the floor to each row; return what the floors are based on."""
    model = llm.engine.model
    weights = weight_bytes(model, llm.engine.model_config)
    per_sequence = kv_bytes(model.attention_specs, model.dtype, window.context)
    for row in rows:
        row["floor_ms"], row["of_floor"] = None, {}
        if weights is not None:
            seconds = (weights + row["batch"] * per_sequence) / bandwidth["bytes_per_s"]
            row["floor_ms"] = seconds * 1e3
            row["of_floor"] = {name: row["floor_ms"] / ms for name, ms in row["tpot_ms"].items()}
    return {
        "bandwidth": bandwidth,
        "weight_bytes": weights,
        "kv_bytes_per_sequence": per_sequence,
    }


def measure_batch(
    subjects: dict[str, Generate], vocab_size: int, batch: int, window: Window, bar: Any
) -> dict[str, Any]:
    """Measure the subjects in turns; the one called ``OURS`` is the one others are compared to."""
    # New tokens in every repetition: the prefix cache must not skip what the baselines compute.
    source = random.Random(batch)

    def prompts() -> list[list[int]]:
        length = window.prompt_len
        return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]

    running, failed = dict(subjects), {}
    records = {name: Record() for name in subjects}
    for repeat in range(window.repeats + 1):
        for_short, for_long = prompts(), prompts()
        for name, generate in list(running.items()):
            what = f"repeat {repeat} of {window.repeats}" if repeat else "warm-up"
            bar.set_description(f"batch {batch}, {name}, {what}")
            try:
                _run(records[name], generate, for_short, for_long, window, warms_up=repeat == 0)
            except Exception as error:
                if name == OURS:
                    raise
                failed[name] = reason(error)
                del running[name]
            bar.update()
    kept = {name: records[name] for name in running}
    row = evaluate(kept, ours=OURS, batch=batch, new_tokens=window.new_tokens)
    return {**row, "failed": failed}


def _run(
    record: Record,
    generate: Generate,
    for_short: list[list[int]],
    for_long: list[list[int]],
    window: Window,
    *,
    warms_up: bool,
) -> None:
    """A short and a long generation, timed unless this is a warm-up."""
    most = SHORT + window.new_tokens
    if warms_up:  # over all lengths: cuDNN builds a plan for each new one
        record.tokens += generate(for_short, most)
        return
    for prompts, num_tokens, seconds in (
        (for_short, SHORT, record.short_s),
        (for_long, most, record.long_s),
    ):
        tokens, taken = timed(functools.partial(generate, prompts, num_tokens))
        record.tokens += tokens
        seconds.append(taken)
