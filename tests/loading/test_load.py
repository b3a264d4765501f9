"""Loading: names, files, faults in them, random weights. Numbers are compared in test_decoder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import (
    TINY_GENERIC,
    TINY_MIXTURES,
    TINY_NATIVE,
    TINY_WITH_OPTIONS,
    save_tiny,
)
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.free_memory import free_memory
from ostinato.loading.load import LoadedModel, load_model
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.config.raw_config import raw_config
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import SHAPES, shape_config

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
Q = "model.layers.0.self_attn.q_proj.weight"


def load(name: str | Path | None, device: torch.device = CPU, **options: Any) -> LoadedModel:
    options = {"dtype": torch.float32, "show_progress": False} | options
    return load_model(None if name is None else str(name), device=device, **options)


def save(path: Path, *, shards: bool = False, **settings: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | settings))
    model.save_pretrained(path, max_shard_size="2KB" if shards else "1GB")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small healthy checkpoint, to be damaged."""
    return save(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = save(tmp_path / "sharded", shards=True)
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2
    return path


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def parameters(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    assert isinstance(loaded.model, Decoder)
    return dict(loaded.model.named_parameters())


def assert_same(first: LoadedModel, second: LoadedModel) -> None:
    other = parameters(second)
    for name, parameter in parameters(first).items():
        assert torch.equal(parameter, other[name]), name


# Files


def test_every_tensor_is_where_it_belongs(path: Path, device: torch.device) -> None:
    loaded = load(path, device)
    assert loaded.path == path
    assert loaded.model.device == device
    assert isinstance(loaded.model, Decoder)
    saved = load_file(path / "model.safetensors")
    layer = loaded.model.layers[1]
    prefix = "model.layers.1"
    qkv = [saved.pop(f"{prefix}.self_attn.{part}_proj.weight") for part in "qkv"]
    assert torch.equal(layer.qkv_proj.weight.cpu(), torch.cat(qkv))
    gate_up = [saved.pop(f"{prefix}.mlp.{part}_proj.weight") for part in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj.weight.cpu(), torch.cat(gate_up))
    for parameter in loaded.model.parameters():
        assert parameter.device == device
        assert not parameter.requires_grad


def test_shards(path: Path, sharded: Path) -> None:
    assert_same(load(path), load(sharded))


def test_one_file_of_another_name(path: Path) -> None:
    before = load(path)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert_same(before, load(path))


def test_dtype_is_converted(path: Path) -> None:
    half = parameters(load(path, dtype=torch.bfloat16))
    for name, parameter in parameters(load(path)).items():
        assert torch.equal(half[name], parameter.to(torch.bfloat16))


def test_progress_can_be_seen_or_not(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(path, show_progress=False)
    assert capsys.readouterr().err == ""
    load(path, show_progress=True)
    assert "loading weights" in capsys.readouterr().err


def test_progress_of_transformers_can_be_seen_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(TINY_GENERIC["gpt2"](), tmp_path)
    capsys.readouterr()
    load(tmp_path, show_progress=False)
    assert capsys.readouterr().err == ""
    load(tmp_path, show_progress=True)
    assert "Loading weights" in capsys.readouterr().err


def test_old_rotary_frequencies_are_ignored(path: Path) -> None:
    before = load(path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(path, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert_same(before, load(path))


def test_tied_head_that_was_saved_too(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, lambda tensors: tensors.update({"lm_head.weight": embeddings.clone()}))
    assert "lm_head.weight" not in parameters(load(path))


def test_head_that_should_be_tied_but_differs(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=True)
    head = torch.randn(SIZES["vocab_size"], SIZES["hidden_size"])
    edit(path, lambda tensors: tensors.update({"lm_head.weight": head}))
    theirs = AutoModelForCausalLM.from_pretrained(path).lm_head.weight
    assert torch.equal(theirs, head)  # transformers believes the checkpoint, not the config
    assert torch.equal(parameters(load(path))["lm_head.weight"], head)


# Faults


@pytest.mark.parametrize("keep", [0, 5, 100, 5000])
def test_truncated_file(path: Path, keep: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=rf"model.safetensors \({keep} bytes\) cannot be read"):
        load(path)


def test_truncated_shard(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ModelLoadError, match=f"{file.name} .* damaged or was not copied completely"
    ):
        load(sharded)


def test_missing_shard(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(ModelLoadError, match=f"{file.name} of the .* cannot be found"):
        load(sharded)


def test_missing_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"\.safetensors files and no model.safetensors.index"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index.json (cannot be read as|is not a JSON)"):
        load(sharded)


def test_index_of_another_checkpoint(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.more.weight"] = content["weight_map"][Q]
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"places the tensor model.more.weight in .* does not"):
        load(sharded)


def test_missing_tensor(path: Path) -> None:
    edit(path, lambda tensors: tensors.pop(Q))
    with pytest.raises(ModelLoadError, match=f"{path} lacks {Q}, which its config.json asks for"):
        load(path)


def test_extra_tensor(path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    edit(path, lambda tensors: tensors.update(extra))
    with pytest.raises(ModelLoadError, match=r"model.safetensors has model.layers.0.*q_proj.bias"):
        load(path)


def test_fewer_layers_in_the_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"has model.layers.1.* and \d more, which this"):
        load(path)


def test_wrong_shape(path: Path) -> None:
    edit(path, lambda tensors: tensors.update({Q: torch.zeros(16, 15)}))
    with pytest.raises(ModelLoadError, match=rf"{Q} in .* \[16, 15\]; config.json .* \[16, 16\]"):
        load(path)


def test_quantized_tensor(path: Path) -> None:
    edit(path, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=rf"{Q} in .* has dtype I8; .* F32"):
        load(path)


def test_pickle_weights_are_refused(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"only as pickle files \(pytorch_model.bin\).*convert"
    ):
        load(path)


def test_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file.*--random-weights"):
        load(path)


def test_no_config(path: Path) -> None:
    (path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=f"{path} has no config.json"):
        load(path)
    with pytest.raises(ModelLoadError, match=f"{path} has no config.json"):
        load(path, random_weights=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"model_type": "no-such-model"}',
        '{"model_type": "llama", "hidden_size": "many"}',
        '{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}',
    ],
)
def test_bad_config(path: Path, text: str) -> None:
    (path / "config.json").write_text(text)
    # Were it ever imported, this would be the error instead.
    (path / "configuration_own.py").write_text("raise SystemExit('code from a checkpoint was run')")
    with pytest.raises(ModelLoadError, match=r"transformers cannot read .*config.json|as JSON"):
        load(path)


def test_impossible_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text()) | {"num_key_value_heads": 3}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="2 query heads cannot share 3"):
        load(path)


def test_a_model_that_does_not_fit(path: Path) -> None:
    loaded = load(path)
    assert isinstance(loaded.model, Decoder)
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    needed = sum(tensor.nbytes for tensor in tensors)
    load(path, free_memory=lambda device: needed)
    load(path, free_memory=lambda device: None)  # not known: the device will tell
    for options in ({}, {"random_weights": True}):
        with pytest.raises(ModelLoadError, match=r"needs 0\.00 GiB in torch.float32.* 0\.00 GiB"):
            load(path, free_memory=lambda device: needed - 1, **options)


def test_the_message_about_fit_has_both_numbers() -> None:
    with pytest.raises(ModelLoadError, match=r"needs 29\.9\d GiB .* cpu has 8\.00 GiB free"):
        load("llama-3.1-8b", random_weights=True, free_memory=lambda device: 8 * 2**30)
    with pytest.raises(ModelLoadError, match=r"needs 14\.9\d GiB in torch.bfloat16"):
        load(
            "llama-3.1-8b",
            random_weights=True,
            dtype=torch.bfloat16,
            max_position=1024,
            free_memory=lambda device: 8 * 2**30,
        )


def test_free_memory_is_known(device: torch.device) -> None:
    free = free_memory(device)
    assert free is None or 2**20 < free < 2**50
    if device.type == "cuda" or Path("/proc/meminfo").is_file():
        assert free is not None


def test_dtype_must_be_one_of_floats(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch.int8; choose one of .*torch.bfloat16"):
        load(path, dtype=torch.int8)


# Names


def test_a_file_is_not_a_model(path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file; name the directory"):
        load(path / "model.safetensors")


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_no_such_directory(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no directory .*no.such.model"):
        load(name)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the snapshot; check your connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


@pytest.mark.usefixtures("offline")
def test_hub_that_cannot_be_reached() -> None:
    with pytest.raises(ModelLoadError, match=r"'some/model'.* name a local directory.* snapshot"):
        load("some/model")


@pytest.mark.usefixtures("offline")
def test_shape_without_weights() -> None:
    with pytest.raises(ModelLoadError, match=r"llama-3.2-1b is also a named shape.*--random-weigh"):
        load("llama-3.2-1b")


def test_not_a_hub_name() -> None:
    with pytest.raises(ModelLoadError, match=r"'a/b/c'.*Repo id must be"):
        load("a/b/c")


def test_hub_gives_a_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load("some/model").path == path
    assert asked["name"] == "some/model"
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


# Random weights


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("gemma-3-1b", 999_885_952),
        ("phi-4-mini", 3_836_021_760),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v2-lite", 15_706_484_224),
        ("smollm2-135m", 134_515_008),
        ("tiny", 139_584),
    ],
)
def test_shapes_have_the_published_size(name: str, elements: int) -> None:
    config = DecoderConfig.from_hf(shape_config(name))
    model = Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16, max_position=1)
    assert sum(slot.shape.numel() for slot in model.weight_slots()) == elements
    assert set(SHAPES) >= {name}


def stated(fields: dict[str, Any]) -> DecoderConfig:
    config = raw_config(fields)
    assert config is not None
    return DecoderConfig.from_hf(config)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_mean_what_transformers_takes_them_for(name: str) -> None:
    config = shape_config(name)
    assert DecoderConfig.from_hf(config) == DecoderConfig.from_hf(config.to_hf())
    assert config.to_hf().eos_token_id == config.eos_token_id


@pytest.mark.parametrize(
    "name",
    [
        *sorted(TINY_NATIVE.keys() - TINY_WITH_OPTIONS),
        "deepseek_v2",
        "gemma3",
        "mixtral",
        "phi3",
        "phi4_mini",
        "qwen3_moe",
    ],
)
def test_a_config_that_states_everything_is_read_without_transformers(
    tmp_path: Path, name: str
) -> None:
    (TINY_MIXTURES.get(name) or TINY_NATIVE[name])().save_pretrained(tmp_path)
    expected = DecoderConfig.from_hf(AutoConfig.from_pretrained(tmp_path))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert stated(fields) == expected
    for field in ("rope_parameters", "tie_word_embeddings", "rms_norm_eps"):
        assert raw_config({key: fields[key] for key in fields if key != field}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"quantization_config": {"bits": 4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}},
        {"model_type": "qwen3", "sliding_window": 8},
        {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
        {"model_type": "phi3", "sliding_window": None},  # RoPE of all or a part of a head?
        SHAPES["gemma-3-1b"] | {"layer_types": ["full_attention"] * 26},
        SHAPES["gemma-3-1b"] | {"rope_parameters": SHAPES["tiny"]["rope_parameters"]},
        {"model_type": "qwen2"},
        SHAPES["llama-3.2-1b"] | {"original_max_position_embeddings": 4096},
        {"head_dim": None},
        {"auto_map": {"AutoConfig": "configuration.Config"}},
    ],
    ids=str,
)
def test_configs_that_transformers_must_read(change: dict[str, Any]) -> None:
    assert raw_config(SHAPES["tiny"]) is not None
    assert raw_config(SHAPES["tiny"] | change) is None


@pytest.mark.slow
def test_loading_the_embedded_kind_of_model_imports_no_compiler(tmp_path: Path) -> None:
    save_tiny(TINY_NATIVE["llama"](), tmp_path)
    words = Tokenizer(models.WordLevel({"?": 0, "two": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    script = (
        "import sys; from ostinato import LLM; LLM(sys.argv[1], device='cpu', show_progress=False);"
        "print(*(name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


def test_unknown_shape() -> None:
    with pytest.raises(ConfigError, match=r"'llama-9b'; the shapes are .*qwen3-4b.*tiny"):
        load("llama-9b", random_weights=True)


def test_random_weights_follow_the_seed(device: torch.device) -> None:
    first, again, other = (
        load("tiny", device, random_weights=True, seed=seed) for seed in (1, 1, 2)
    )
    assert_same(first, again)
    assert first.path is first.tokenizer is None
    assert not first.eos_token_ids
    differing = parameters(other)
    for name, parameter in parameters(first).items():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert not torch.equal(parameter, differing[name])
            assert abs(parameter.std().item() - 0.02) < 2e-3
            assert abs(parameter.mean().item()) < 2e-3


def test_random_weights_do_not_touch_the_global_generator(device: torch.device) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    load("tiny", device, random_weights=True)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_random_weights_for_a_config(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, attention_bias=True).save_pretrained(tmp_path)
    loaded = load(tmp_path, random_weights=True)
    assert loaded.path == tmp_path
    assert loaded.model.vocab_size == SIZES["vocab_size"]
    assert (parameters(loaded)["layers.0.qkv_proj.bias"] == 0).all()


# What belongs to a model


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (7, None, {7}),
        ([7, 8], None, {7, 8}),
        (7, [9, 10], {9, 10}),
        (7, 9, {9}),
        (None, None, set()),
    ],
)
def test_eos_tokens(
    tmp_path: Path, in_config: Any, in_generation_config: Any, expected: set[int]
) -> None:
    path = save(tmp_path, eos_token_id=in_config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert load(path).eos_token_ids == expected
    (path / "generation_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"generation_config.json cannot be read as JSON"):
        load(path)


def test_tokenizer(path: Path) -> None:
    assert load(path).tokenizer is None
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(path)
    tokenizer = load(path).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("two") == [1]
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=f"cannot read the tokenizer in {path}"):
        load(path)


def test_other_architectures_go_the_generic_way(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for options in ({}, {"random_weights": True}):
        loaded = load(tmp_path, **options)
        assert isinstance(loaded.model, HFCausalLM)
        assert loaded.generic_reason is not None
        assert "model_type is 'gpt2'" in loaded.generic_reason
    with pytest.raises(ModelLoadError, match=r"needs .* GiB"):
        load(tmp_path, free_memory=lambda device: 100)
    shutil.move(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickle"):
        load(tmp_path)
