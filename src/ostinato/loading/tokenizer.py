"""Reads the tokenizer of a checkpoint, and which tokens end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.errors import ModelLoadError, OstinatoError
from ostinato.loading.tokenizer_check import check_tokenizer
from ostinato.models.json_file import check_numbers, read_object
from ostinato.quoting import is_failure, said, shown

if TYPE_CHECKING:
    from ostinato.loading.description import ModelConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Tokenizer classes fully described by their files.
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_LARGEST_TOKENIZER_CONFIG = 64 * 2**20


def read_tokenizer(path: Path) -> Any | None:
    """The tokenizer in the directory ``path``; None if there is none."""
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return None
    check_tokenizer(path)
    try:
        if _tokenizer_class(path) in _PLAIN_TOKENIZERS:
            # Avoids importing every model's configuration to look up the class.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except OstinatoError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelLoadError(
            f"transformers cannot read the tokenizer in {path}: {said(error)}"
        ) from error


def _tokenizer_class(path: Path) -> str | None:
    file = path / "tokenizer_config.json"
    if not file.is_file() or not (path / "tokenizer.json").is_file():
        return None
    stated = read_object(file, largest=_LARGEST_TOKENIZER_CONFIG)
    return stated.get("tokenizer_class") if "auto_map" not in stated else None


def eos_token_ids(path: Path | None, config: ModelConfig, vocab_size: int) -> frozenset[int]:
    """The tokens that end a sequence. A config may name some that the model does not have."""
    where, stated = "config.json", getattr(config, "eos_token_id", None)
    if stated is None and hasattr(config, "get_text_config"):  # of a model that takes images
        stated = getattr(config.get_text_config(), "eos_token_id", None)
    file = None if path is None else path / "generation_config.json"
    if file is not None and file.is_file():
        fields = read_object(file)
        check_numbers(file, fields)
        if fields.get("eos_token_id") is not None:
            where, stated = str(file), fields["eos_token_id"]
    if stated is None:
        return frozenset()
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelLoadError(
            f"eos_token_id in {where} is {shown(stated)}; it must be a token id, a list of them, "
            "or null"
        )
    return frozenset(token for token in ids if token < vocab_size)
