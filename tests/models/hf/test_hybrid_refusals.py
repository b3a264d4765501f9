"""What models with recurrent layers do not support is refused, or off, with a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_hybrid import TINY_HYBRID
from tiny_models import TINY_NATIVE
from transformers import PretrainedConfig

from ostinato import LLM, ConfigError, GraphConfig, OffloadConfig, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.explain import explain_batch
from ostinato.graphs.policy.modes import AttentionCGSupport, CUDAGraphMode
from ostinato.models.hf.encoder import HFEncoder
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.replaced.mixers import ShortConv

CPU = torch.device("cpu")


def save(name: str, path: Path) -> Path:
    (TINY_HYBRID.get(name) or TINY_NATIVE[name])().save_pretrained(path)
    return path


def open_llm(path: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "random_weights": True,
        "device": "cpu",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "4M",
        "show_progress": False,
        "graphs": GraphConfig(mode="NONE"),
    }
    return LLM(path, **{**options, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"enable_prefix_caching": True},
            "enable_prefix_caching is on, but the model has recurrent layers.*leave it out",
        ),
        ({"speculative": "ngram"}, "speculative does not work with models with recurrent layers"),
        (
            {"graphs": GraphConfig(compile="eager")},
            "compile='eager' does not support models with recurrent layers",
        ),
        ({"enable_lora": True}, "enable_lora needs a dense model of the native decoder"),
        ({"swiftkv_layers": 2}, "swiftkv_layers=2 is for models of the native decoder"),
        (
            {"offload": OffloadConfig(group=2, offloaded=1, prefetch=1)},
            "offload needs a model of the native decoder",
        ),
        (
            {"kv_cache_memory_bytes": 1000},
            r"has 1,000 bytes, but the states of 2 requests in the model's recurrent layers take "
            r"[\d,]+; raise kv_cache_memory_bytes or lower max_num_seqs",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_with_recurrent_layers(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(save("lfm2", tmp_path), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [None, False])
def test_prefix_caching_is_off(
    setting: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ostinato")
    prompt = list(range(3, 40))
    params = SamplingParams(temperature=0, max_tokens=4)
    with open_llm(save("lfm2", tmp_path), enable_prefix_caching=setting) as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert llm.engine.replica_stats()[0].prefix_hit_tokens == 0
    is_said = "prefix caching is off: the model has recurrent layers" in caplog.text
    assert is_said == (setting is None)


def test_explain_says_so(tmp_path: Path) -> None:
    def explain(name: str, **options: Any) -> dict[str, Any]:
        path = save(name, tmp_path / name)
        config = EngineConfig(path, device="cpu", **options)
        return explain_batch(config, num_tokens=4, num_reqs=4)

    plain = explain("llama")
    assert (plain["prefix_caching"], "recurrent_layers" in plain) == ("on", False)
    off = explain("llama", enable_prefix_caching=False)
    assert off["prefix_caching"] == "off: enable_prefix_caching is False"
    full = GraphConfig(mode="FULL")
    lfm2 = explain("lfm2", graphs=full)
    assert lfm2["prefix_caching"].startswith("off: the model has recurrent layers")
    assert (lfm2["recurrent_layers"], lfm2["mode_in_force"]) == ("capturable: ALWAYS", "FULL")
    mamba = explain("mamba2", graphs=full)
    assert mamba["recurrent_layers"] == "capturable: UNIFORM_SINGLE_TOKEN_DECODE"
    assert mamba["mode_in_force"] == "FULL_AND_PIECEWISE"
    assert "a recurrent layer is capturable for uniform" in mamba["mode_changed_because"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_HYBRID)
def test_explain_agrees_with_the_model(name: str, tmp_path: Path) -> None:
    config = EngineConfig(save(name, tmp_path), device="cpu")
    answer = explain_batch(config, num_tokens=4, num_reqs=4)
    model = random_model(TINY_HYBRID[name]())
    support = AttentionCGSupport.weakest(spec.support for spec in model.recurrent_specs)
    assert answer["recurrent_layers"] == f"capturable: {support.name}"
    assert answer["mode_in_force"] == CUDAGraphMode.FULL_AND_PIECEWISE.name


def random_model(config: PretrainedConfig, max_model_len: int | None = 64) -> Any:
    return HFCausalLM.from_config(
        config, device=CPU, dtype=torch.float32, seed=0, max_model_len=max_model_len
    )


def test_a_model_without_a_limit_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"mamba2 have no limit.*set max_model_len"):
        random_model(TINY_HYBRID["mamba2"](), max_model_len=None)
    assert random_model(TINY_HYBRID["mamba2"](), max_model_len=100).max_position == 100


def test_a_limited_time_step_is_refused() -> None:
    config = TINY_HYBRID["mamba2"]()
    config.time_step_limit = (0.001, 0.1)
    with pytest.raises(ConfigError, match=r"time_step_limit \(0.001, 0.1\).*only \(0, inf\)"):
        random_model(config)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_another_activation_is_refused(name: str) -> None:
    config = TINY_HYBRID[name]()
    config.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="has the activation 'gelu' after its convolution"):
        random_model(config)


def test_a_mixer_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another version of transformers computed something else."""
    correct = ShortConv.mix
    monkeypatch.setattr(ShortConv, "mix", lambda self, hidden: 1.01 * correct(self, hidden))
    with pytest.raises(ConfigError, match="Lfm2ShortConv does not compute what this version"):
        random_model(TINY_HYBRID["lfm2"]())


@pytest.mark.parametrize("config", [TINY_HYBRID["lfm2"](), transformers.MambaConfig()])
def test_such_models_do_not_embed(config: PretrainedConfig) -> None:
    with pytest.raises(ConfigError, match=r"has state-space.* cannot embed or classify"):
        HFEncoder.from_config(
            config,
            task="embed",
            device=CPU,
            dtype=torch.float32,
            seed=0,
            max_model_len=None,
            most_bytes=None,
        )
