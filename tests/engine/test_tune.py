"""Whose GEMMs are measured, and when; the measuring itself is tested in test_linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato import LLM, ConfigError, GraphConfig
from ostinato.config import EngineConfig
from ostinato.engine import tune as tune_module
from ostinato.engine.tune import tune, tune_at_start
from ostinato.models.base import CausalLM
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import shape_config
from ostinato.ops.gemm import measuring
from ostinato.ops.gemm.measuring import StepGemm
from ostinato.ops.gemm.tile_config import Gpu, LinearShape
from ostinato.ops.gemm.tuning import cache_file, tuning
from ostinato.runner import startup


class Generic(CausalLM):
    """A model that transformers' modules run, as far as tuning asks."""


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float32", "nothing to tune in float32; use bfloat16"),
        ("bfloat16", "need Triton and a GPU of compute capability 8.0"),
        (None, "transformers' modules"),
    ],
)
def test_models_without_kernels_to_tune_are_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: str | None, message: str
) -> None:
    """On a GPU, that is; on the CPU nothing is tuned at all (test_cli)."""
    config = EngineConfig(model="tiny", random_weights=True, device="cpu", dtype=dtype or "auto")
    loaded = startup.load(config) if dtype else SimpleNamespace(model=Generic())
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: torch.device("cuda"))
    monkeypatch.setattr(startup, "load", lambda config: loaded)
    with pytest.raises(ConfigError, match=message):
        tune(config)


def test_tensor_parallel_gemms_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: torch.device("cuda"))
    with pytest.raises(ConfigError, match="nothing to tune with tensor_parallel_size 2"):
        tune(EngineConfig(model="tiny", random_weights=True, tensor_parallel_size=2))


# --- at start-up ----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[LinearShape]]:
    """What is measured, on a CPU that passes for a GPU, with an empty cache of its own."""
    shapes: list[LinearShape] = []

    def measure(step: Sequence[StepGemm]) -> float:
        shapes.append(step[-1].shape)
        return 1.0

    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    monkeypatch.setattr(tune_module, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(tune_module, "is_interpreted", lambda: False)
    monkeypatch.setattr(tune_module, "gpu_of", lambda device: Gpu("GPU"))
    monkeypatch.setattr(measuring, "measure_step", measure)
    monkeypatch.setattr(measuring, "compile_all", lambda gemms: iter([None] * len(gemms)))
    tuning.cache_clear()
    yield shapes
    tuning.cache_clear()


OPTIONS: dict[str, Any] = {
    "model": "smollm2-135m",
    "random_weights": True,
    "device": "cpu",
    "dtype": "bfloat16",
    "max_model_len": 32,
    "max_num_seqs": 4,
    "graphs": GraphConfig(mode="NONE"),
    "show_progress": False,
}


def meta_model() -> Decoder:
    config = DecoderConfig.from_hf(shape_config(OPTIONS["model"]))
    return Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16, max_position=1)


@pytest.mark.slow
def test_the_first_start_measures_large_gemms_and_the_second_knows_them(
    measured: list[LinearShape],
) -> None:
    LLM(**OPTIONS).close()
    head = (49152, 576)  # the other weights have less than 4 MiB
    assert {(shape.num_rows, shape.n, shape.k) for shape in measured} == {(1, *head), (8, *head)}
    measured.clear()
    tuning.cache_clear()  # as in another process
    LLM(**OPTIONS).close()
    assert measured == []


def test_the_command_measures_again_what_a_start_has_measured(
    measured: list[LinearShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**OPTIONS)
    loaded = SimpleNamespace(model=meta_model())
    tune_at_start(config, loaded.model)
    quick, at_start = len(measured), set(measured)
    measured.clear()
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: torch.device("cuda"))
    monkeypatch.setattr(startup, "load", lambda config: loaded)
    tune(config)
    assert at_start < set(measured)
    assert sum(shape in at_start for shape in measured) > quick


def test_a_start_measures_nothing_if_told_so(measured: list[LinearShape]) -> None:
    model = meta_model()
    tune_at_start(EngineConfig(**OPTIONS, tune="off"), model)
    tune_at_start(EngineConfig(**OPTIONS, tensor_parallel_size=2), model)
    assert measured == []


def test_a_start_measures_nothing_where_kernels_are_interpreted(
    measured: list[LinearShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would always win, and be saved."""
    monkeypatch.setattr(tune_module, "is_interpreted", lambda: True)
    loaded = SimpleNamespace(model=meta_model())
    tune_at_start(EngineConfig(**OPTIONS), loaded.model)
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: torch.device("cuda"))
    monkeypatch.setattr(startup, "load", lambda config: loaded)
    with pytest.raises(ConfigError, match="kernels are interpreted; unset TRITON_INTERPRET"):
        tune(EngineConfig(**OPTIONS))
    assert measured == []


@pytest.mark.slow
def test_a_start_goes_on_if_measuring_fails(
    measured: list[LinearShape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_step: Sequence[StepGemm]) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measuring, "measure_step", fail)
    LLM(**OPTIONS).close()
    assert "measuring GEMMs failed (RuntimeError: out of memory)" in caplog.text
    assert not cache_file().exists()


def test_unknown_ways_to_tune_are_refused() -> None:
    with pytest.raises(ConfigError, match="tune must be 'auto' or 'off', got 'always'"):
        EngineConfig(tune="always")  # type: ignore[arg-type]
