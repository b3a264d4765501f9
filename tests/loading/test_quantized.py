"""Quantized checkpoints: run where transformers can undo it, otherwise refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import save_talking, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ModelLoadError

PROMPT = [3, 5, 7, 11, 13]
EXPERTS, HIDDEN, INNER = 4, 64, 32
Tensors = dict[str, torch.Tensor]


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", show_progress=False, graphs=GraphConfig(mode="NONE"))


def set_quantization(path: Path, fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = fields
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    """A small GPT-OSS with experts in blocks of 32 four-bit numbers and a scale each."""
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
    )
    save_tiny(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            rows, columns = (2 * INNER, HIDDEN) if "gate" in name else (HIDDEN, INNER)
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.full(blocks.shape[:3], 122, dtype=torch.uint8)
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    set_quantization(tmp_path, {"quant_method": "mxfp4", "dequantize": True})
    return tmp_path


def test_weights_are_those_of_transformers(mxfp4: Path) -> None:
    with opened(mxfp4) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=64)
        (output,) = llm.generate([PROMPT], params)
    model = transformers.AutoModelForCausalLM.from_pretrained(mxfp4, dtype=torch.float32)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert output.outputs[0].logprobs is not None
    (top,) = output.outputs[0].logprobs
    found = torch.tensor([top[token].logprob for token in range(64)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def cut(*ends: str) -> Callable[[Tensors, Tensors], object]:
    """Leave out the last row, of blocks and of scales alike, or of a tensor of its own."""
    return lambda tensors, made: made.update(
        {
            name: t[:, :-1].contiguous() if t.dim() > 1 else t[:-1].contiguous()
            for name, t in tensors.items()
            if ".0." in name and name.endswith(ends)
        }
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            cut("gate_up_proj_blocks", "gate_up_proj_scales"),
            r"experts\.gate_up_proj in .* \[4, 64, 63\] .*for \[4, 64, 64\]",
        ),
        (cut("down_proj_blocks", "down_proj_scales"), r"experts\.down_proj in .* \[4, 32, 63\]"),
        (cut("q_proj.weight"), r"layers\.0\.self_attn\.q_proj\.weight in .* \[64, 63\]"),
        (cut("input_layernorm.weight"), r"input_layernorm\.weight in .* \[63\]"),
        (cut("down_proj_scales"), "quantized by mxfp4"),
    ],
    ids=["gate", "down", "attention", "norm", "scales"],
)
def test_shapes_are_those_of_the_config(
    mxfp4: Path, change: Callable[[Tensors, Tensors], object], message: str
) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    made: Tensors = {}
    change(tensors, made)
    assert made
    save_file(tensors | made, mxfp4 / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        opened(mxfp4)


PACKAGES = {
    "gptq": ({"bits": 4}, "optimum"),
    "awq": ({"bits": 4}, "gptqmodel"),
    "bitsandbytes": ({"load_in_4bit": True}, "accelerate"),
    "hqq": ({}, "HQQ"),
    "compressed-tensors": ({}, "compressed-tensors"),
    "fp8": ({}, "accelerate"),
}


@pytest.mark.parametrize("method", PACKAGES)
def test_a_missing_package_is_named(tmp_path: Path, method: str) -> None:
    fields, package = PACKAGES[method]
    if find_spec(package.lower().replace("-", "_")) is not None:
        pytest.skip(f"{package} is there")
    save_talking(tmp_path, None)
    set_quantization(tmp_path, {"quant_method": method, **fields})
    with pytest.raises(ModelLoadError, match=f"{package}.* quantized by {method}: ") as caught:
        opened(tmp_path)
    assert "install what that needs, or use an unquantized checkpoint" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_a_config_without_a_method(tmp_path: Path) -> None:
    save_talking(tmp_path, None)
    for odd in ({}, {"quant_method": None}, {"quant_method": 3}, {"quant_method": ["fp8"]}):
        set_quantization(tmp_path, odd)
        with pytest.raises(ModelLoadError, match=r"quant_method .*; it must be a name"):
            opened(tmp_path)


def test_a_method_that_is_not_known_allows_no_other_types(tmp_path: Path) -> None:
    """transformers ignores such a method, and would take integers for weights as they are."""
    save_talking(tmp_path, None)
    set_quantization(tmp_path, {"quant_method": "unknown"})
    with opened(tmp_path) as llm:
        assert llm.generate([PROMPT])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (100 * tensors[name]).to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight .*I8"):
        opened(tmp_path)
