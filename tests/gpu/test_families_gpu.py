"""Families with options of their own, in bfloat16 through our kernels, beside transformers.

Native or through transformers' modules, our logits must be as near to those of float32 as
transformers' own in bfloat16.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams
from ostinato.models.hf.model import HFCausalLM
from ostinato.runner.step_result import SampledLogits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
NEW_TOKENS = 24
BATCHES = [1, 5, 20, 40, 70]  # one of each row class of the small-M GEMMs, and beyond
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
NATIVE: dict[str, Callable[[], Any]] = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=256),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES | WINDOWS | {"num_attention_heads": 4, "num_key_value_heads": 1}, head_dim=256
    ),
    "phi4_mini": lambda: transformers.Phi3Config(
        **SIZES | {"hidden_size": 768, "num_attention_heads": 24, "num_key_value_heads": 8},
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
    ),
    "olmo3": lambda: transformers.Olmo3Config(**SIZES, **WINDOWS),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),
    "exaone4": lambda: transformers.Exaone4Config(**SIZES, **WINDOWS),
    "cohere2": lambda: transformers.Cohere2Config(**SIZES, **WINDOWS),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES),
    "nemotron": lambda: transformers.NemotronConfig(**SIZES),
    # Without experts: another rounding may choose others.
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 8}, q_lora_rank=None, first_k_dense_replace=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_attention_heads": 128, "num_key_value_heads": 128},
        q_lora_rank=256,
        first_k_dense_replace=4,
    ),
}
# Through transformers' modules: norms, MLPs and RoPE in fused operators.
GENERIC: dict[str, Callable[[], Any]] = {
    "stablelm": lambda: transformers.StableLmConfig(**SIZES),
    "helium": lambda: transformers.HeliumConfig(**SIZES, head_dim=64),
    "hunyuan_v1_dense": lambda: transformers.HunYuanDenseV1Config(**SIZES, head_dim=64),
}


def draw(config: Any) -> Any:
    """transformers' model in bfloat16, as models of this kind start, but every weight matters."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(CUDA, torch.bfloat16).eval()


@pytest.mark.parametrize("name", [*NATIVE, *GENERIC])
def test_logits_are_as_exact_as_transformers(name: str, tmp_path: Path) -> None:
    theirs = draw((NATIVE.get(name) or GENERIC[name])())
    theirs.save_pretrained(tmp_path)
    exact = copy.deepcopy(theirs).float()
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        # Cloned: transformers' modules compute them in float32, and the next step overwrites them.
        for request, row in zip(sampled.request_ids, sampled.logits.float().clone(), strict=True):
            rows[request].append(row)

    llm = LLM(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=80,
        max_num_batched_tokens=1024,
        max_model_len=128,
        kv_cache_memory_bytes="512M",
        show_progress=False,
    )
    with llm:
        model = llm.engine.runner.model
        assert isinstance(model, HFCausalLM) == (name in GENERIC)
        if isinstance(model, HFCausalLM):
            assert model.num_fused_modules > 0
        llm.engine.runner.on_logits = record
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for batch in BATCHES:
            rows.clear()
            prompts = [[(i * 37 + j * 11 + 5) % 1000 for j in range(9)] for i in range(batch)]
            outputs = llm.generate(prompts, params)
            ours = torch.stack([torch.stack(rows[f"{each.request_id}.0"]) for each in outputs])
            tokens = [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)]
            ids = torch.tensor(tokens, device=CUDA)
            with torch.no_grad():
                expected = exact(ids, use_cache=False).logits[:, 8:-1]
                rounded = theirs(ids, use_cache=False).logits[:, 8:-1].float()
            assert (ours - expected).norm() <= 1.2 * (rounded - expected).norm(), batch
        assert llm.engine.runner.stats.hits > 0
