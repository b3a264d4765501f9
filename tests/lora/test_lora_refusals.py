"""Adapters and options that are refused: a clear error each, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import edit_config, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import TINY_GENERIC, TINY_NATIVE, save_tiny

from ostinato import (
    LLM,
    ClosedError,
    ConfigError,
    GraphConfig,
    ModelLoadError,
    OstinatoError,
    RequestError,
    SamplingParams,
)

PROMPT = [5, 9, 33, 7, 21]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    good = save_adapter(tmp_path_factory.mktemp("good"), model)
    with open_llm(model) as llm:
        llm.load_adapter("good", good)
        yield llm


def open_llm(model: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 64,
        "kv_cache_memory_bytes": "1M",
        "enable_lora": True,
        "show_progress": False,
        "graphs": GraphConfig(mode="NONE"),
    }
    return LLM(str(model), **{**defaults, **options})


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def config_of(**fields: Any) -> Callable[[Path], object]:
    return lambda path: edit_config(path, **fields)


def tensors_of(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda path: change_tensors(path, change)


def rename(old: str, new: str) -> Callable[[Path], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return tensors_of(change)


def without_weights(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def cut_short(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "targets that lack one": (
        lambda path: edit_config(path, target_modules=["v_proj", "k_proj"]),
        r"changes model.layers.0.mlp.down_proj, which target_modules in .* leaves out .*'v_proj'",
    ),
    "layers that lack one": (
        lambda path: edit_config(path, layers_to_transform=[0]),
        r"changes model.layers.1.mlp.down_proj, which layers_to_transform in .* leaves out \(\[0\]",
    ),
    "a layer that is not the only one": (
        lambda path: edit_config(path, layers_to_transform=1),
        r"changes model.layers.0.mlp.down_proj, which layers_to_transform in .* leaves out \(1\)",
    ),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), r"has no adapter_config"),
    "no weights": (without_weights, r"has no adapter_model\.safetensors.*\.bin is a pickle file"),
    "damaged": (cut_short, r"adapter_model\.safetensors .* cannot be read as safetensors"),
    "not JSON": (
        lambda path: (path / "adapter_config.json").write_text("{"),
        r"adapter_config\.json cannot be read as JSON",
    ),
    "peft_type": (config_of(peft_type="IA3"), r"has peft_type 'IA3'; only LORA is supported"),
    "DoRA": (config_of(use_dora=True), r"use_dora=True, which is not supported.*merge_and_unload"),
    "bias": (config_of(bias="all"), r"bias='all', which is not supported"),
    "lora_bias": (config_of(lora_bias=True), r"lora_bias=True, which is not supported"),
    "modules_to_save": (config_of(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\]"),
    "fan_in_fan_out": (config_of(fan_in_fan_out=True), r"fan_in_fan_out=True, which is not"),
    "PiSSA": (config_of(init_lora_weights="pissa_niter_4"), r"changes the model's own weights"),
    "r": (config_of(r="8"), r"r in .* must be a positive number, got '8'"),
    "alpha": (config_of(lora_alpha=None), r"lora_alpha in .* must be a positive number, got None"),
    "another rank": (config_of(r=4), r"_proj the rank 4, but its tensors .* have rank 8"),
    "rank pattern": (config_of(rank_pattern={"q_proj": 2}), r"the rank 2.*, but its tensors"),
    "bad pattern": (config_of(alpha_pattern={"(": 2}), r"alpha_pattern in .* invalid pattern '\('"),
    "no pattern": (config_of(alpha_pattern=[1]), r"alpha_pattern in .* must map names to numbers"),
    "head": (rename("layers.0.self_attn.q_proj", "lm_head"), r"can change down_proj, gate_proj, k"),
    "too many layers": (
        rename("layers.1.", "layers.7."),
        r"7\..*numbered 0 to 1, and adapters can",
    ),
    "another family's names": (
        rename("model.layers", "model.language_model.layers"),
        r"model\.language_model\.layers\..* is not LoRA of a linear",
    ),
    "embeddings": (rename("lora_A.weight", "lora_embedding_A"), r"is not LoRA of a linear"),
    "half": (
        tensors_of(lambda tensors: tensors.pop(Q0)),
        r"lacks lora_A of model\.layers\.0\.self",
    ),
    "empty": (tensors_of(lambda tensors: tensors.clear()), r"has no tensors"),
    "inputs": (
        tensors_of(lambda tensors: tensors.update({Q0: torch.zeros(8, 60)})),
        r"\[8, 60\] and \[64, 8\], but the model's linear takes \[r, 64\] and \[64, r\]",
    ),
    "rank of B": (
        tensors_of(lambda tensors: tensors.update({Q0: torch.zeros(4, 64)})),
        r"\[4, 64\] and \[64, 8\].*belongs to another model",
    ),
    "vector": (
        tensors_of(lambda tensors: tensors.update({Q0: torch.zeros(64)})),
        r"has the shapes \[64\] and",
    ),
    "integers": (
        tensors_of(lambda tensors: tensors.update({Q0: torch.zeros(8, 64, dtype=torch.int8)})),
        r"has dtype I8; weights must be one of",
    ),
    "not finite": (
        tensors_of(lambda tensors: tensors[Q0].fill_(torch.nan)),
        r"q_proj\.lora_A\.weight.* in .* contain NaN",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_adapters_change_nothing(llm: LLM, model: Path, tmp_path: Path, name: str) -> None:
    tokens = llm.generate([PROMPT], GREEDY, adapter="good")[0].outputs[0].token_ids
    spoil, message = BROKEN[name]
    path = save_adapter(tmp_path / "bad", model, seed=1)
    spoil(path)
    with pytest.raises(ModelLoadError, match=message):
        llm.load_adapter("good", path)  # would replace it
    assert llm.adapters == ["good"]
    assert llm.generate([PROMPT], GREEDY, adapter="good")[0].outputs[0].token_ids == tokens


def test_rank_above_the_limit(llm: LLM, model: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path, model, rank=8, ranks={"down_proj": 17})
    with pytest.raises(
        ModelLoadError, match=r"rank 17 \(of .*down_proj\), but max_lora_rank is 16; .*rank=17"
    ):
        llm.load_adapter("good", path)


def test_another_models_adapter(llm: LLM, tmp_path: Path) -> None:
    other = save_tiny(TINY_NATIVE["qwen3"](), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    assert config["head_dim"] * config["num_attention_heads"] != 64, "its queries differ"
    path = save_adapter(tmp_path / "adapter", other, targets=("q_proj",))
    with pytest.raises(ModelLoadError, match="it belongs to another model"):
        llm.load_adapter("good", path)


def test_missing_directory(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no directory .*nowhere; an adapter is a"):
        llm.load_adapter("good", tmp_path / "nowhere")


def test_too_many_adapters(llm: LLM, model: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path, model)
    with pytest.raises(
        ConfigError, match="'x' cannot be loaded: all 1 slots are taken, by good; unload one"
    ):
        llm.load_adapter("x", path)
    assert llm.adapters == ["good"]


@pytest.mark.parametrize("name", ["", 3])
def test_names_of_adapters(llm: LLM, tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="the name of an adapter is a non-empty string"):
        llm.load_adapter(name, tmp_path)


def test_requests(llm: LLM) -> None:
    for adapter, message in (
        ("other", r"no adapter 'other' \(loaded are good\); load it with load_adapter"),
        (["good"], "1 adapters for 2 prompts; give one for each, or one for all"),
        (["good", 3], "a name or None per prompt, got"),
        (3, "adapter is the name of a loaded adapter"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([PROMPT, PROMPT], GREEDY, adapter=adapter)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no adapter 'other'"):
        llm.unload_adapter("other")
    with pytest.raises(RequestError, match="no adapter 'other'"):
        llm.stream(PROMPT, GREEDY, adapter="other")


def test_without_enable_lora(model: Path, tmp_path: Path) -> None:
    with open_llm(model, enable_lora=False) as llm:
        assert llm.adapters == []
        for call in (
            lambda: llm.load_adapter("x", tmp_path),
            lambda: llm.unload_adapter("x"),
            lambda: llm.generate([PROMPT], GREEDY, adapter="x"),
        ):
            with pytest.raises(ConfigError, match="adapters are off; build the LLM with enable_l"):
                call()


def test_after_close(model: Path, tmp_path: Path) -> None:
    llm = open_llm(model)
    llm.close()
    with pytest.raises(ClosedError):
        llm.load_adapter("x", tmp_path)
    with pytest.raises(ClosedError):
        llm.unload_adapter("x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 0}, "max_loras must be"),
        ({"max_lora_rank": -1}, "max_lora_rank must be"),
        ({"max_lora_rank": 257}, "max_lora_rank is 257, above the limit of 256"),
        ({"enable_lora": False, "max_loras": 4}, "max_loras is 4, but enable_lora is off"),
        ({"enable_lora": False, "max_lora_rank": 4}, "max_lora_rank is 4, but enable_lora is off"),
        ({"graphs": GraphConfig(compile=True)}, "compile=True does not support adapters"),
        ({"tensor_parallel_size": 2}, "enable_lora supports one rank per replica, not 2; leave"),
        ({"task": "embed"}, "enable_lora is for models that generate; merge the adapter"),
        ({"task": "classify"}, "enable_lora is for models that generate; merge the adapter"),
        ({"swiftkv_layers": 1}, "enable_lora needs a dense model .*: it is a SwiftKV model"),
        ({"max_cpu_loras": 4}, "max_loras"),
    ],
)
def test_options(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(model, **options)


def test_models_outside_the_native_decoder(tmp_path: Path) -> None:
    model = save_tiny(TINY_GENERIC["gpt2"](), tmp_path)
    with pytest.raises(OstinatoError, match="enable_lora needs a dense model of the native decod"):
        open_llm(model)
