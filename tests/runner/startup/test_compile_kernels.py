"""The pass that asks for kernels, against what captures launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from ostinato import CapturePlan, CUDAGraphMode, DraftModel, GraphConfig, SuffixDrafts
from ostinato.attention import triton_paged
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.config import EngineConfig
from ostinato.ops import decode_state
from ostinato.ops.gemm import lora
from ostinato.ops.sampling import drafts
from ostinato.ops.triton.launch import without_running
from ostinato.runner import decode_step, startup
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.startup.compile_kernels import compile_kernels, request_kernels
from ostinato.speculative import look_up

triton = pytest.importorskip("triton")

Kernel = tuple[str, frozenset[tuple[str, Any]]]


class Asked:
    """The kernels that launches ask for, by name and constants. Nothing runs."""

    def __init__(self) -> None:
        self.kernels: set[Kernel] = set()

    def __call__(self, kernel: Any, _arguments: Any, constants: dict[str, Any]) -> None:
        self.kernels.add((kernel.fn.__name__, frozenset(constants.items())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_FULL"]
)
def test_it_asks_for_every_kernel_of_a_capture(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs in Triton on the CPU too, under the interpreter."""
    monkeypatch.setattr(triton_paged, "num_sms", lambda _: 8)  # decode kernels then differ by size
    config = EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        dtype="bfloat16",
        attention=TritonPagedAttention(),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory_bytes=2**22,
        show_progress=False,
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 16, 32]),
    )
    captured, ahead = asked_for(config)
    assert captured.kernels
    assert captured.kernels <= ahead.kernels
    # Besides those, only what a prompt of the largest step needs.
    more = {name for name, _ in ahead.kernels - captured.kernels}
    assert more <= {"rotary_store_kernel", "attend_kernel", "combine_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_it_asks_for_the_kernels_of_adapters(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shrink", "expand"):
        monkeypatch.setattr(lora, f"torch_{name}", getattr(lora, f"triton_{name}"))
    config = EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        dtype="bfloat16",  # in float32 one kernel serves all sizes
        max_num_seqs=64,
        max_num_batched_tokens=128,
        max_model_len=128,
        kv_cache_memory_bytes=2**22,
        show_progress=False,
        enable_lora=True,
        max_loras=3,
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 8, 16, 24, 32, 40, 64, 72]),
    )
    captured, ahead = asked_for(config)
    assert {"lora_shrink_kernel", "lora_expand_kernel"} <= {name for name, _ in captured.kernels}
    assert captured.kernels <= ahead.kernels


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_it_asks_for_the_kernels_of_drafts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "look_up_drafts", drafts.triton_look_up_drafts)
    monkeypatch.setattr(draft_sampling, "accept_drafts", drafts.triton_accept_drafts)
    load = decode_state.triton_load_decode_inputs
    monkeypatch.setattr(decode_step, "load_decode_inputs", load)
    config = EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory_bytes=2**22,
        show_progress=False,
        speculative=SuffixDrafts(num_tokens={2: 6, 8: 2}),
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 8, 16, 32]),
    )
    captured, ahead = asked_for(config)
    for name in ("find_match_kernel", "write_drafts_kernel", "accept_drafts_kernel"):
        assert name in {kernel for kernel, _ in captured.kernels}
    query_lens = {dict(constants).get("QUERY_LEN") for _, constants in captured.kernels}
    assert query_lens >= {1, 3, 7}
    assert captured.kernels <= ahead.kernels


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_it_asks_for_the_kernels_of_a_draft_model(mode: str, tmp_path: Path) -> None:
    """A draft model reads prompts too, with kernels for its own heads."""
    LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ).save_pretrained(tmp_path)
    config = EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        dtype="bfloat16",
        attention=TritonPagedAttention(),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory_bytes=2**22,
        show_progress=False,
        speculative=DraftModel(model=str(tmp_path), random_weights=True, num_tokens=2),
        graphs=GraphConfig(mode=mode, capture_sizes=[4, 12, 32]),
    )
    read, ahead = Asked(), Asked()
    runner, _ = startup.build_runner(config, startup.load(config))
    memory = runner.memory
    metadata = memory.metadata(
        num_reqs=4,
        num_tokens=64,
        max_query_len=16,
        max_seq_len=128,
        selected=False,
        uniform_decode=False,
    )
    with without_running(read):
        draft_sampling.read_step(memory, metadata)
    with without_running(ahead):
        request_kernels(runner.model, runner.plan, memory)
    runner.close()
    assert "attend_kernel" in {name for name, _ in read.kernels}
    assert read.kernels <= ahead.kernels


def asked_for(config: EngineConfig) -> tuple[Asked, Asked]:
    """The kernels of start-up, and of the pass that compiles ahead."""
    captured, ahead = Asked(), Asked()
    with without_running(captured):
        runner, _ = startup.build_runner(config, startup.load(config))
    with without_running(ahead):
        request_kernels(runner.model, runner.plan, runner.memory)
    runner.close()
    return captured, ahead


def test_a_failure_is_logged_and_start_up_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    model: Any = SimpleNamespace(device=torch.device("cuda"), max_position=64)  # and nothing else
    plan = CapturePlan.without_sizes(CUDAGraphMode.NONE, max_num_seqs=2, max_num_batched_tokens=16)
    compile_kernels(
        model,
        plan,
        TritonPagedAttention(),
        block_size=16,
        max_model_len=None,
        show_progress=False,
    )
    assert "compiled one after another, because asking for them ahead failed" in caplog.text
