"""Which task a checkpoint is for, what it says about pooling, and which weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_encoders import save_encoder, save_modules

from ostinato import LLM, ConfigError, GraphConfig, ModelLoadError
from ostinato.loading.encoders.sentence import SentenceSettings, read_settings
from ostinato.loading.encoders.task import task_of


def open_eagerly(path: Path) -> LLM:
    return LLM(path, device="cpu", graphs=GraphConfig(mode="NONE"), show_progress=False)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", "generate"),
        ("GPT2LMHeadModel", "generate"),
        ("BertModel", "embed"),
        ("Qwen3Model", "embed"),
        ("ModernBertForMaskedLM", "embed"),
        ("BertForPreTraining", "embed"),
        ("XLMRobertaForSequenceClassification", "classify"),
        (None, "generate"),
        (7, "generate"),
    ],
)
def test_the_task_follows_the_architecture(architecture: Any, task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert task_of(tmp_path) == task
    save_modules(tmp_path, {"pooling_mode_cls_token": True})
    assert task_of(tmp_path) == ("embed" if task == "generate" else task)


def test_settings_of_sentence_transformers(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == SentenceSettings()
    save_modules(tmp_path, {"pooling_mode_lasttoken": True}, "Normalize", max_seq_length=7)
    assert read_settings(tmp_path) == SentenceSettings(pooling="last", max_seq_length=7)


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        {"pooling_mode": "max"},
        {"pooling_mode": ["cls"]},
        {},
    ],
)
def test_other_poolings_are_refused(pooling: Any, tmp_path: Path) -> None:
    save_modules(tmp_path, pooling)
    with pytest.raises(ModelLoadError, match=r"a pooling that is not supported; .* cls, last"):
        read_settings(tmp_path)


def test_other_steps_are_refused(tmp_path: Path) -> None:
    save_modules(tmp_path, {"pooling_mode_cls_token": True}, "Dense")
    with pytest.raises(ModelLoadError, match=r"a step 'sentence_transformers.models.Dense'"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", "[" * 100_000])
def test_damaged_lists_of_modules_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"modules.json cannot be read"):
        read_settings(tmp_path)


def test_a_pooling_elsewhere_is_not_read(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "../other"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="outside its directory"):
        read_settings(tmp_path)


@pytest.mark.parametrize("length", [0, "512", 1.5, True])
def test_bad_limits_are_named(length: Any, tmp_path: Path) -> None:
    save_modules(tmp_path, {"pooling_mode_cls_token": True}, max_seq_length=length)
    with pytest.raises(ModelLoadError, match=r"max_seq_length in .* must be a positive integer"):
        read_settings(tmp_path)


# --- weights -----------------------------------------------------------------------------------


def change_weights(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_lists_of_positions_of_old_versions_are_ignored(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    positions = torch.arange(64)[None]
    change_weights(tmp_path, lambda tensors: tensors.update({"embeddings.position_ids": positions}))
    with open_eagerly(tmp_path) as llm:
        assert len(llm.embed([4, 5])) == 1


def test_names_of_old_versions_are_understood(tmp_path: Path) -> None:
    """As in bert-base-uncased."""
    save_encoder(tmp_path, "bert", transformers.AutoModelForPreTraining)
    with open_eagerly(tmp_path) as llm:
        (expected,) = llm.embed([4, 5])

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    change_weights(tmp_path, rename)
    with open_eagerly(tmp_path) as llm:
        assert torch.equal(llm.embed([4, 5])[0].embedding, expected.embedding)


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.AutoModelForMaskedLM])
def test_missing_weights_are_named(auto: Any, tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", auto)
    lost = "encoder.layer.1.output.dense.weight"
    prefix = "" if auto is transformers.AutoModel else "bert."
    change_weights(tmp_path, lambda tensors: tensors.pop(prefix + lost))
    with pytest.raises(ModelLoadError, match=f"lacks {lost}"):
        open_eagerly(tmp_path)


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.AutoModelForMaskedLM])
def test_unknown_weights_are_named(auto: Any, tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", auto)
    prefix = "" if auto is transformers.AutoModel else "bert."
    extra = {f"{prefix}encoder.gate.weight": torch.zeros(3)}
    change_weights(tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(ModelLoadError, match=r"encoder.gate.weight, which this architecture does"):
        open_eagerly(tmp_path)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    name = "embeddings.word_embeddings.weight"
    change_weights(tmp_path, lambda tensors: tensors[name][5].fill_(float("nan")))
    with pytest.raises(ModelLoadError, match=f"{name} in .* contain NaN"):
        open_eagerly(tmp_path)


def test_encoders_with_their_own_attention_are_refused(tmp_path: Path) -> None:
    config = transformers.MPNetConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"MPNetModel does not use .* AttentionInterface"):
        open_eagerly(tmp_path)


def test_a_type_of_several_encoders_is_refused(tmp_path: Path) -> None:
    transformers.FunnelConfig(vocab_size=64, d_model=16, n_head=2, d_head=8).save_pretrained(
        tmp_path
    )
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"several encoders of type 'funnel' \(FunnelModel, "):
        LLM(tmp_path, device="cpu", task="embed", show_progress=False)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1)
    transformers.T5Model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="t5 is an encoder-decoder model"):
        open_eagerly(tmp_path)
