"""Decode steps whose GEMMs add the adapters themselves, in a whole engine without a GPU.

The CPU runs other strategies, so these tests choose the one of small-M steps for it. Tokens are
compared with transformers' for the adapter merged into the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Merged, save_adapter
from tiny_models import TINY_NATIVE, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.models.native import decoder
from ostinato.models.native.fused_kernels import SmallM
from ostinato.ops.gemm import lora_linear
from ostinato.ops.gemm.linear import Gemm
from ostinato.ops.gemm.lora_linear import run_lora_kernels
from ostinato.ops.gemm.tile_config import MAX_ROWS, GemmChoice, TileConfig

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here"),
]

PROMPTS = [[5, 9, 33, 7, 21], [8, 2, 40], [17, 3, 3, 9]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(decoder, "LargeM", SmallM)
    return save_tiny(TINY_NATIVE["llama"](), tmp_path / "model")


def check(model: Path, directory: Path, num_requests: int, count: int, graphs: GraphConfig) -> None:
    """Adapters of different ranks, one of them in some linears only, and a request without."""
    adapters: dict[str, dict[str, Any]] = {
        "all": {"rank": 20, "seed": 1},
        "some": {"rank": 5, "seed": 2, "targets": ("q_proj", "v_proj", "up_proj", "o_proj")},
    }
    paths = {name: save_adapter(directory / name, model, **how) for name, how in adapters.items()}
    wanted = ["all", "some", None][:num_requests]
    with LLM(
        str(model),
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=20,
        show_progress=False,
        graphs=graphs,
    ) as llm:
        for name, path in paths.items():
            llm.load_adapter(name, path)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate(PROMPTS[:num_requests], params, adapter=wanted)
        tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [
        (Merged(model, paths[name]) if name else Merged(model)).tokens(prompt, count)
        for prompt, name in zip(PROMPTS, wanted, strict=False)
    ]


@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_kernels_in_every_layer(
    model: Path, tmp_path: Path, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def choose(gemm: Gemm, **_: bool) -> GemmChoice:
        return TileConfig(16, 32, 4, 2) if len(gemm.x) <= MAX_ROWS else "torch"

    def run(config: TileConfig, gemm: Gemm, *adapters: Any) -> torch.Tensor:
        calls.append(len(gemm.x))
        weight = gemm.weight.contiguous()  # the CPU has some of them transposed
        return run_lora_kernels(config, gemm._replace(weight=weight), *adapters)

    monkeypatch.setattr(lora_linear, "choose_kernel", choose)
    monkeypatch.setattr(lora_linear, "run_lora_kernels", run)
    check(model, tmp_path, num_requests, count=3, graphs=GraphConfig(mode="NONE"))
    assert num_requests in calls


def test_other_devices_compute_the_same_in_graphs(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path, 3, count=12, graphs=GraphConfig(capture_sizes=[4, 16]))
