"""Classes and scores of pairs, compared with transformers' own heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_encoders import ENCODERS, PROMPTS, open_encoder, save_encoder

from ostinato import LLM, ConfigError, RequestError

CLASSIFIER = transformers.AutoModelForSequenceClassification
NAMES = {0: "bad", 1: "fair", 2: "good"}
QUERY = "w10 w11 w12"
DOCUMENTS = ["w20 w21", "w10 w11 w12 w13", "w30", "w40 w41 w42 w43 w44 w45 w46 w47"]


def save_classifier(path: Path, name: str = "bert", num_labels: int = 3, **options: Any) -> Any:
    labels = {"id2label": NAMES} if num_labels == 3 else {"num_labels": num_labels}
    return save_encoder(path, name, CLASSIFIER, tokenizer=True, **labels, **options)


@torch.no_grad()
def logits_of(model: Any, prompts: Any = PROMPTS) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in prompts])


def probabilities_of(llm: LLM) -> torch.Tensor:
    return torch.tensor([list(each.probs.values()) for each in llm.classify(PROMPTS)])


def scores_of(llm: LLM, *args: Any, **options: Any) -> torch.Tensor:
    return torch.tensor([each.score for each in llm.score(*args, **options)])


# --- classes -----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
@pytest.mark.parametrize("name", ENCODERS)
def test_classes_are_those_of_transformers(
    name: str, mode: str, device: torch.device, tmp_path: Path
) -> None:
    expected = logits_of(save_classifier(tmp_path, name)).softmax(-1)
    with open_encoder(tmp_path, device, mode=mode) as llm:
        torch.testing.assert_close(probabilities_of(llm), expected, atol=2e-5, rtol=1e-4)
        result = llm.classify(PROMPTS[2])[0]
    assert list(result.probs) == list(NAMES.values())
    assert result.label == NAMES[int(expected[2].argmax())]
    assert result.prompt_token_ids == PROMPTS[2]


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda logits: logits),
        ({"problem_type": "single_label_classification"}, lambda logits: logits.softmax(-1)),
        ({"num_labels": 1}, torch.sigmoid),
        (
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            lambda logits: logits,
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            torch.sigmoid,
        ),
    ],
)
def test_probabilities_follow_the_config(
    options: dict[str, Any], activation: Any, tmp_path: Path
) -> None:
    model = save_classifier(tmp_path, **options)
    expected = activation(logits_of(model))
    with open_encoder(tmp_path, mode="NONE") as llm:
        torch.testing.assert_close(probabilities_of(llm), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pad_token", [None, 100])
def test_padding_tokens_beyond_the_table_of_positions(
    pad_token: int | None, tmp_path: Path
) -> None:
    """As in Qwen3: no position is counted from them."""
    model = save_classifier(tmp_path, "qwen3", pad_token_id=pad_token)
    prompts = [[token for token in prompt if token != pad_token] for prompt in PROMPTS]
    expected = logits_of(model, prompts).softmax(-1)
    with open_encoder(tmp_path, mode="NONE") as llm:
        got = torch.tensor([list(each.probs.values()) for each in llm.classify(prompts)])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path, sbert_ce_default_activation_function="torch.nn.Softplus")
    with (
        open_encoder(tmp_path, mode="NONE") as llm,
        pytest.raises(ConfigError, match=r"activation 'torch.nn.Softplus'; Identity and Sigmoid"),
    ):
        llm.classify(PROMPTS)


def test_a_head_that_reads_other_states_is_refused(tmp_path: Path) -> None:
    """ALBERT's pooler is a part of its encoder's forward that no head includes."""
    config = transformers.AlbertConfig(
        vocab_size=128,
        embedding_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    CLASSIFIER.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not a function of a sequence's first, last or mean"):
        open_encoder(tmp_path)


# --- scores ------------------------------------------------------------------------------------


@torch.no_grad()
def pair_logits(model: Any, tokenizer: Any, pairs: Any, **options: Any) -> torch.Tensor:
    logits = []
    for pair in pairs:
        encoded = tokenizer(*pair, return_tensors="pt", return_token_type_ids=True, **options)
        types = {"token_type_ids": encoded["token_type_ids"]}
        if getattr(model.config, "type_vocab_size", 0) < 2:
            types = {}
        logits.append(model(input_ids=encoded["input_ids"], **types).logits[:, 0])
    return torch.cat(logits)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "qwen3"])
def test_cross_encoders_read_pairs(name: str, device: torch.device, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, name, num_labels=1)
    with open_encoder(tmp_path, device) as llm:
        pairs = [(QUERY, document) for document in DOCUMENTS]
        expected = pair_logits(model, llm.tokenizer, pairs).sigmoid()
        got = scores_of(llm, QUERY, DOCUMENTS)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        # A query for each document.
        swapped = pair_logits(model, llm.tokenizer, [(d, QUERY) for d in DOCUMENTS]).sigmoid()
        got = scores_of(llm, DOCUMENTS, [QUERY] * len(DOCUMENTS))
        torch.testing.assert_close(got, swapped, atol=2e-5, rtol=1e-4)
        assert (expected - swapped).abs().max() > 1e-3


def test_long_pairs_are_truncated_if_asked(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, num_labels=1)
    pair = (QUERY, " ".join(f"w{5 + n % 100}" for n in range(70)))
    with open_encoder(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"documents\[0\] with its query has 76 tokens"):
            llm.score(*pair)
        (result,) = llm.score(*pair, truncate=True)
        limit = {"truncation": True, "max_length": 64}
        expected = pair_logits(model, llm.tokenizer, [pair], **limit).sigmoid()
    assert len(result.prompt_token_ids) == 64
    assert result.score == pytest.approx(float(expected), abs=2e-5)


def test_scores_of_embeddings_are_cosines(tmp_path: Path) -> None:
    save_encoder(tmp_path, "qwen3", tokenizer=True)
    with open_encoder(tmp_path) as llm:
        query, *documents = (each.embedding for each in llm.embed([QUERY, *DOCUMENTS]))
        expected = F.cosine_similarity(query[None], torch.stack(documents))
        torch.testing.assert_close(scores_of(llm, QUERY, DOCUMENTS), expected)
        reversed_documents = DOCUMENTS[::-1]
        each = F.cosine_similarity(torch.stack(documents), torch.stack(documents[::-1]))
        torch.testing.assert_close(scores_of(llm, DOCUMENTS, reversed_documents), each)
        torch.testing.assert_close(scores_of(llm, [5, 6], [[5, 6]]), torch.ones(1))


@pytest.mark.slow
def test_bad_scores_are_named(tmp_path: Path) -> None:
    save_classifier(tmp_path / "three")
    with (
        open_encoder(tmp_path / "three", mode="NONE") as llm,
        pytest.raises(RequestError, match="one label, and this one has 3; use classify"),
    ):
        llm.score(QUERY, DOCUMENTS)
    save_classifier(tmp_path / "one", num_labels=1)
    with open_encoder(tmp_path / "one", mode="NONE") as llm:
        with pytest.raises(RequestError, match="2 queries for 4 documents"):
            llm.score([QUERY, QUERY], DOCUMENTS)
        with pytest.raises(RequestError, match="documents must be text or a list of texts"):
            llm.score(QUERY, [])
        with pytest.raises(RequestError, match=r"documents\[1\] must be text"):
            llm.score(QUERY, ["w4", [5, 6]])
        with pytest.raises(RequestError, match="was loaded to classify, not to embed"):
            llm.embed(QUERY)
    (tmp_path / "one" / "tokenizer.json").unlink()
    (tmp_path / "one" / "tokenizer_config.json").unlink()
    with (
        open_encoder(tmp_path / "one", mode="NONE") as llm,
        pytest.raises(RequestError, match="score needs a tokenizer"),
    ):
        llm.score(QUERY, DOCUMENTS)
    save_encoder(tmp_path / "embeds", tokenizer=True)
    with (
        open_encoder(tmp_path / "embeds", mode="NONE") as llm,
        pytest.raises(RequestError, match=r"documents\[1\] contains 500"),
    ):
        llm.score(QUERY, ["w4", [500]])
