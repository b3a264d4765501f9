"""The generic path: transformers' modules on a flat row, held against transformers' own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    TINY_GENERIC,
    TINY_MIXTURES,
    TINY_NATIVE,
    TINY_WITH_OPTIONS,
    VOCAB_SIZE,
    WINDOW,
    save_tiny,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from ostinato import GraphPool
from ostinato.attention.base import AttentionSpec
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.replaced import experts as expert_layers

CPU = torch.device("cpu")
TOLERANCE = 1e-4
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
CheckpointFinder = Callable[[str], Path]


THROUGH_MODULES = {**TINY_GENERIC, **TINY_WITH_OPTIONS, **TINY_MIXTURES}


class DenseAttention:
    """Attention of whole prompts in one row, with no cache: every definition spelt out."""

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        num_tokens = query.shape[0]
        assert query.shape == (num_tokens, spec.num_heads, spec.head_dim)
        assert key.shape == (num_tokens, spec.num_kv_heads, spec.head_dim)
        assert value.shape == (num_tokens, spec.num_kv_heads, spec.value_dim)
        row = torch.arange(num_tokens, device=query.device)
        request = (row[:, None] >= metadata.query_start_loc[1:]).sum(1)
        distance = row[:, None] - row
        visible = (request[:, None] == request) & (distance >= 0)
        if spec.window is not None:
            visible = visible & (distance < spec.window)
        groups = spec.num_heads // spec.num_kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_tokens, 1)], -1)
        weights = scores.softmax(-1)[..., :num_tokens]
        out.copy_(torch.einsum("hqk,khd->qhd", weights, value))


def row_of(*lengths: int, device: torch.device = CPU) -> set_forward_context:
    """A batch of whole prompts of these lengths, one after the other."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    metadata = SimpleNamespace(backend=DenseAttention(), query_start_loc=starts)
    return set_forward_context(attn_metadata=metadata)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator)


def logits_of(model: HFCausalLM, *prompts: torch.Tensor) -> torch.Tensor:
    device = model.device
    ids = torch.cat(prompts).to(device)
    positions = torch.cat([torch.arange(len(ids)) for ids in prompts]).to(device)
    with row_of(*(len(ids) for ids in prompts), device=device):
        hidden = model.forward(ids, positions)
        assert hidden.shape == (len(ids), model.hidden_size)
        return model.compute_logits(hidden)


def load(path: Path, device: torch.device = CPU, **options: Any) -> HFCausalLM:
    config = transformers.AutoConfig.from_pretrained(path)
    return HFCausalLM.from_pretrained(
        path, config=config, device=device, dtype=torch.float32, **options
    )


def reference(path: Path, device: torch.device = CPU) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    return model.eval().to(device)


def reference_logits(path: Path, ids: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    with torch.no_grad():
        return reference(path, device)(ids[None].to(device), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFinder:
    saved: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in saved:
            build = THROUGH_MODULES.get(name) or TINY_NATIVE[name]
            saved[name] = save_tiny(build(), tmp_path_factory.mktemp(name))
        return saved[name]

    return find


# --- parity with transformers --------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*THROUGH_MODULES, "llama", "mistral"])
def test_logits_are_those_of_transformers(
    name: str, checkpoint: CheckpointFinder, device: torch.device
) -> None:
    ids = prompt(24)
    expected = reference_logits(checkpoint(name), ids, device)
    model = load(checkpoint(name), device)
    logits = logits_of(model, ids)
    assert logits.shape == (24, model.vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert model.max_position == 256
    assert not any(parameter.requires_grad for parameter in model.model.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("name", THROUGH_MODULES)
def test_prompts_in_one_row_do_not_meet(
    name: str, checkpoint: CheckpointFinder, device: torch.device
) -> None:
    first, second = prompt(11, seed=1), prompt(24, seed=2)
    together = logits_of(load(checkpoint(name), device), first, second)
    alone = [reference_logits(checkpoint(name), ids, device) for ids in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), atol=TOLERANCE, rtol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("name", THROUGH_MODULES)
def test_forward_and_head_can_be_captured(
    name: str, checkpoint: CheckpointFinder, device: torch.device, pool: GraphPool
) -> None:
    model = load(checkpoint(name), device)
    ids, positions = prompt(12).to(device), torch.arange(12, device=device)
    first, second = prompt(7, seed=5), prompt(5, seed=6)
    expected = logits_of(model, first, second)  # eagerly; kernels also set themselves up here
    with row_of(12, 0, device=device) as context:
        captured = pool.capture(lambda: model.compute_logits(model.forward(ids, positions)))
        # Another batch at the same addresses.
        context.attn_metadata.query_start_loc.copy_(torch.tensor([0, 7, 12]))
        ids.copy_(torch.cat([first, second]))
        positions.copy_(torch.cat([torch.arange(7), torch.arange(5)]))
        pool.replay(captured.tape)
    tolerance = 0.0 if device.type == "cpu" else 1e-5
    torch.testing.assert_close(captured.output, expected, atol=tolerance, rtol=0)


# --- what is learnt about the layers -------------------------------------------------------------


def test_specs_have_what_is_peculiar_to_a_layer(checkpoint: CheckpointFinder) -> None:
    gemma = load(checkpoint("gemma2")).attention_specs
    assert [spec.layer for spec in gemma] == [0, 1]
    assert [spec.window for spec in gemma] == [WINDOW, None]
    assert [spec.soft_cap for spec in gemma] == [5.0, 5.0]
    assert [spec.scale for spec in gemma] == [pytest.approx(24**-0.5)] * 2
    assert [(spec.num_heads, spec.num_kv_heads) for spec in gemma] == [(4, 2)] * 2
    latent = load(checkpoint("deepseek_v3")).attention_specs[0]
    assert (latent.head_dim, latent.value_dim) == (32, 16)
    opt = load(checkpoint("opt"))
    assert opt.attention_specs[0].scale == 1.0  # OPT scales its queries itself
    assert opt.hidden_size == 32  # after its projection


def test_a_window_as_long_as_the_model_is_none() -> None:
    config = transformers.MistralConfig(**_SMALL, sliding_window=64)
    assert _random(config).attention_specs[0].window is None
    config = transformers.MistralConfig(**_SMALL, sliding_window=63)
    assert _random(config).attention_specs[0].window == 63


def test_tokens_that_the_model_cannot_read_are_not_in_its_vocabulary() -> None:
    config = transformers.Gemma3nTextConfig(
        **{**_SMALL, "intermediate_size": [48, 48], "vocab_size": 128},
        head_dim=16,
        vocab_size_per_layer_input=120,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        altup_num_inputs=2,
        laurel_rank=4,
    )
    model = _random(config)
    assert model.vocab_size == 120
    assert model.compute_logits(torch.ones(3, 32)).shape == (3, 120)


def test_the_callers_config_is_left_alone(checkpoint: CheckpointFinder) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("mixtral"))
    before = copy.deepcopy(config)
    HFCausalLM.from_pretrained(
        checkpoint("mixtral"), config=config, device=CPU, dtype=torch.float32
    )
    HFCausalLM.from_config(config, device=CPU, dtype=torch.float32, seed=0)
    assert config.to_dict() == before.to_dict()
    assert config._attn_implementation == before._attn_implementation
    assert config.pad_token_id == 0


def test_a_config_that_asks_for_attention_weights_is_taken(checkpoint: CheckpointFinder) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint("olmo2"))
    config.output_attentions = True
    path = checkpoint("olmo2")
    model = HFCausalLM.from_pretrained(path, config=config, device=CPU, dtype=torch.float32)
    torch.testing.assert_close(logits_of(model, prompt(9)), reference_logits(path, prompt(9)))


# --- random weights ------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BERT = {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"}


def _random(config: PretrainedConfig, seed: int = 0, **options: Any) -> HFCausalLM:
    return HFCausalLM.from_config(config, device=CPU, dtype=torch.float32, seed=seed, **options)


def test_random_weights_are_the_seeds_alone(device: torch.device) -> None:
    config = transformers.GemmaConfig(**_SMALL, head_dim=16)
    state = torch.get_rng_state()

    def weights(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = HFCausalLM.from_config(config, device=device, dtype=dtype, seed=seed)
        assert (model.device.type, model.dtype) == (device.type, dtype)
        weight: torch.Tensor = model.model.model.layers[1].mlp.up_proj.weight
        assert (weight.device.type, weight.dtype) == (device.type, dtype)
        return weight

    first = weights(0)
    torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))
    weights(0, torch.bfloat16 if device.type == "cuda" else torch.float64)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="half precision is for GPUs")
@pytest.mark.parametrize("name", [*MIXTURES, "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_transformers(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    model = HFCausalLM.from_config(THROUGH_MODULES[name](), device=device, dtype=dtype, seed=3)
    expected = copy.deepcopy(model.model)
    expected.set_attn_implementation("eager")
    ids = prompt(24)
    with torch.no_grad():
        full = expected(ids[None].to(device), use_cache=False).logits[0].float()
    torch.testing.assert_close(logits_of(model, ids), full, atol=0.03, rtol=0)
    row, positions = ids.to(device), torch.arange(24, device=device)
    with GraphPool(device, lazy_capture=True) as pool, row_of(24, device=device):
        captured = pool.capture(lambda: model.compute_logits(model.forward(row, positions)))
        torch.testing.assert_close(captured.output, full, atol=0.03, rtol=0)


# --- rotary embeddings that change with the length -----------------------------------------------

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0] * 8,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (
            transformers.Phi3Config(
                **_SMALL, rope_parameters=_LONGROPE, original_max_position_embeddings=32
            ),
            32,
        ),
        (transformers.GPTNeoXConfig(**{**_SMALL, "rope_parameters": _DYNAMIC}), 64),
    ],
    ids=["longrope", "dynamic"],
)
def test_rope_is_frozen_where_it_would_change(
    config: PretrainedConfig, limit: int, tmp_path: Path
) -> None:
    save_tiny(config, tmp_path)
    model = load(tmp_path, max_model_len=limit)
    assert model.max_position == limit
    ids = prompt(limit) % 64
    expected = reference_logits(tmp_path, ids)
    torch.testing.assert_close(logits_of(model, ids), expected, atol=TOLERANCE, rtol=0)
    with GraphPool(CPU, lazy_capture=True) as pool, row_of(limit):
        pool.capture(lambda: model.forward(ids, torch.arange(limit)))
    with pytest.raises(
        ConfigError, match=rf"set max_model_len to at most {limit}, got {limit + 1}"
    ):
        load(tmp_path, max_model_len=limit + 1)


# --- expert layers -------------------------------------------------------------------------------


def _experts_in(model: Any) -> Any:
    return next(
        m
        for m in model.modules()
        if getattr(m, "down_proj", None) is not None and isinstance(m.down_proj, torch.nn.Parameter)
    )


def _routing(experts: Any, num_tokens: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    weights, index = torch.rand(num_tokens, experts.num_experts).topk(top_k)
    return index, weights


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_every_expert_adds_up_to_what_transformers_computes(
    name: str, num_tokens: int, checkpoint: CheckpointFinder
) -> None:
    torch.manual_seed(0)
    experts = _experts_in(reference(checkpoint(name)))
    hidden = torch.randn(num_tokens, 64)
    routing = _routing(experts, num_tokens)
    with torch.no_grad():
        expected = experts(hidden, *routing)
        got = expert_layers.every_expert_forward(experts, hidden, *routing)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_expert_that_overflows_touches_only_its_own_tokens(
    checkpoint: CheckpointFinder,
) -> None:
    torch.manual_seed(0)
    experts = _experts_in(reference(checkpoint("mixtral")))
    hidden = torch.randn(6, 64)
    index, weights = torch.tensor([[0, 1]] * 5 + [[2, 3]]), torch.rand(6, 2)
    with torch.no_grad():
        expected = experts(hidden, index, weights)
        experts.down_proj[3] = float("inf")
        got = expert_layers.every_expert_forward(experts, hidden, index, weights)
    torch.testing.assert_close(got[:5], expected[:5], atol=1e-5, rtol=1e-5)
    assert not got[5].isfinite().any()


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_without_a_grouped_product_can_be_captured(
    name: str, checkpoint: CheckpointFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_layers, "_grouped_product_stays_on_device", lambda experts: False)
    model = load(checkpoint(name))
    ids, positions = prompt(6), torch.arange(6)
    with GraphPool(CPU, lazy_capture=True) as pool, row_of(6):
        captured = pool.capture(lambda: model.compute_logits(model.forward(ids, positions)))
        ids.copy_(prompt(6, seed=1))
        pool.replay(captured.tape)
        expected = reference_logits(checkpoint(name), ids)
        torch.testing.assert_close(captured.output, expected, atol=TOLERANCE, rtol=0)


def test_experts_of_odd_sizes_go_without_the_grouped_product() -> None:
    config = transformers.MixtralConfig(
        **{**_SMALL, "intermediate_size": 6}, num_local_experts=4, num_experts_per_tok=2
    )
    model = _random(config)
    expected = copy.deepcopy(model.model)
    expected.set_attn_implementation("eager")
    expected.set_experts_implementation("eager")
    ids = prompt(10) % 64
    with torch.no_grad():
        full = expected(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, ids), full, atol=TOLERANCE, rtol=0)


# --- what cannot be run, is said ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.FalconConfig(), "FalconForCausalLM does not use .*AttentionInterface"),
        (transformers.BloomConfig(), "BloomForCausalLM does not use .*AttentionInterface"),
        (transformers.MptConfig(), "MptForCausalLM does not use .*AttentionInterface"),
        (transformers.MambaConfig(), "MambaForCausalLM has state-space.* can: bamba, falcon_h1"),
        (transformers.JambaConfig(), "JambaForCausalLM has state-space"),
        (transformers.RecurrentGemmaConfig(), "RecurrentGemmaForCausalLM has state-space"),
        (transformers.BltConfig(), "BltForCausalLM has no num_hidden_layers"),
        (transformers.BartConfig(), "bart is an encoder-decoder model"),
        (transformers.T5Config(), "t5 is an encoder-decoder model"),
        (transformers.ViTConfig(), "no causal language model of type 'vit'"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_refused_from_the_config_before_any_weight_is_made(
    config: PretrainedConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", build)
    with pytest.raises(ConfigError, match=message):
        HFCausalLM.from_config(config, device=CPU, dtype=torch.float32, seed=0)
    with pytest.raises(ConfigError, match=message):
        HFCausalLM.from_pretrained(tmp_path, config=config, device=CPU, dtype=torch.float32)


def test_refused_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"only as pickle files \(pytorch_model.bin\)"):
        HFCausalLM.from_pretrained(
            tmp_path, config=TINY_NATIVE["olmo2"](), device=CPU, dtype=torch.float32
        )


def test_refused_for_a_table_of_attention_classes(tmp_path: Path) -> None:
    """In a module that uses the interface elsewhere, so that transformers offers to replace it."""
    config = transformers.GitConfig(
        **_BERT, vision_config={"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1}
    )
    save_tiny(config, tmp_path)
    with pytest.raises(ConfigError, match="GitForCausalLM does not use transformers' Attention"):
        HFCausalLM.from_pretrained(tmp_path, config=config, device=CPU, dtype=torch.float32)


def test_refused_without_a_longest_sequence() -> None:
    config = transformers.OlmoConfig(**_SMALL)
    vars(config)["max_position_embeddings"] = None
    with pytest.raises(ConfigError, match="none of max_position_embeddings, n_positions"):
        _random(config)


def _chunked() -> PretrainedConfig:
    return transformers.Llama4TextConfig(
        **_SMALL,
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=8,
        layer_types=["full_attention", "chunked_attention"],
    )


def _sparse() -> PretrainedConfig:
    return transformers.DeepseekV32Config(
        **_SMALL,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        index_n_heads=2,
        index_head_dim=32,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BertConfig(**_BERT), "layer 0 of BertLMHeadModel is not causal"),
        (_chunked(), "layer 1 of Llama4ForCausalLM is not causal .*by chunks"),
        (transformers.DiffLlamaConfig(**_SMALL), "attention more than once in layer 0"),
        (
            transformers.GraniteMoeConfig(**_SMALL, attention_multiplier=-1.0),
            r"attention in layer 0 the scaling -1.0, which must be a positive number",
        ),
        (_sparse(), "DeepseekV32ForCausalLM cannot be run .*computes with its attention mask"),
        (
            transformers.RobertaConfig(**_BERT, is_decoder=True),
            "RobertaForCausalLM does not number the tokens of a sequence 0, 1, 2",
        ),
        (
            transformers.MarianConfig(
                vocab_size=64,
                d_model=32,
                decoder_layers=1,
                encoder_layers=1,
                decoder_ffn_dim=48,
                decoder_attention_heads=2,
                pad_token_id=0,
                is_encoder_decoder=False,
            ),
            "MarianForCausalLM depends on .* or ignores the positions it is given",
        ),
    ],
    ids=["bidirectional", "chunked", "twice", "negative", "sparse", "numbering", "own positions"],
)
def test_refused_for_what_the_layers_do(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _random(config)


def _llama() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**_SMALL), attn_implementation="ostinato"
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_the_model_that_the_following_ones_spoil_is_fine() -> None:
    HFCausalLM(_llama(), max_position=64)


def test_refused_when_tokens_meet_outside_attention() -> None:
    model = _llama()
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="LlamaForCausalLM depends on more than its id"):
        HFCausalLM(model, max_position=64)


def test_refused_when_positions_are_ignored() -> None:
    model = _llama()
    rotary = model.model.rotary_emb
    rotary.forward = lambda x, position_ids, forward=rotary.forward: forward(
        x, torch.arange(position_ids.shape[1])[None]
    )
    with pytest.raises(ConfigError, match="ignores the positions it is given"):
        HFCausalLM(model, max_position=64)


def test_refused_when_logits_need_more_than_hidden_states() -> None:
    model = _llama()

    def add_inputs(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("input_ids") is not None:
            output.logits = output.logits + kwargs["input_ids"][..., None]
        return output

    model.register_forward_hook(add_inputs, with_kwargs=True)
    with pytest.raises(ConfigError, match="not a function of its last hidden state alone"):
        HFCausalLM(model, max_position=64)


def test_refused_when_a_layer_has_its_own_mask_or_arguments() -> None:
    def spoilt(**changes: Any) -> Any:
        model = _llama()
        attention = model.model.layers[1].self_attn
        attention.forward = lambda *args, forward=attention.forward, **kwargs: forward(
            *args, **{**kwargs, **changes}
        )
        return model

    with pytest.raises(ConfigError, match="passes its own attention mask in layer 1"):
        HFCausalLM(spoilt(attention_mask=torch.zeros(1, 1, 16, 16)), max_position=64)
    with pytest.raises(ConfigError, match="layer 1 of LlamaForCausalLM is not causal"):
        HFCausalLM(spoilt(attention_mask=None), max_position=64)
    with pytest.raises(ConfigError, match="layer 1 of LlamaForCausalLM is not causal"):
        HFCausalLM(spoilt(is_causal=False), max_position=64)
    with pytest.raises(ConfigError, match=r"passes \['slopes'\] to attention in layer 1"):
        HFCausalLM(spoilt(slopes=torch.ones(2)), max_position=64)


def test_refused_when_a_layer_goes_around_the_interface() -> None:
    model = _llama()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ConfigError, match=r"has 2 layers, of which \[1\] did not go through"):
        HFCausalLM(model, max_position=64)


def test_a_mask_that_appears_later_is_refused() -> None:
    wrapped = HFCausalLM(_llama(), max_position=64)
    attention = wrapped.model.model.layers[0].self_attn
    attention.forward = lambda *args, forward=attention.forward, **kwargs: forward(
        *args, **{**kwargs, "attention_mask": torch.zeros(1, 1, 4, 4)}
    )
    with row_of(4), pytest.raises(ConfigError, match="LlamaAttention passed an attention mask"):
        wrapped.forward(torch.arange(4), torch.arange(4))
