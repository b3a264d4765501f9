"""Greedy tokens and logits equal transformers', an independent implementation, in every mode.

The checkpoints are tiny and random; prompts of different lengths are batched together. transformers
runs each prompt alone, through its own ``generate`` with its own attention and cache.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, VOCAB_SIZE, save_tiny
from transformers import AutoModelForCausalLM
from transformers_tokens import greedy_tokens, logits_of_tokens

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.runner.step_result import SampledLogits

NEW_TOKENS = 20  # beyond windows of 8, and into another block of 16
LENGTHS = (1, 5, 23, 40)  # in the order that a batch has them: single tokens first
BY_BREAKS = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL")
# Split by torch.compile, and no code generated: the operators are those of eager.
BY_COMPILE = ("PIECEWISE compiled", "FULL_AND_PIECEWISE compiled")
ARCHITECTURES = {**TINY_NATIVE, **TINY_MIXTURES, **TINY_GENERIC}
QUICK = ("llama", "gpt2")  # one of each kind, where a run is to take a minute


def options_of(value: Any, path: str = "") -> set[tuple[str, object]]:
    """The branches that a config takes in a layer: its options; of numbers and of names of weights,
    whether there is one."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return set().union(*(options_of(getattr(value, name), f"{path}.{name}") for name in names))
    if isinstance(value, tuple):
        return {(path, len(set(value)) > 1)}
    choice = isinstance(value, bool) or (isinstance(value, str) and ".names." not in path)
    return {(path, value if choice or value is None else value not in (0, 1))}


def compiled_architectures() -> list[str]:
    """All that run transformers' own code; and of the native ones, whose layers are one body, as
    many as it takes to have every option of any of them."""
    native = {
        name: options_of(DecoderConfig.from_hf(ARCHITECTURES[name]()))
        for name in (*TINY_NATIVE, *TINY_MIXTURES)
    }
    chosen, seen = [*TINY_GENERIC, "llama"], set(native["llama"])
    while any(options - seen for options in native.values()):
        chosen.append(max(native, key=lambda name: len(native[name] - seen)))
        seen |= native[chosen[-1]]
    return chosen


COMPILED = compiled_architectures()
CASES = [
    pytest.param(name, mode, marks=() if name in QUICK and mode in BY_BREAKS else pytest.mark.slow)
    for name in ARCHITECTURES
    for mode in (*BY_BREAKS, *(BY_COMPILE if name in COMPILED else ()))
    # The other compiled mode runs batches with prompts in the same pieces.
    if name in QUICK or mode != "PIECEWISE compiled"
]
# Graphs replay the operators of eager steps. Both ways for a model of each kind (dense, with layers
# that differ, a mixture, transformers' own), through graphs for the others.
BOTH_WAYS = (*QUICK, "gemma2", "gpt_oss", "deepseek_v3")
WITHOUT_NUMBA = [
    pytest.param(name, mode, marks=() if name in QUICK else pytest.mark.slow)
    for name in ARCHITECTURES
    for mode in ("NONE", "FULL_AND_PIECEWISE")
    if name in BOTH_WAYS or mode != "NONE"
]


def prompts_for(name: str) -> list[list[int]]:
    source = random.Random(name)
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


class Reference:
    """What transformers makes of a checkpoint: its tokens, and its logits for any tokens."""

    def __init__(self, directory: Path, device: torch.device, prompts: list[list[int]]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self.tokens = [greedy_tokens(self._model, prompt, NEW_TOKENS) for prompt in prompts]

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Of every generated token, in one pass over the whole sequence."""
        return logits_of_tokens(self._model, prompt, tokens)


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, torch.device], tuple[Path, Reference]]:
    made: dict[tuple[str, str], tuple[Path, Reference]] = {}

    def make(name: str, device: torch.device) -> tuple[Path, Reference]:
        if (name, device.type) not in made:
            directory = tmp_path_factory.mktemp(name)
            save_tiny(ARCHITECTURES[name](), directory)
            made[name, device.type] = directory, Reference(directory, device, prompts_for(name))
        return made[name, device.type]

    return make


def open_llm(directory: Path, device: torch.device, mode: str) -> LLM:
    mode, *compiled = mode.split()
    graphs = GraphConfig(mode=mode, capture_sizes=[4, 96], compile="eager" if compiled else False)
    return LLM(
        directory,
        device=str(device),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_model_len=128,
        kv_cache_memory_bytes="64M",
        graphs=graphs,
        show_progress=False,
    )


def record_logits(llm: LLM) -> dict[str, list[torch.Tensor]]:
    """Every row of logits that tokens were sampled from, in order, by request."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        for name, row in zip(sampled.request_ids, sampled.logits.clone(), strict=True):
            rows[name].append(row)

    llm.engine.runner.on_logits = record
    return rows


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_greedy_tokens_and_logits(
    name: str,
    mode: str,
    device: torch.device,
    checkpoint: Callable[[str, torch.device], tuple[Path, Reference]],
) -> None:
    directory, reference = checkpoint(name, device)
    prompts = prompts_for(name)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with open_llm(directory, device, mode) as llm:
        rows = record_logits(llm)
        results = llm.generate(prompts, params)
        tokens = [result.outputs[0].token_ids for result in results]
        assert tokens == reference.tokens
        assert len({tuple(row) for row in tokens}) == len(prompts)  # the prompts matter
        assert len(rows) == len(prompts)
        for prompt, result in zip(prompts, results, strict=True):
            logits = torch.stack(rows[f"{result.request_id}.0"])
            expected = reference.logits(prompt, result.outputs[0].token_ids)
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        eager_steps = {"NONE": NEW_TOKENS, "FULL_DECODE_ONLY": 1}
        assert llm.engine.runner.stats.misses == eager_steps.get(mode, 0)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mode"), WITHOUT_NUMBA)
def test_greedy_tokens_without_numba(
    name: str,
    mode: str,
    checkpoint: Callable[[str, torch.device], tuple[Path, Reference]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a CPU runs where no kernels can be compiled: torch's operators alone."""
    monkeypatch.setattr("ostinato.ops.numba.has_numba", lambda: False)
    monkeypatch.setattr("ostinato.attention.has_numba", lambda: False)
    device = torch.device("cpu")
    directory, reference = checkpoint(name, device)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with open_llm(directory, device, mode) as llm:
        assert llm.engine.runner.backend.name == "torch"
        results = llm.generate(prompts_for(name), params)
    assert [result.outputs[0].token_ids for result in results] == reference.tokens


@pytest.mark.slow
@pytest.mark.parametrize("order", ["language_model.model", "model.language_model"])
def test_the_language_model_of_gemma_3(order: str, tmp_path: Path) -> None:
    """In a checkpoint with an image encoder, under either order of names."""
    text = ARCHITECTURES["gemma3"]().to_dict()
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_id=VOCAB_SIZE - 1,
        tie_word_embeddings=False,
    )
    save_tiny(config, tmp_path, auto=transformers.AutoModelForImageTextToText)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {
        name.replace("language_model.model", order).replace(
            "language_model.lm_head", "lm_head" if order[0] == "m" else "language_model.lm_head"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    prompts = prompts_for("gemma3")
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with open_llm(tmp_path, torch.device("cpu"), "FULL_AND_PIECEWISE") as llm:
        assert isinstance(llm.engine.model, Decoder)
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            ids = torch.tensor([prompt + result.outputs[0].token_ids])
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(dim=-1).tolist() == result.outputs[0].token_ids


_GEMMA_4_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_PLACEHOLDERS = {
    f"{name}_token_id": VOCAB_SIZE + number  # in no prompt
    for number, name in enumerate(("image", "video", "audio", "boi", "eoi", "boa", "eoa"))
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "audio"),
    [
        (_PER_LAYER, _TOWER),  # its encoder clamps by bounds, which are infinite until trained
        ({**_PER_LAYER, "num_kv_shared_layers": 2}, None),
        ({"hidden_size_per_layer_input": 0}, None),
    ],
    ids=["with-audio", "shared-keys", "one-table"],
)
def test_the_language_model_of_gemma_4(
    text: dict[str, Any], audio: dict[str, Any] | None, tmp_path: Path
) -> None:
    """In a checkpoint with encoders, which are left out; new weights have the same names."""
    config = transformers.Gemma4Config(
        text_config={**_GEMMA_4_TEXT, **text},
        vision_config={**_TOWER, "head_dim": 16, "patch_size": 4},
        audio_config=audio,
        **_PLACEHOLDERS,
    )
    first = save_tiny(config, tmp_path / "0", auto=transformers.AutoModelForImageTextToText)
    other = save_tiny(config, tmp_path / "1", 1, auto=transformers.AutoModelForImageTextToText)
    prompts = prompts_for("gemma3")
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with open_llm(first, torch.device("cpu"), "FULL_AND_PIECEWISE") as llm:
        for path in (first, other, first):
            llm.update_weights(path)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
            for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
                ids = torch.tensor([prompt + result.outputs[0].token_ids])
                with torch.no_grad():
                    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                assert logits.argmax(dim=-1).tolist() == result.outputs[0].token_ids
