"""SwiftKV in the engine: ``LLM`` against the plain statement of it, and against plain models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from swiftkv_statement import Statement, untrained
from test_workloads import poison_every_step
from tiny_models import TINY_GENERIC, TINY_NATIVE, save_tiny
from transformers import AutoConfig, LlamaConfig

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import ConfigError, ModelLoadError

EARLY, LAYERS = 2, 4
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "block_size": 4,
    "show_progress": False,
}
# More requests than run at once; prompts of several chunks beside requests that decode.
LENGTHS = (3, 30, 1, 17, 8, 40)
OUTPUT = 9
PROMPTS = [[(n * 31 + i * 7) % 97 for i in range(n)] for n in LENGTHS]
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)


def poison(llm: LLM) -> None:
    """Nothing may be read that this step has not written."""
    poison_every_step(llm.engine)
    for layer in llm.engine.runner.kv_cache.layers:
        for cache in layer:
            cache.fill_(float("nan"))


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a plain decoder."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_bias=True,
        eos_token_id=None,
    )
    return save_tiny(config, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def trained(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as SwiftKV's training leaves it: the teacher's projections are there too."""
    path = tmp_path_factory.mktemp("trained")
    weights = untrained(load_file(plain / "model.safetensors"), EARLY, LAYERS)
    torch.manual_seed(0)
    for name, weight in weights.items():
        if "_swiftkv" in name:
            weights[name] = weight + 0.05 * torch.randn_like(weight)
    save_file(weights, path / "model.safetensors")
    fields = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    fields |= {"model_type": "llama_swiftkv", "num_key_value_layers": EARLY}
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stated(plain: Path, trained: Path) -> dict[str, list[list[int]]]:
    """What both checkpoints answer."""
    config: Any = AutoConfig.from_pretrained(plain)
    weights = {
        "plain": untrained(load_file(plain / "model.safetensors"), EARLY, LAYERS),
        "trained": load_file(trained / "model.safetensors"),
    }
    answers = {
        name: [Statement(config, its, EARLY).greedy(prompt, OUTPUT) for prompt in PROMPTS]
        for name, its in weights.items()
    }
    assert answers["plain"] != answers["trained"]
    return answers


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
)
def test_tokens_are_those_of_the_statement(
    plain: Path,
    stated: dict[str, list[list[int]]],
    device: torch.device,
    mode: str,
    chunk: int | None,
) -> None:
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [1, 2, 4, 12, 24])
    options = LIMITS | {
        "device": device.type,
        "graphs": graphs,
        "long_prefill_token_threshold": chunk,
    }
    with LLM(plain, swiftkv_layers=EARLY, **options) as llm:
        poison(llm)
        assert tokens_of(llm) == stated["plain"]
        assert mode == "NONE" or llm.engine.runner.stats.hits > 10


@pytest.mark.slow
def test_trained_checkpoints_say_what_they_are(
    trained: Path, stated: dict[str, list[list[int]]], device: torch.device
) -> None:
    with LLM(trained, device=device.type, **LIMITS) as llm:
        assert tokens_of(llm) == stated["trained"]
        assert llm.engine.model_config.model_type == "llama"
    with pytest.raises(ConfigError, match=r"swiftkv_layers=3, but .* trained with 2; leave"):
        LLM(trained, swiftkv_layers=3, **LIMITS)
    with LLM(trained, swiftkv_layers=EARLY, random_weights=True, **LIMITS) as llm:
        assert len(tokens_of(llm)) == len(PROMPTS)  # its shape, with random weights


def test_a_trained_checkpoint_without_its_projections(trained: Path, tmp_path: Path) -> None:
    weights = load_file(trained / "model.safetensors")
    del weights["model.layers.3.self_attn.k_proj_swiftkv.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((trained / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"lacks model.layers.3.self_attn.k_proj_swiftkv"):
        LLM(tmp_path, **LIMITS)


@pytest.mark.parametrize("num_early", [2, 1])
def test_with_at_most_one_late_layer_it_is_the_plain_model(
    num_early: int, device: torch.device
) -> None:
    """Random weights are the same too. The named shape has two layers."""
    options = LIMITS | {"device": device.type, "random_weights": True}
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=1)
    with LLM("tiny", **options) as llm:
        expected = tokens_of(llm, params)
    with LLM("tiny", swiftkv_layers=num_early, long_prefill_token_threshold=7, **options) as llm:
        assert llm.engine.runner.memory.selects == (num_early == 1)
        assert tokens_of(llm, params) == expected


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "granite", "phi3", "glm4", "smollm3", "cohere2", "nemotron"]
)
def test_a_late_layer_of_any_family(name: str, tmp_path: Path) -> None:
    """Of two: it is the plain model."""
    path, options = save_tiny(TINY_NATIVE[name](), tmp_path), LIMITS | {"device": "cpu"}
    with LLM(path, **options) as llm:
        expected = tokens_of(llm)
    with LLM(path, swiftkv_layers=1, **options) as llm:
        assert llm.engine.runner.memory.selects
        assert tokens_of(llm) == expected


def test_models_without_a_norm_before_attention(tmp_path: Path) -> None:
    path = save_tiny(TINY_NATIVE["olmo2"](), tmp_path)
    with pytest.raises(ConfigError, match="SwiftKV needs a model with a norm before attention"):
        LLM(path, swiftkv_layers=1, **LIMITS)


def test_late_layers_run_for_one_token_of_a_request(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LIMITS | {"device": "cpu", "graphs": GraphConfig(mode="NONE")}
    with LLM(plain, swiftkv_layers=EARLY, **options) as llm:
        model: Any = llm.engine.model
        rows: dict[str, set[int]] = {"early": set(), "late": set()}
        layers = {"early": model.decoder_layers(), "late": model.late.late_layers()}
        kinds = {
            layer.o_proj.weight.data_ptr(): name for name, its in layers.items() for layer in its
        }
        linear = F.linear

        def recording(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            if weight.data_ptr() in kinds:
                rows[kinds[weight.data_ptr()]].add(x.shape[0])
            return linear(x, weight, *bias)

        monkeypatch.setattr(F, "linear", recording)
        tokens_of(llm)
    assert max(rows["early"]) == LIMITS["max_num_batched_tokens"]
    assert max(rows["late"]) <= LIMITS["max_num_seqs"]


@pytest.mark.parametrize(
    ("num_layers", "message"),
    [
        (5, "swiftkv_layers=5 is more than the model's 4 layers; choose 1 to 4"),
        (0, "swiftkv_layers must be a positive int"),
        (True, "swiftkv_layers must be a positive int"),
    ],
)
def test_numbers_of_layers_that_are_refused(plain: Path, num_layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(plain, swiftkv_layers=num_layers, **LIMITS)


def test_generic_models_are_refused_by_name(tmp_path: Path) -> None:
    TINY_GENERIC["gpt2"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"swiftkv_layers=1 is for .* model_type is 'gpt2'"):
        LLM(tmp_path, swiftkv_layers=1, random_weights=True, **LIMITS)
