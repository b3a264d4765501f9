"""Converts a GGUF file of a Llama model with a byte-level vocabulary to a transformers directory.

Written for the embedded default, not for every GGUF file: weights become float32 safetensors, and
the tokenizer is rebuilt from the file's vocabulary and merges, because transformers' reader loses
how SmolLM splits digits and which token ends a turn.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from ostinato.errors import ModelLoadError
from ostinato.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_CONTROL_TOKEN = 3  # GGUF's type of tokens that are never part of text
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, target: Path, *, show_progress: bool) -> None:
    """Write config, generation config, tokenizer and weights of ``source`` into ``target``."""
    from gguf import GGUFReader

    bar = ProgressBar(
        desc=f"preparing {source.stem} (once)", unit="tensor", disable=not show_progress
    )
    with bar:
        reader = GGUFReader(source)
        settings = _Settings(reader, source)
        if (
            settings["general.architecture"] != "llama"
            or settings["tokenizer.ggml.pre"] != "smollm"
        ):
            raise ModelLoadError(
                f"{source} is a {settings['general.architecture']} model with a "
                f"{settings['tokenizer.ggml.pre']} tokenizer; only SmolLM models are converted"
            )
        bar.reset(total=len(reader.tensors))
        tensors = {}
        heads = settings["llama.attention.head_count"]
        kv_heads = settings["llama.attention.head_count_kv"]
        for tensor in reader.tensors:
            name, weight = _converted(tensor, heads, kv_heads)
            tensors[name] = weight
            bar.update()
    config = _config(settings, tied_head="lm_head.weight" not in tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    _tokenizer(settings).save_pretrained(target)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id")}
    generation["pad_token_id"] = settings["tokenizer.ggml.padding_token_id"]
    (target / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


class _Settings:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: Any, source: Path) -> None:
        self._fields = reader.fields
        self._source = source

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelLoadError(f"{self._source} has no {key}; the file is not a complete model")
        return self._fields[key].contents()


def _converted(tensor: Any, heads: int, kv_heads: int) -> tuple[str, torch.Tensor]:
    from gguf import dequantize

    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
    names = _TOP_LEVEL if match is None or match[1] is None else _IN_LAYER
    if match is None or match[2] not in names:
        raise ModelLoadError(f"the GGUF file has an unknown tensor {tensor.name}")
    if match[2] == "attn_q":
        weight = _halves(weight, heads)
    elif match[2] == "attn_k":
        weight = _halves(weight, kv_heads)
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{prefix}{names[match[2]]}.weight", weight.contiguous()


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps a rotary pair in neighbouring rows, transformers in the two halves of a head."""
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _config(settings: _Settings, *, tied_head: bool) -> PretrainedConfig:
    from transformers import LlamaConfig

    def shortest(value: float) -> float:
        """The decimal that was rounded to the file's float32: 1e-05, not 9.99999974e-06."""
        return float(f"{value:.6g}")

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=settings["llama.vocab_size"],
        hidden_size=settings["llama.embedding_length"],
        intermediate_size=settings["llama.feed_forward_length"],
        num_hidden_layers=settings["llama.block_count"],
        num_attention_heads=settings["llama.attention.head_count"],
        num_key_value_heads=settings["llama.attention.head_count_kv"],
        max_position_embeddings=settings["llama.context_length"],
        rms_norm_eps=shortest(settings["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shortest(settings["llama.rope.freq_base"]),
        },
        tie_word_embeddings=tied_head,
        bos_token_id=settings["tokenizer.ggml.bos_token_id"],
        eos_token_id=settings["tokenizer.ggml.eos_token_id"],
        pad_token_id=settings["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _tokenizer(settings: _Settings) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, settings["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == _CONTROL_TOKEN
        ]
    )
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=tokens[settings["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[settings["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[settings["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[settings["tokenizer.ggml.padding_token_id"]],
        model_max_length=settings["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=settings["tokenizer.chat_template"],
    )
    return fast
