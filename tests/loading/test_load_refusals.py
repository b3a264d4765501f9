"""Checkpoints that must not run: weights that are missing, left over, misplaced or no numbers."""

from __future__ import annotations

import json
import logging
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, save_tiny
from transformers import AutoModelForCausalLM

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.load import LoadedModel, load_model
from ostinato.models.hf.model import HFCausalLM

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
C_ATTN = "transformer.h.0.attn.c_attn.weight"


def load(path: Path, **options: Any) -> LoadedModel:
    options = {"device": CPU, "dtype": torch.float32, "show_progress": False} | options
    return load_model(str(path), **options)


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return save_tiny(TINY_GENERIC["gpt2"](), tmp_path / "gpt2")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny(TINY_NATIVE["llama"](), tmp_path / "llama")


def weights(loaded: LoadedModel) -> Tensors:
    assert isinstance(loaded.model, HFCausalLM)
    tensors: Tensors = loaded.model.model.state_dict()
    return tensors


def assert_as_transformers(path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    found = weights(load(path))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# The generic path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(C_ATTN), f"lacks {re.escape(C_ATTN)}, which its config.json asks for"),
        (lambda t: t.clear(), r"lacks .* and \d+ more|has 0 tensors"),
        (lambda t: t.update(more=torch.ones(2)), "has more, which this architecture"),
        (
            lambda t: t.update({C_ATTN: t[C_ATTN].to(torch.int8)}),
            f"{C_ATTN} in .* dtype I8; .* F32",
        ),
        (lambda t: t.update({C_ATTN: t[C_ATTN].bool()}), f"{C_ATTN} in .* has dtype BOOL"),
        (lambda t: t.update({C_ATTN: t[C_ATTN].T.contiguous()}), r"\[192, 64\]; .* \[64, 192\]"),
        (
            lambda t: t.update({C_ATTN.removeprefix("transformer."): t[C_ATTN].clone()}),
            "h.0.attn.c_attn.weight with and without 'transformer.' before it",
        ),
    ],
)
def test_generic_weights_must_be_complete(
    gpt2: Path, change: Callable[[Tensors], object], message: str
) -> None:
    edit(gpt2, change)
    with pytest.raises(ModelLoadError, match=message):
        load(gpt2)


def test_weights_of_another_model(
    gpt2: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (llama / "model.safetensors").replace(gpt2 / "model.safetensors")
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ModelLoadError, match=r"lacks transformer.* and \d+ more"):
            load(gpt2)
    finally:
        logger.removeHandler(caplog.handler)
    assert "REPORT" not in caplog.text  # a table of all names


def test_what_old_versions_saved_is_no_fault(gpt2: Path) -> None:
    before = weights(load(gpt2))

    def as_saved_long_ago(tensors: Tensors) -> None:
        mask = torch.ones(256, 256, dtype=torch.uint8).tril()[None, None]
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = mask.clone()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    edit(gpt2, as_saved_long_ago)
    for name, tensor in weights(load(gpt2)).items():
        assert torch.equal(tensor, before[name])
    assert_as_transformers(gpt2)


def test_experts_of_the_generic_path(tmp_path: Path) -> None:
    config: Any = TINY_MIXTURES["deepseek_v3"]()
    config.rope_interleave = False  # the native decoder leaves it to transformers
    assert_as_transformers(save_tiny(config, tmp_path))


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_experts(tmp_path: Path, name: str) -> None:
    path = save_tiny((TINY_MIXTURES.get(name) or TINY_GENERIC[name])(), tmp_path)
    names = load_file(path / "model.safetensors")
    first = next(name for name in names if ".experts.0." in name)
    kind = first.replace(".experts.0.", ".experts.{}.")
    count = sum(kind.format(number) in names for number in range(len(names)))
    last = kind.format(count)  # the rest, in order, would make a stack of the right size
    edit(path, lambda tensors: tensors.update({last: tensors.pop(first)}))
    with pytest.raises(ModelLoadError, match=f"lacks {re.escape(first)}, .* is incomplete"):
        load(path)
    edit(path, lambda tensors: tensors.pop(last))
    with pytest.raises(ModelLoadError, match=f"lacks {re.escape(first)}, .* is incomplete"):
        load(path)


def test_loading_leaves_the_global_generator_alone(gpt2: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(gpt2)
    assert torch.equal(torch.rand(3), expected)


# Index files


def shard(path: Path, *, of_another: bool = False) -> dict[str, Any]:
    """Split the weights over two files that both have all of them; the index says which counts.

    ``of_another``: where the index does not send for a tensor, the file has zeros.
    """
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    index: dict[str, Any] = {"weight_map": {}}
    for number, name in enumerate(sorted(tensors)):
        index["weight_map"][name] = "ab"[number % 2] + ".safetensors"
    for file in ("a.safetensors", "b.safetensors"):
        save_file(
            {
                name: torch.zeros_like(tensor) if of_another and placed != file else tensor
                for (name, placed), tensor in (
                    (item, tensors[item[0]]) for item in index["weight_map"].items()
                )
            },
            path / file,
        )
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_of_a_tensor_in_several_files_the_index_says_which(
    family: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(family)

    def numbers() -> Tensors:
        model: Any = load(path).model
        return {name: p.clone() for name, p in getattr(model, "model", model).named_parameters()}

    before = numbers()
    shard(path, of_another=True)
    for name, tensor in numbers().items():
        assert torch.equal(tensor, before[name]), name


def test_a_tensor_in_several_files_that_the_index_leaves_out(llama: Path) -> None:
    index = shard(llama)
    del index["weight_map"][Q]
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"both .*a.safetensors and .*b.* have the tensor {Q}"):
        load(llama)


@pytest.mark.parametrize("outside", ["/etc/passwd", "../b.safetensors", "sub/../../b.safetensors"])
def test_an_index_that_names_files_elsewhere(llama: Path, outside: str) -> None:
    index = shard(llama)
    index["weight_map"][Q] = outside
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"outside its directory: {outside}"):
        load(llama)


def test_links_are_followed_as_the_hub_lays_them(llama: Path, tmp_path: Path) -> None:
    blob = (llama / "model.safetensors").rename(tmp_path / "blob")
    (llama / "model.safetensors").symlink_to(blob)
    load(llama)
    shard_file = llama / "model-00001-of-00001.safetensors"
    (llama / "model.safetensors").rename(shard_file)
    names = load_file(shard_file)
    index = {"weight_map": dict.fromkeys(names, shard_file.name)}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    load(llama)


# Numbers that are none


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(
    family: str, value: float, request: pytest.FixtureRequest, device: torch.device
) -> None:
    path: Path = request.getfixturevalue(family)
    name = {"llama": Q, "gpt2": C_ATTN}[family]
    edit(path, lambda tensors: tensors[name][3].fill_(value))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} in .* contain NaN, infinite"):
        load(path, device=device)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_that_do_not_fit_the_dtype(
    family: str, request: pytest.FixtureRequest, device: torch.device
) -> None:
    path: Path = request.getfixturevalue(family)
    name = {"llama": Q, "gpt2": C_ATTN}[family]
    edit(path, lambda tensors: tensors[name][0].fill_(1e5))
    load(path, device=device)
    load(path, device=device, dtype=torch.bfloat16)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} .* too large for the dtype"):
        load(path, device=device, dtype=torch.float16)


def test_tiny_models_are_of_both_kinds(llama: Path, gpt2: Path) -> None:
    assert load(llama).generic_reason is None
    assert load(gpt2).generic_reason is not None
    assert transformers.AutoConfig.from_pretrained(gpt2).model_type == "gpt2"


@pytest.mark.parametrize("name", ["vocab_size", "n_embd", "n_inner"])
def test_random_weights_of_a_config_without_measure(gpt2: Path, name: str) -> None:
    config = json.loads((gpt2 / "config.json").read_text()) | {name: 2 * 10**9}
    (gpt2 / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"larger model than fits into the 8\.00 GiB"):
        load(gpt2, random_weights=True, free_memory=lambda device: 8 * 2**30)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 5000},
            r"asks for 5,000 layers, but the checkpoint has \d+",
        ),
        (
            "llama",
            {"num_hidden_layers": 10**5},
            r"'num_hidden_layers' in .* is 100,000; the limit is 10,000",
        ),
        ("llama", {"head_dim": 10**9}, r"head_dim must be an integer from 1 to .* not 1000000000"),
        ("llama", {"rms_norm_eps": float("nan")}, r"'rms_norm_eps' in .* is nan"),
        ("llama", {"rms_norm_eps": -1.0}, r"rms_norm_eps must be a number in \[0, 1\), got -1\.0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
            r"'rope_theta': -10000\.0.* do not give a finite frequency",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ("gpt2", {"n_layer": 10**9}, r"'n_layer' in .* is 1,000,000,000; the limit is 10,000"),
        ("gpt2", {"n_layer": 3}, r"lacks transformer\.h\.2.* and \d+ more"),
        ("gpt2", {"n_embd": 4096}, "a larger model than its checkpoint has weights for"),
        ("gpt2", {"n_positions": 10**12}, "longest sequence of gpt2, by its config, is 10000000"),
        ("gpt2", {"layer_norm_epsilon": -1.0}, "gives NaN or infinite logits"),
    ],
)
def test_numbers_of_a_config(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    path = save_tiny((TINY_NATIVE.get(family) or TINY_GENERIC[family])(), tmp_path)
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ModelLoadError, ConfigError), match=message):
        load(path)


@pytest.mark.parametrize("eos", ["2", 2.0, True, -1, [2, "3"], [[2]], {"id": 2}])
def test_end_tokens_of_another_kind(llama: Path, eos: Any) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelLoadError, match=r"eos_token_id in .*generation_config.json is .*null"):
        load(llama)


def test_end_tokens_that_the_model_does_not_have(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**6]}))
    assert load(llama).eos_token_ids == {2}


def test_a_config_of_long_texts(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["hybrid_override_pattern"] = "M" * 100_000
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"'hybrid_override_pattern' in .* 100,000 characters"):
        load(llama)


def test_a_config_of_long_names(llama: Path) -> None:
    content = {"k" * 20_000: [[0] * 20_000, -math.inf]}  # named one by one: 400 MB
    (llama / "config.json").write_text(json.dumps(content))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=r"kkk\[1\]' in .*config.json is -inf"):
            load(llama)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "types",
    [
        [[["global"], 2 * 10**9]],
        [[["global"] * 101, 100]],
        [[["global"], -(10**9)], [["global"], 9_000], [["local"], 9_000]],
    ],
)
def test_a_config_that_repeats_layers(tmp_path: Path, types: Any) -> None:
    fields = {"model_type": "gpt_neo", "attention_types": types}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        ModelLoadError, match=r"'attention_types' .* is [\d,]+; the limit is 10,000"
    ):
        load(tmp_path)


@pytest.mark.parametrize("character", ["\ud800", "\0", "\x1b"])
def test_messages_can_be_printed(tmp_path: Path, character: str) -> None:
    fields = {"model_type": f"gpt{character}2"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=r"gpt\\[ux]") as caught:
        load(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("method", ["mxfp4", "four_over_six"])
def test_a_quantized_model_without_measure(llama: Path, method: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    quantized = {"quant_method": method, "dequantize": True}
    config |= {"vocab_size": 20_000_000, "quantization_config": quantized}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="larger model than its checkpoint has weights for"):
        load(llama)


def test_a_base_model_without_its_head(llama: Path) -> None:
    transformers.AutoModel.from_pretrained(llama).save_pretrained(llama)
    with pytest.raises(ModelLoadError, match=r"no 'model.' before their names: .* a base model"):
        load(llama)


def test_an_adapter_is_no_model(llama: Path) -> None:
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"adapter \(LoRA\) for another model"):
        load(llama)
