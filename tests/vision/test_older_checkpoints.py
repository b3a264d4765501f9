"""Checkpoints in the form of the hub: older names of tensors, and a config without text_config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_vision import open_vision, picture, prompt_of, reference, save_vision_model

from ostinato import SamplingParams

NUM_TOKENS = 4


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_older_checkpoints(name: str, tmp_path: Path) -> None:
    model = save_vision_model(tmp_path, name)
    prompt = prompt_of(6, picture(24, 16), 7)
    expected = reference(model, prompt, NUM_TOKENS)
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    renamed = {
        key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for key, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["eos_token_id"] = expected[-1]
    config_file.write_text(json.dumps({**text, **config}))
    (tmp_path / "generation_config.json").unlink()
    with open_vision(tmp_path, "NONE") as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2 * NUM_TOKENS))
        assert output.outputs[0].token_ids == expected[: expected.index(expected[-1]) + 1]
        assert output.outputs[0].finish_reason == "stop"
