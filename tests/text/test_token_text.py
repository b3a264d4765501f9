"""The text of a lone token has its spaces, whatever the tokenizer's decoder does with the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from spelling_models import OPTIONS, save_spelling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ostinato import LLM, SamplingParams
from ostinato.text.detokenizer import token_text

PIECES = {"the": "the", "▁the": " the", "▁": " ", "▁▁": "  ", "▁▁the": "  the", "<0x41>": "A"}
DECODERS = {
    "sentencepiece": lambda: decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": lambda: decoders.Metaspace(prepend_scheme="always"),
    "metaspace-never": lambda: decoders.Metaspace(prepend_scheme="never"),
}


def tokenizer_of(decoder: str) -> transformers.PreTrainedTokenizerFast:
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    spelling = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    spelling.pre_tokenizer = pre_tokenizers.Metaspace()
    spelling.decoder = DECODERS[decoder]()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=spelling)


@pytest.mark.parametrize("decoder", DECODERS)
def test_spaces_of_sentencepiece_stay(decoder: str) -> None:
    tokenizer = tokenizer_of(decoder)
    for number, (piece, text) in enumerate(PIECES.items()):
        if piece.startswith("<") and decoder != "sentencepiece":
            continue  # only that one knows bytes
        assert token_text(tokenizer, number) == text


def test_pieces_of_other_tokenizers_are_as_they_decode() -> None:
    words = Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, unk_token="b"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    assert [token_text(tokenizer, token) for token in (0, 1, 2)] == ["▁a", "b", ""]


def test_log_probabilities_tell_such_tokens_apart(tmp_path: Path) -> None:
    save_spelling(tmp_path)
    tokenizer_of("sentencepiece").save_pretrained(tmp_path)
    bias = dict.fromkeys(range(len(PIECES)), 100.0)
    params = SamplingParams(max_tokens=3, logprobs=20, logit_bias=bias, seed=0, ignore_eos=True)
    with LLM(tmp_path, device="cpu", **OPTIONS) as llm:
        (output,) = llm.generate([[1, 2]], params)[0].outputs
    assert output.logprobs is not None
    for row in output.logprobs:
        for token, value in row.items():
            expected = list(PIECES.values())[token] if token < len(PIECES) else ""
            assert value.decoded_token == expected
