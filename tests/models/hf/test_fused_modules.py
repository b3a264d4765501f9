"""Norms and MLPs of transformers' modules in our operators: which, and with what results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from test_hf_models import logits_of, prompt, row_of
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ostinato import GraphPool
from ostinato.models.hf.model import HFCausalLM
from ostinato.models.hf.replaced.fused_modules import fuse_modules
from ostinato.ops.rotate_heads import rotate_heads, triton_rotate_heads

# Modules of the two layers of each tiny model that are taken over, and the last norm: norms, MLPs,
# and attention whose RoPE is by halves.
FUSED = {
    "gpt2": 0,
    "stablelm": 4,  # it has LayerNorm
    "cohere": 2,
    "mixtral": 7,
    "qwen3_moe": 11,
    "deepseek_v3": 13,  # the first layer's MLP and the second's shared expert; latent norms
    "gpt_oss": 5,
    "llama": 9,
    "qwen3": 13,
    "gemma2": 13,
    "gemma3": 17,
    "olmo2": 13,
    "granite": 9,
    "phi3": 7,  # gate and up are one linear already
    "glm4": 9,
    "nemotron": 2,
    "seed_oss": 9,
}


def randomized(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        size = 0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data = parameter.data * (parameter.dim() == 1) + size * torch.randn_like(
            parameter
        )
    return module.eval().requires_grad_(False).to(device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_half_precision_is_as_exact_as_transformers(name: str, device: torch.device) -> None:
    dtype, ids = torch.bfloat16, prompt(24)
    config = (TINY_GENERIC | TINY_NATIVE | TINY_MIXTURES)[name]()
    torch.manual_seed(0)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).to(device)
    randomized(theirs, dtype, device)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("ostinato")
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        row = ids[None].to(device)
        rounded = theirs(row, use_cache=False).logits[0].float()
        model = HFCausalLM(ours, max_position=256)
        assert model.num_fused_modules == FUSED[name]
        logits = logits_of(model, ids)
        exact = theirs.float()(row, use_cache=False).logits[0]
    # Of most tokens: a router may choose another expert where two are almost equal.
    errors = [(each - exact).norm(dim=1).median() for each in (logits, rounded)]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_float32_is_left_alone(name: str, device: torch.device) -> None:
    """So no bit of its results can change."""
    model = HFCausalLM.from_config(TINY_NATIVE[name](), device=device, dtype=torch.float32, seed=0)
    assert model.num_fused_modules == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
def test_norms(kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    norm = randomized(kind(48), dtype, device)
    theirs = copy.deepcopy(norm)
    assert fuse_modules(norm) == 1
    assert isinstance(norm, kind)
    assert norm.state_dict().keys() == theirs.state_dict().keys()
    hidden = torch.randn(1, 5, 3 * 48, device=device).to(dtype)
    heads = hidden.view(1, 5, 3, 48)
    for x in (hidden[..., :48], heads, heads.transpose(1, 2), hidden[0, :, 48:96], heads[0, 0]):
        got, expected = norm(x), theirs(x)
        assert got.shape == x.shape
        assert got.dtype is dtype
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    wide = hidden.float()[..., :48]
    assert torch.equal(norm(wide), theirs(wide))  # rows of another dtype are transformers'


def test_a_norm_with_more_arguments_is_transformers(device: torch.device) -> None:
    norm: Any = randomized(FalconH1RMSNormGated(48, n_groups=1), torch.bfloat16, device)
    theirs = copy.deepcopy(norm)
    fuse_modules(norm)
    x, gate = (torch.randn(3, 48, device=device).bfloat16() for _ in range(2))
    assert torch.equal(norm(x, gate), theirs(x, gate))


class Scaled(LlamaRMSNorm):
    """Almost a plain norm."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.01


class OtherEps(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.variance_epsilon, own = 1e-5, self.variance_epsilon
        result: torch.Tensor = super().forward(hidden_states)
        self.variance_epsilon = own
        return result


class Residual(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


@pytest.mark.parametrize("kind", [Scaled, OtherEps, Residual, nn.LayerNorm])
def test_other_modules_are_left_alone(kind: Any, device: torch.device) -> None:
    argument = TINY_NATIVE["llama"]() if kind is Residual else 48
    module = randomized(kind(argument), torch.bfloat16, device)
    assert fuse_modules(module) == 0
    assert type(module) is kind


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlps(bias: bool, activation: str, device: torch.device) -> None:
    config = TINY_NATIVE["llama"]()
    config.hidden_act, config.mlp_bias = activation, bias
    mlp = randomized(LlamaMLP(config), torch.bfloat16, device)
    theirs = copy.deepcopy(mlp)
    x = torch.randn(1, 7, config.hidden_size, device=device).bfloat16()
    with torch.backends.mkldnn.flags(enabled=False):
        assert fuse_modules(mlp) == 1
        expected = theirs(x)
        torch.testing.assert_close(mlp(x), expected, rtol=2**-5, atol=2**-6)
        for name, parameter in mlp.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name))
        torch.compiler.reset()  # each kind of module counts as one more recompilation
        compiled = torch.compile(mlp, backend="eager")
        assert torch.equal(compiled(x), expected)  # a compiler sees transformers' code


def test_fused_modules_can_be_captured(device: torch.device, pool: GraphPool) -> None:
    model = HFCausalLM.from_config(
        TINY_NATIVE["qwen3"](), device=device, dtype=torch.bfloat16, seed=0
    )
    assert model.num_fused_modules
    ids, positions = prompt(12).to(device), torch.arange(12, device=device)
    other = prompt(12, seed=5)
    with torch.backends.mkldnn.flags(enabled=False):
        expected = logits_of(model, other)
        with row_of(12, device=device):
            captured = pool.capture(lambda: model.compute_logits(model.forward(ids, positions)))
            ids.copy_(other)
            pool.replay(captured.tape)
    torch.testing.assert_close(captured.output, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rotate", [rotate_heads, triton_rotate_heads])
@pytest.mark.parametrize("sizes", [(4, 2, 5, 16), (17, 17, 3, 24), (1, 1, 0, 8)])
def test_rotated_heads(
    sizes: tuple[int, int, int, int], rotate: Any, dtype: torch.dtype, device: torch.device
) -> None:
    if rotate is triton_rotate_heads and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    num_heads, num_kv_heads, num_tokens, dim = sizes
    wide = torch.full((num_tokens, num_heads + num_kv_heads, dim + 3), torch.nan, device=device)
    rows = wide.to(dtype)[..., :dim].normal_()
    query, key = (each.transpose(0, 1) for each in rows.split((num_heads, num_kv_heads), dim=1))
    cos, sin = torch.randn(2, num_tokens, dim, device=device).to(dtype)
    expected = apply_rotary_pos_emb(
        *(each[None].double() for each in (query, key)), cos[None].double(), sin[None].double()
    )
    before = rows.clone()
    for got, exact in zip(rotate(query, key, cos, sin), expected, strict=True):
        assert got.shape == exact.shape[1:]
        assert got.dtype is dtype
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(got[None].double(), exact, rtol=tolerance, atol=8 * tolerance)
    assert torch.equal(rows, before)


def test_rope_of_other_models_is_transformers(device: torch.device) -> None:
    """Taking a model over changes nothing outside of it."""
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    model = HFCausalLM.from_config(
        TINY_NATIVE["llama"](), device=device, dtype=torch.bfloat16, seed=0
    )
    attention = model.model.model.layers[0].self_attn
    assert type(attention) is not modeling_llama.LlamaAttention
    assert isinstance(attention, modeling_llama.LlamaAttention)
    after = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    assert before == after
