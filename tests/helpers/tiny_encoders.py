"""Tiny encoders and embedding models with random weights, saved as checkpoints, and a tokenizer
that can join two texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ostinato import LLM, GraphConfig

VOCAB_SIZE = 128
MAX_LEN = 64
_LENGTHS = (9, 1, 30, 2, 9, MAX_LEN, 17, 5, 9, 40, 3)
PROMPTS = [[3 + (7 * n + 11 * k) % (VOCAB_SIZE - 3) for k in range(n)] for n in _LENGTHS]
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _bert() -> PretrainedConfig:
    return transformers.BertConfig(**_SIZES, pad_token_id=0)


def _roberta() -> PretrainedConfig:
    # Its positions count from the number after the padding token's.
    sizes = {**_SIZES, "max_position_embeddings": MAX_LEN + 1}
    return transformers.RobertaConfig(**sizes, pad_token_id=0, type_vocab_size=1)


def _distilbert() -> PretrainedConfig:
    return transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE,
        dim=64,
        hidden_dim=96,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=MAX_LEN,
    )


def _modernbert(**options: Any) -> PretrainedConfig:
    # The first layer sees all tokens, the others four to each side.
    return transformers.ModernBertConfig(
        **_SIZES, **_TOKENS, cls_token_id=1, sep_token_id=2, local_attention=8, **options
    )


def _modernbert_mean() -> PretrainedConfig:
    return _modernbert(classifier_pooling="mean")


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_SIZES, **_TOKENS, num_key_value_heads=2, head_dim=16)


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=MAX_LEN, **_TOKENS
    )


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_SIZES, **_TOKENS, num_key_value_heads=2, sliding_window=8)


ENCODERS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": _bert,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "modernbert_mean": _modernbert_mean,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gpt2": _gpt2,
}


def save_encoder(
    directory: Path,
    name: str = "bert",
    auto: Any = transformers.AutoModel,
    tokenizer: bool = False,
    **options: Any,
) -> Any:
    """Save a model with seeded float32 weights, and return it, ready to compare with.

    ``auto``: its kind. ``options`` change the config.
    """
    config = ENCODERS[name]()
    for option, value in options.items():
        setattr(config, option, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    if tokenizer:
        save_tokenizer(directory)
    return model


def save_tokenizer(directory: Path) -> None:
    """Words are tokens: w3, w4, ... A text is [CLS] ... [SEP], a pair has a second ... [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}
    vocab = special | {f"w{n}": n for n in range(3, VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(directory)


def save_modules(directory: Path, pooling: dict[str, Any], *more: str, **limits: Any) -> None:
    """The files that sentence-transformers adds: modules, their pooling, and limits."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"} | {kind: kind for kind in more}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for kind, path in paths.items()
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if limits:
        (directory / "sentence_bert_config.json").write_text(json.dumps(limits))


def open_encoder(path: Path | str, device: torch.device | str = "cpu", **settings: Any) -> LLM:
    """An engine for up to 8 sequences and 128 tokens in a batch; ``mode`` and ``sizes``: graphs."""
    mode, sizes = settings.pop("mode", "PIECEWISE"), settings.pop("sizes", [8, 32, 128])
    graphs = GraphConfig(mode=mode, capture_sizes=sizes)
    options = {"dtype": "float32", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    return LLM(
        path, device=str(device), graphs=graphs, show_progress=False, **{**options, **settings}
    )
