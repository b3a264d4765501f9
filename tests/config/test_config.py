"""Settings: what is refused, and what the defaults resolve to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato import ConfigError, CUDAGraphMode, GraphConfig
from ostinato.config import EngineConfig, parse_bytes
from ostinato.config.checks import LARGEST

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# --- when it is built -----------------------------------------------------------------------------

BAD_GRAPHS: list[tuple[dict[str, Any], str]] = [
    (
        {"mode": "fullish"},
        "unknown graph mode 'fullish'; choose one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, "
        "FULL_AND_PIECEWISE, FULL_AND_FULL",
    ),
    (
        {"mode": 1},
        "graph mode must be text or CUDAGraphMode, got 1; choose one of NONE, PIECEWISE, FULL, ",
    ),
    ({"capture_sizes": []}, "capture sizes are empty; give at least one, or use graph mode NONE"),
    ({"compile": "nvcc"}, "compile must be True, False, 'inductor' or 'eager', got 'nvcc'"),
    ({"capture_sizes": "1,2"}, "capture sizes must be a list of positive integers, got '1,2'"),
    ({"capture_sizes": [4, 0]}, "capture size must be a positive integer, got 0"),
    ({"num_warmups": -1}, "num_warmups must be from 0 to 1000, got -1"),
    ({"num_warmups": 1.0}, "num_warmups must be from 0 to 1000, got 1.0"),
    ({"num_warmups": 2**31}, "num_warmups must be from 0 to 1000, got 2147483648"),
    ({"lazy_capture": "false"}, "lazy_capture must be True or False, got 'false'"),
    ({"eager_fallback": None}, "eager_fallback must be True or False, got None"),
    ({"compile": torch.ones(2)}, "compile must be True, False, 'inductor' or 'eager', got tensor("),
    ({"compile": 0}, "compile must be True, False, 'inductor' or 'eager', got 0"),
    *(
        ({name: torch.tensor(3)}, "capture sizes must be a list of positive integers, got tensor(3")
        for name in ("capture_sizes", "mixed_capture_sizes", "vision_capture_sizes")
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_GRAPHS, ids=str)
def test_bad_graph_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        GraphConfig(**options)
    assert str(error.value).startswith(message)


def test_graph_settings_are_read() -> None:
    config = GraphConfig(mode=" full_Decode_only ", capture_sizes=[8, 2, 8])
    assert config.mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert config.capture_sizes == (2, 8)
    assert GraphConfig().mode is None
    with pytest.raises(FrozenInstanceError):
        config.num_warmups = 3  # type: ignore[misc]


LIMITS = [
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "long_prefill_token_threshold",
    "block_size",
]
BAD_ENGINES: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} must be a positive integer, got 0") for name in LIMITS),
    *(({name: True}, f"{name} must be a positive integer, got True") for name in LIMITS),
    ({"max_num_seqs": "8"}, "max_num_seqs must be a positive integer, got '8'"),
    ({"kv_cache_tokens": 0}, "kv_cache_tokens must be a positive integer, got 0"),
    (
        {"kv_cache_tokens": 63, "max_model_len": 64},
        "kv_cache_tokens 63 is below max_model_len 64, so the longest request would not fit; raise "
        "kv_cache_tokens or lower max_model_len",
    ),
    ({"block_size": None}, "block_size must be a positive integer, got None"),
    ({"seed": -1}, "seed must be an integer in [0, 2**63), got -1"),
    ({"seed": 2**63}, f"seed must be an integer in [0, 2**63), got {2**63}"),
    ({"seed": None}, "seed must be an integer in [0, 2**63), got None"),
    *(
        (
            {"gpu_memory_utilization": share},
            f"gpu_memory_utilization must be a number in (0, 1], got {share!r}",
        )
        for share in (0, 1.01, -0.5, float("nan"), "0.9", None)
    ),
    (
        {"kv_cache_memory_bytes": "lots"},
        "not an amount of memory: 'lots'; write 1073741824, '1GiB' or '512M'",
    ),
    *(
        ({name: "no"}, f"{name} must be True or False, got 'no'")
        for name in ("enforce_eager", "enable_lora", "enable_prefix_caching", "async_scheduling")
    ),
    *(
        ({name: most + 1}, f"{name} must be at most {most:,}, got {most + 1}; lower it")
        for name, most in LARGEST.items()
    ),
    ({"max_num_seqs": 2**70}, f"max_num_seqs must be at most 65,536, got {2**70}; lower it"),
    ({"device": 1}, "unknown device 1; choose auto, cpu or cuda"),
    ({"task": []}, "task must be one of auto, generate, embed, classify, got []"),
    ({"model": ""}, "model is empty; give a directory, a hub model, a shape or None"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ENGINES, ids=str)
def test_bad_engine_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["mode", "capture_sizes", "compile", "num_warmups"])
def test_what_is_quoted_is_short(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        GraphConfig(**{name: "x" * 10_000})  # type: ignore[arg-type]
    assert len(str(error.value)) < 300


def test_a_torch_device_is_a_device() -> None:
    config = EngineConfig(device=torch.device("cpu"), tensor_parallel_size=2)  # type: ignore[arg-type]
    assert config.device == "cpu"


def test_misspelt_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        EngineConfig(max_seqs=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="sizes"):
        GraphConfig(sizes=[1])  # type: ignore[call-arg]


# --- memory ---------------------------------------------------------------------------------------

AMOUNTS: list[tuple[int | str, int]] = [
    (1, 1),
    (1073741824, 2**30),
    ("1073741824", 2**30),
    ("1GiB", 2**30),
    ("1 gib", 2**30),
    ("1G", 2**30),
    ("1GB", 2**30),
    (" 512M ", 512 * 2**20),
    ("1.5k", 1536),
    ("2T", 2**41),
    ("7b", 7),
]


@pytest.mark.parametrize(("text", "count"), AMOUNTS, ids=str)
def test_amounts_of_memory(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count
    assert EngineConfig(kv_cache_memory_bytes=text).kv_cache_memory_bytes == count


NOT_AMOUNTS = [0, -1, "0", "-1G", "", "G", ".", "1.2.3G", "1e9", "12 apples", "1Gi", "1XB", True]


@pytest.mark.parametrize("text", [*NOT_AMOUNTS, None, "0.1", "9" * 400 + "T"], ids=repr)
def test_what_is_no_amount(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"not an amount of memory: .*; write 1073741824, '1GiB'"):
        parse_bytes(text)


@given(text=st.text(st.sampled_from("0123456789.kmgtibGM -+e"), max_size=12) | st.text(max_size=8))
def test_any_text_is_an_amount_or_an_error(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except ConfigError as error:
        assert repr(text) in str(error)  # noqa: PT017


# --- device and dtype -----------------------------------------------------------------------------


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert EngineConfig().torch_device() == CPU
    assert EngineConfig(device="cpu").torch_device() == CPU
    with pytest.raises(ConfigError, match="'cuda' was requested, but torch finds no CUDA GPU"):
        EngineConfig(device="cuda").torch_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert EngineConfig().torch_device() == CUDA
    assert EngineConfig(device="cuda:1").torch_device() == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:2' was requested, but torch finds 2 CUDA GPUs"):
        EngineConfig(device="cuda:2").torch_device()


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", None, 3.5])
def test_unknown_devices(device: Any) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(device=device).torch_device()
    assert str(error.value) == f"unknown device {device!r}; choose auto, cpu or cuda"


def test_devices_that_torch_knows_and_we_do_not() -> None:
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'mps'"):
        EngineConfig(device="mps").torch_device()


def test_dtypes() -> None:
    assert EngineConfig().torch_dtype(CPU) is torch.float32
    assert EngineConfig().torch_dtype(CUDA) is torch.bfloat16
    for device in (CPU, CUDA):
        assert EngineConfig(dtype="float16").torch_dtype(device) is torch.float16
        assert EngineConfig(dtype=torch.bfloat16).torch_dtype(device) is torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int8, None, 16])
def test_unknown_dtypes(dtype: Any) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(dtype=dtype).torch_dtype(CPU)
    choices = "auto, float32, bfloat16, float16"
    assert str(error.value) == f"unknown dtype {dtype!r}; choose {choices}"


# --- limits and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "seqs", "tokens", "limits"),
    [
        (CPU, None, None, (16, 512)),
        (CUDA, None, None, (256, 8192)),
        (CPU, 700, None, (700, 700)),
        (CPU, 4, None, (4, 512)),
        (CPU, None, 8, (8, 8)),
        (CUDA, None, 100, (100, 100)),
        (CPU, None, 100, (16, 100)),
        (CPU, 3, 3, (3, 3)),
    ],
)
def test_limits(
    device: torch.device, seqs: int | None, tokens: int | None, limits: tuple[int, int]
) -> None:
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert config.batch_limits(device) == limits


def test_limits_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(max_num_seqs=5, max_num_batched_tokens=4).batch_limits(CPU)
    assert str(error.value) == (
        "max_num_batched_tokens 4 is below max_num_seqs 5, so a step could not take one token of "
        "every request; raise max_num_batched_tokens or lower max_num_seqs"
    )


def test_capture_sizes() -> None:
    assert EngineConfig().capture_sizes(CPU) == (1, 2, 4, 8, 16)
    on_gpu = EngineConfig().capture_sizes(CUDA)
    assert (on_gpu[:4], on_gpu[-1], len(on_gpu)) == ((1, 2, 4, 8), 512, 51)
    assert EngineConfig(max_num_seqs=3).capture_sizes(CUDA) == (1, 2, 4)
    graphs = GraphConfig(capture_sizes=[12, 3])
    assert EngineConfig(graphs=graphs).capture_sizes(CPU) == (3, 12)


def test_capture_sizes_above_the_limit() -> None:
    graphs = GraphConfig(capture_sizes=[8, 64])
    with pytest.raises(ConfigError) as error:
        EngineConfig(graphs=graphs, max_num_batched_tokens=32).capture_sizes(CPU)
    assert str(error.value) == (
        "capture size 64 is above max_num_batched_tokens=32, so no batch could ever use it; drop "
        "it or raise the limit"
    )
