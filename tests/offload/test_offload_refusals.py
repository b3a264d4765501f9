"""Offload options that are refused: a clear error each, before anything is loaded or captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deep_models import deep_model
from tiny_encoders import save_encoder
from tiny_models import TINY_GENERIC, save_tiny

from ostinato import LLM, ConfigError, GraphConfig, OffloadConfig

HALF = OffloadConfig(group=2, offloaded=1, prefetch=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 0}, "group must be a positive integer, got 0"),
        ({"group": True}, "group must be a positive integer, got True"),
        ({"group": "4"}, "group must be a positive integer, got '4'"),
        ({"offloaded": -1}, "offloaded must be a positive integer, got -1"),
        ({"prefetch": 1.5}, r"prefetch must be a positive integer, got 1\.5"),
        ({"prefetch": None}, "prefetch must be a positive integer, got None"),
        ({"group": 2, "offloaded": 3}, "offloaded is 3, but a group has only 2 layers"),
        ({"groups": 2}, "OffloadConfig has no option 'groups'; did you mean group"),
        ({"offload_num_in_group": 1}, "has no option offload_num_in_group.*write offloaded"),
    ],
)
def test_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**options)


@pytest.mark.parametrize("text", ["", "2,", "a", "1,2,3,4", "-2", "2;1", "²"])
def test_text(text: str) -> None:
    with pytest.raises(ConfigError, match="offload takes group,offloaded,prefetch"):
        OffloadConfig.parse(text)


def test_text_that_is_right() -> None:
    assert OffloadConfig.parse("6") == OffloadConfig(group=6)
    assert OffloadConfig.parse("6, 2,3") == OffloadConfig(group=6, offloaded=2, prefetch=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": {"group": 2}}, r"must be an OffloadConfig, got \{'group': 2\}; write offload"),
        ({"offload": True}, "must be an OffloadConfig, got True"),
        ({"offload": HALF, "tensor_parallel_size": 2}, "offload supports one device, not 2 ranks"),
        ({"offload": HALF, "graphs": GraphConfig(compile=True)}, "compile=True does not support"),
        ({"offload": HALF, "swiftkv_layers": 1}, "offload does not support SwiftKV"),
        ({"cpu_offload_gb": 4}, r"cpu_offload_gb \(got 4\): write offload=OffloadConfig"),
        ({"offload_group_size": 4}, r"write offload=OffloadConfig\(group=\.\.\.\)"),
    ],
)
def test_with_other_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", random_weights=True, device="cpu", **options)


@pytest.mark.parametrize(
    ("group", "offloaded", "prefetch", "message"),
    [
        (
            7,
            1,
            1,
            "the last 1 of every 7 layers in host memory, but this model has 6 layers, so it",
        ),
        (2, 1, 3, "keeps 3 of this model's 6 layers in host memory, but prefetch 3 needs room"),
        (6, 1, 1, "which saves nothing; lower prefetch or group, or raise offloaded"),
    ],
)
def test_layers_that_the_model_has_not(
    group: int, offloaded: int, prefetch: int, message: str
) -> None:
    offload = OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch)
    with pytest.raises(ConfigError, match=message):
        LLM(deep_model(), device="cpu", max_model_len=64, show_progress=False, offload=offload)


def test_models_on_transformers_modules(tmp_path: Path) -> None:
    model = save_tiny(TINY_GENERIC["gpt2"](), tmp_path)
    with pytest.raises(ConfigError, match=r"offload needs a model of the native decoder; "):
        LLM(model, device="cpu", max_model_len=64, show_progress=False, offload=HALF)


def test_models_that_embed(tmp_path: Path) -> None:
    save_encoder(tmp_path, tokenizer=True)
    with pytest.raises(ConfigError, match="offload is for models that generate; leave it out"):
        LLM(tmp_path, device="cpu", show_progress=False, offload=HALF)
