"""Which graphs an engine plans by default: on CUDA, without one, from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import CapturePlan, CUDAGraphMode, GraphConfig
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.config import EngineConfig
from ostinato.engine.explain import explain_batch
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.runner.startup.graph_plans import GraphPlans, plan_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WHOLE, PIECES = CUDAGraphMode.FULL_AND_FULL, CUDAGraphMode.FULL_AND_PIECEWISE


class DecodeOnly(TritonPagedAttention):
    support = AttentionCGSupport.UNIFORM_BATCH


def plans_of(
    device: torch.device = CUDA, attention: Any = None, *, swiftkv: bool = False, **options: Any
) -> GraphPlans:
    backend = TritonPagedAttention() if attention is None else attention
    return plan_graphs(EngineConfig(**options), device, backend, selects_tokens=swiftkv)


def sizes_of(plan: CapturePlan, phase: str) -> list[int]:
    return sorted(e.descriptor.num_tokens for e in plan.entries if e.phase == phase)


@pytest.mark.parametrize(
    ("device", "attention", "graphs", "mode"),
    [
        (CUDA, TritonPagedAttention(), {}, WHOLE),
        (CUDA, TritonPagedAttention(), {"capture_sizes": [8]}, WHOLE),
        (CUDA, TritonPagedAttention(), {"compile": "eager"}, PIECES),
        (CUDA, TorchPagedAttention(), {}, PIECES),
        (CUDA, DecodeOnly(), {}, PIECES),
        (CPU, TritonPagedAttention(), {}, PIECES),
    ],
)
def test_the_default_mode(
    device: torch.device, attention: Any, graphs: dict[str, Any], mode: CUDAGraphMode
) -> None:
    plans = plans_of(device, attention, graphs=GraphConfig(**graphs))
    assert plans.model.mode is plans.resolved.requested is plans.resolved.mode is mode


def test_a_mode_that_attention_does_not_allow() -> None:
    plans = plans_of(CPU, DecodeOnly(), graphs=GraphConfig(mode=WHOLE))
    assert (plans.resolved.requested, plans.resolved.mode) == (WHOLE, PIECES)
    assert plans.model.sizes == plans.model.mixed_sizes == (1, 2, 4, 8, 16)


def test_default_sizes_of_decode_and_of_mixed_batches() -> None:
    plan = plans_of().model
    decode, mixed = sizes_of(plan, "decode, FULL"), sizes_of(plan, "mixed, FULL")
    assert (decode[:4], decode[-1], len(decode)) == ([1, 2, 4, 8], 256, 35)
    assert (mixed[:4], mixed[-1], len(mixed)) == ([16, 32, 64, 128], 8192, 42)
    assert len(plan.entries) == len(decode) + len(mixed)


def test_graphs_with_adapters_stay_bounded() -> None:
    """Decode graphs for 0, 1, 2, 4 and 8 adapters; whole graphs of mixed batches for 0, 1, 8."""
    without = plans_of().model
    plan = plans_of(enable_lora=True, max_loras=8).model
    assert (plan.sizes, plan.mixed_sizes) == (without.sizes, without.mixed_sizes)
    assert len(sizes_of(plan, "decode, FULL")) == 5 * 35
    assert len(sizes_of(plan, "mixed, FULL")) == 3 * 42


@pytest.mark.parametrize(
    ("graphs", "sizes"),
    [({"capture_sizes": [3, 700]}, (3, 700)), ({"max_cudagraph_capture_size": 8}, (1, 2, 4, 8))],
)
def test_sizes_of_the_user_are_for_all_batches(
    graphs: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    plan = plans_of(graphs=GraphConfig(**graphs)).model
    assert plan.mode is WHOLE
    assert plan.sizes == plan.mixed_sizes == sizes


@pytest.mark.parametrize("swiftkv", [False, True])
def test_default_sizes_with_shift_parallelism(swiftkv: bool) -> None:
    plans = plans_of(
        swiftkv=swiftkv,
        ulysses_sequence_parallel_size=2,
        shift_parallel_threshold=100,
        max_num_batched_tokens=3000,
    )
    base, shift = plans.model, plans.shift
    assert shift is not None
    assert sizes_of(shift, "mixed, FULL") == [16, 32, 64, 128]
    assert base.mixed_sizes[:2] == (128, 256)
    assert base.mixed_sizes[-1] == 3000
    assert all(size % 2 == 0 for size in base.mixed_sizes)


def test_explain_shows_the_sizes_of_mixed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: CUDA)
    config = EngineConfig(attention=TritonPagedAttention(), max_num_batched_tokens=300)
    answer = explain_batch(config, num_tokens=257, num_reqs=3)
    assert answer["mode_in_force"] == "FULL_AND_FULL"
    assert (answer["runs"], answer["padded_to"]) == ("FULL graph", 300)
    assert answer["mixed_sizes"] == [16, 32, 64, 128, 192, 256, 300]
    assert answer["captured_sizes"][:3] == [1, 2, 4]
    decode = explain_batch(config, num_tokens=3, num_reqs=3)
    assert decode["padded_to"] == 4
    assert "uniform=True" in decode["key"]
