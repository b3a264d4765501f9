"""A tiny model whose tokens are bytes and a few longer texts, so that it can write anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tiny_models import save_tiny

VOCAB = 300  # more than the tokenizer has, and no multiple of 32
MERGES = [('"', ":"), ("{", '"'), ("a", "b"), ("ab", "c"), ("Ġ", "Ġ"), ('"', ","), ("t", "r")]
END, CALL, END_OF_CALL = "<|im_end|>", "<tool_call>", "</tool_call>"


def save_spelling(directory: Path, chat_template: str | None = None) -> Path:
    """Save a one-layer Llama with random weights and such a tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    vocab = {word: number for number, word in enumerate(words)}
    spelling = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens([END])
    spelling.add_tokens([AddedToken(text, special=False) for text in (CALL, END_OF_CALL)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token=END)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    return save_tiny(config, directory)


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kv_cache_memory_bytes": "4M",
    "show_progress": False,
}
