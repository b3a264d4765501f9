"""``ostinato bench core``: what the graph machinery costs, and what it saves."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.bench.core.stream import measure_all
from ostinato.bench.models import Decoder
from ostinato.bench.timing.measure import machine, median_seconds
from ostinato.errors import MeasurementError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.graphs.wrapper import CUDAGraphWrapper


def run() -> dict[str, Any]:
    """Run all measurements that this machine supports."""
    results: dict[str, Any] = {
        "command": "ostinato bench core",
        "machine": machine(),
        "dispatch_us": {str(keys): dispatch_microseconds(keys) for keys in (4, 400)},
        "wrapper_us": {"cpu": wrapper_microseconds(torch.device("cpu"))},
        "cpu_decoder": [decoder_step(batch) for batch in (1, 8)],
    }
    if torch.cuda.is_available():
        results["wrapper_us"]["cuda"] = wrapper_microseconds(torch.device("cuda"))
        results["stream"] = measure_all()
    return results


def dispatch_microseconds(num_keys: int) -> float:
    """Median time to build a batch's shape and dispatch it, with ``num_keys`` graphs captured."""
    plan = CapturePlan.build(
        CUDAGraphMode.FULL_AND_PIECEWISE,
        range(1, num_keys // 2 + 1),
        max_num_seqs=num_keys // 2,
        max_num_batched_tokens=num_keys,
    )
    assert len(plan.entries) == num_keys
    dispatcher = Dispatcher(plan)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    shapes = [
        (tokens, requests, query_len)
        for tokens in range(1, num_keys // 2 + 1)
        for requests, query_len in ((tokens, 1), (1, tokens))
    ]

    def dispatch_all() -> None:
        for tokens, requests, query_len in shapes:
            dispatcher.dispatch(BatchShape(tokens, requests, query_len))

    calls = max(1, 2000 // len(shapes))
    seconds = median_seconds({"dispatch": dispatch_all}, repeats=101, calls=calls)["dispatch"]
    return seconds / len(shapes) * 1e6


def wrapper_microseconds(device: torch.device) -> dict[str, float]:
    """A wrapped call with ten tensor arguments, checks on, next to a bare replay of its graph."""
    tensors = [torch.randn(4, 4, device=device) for _ in range(10)]
    descriptor = BatchDescriptor(4)

    def first_plus_one(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return first + 1

    with GraphPool(device, lazy_capture=True) as pool:
        wrapper = CUDAGraphWrapper(first_plus_one, CUDAGraphMode.FULL, pool=pool)
        with set_forward_context(CUDAGraphMode.FULL, descriptor):
            wrapper(*tensors)
            replay = wrapper.concrete_cudagraph_entries[descriptor].tape.replay
            seconds = median_seconds(
                {"wrapped": lambda: wrapper(*tensors), "bare": lambda: replay()},
                repeats=301,
                calls=100,
            )
    if seconds["wrapped"] <= seconds["bare"]:
        raise MeasurementError(
            f"noise: a wrapped call took {seconds['wrapped'] * 1e6:.2f} µs and the bare replay in "
            f"it {seconds['bare'] * 1e6:.2f} µs (medians); measure on a quieter machine"
        )
    return {
        "wrapped": seconds["wrapped"] * 1e6,
        "bare_replay": seconds["bare"] * 1e6,
        "own_cost": (seconds["wrapped"] - seconds["bare"]) * 1e6,
    }


def decoder_step(batch: int) -> dict[str, Any]:
    """One decode step of a 30-layer decoder on the CPU: eagerly, and through its graph."""
    torch.manual_seed(0)
    model = Decoder(max_rows=batch).eval().requires_grad_(False)
    ids = torch.randint(0, 49152, (batch,))
    positions = torch.full((batch,), 63)
    with GraphPool("cpu", lazy_capture=True) as pool, torch.inference_mode():
        captured = pool.capture(lambda: model(ids, positions))
        exact = torch.equal(captured.output, model(ids, positions))
        pool.replay(captured.tape)
        exact = exact and torch.equal(captured.output, model(ids, positions))
        seconds = median_seconds(
            {
                "eager": lambda: model(ids, positions),
                "replay": lambda: pool.replay(captured.tape),
            },
            repeats=41,
        )
        operators, pool_bytes = captured.tape.num_nodes, pool.num_bytes
    return {
        "batch": batch,
        "eager_ms": seconds["eager"] * 1e3,
        "replay_ms": seconds["replay"] * 1e3,
        "ratio": seconds["replay"] / seconds["eager"],
        "operators": operators,
        "pool_bytes": pool_bytes,
        "bit_exact": exact,
    }
