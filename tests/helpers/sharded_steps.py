"""A request on one rank of a sharded model, step by step, against its own part of a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from ostinato import set_forward_context
from ostinato.attention.base import AttentionMetadata
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import build_base, build_shift
from ostinato.runner.kv_cache import KVCache

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 16


def config_of(family: str, num_kv_heads: int) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97,  # not divisible: the last shard is shorter
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 64,
    }
    if family == "llama":
        return transformers.LlamaConfig(
            **sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        )
    if family == "qwen2":
        return transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    if family == "gemma2":
        return transformers.Gemma2Config(
            **sizes, head_dim=16, attn_logit_softcapping=3.0, final_logit_softcapping=20.0
        )
    alternating = ["sliding_attention", "full_attention"]
    if family == "gemma3":
        return transformers.Gemma3TextConfig(
            **sizes, head_dim=16, sliding_window=4, layer_types=alternating
        )
    if family == "smollm3":
        return transformers.SmolLM3Config(
            **sizes, pad_token_id=0, no_rope_layers=[1, 0], attention_bias=True
        )
    if family == "exaone4":
        return transformers.Exaone4Config(**sizes, sliding_window=4, layer_types=alternating)
    if family == "cohere2":
        return transformers.Cohere2Config(
            **sizes, sliding_window=4, layer_types=alternating, logit_scale=0.5
        )
    if family == "starcoder2":
        return transformers.Starcoder2Config(**sizes)
    if family == "nemotron":
        return transformers.NemotronConfig(**sizes, mlp_bias=True)
    if family == "granite":
        return transformers.GraniteConfig(
            **sizes, residual_multiplier=0.4, logits_scaling=0.5, attention_bias=True
        )
    if family == "phi3":
        return transformers.Phi3Config(**sizes, pad_token_id=0)
    if family == "glm4":
        return transformers.Glm4Config(**sizes, pad_token_id=0, head_dim=16)
    if family == "olmo2":
        return transformers.Olmo2Config(**sizes, pad_token_id=0)
    return transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)


@dataclass(frozen=True)
class Step:
    """This many more tokens, on the base or the shift model."""

    num_tokens: int
    model: str


@dataclass
class RankResult:
    """Logits of all tokens [T, V]; keys and values of this rank's heads per layer, by position."""

    logits: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv_heads: tuple[int, ...]
    read: int  # elements that the rank's slots read from the checkpoint, both models


def load(model: Decoder, path: Path) -> int:
    checkpoint = Checkpoint(path)
    slots = list(model.weight_slots())
    checkpoint.check(slots, ignored=["lm_head.weight"] if model.lm_head is None else [])
    checkpoint.copy_into(slots, CPU, show_progress=False)
    return sum(slot.target.numel() for slot in slots)


@torch.inference_mode()
def run_request(
    rank: int,
    layout: ParallelLayout,
    comm_of: Callable[[Sequence[int]], Any],
    path: str,
    tokens: Sequence[int],
    steps: Sequence[Step],
) -> RankResult:
    """Every token's logits, from either model; all steps share one cache."""
    config = DecoderConfig.from_hf(AutoConfig.from_pretrained(path))
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
    models: dict[str, Any] = {
        "base": build_base(config, layout, rank, comm_of, **options),
        "shift": build_shift(config, layout, rank, comm_of, **options),
    }
    read = sum(load(model, Path(path)) for model in models.values())
    specs = models["base"].attention_specs
    assert specs == models["shift"].attention_specs, "both models use one cache"
    cache = KVCache(
        specs, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
    )
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))
    logits, start = [], 0
    for step in steps:
        hidden = forward(models[step.model], layout, cache, tokens, start, step)
        logits.append(models["base"].compute_logits(hidden))
        start += step.num_tokens
    heads = layout.heads(config.num_heads, config.num_kv_heads)
    slots = torch.tensor([slot_of(position) for position in range(start)])
    return RankResult(
        logits=torch.cat(logits),
        keys=[keys.flatten(0, 1)[slots] for keys, _ in cache.layers],
        values=[values.flatten(0, 1)[slots] for _, values in cache.layers],
        kv_heads=tuple(heads.kv_heads(layout.shift_index(rank))),
        read=read,
    )


def slot_of(position: int) -> int:
    """Blocks in a shuffled order; block 0 belongs to no request."""
    block = NUM_BLOCKS - 1 - position // BLOCK_SIZE
    return block * BLOCK_SIZE + position % BLOCK_SIZE


def forward(
    model: Any,
    layout: ParallelLayout,
    cache: KVCache,
    tokens: Sequence[int],
    start: int,
    step: Step,
) -> torch.Tensor:
    """Hidden states of the step's tokens; the base model's padding is poisoned and cut off."""
    stop = start + step.num_tokens
    padded = layout.padded_tokens(step.num_tokens) if step.model == "base" else step.num_tokens
    padding = padded - step.num_tokens
    table = torch.zeros(1, NUM_BLOCKS, dtype=torch.int32)
    for index in range(-(-stop // BLOCK_SIZE)):
        table[0, index] = NUM_BLOCKS - 1 - index
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, step.num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([stop], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor([slot_of(p) for p in range(start, stop)] + [-1] * padding),
        max_query_len=step.num_tokens,
        max_seq_len=stop,
        kv_caches=cache.layers,
        backend=TorchPagedAttention(),
    )
    ids = torch.tensor([*tokens[start:stop], *[1] * padding])
    positions = torch.tensor([*range(start, stop), *[0] * padding])
    with set_forward_context(attn_metadata=metadata):
        hidden: torch.Tensor = model.forward(ids, positions)
    return hidden[: step.num_tokens]
