"""``ostinato bench sampling``: the full sampler against its reference in plain torch, in graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ostinato.bench.timing.measure import machine, synchronize
from ostinato.errors import ConfigError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.ops.sampling.sampling_reference import sample_reference
from ostinato.sampling.sampler import sample
from ostinato.sampling.sampling_state import SamplingFeatures, SamplingState
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import Request

_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 20, top-p 0.8": {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0.0, **_PENALTIES},
    "penalties, top-k, top-p": {"top_k": 20, "top_p": 0.8, **_PENALTIES},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def run(
    *,
    batches: Sequence[int],
    vocab_size: int = 151_936,
    history: int = 2048,
    repeats: int = 20,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """Milliseconds of one call per batch size and case, by replays of a graph; and equal tokens.

    Logits are random, in bfloat16 on CUDA. ``history`` is the length of every sequence, of which
    half is prompt.
    """
    for name, value in (("vocab_size", vocab_size), ("history", history), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not batches or min(batches) < 1:
        raise ConfigError(f"batch sizes must be positive integers, got {list(batches)}")
    device = torch.device(device)
    rows = [
        _measure(batch, name, vocab_size, history, repeats, device)
        for batch in batches
        for name in CASES
    ]
    return {
        "command": "ostinato bench sampling",
        "machine": machine(),
        "vocab_size": vocab_size,
        "history": history,
        "repeats": repeats,
        "rows": rows,
    }


def _measure(
    batch: int, name: str, vocab_size: int, history: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(batch, vocab_size, generator=generator, device=device).mul_(2.5).to(dtype)
    token_ids = torch.randint(
        vocab_size, (batch, history), generator=generator, device=device, dtype=torch.int32
    )
    req_indices = torch.arange(batch, device=device)
    lengths = torch.full((batch,), history, dtype=torch.int32, device=device)
    params = SamplingParams(**CASES[name])
    state = SamplingState(batch, device)
    for req_index in range(batch):
        request = Request(
            request_id=str(req_index),
            prompt_token_ids=[0] * (history // 2),
            params=params,
            max_total_tokens=history + 1,
            seed=req_index,
        )
        state.write(req_index, request)
    features = SamplingFeatures.of([params])

    def ours() -> torch.Tensor:
        return sample(logits, req_indices, lengths, state, token_ids, features).token_ids

    def reference() -> torch.Tensor:
        tokens = sample_reference(
            logits, req_indices, lengths, state.tables, token_ids, features.steps
        )
        if features.num_logprobs >= 0:
            logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1))
            logits.float().topk(min(features.num_logprobs, vocab_size), dim=-1)
        return tokens

    with GraphPool(device, lazy_capture=True) as pool:
        milliseconds, tokens = {}, []
        for label, subject in (("ours", ours), ("reference", reference)):
            subject()  # compiles
            captured = pool.capture(subject)

            def replay(tape: Any = captured.tape) -> None:
                pool.replay(tape)

            milliseconds[label] = _milliseconds(replay, repeats, device)
            tokens.append(captured.output.clone())
    return {
        "batch": batch,
        "case": name,
        "milliseconds": milliseconds,
        "same_tokens": int((tokens[0] == tokens[1]).sum()),
    }


def _milliseconds(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median time of a call on the device, among several in a row."""
    calls = 20 if device.type == "cuda" else 1
    samples = []
    for _ in range(repeats):
        synchronize()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / calls)
        else:
            started = time.perf_counter()
            call()
            samples.append((time.perf_counter() - started) * 1e3)
    return float(statistics.median(samples))
