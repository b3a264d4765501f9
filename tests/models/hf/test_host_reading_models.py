"""Models whose own code reads on the host: refused with graphs by name, right without them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_HOST_READING, save_tiny
from transformers import AutoModelForCausalLM
from transformers_tokens import greedy_tokens

from ostinato import LLM, CaptureError, CaptureOutOfMemoryError, GraphConfig, SamplingParams

PROMPTS = [[5, 6, 7], [9], list(range(10, 30))]
NEW_TOKENS = 8
REMEDY = (
    'run it without graphs: graphs=GraphConfig(mode="NONE"), or --mode NONE on the command line'
)
# What reads, in transformers 5.17.
READS = {"dbrx": "one_hot", "jetmoe": "tolist", "aria_text": "cpu"}


def open_llm(path: Path, graphs: GraphConfig) -> LLM:
    return LLM(
        path,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        show_progress=False,
        graphs=graphs,
    )


def reference(path: Path, prompt: list[int]) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return greedy_tokens(model, prompt, NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_HOST_READING)
def test_they_are_refused_with_the_remedy_and_run_by_it(name: str, tmp_path: Path) -> None:
    path = save_tiny(TINY_HOST_READING[name](), tmp_path)
    with pytest.raises(CaptureError, match=re.escape(REMEDY)) as raised:
        open_llm(path, GraphConfig(capture_sizes=[4]))
    assert raised.value.operator is not None
    assert raised.value.operator in str(raised.value)
    assert READS[name] in str(raised.value.source)
    assert f"modeling_{name.removesuffix('_text')}.py" in str(raised.value)
    with open_llm(path, GraphConfig(mode="NONE")) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        results = llm.generate(PROMPTS, params)
    tokens = [result.outputs[0].token_ids for result in results]
    assert tokens == [reference(path, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY", "FULL"])
def test_the_remedy_is_named_in_every_mode(mode: str, tmp_path: Path) -> None:
    path = save_tiny(TINY_HOST_READING["aria_text"](), tmp_path)
    with pytest.raises(CaptureError, match=re.escape(REMEDY)):
        open_llm(path, GraphConfig(mode=mode, capture_sizes=[4]))


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError("no memory")])
def test_no_remedy_where_it_is_none(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error that an eager run has as well, or that less memory would cure."""

    def forward(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("ostinato.models.native.decoder.Decoder.forward", forward)
    expected = CaptureOutOfMemoryError if isinstance(error, MemoryError) else RuntimeError
    with pytest.raises(expected) as raised:
        LLM(
            "tiny",
            random_weights=True,
            device="cpu",
            show_progress=False,
            kv_cache_memory_bytes="4M",
        )
    assert str(error) in str(raised.value)
    assert 'GraphConfig(mode="NONE")' not in str(raised.value)
