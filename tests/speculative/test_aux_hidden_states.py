"""Hidden states of chosen layers come out of every step, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY_NATIVE, save_tiny
from tiny_vision import (
    open_vision,
    picture,
    prompt_of,
    reference,
    save_vision_model,
    tokens_of,
)

from ostinato import (
    LLM,
    ConfigError,
    GraphConfig,
    Proposer,
    ProposerContext,
    SamplingParams,
    Speculation,
)
from ostinato.ops.decode_state import DecodeState

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
PROMPT = [3, 1, 4, 1, 5, 9, 2]


class _Watching(Proposer):
    """Always drafts token 0."""

    def __init__(self, states: Any) -> None:
        self.states = states
        # A number would be copied from the host, which a capture forbids.
        self.draft = torch.zeros((), dtype=torch.int32, device=states[0].device)

    def propose(self, state: DecodeState) -> None:
        rows, last = state.req_indices, state.num_computed[state.req_indices].long()
        state.token_ids[rows, last + 1] = self.draft


@dataclass(frozen=True, kw_only=True)
class Watching(Speculation):
    num_tokens: int = 1
    layers: tuple[int, ...] = (0, 1)

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.layers

    def build(self, context: ProposerContext) -> Proposer:
        return _Watching(context.aux_hidden_states)


def open_llm(checkpoint: Path | str, **settings: Any) -> LLM:
    return LLM(
        str(checkpoint),
        dtype="float32",
        max_num_seqs=2,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        show_progress=False,
        **settings,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_they_are_those_of_transformers(device: torch.device, tmp_path: Path, mode: str) -> None:
    checkpoint = save_tiny(TINY_NATIVE["llama"](), tmp_path / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def expected(tokens: list[int]) -> list[torch.Tensor]:
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [states[layer][0] for layer in (0, 1)]

    graphs = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8])
    with open_llm(checkpoint, device=str(device), graphs=graphs, speculative=Watching()) as llm:
        proposer = llm.engine.runner.memory.proposer
        assert isinstance(proposer, _Watching)

        def check(tokens: list[int], last: int) -> None:
            for got, its in zip(proposer.states, expected(tokens), strict=True):
                torch.testing.assert_close(got[:last].cpu(), its[-last:], rtol=1e-4, atol=1e-4)

        (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1))
        check(PROMPT, len(PROMPT))
        (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2))
        check([*PROMPT, result.outputs[0].token_ids[0], 0], 2)  # a draft follows


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_FULL"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_prompts_with_images(name: str, mode: str, tmp_path: Path) -> None:
    """What transformers' layers read, including what DeepStack has added."""
    model = save_vision_model(tmp_path, name)
    expected: list[torch.Tensor] = []
    for layer in model.model.language_model.layers[:2]:
        layer.register_forward_pre_hook(lambda _, inputs: expected.append(inputs[0][0]))
    prompt = prompt_of(6, picture(24, 16), 7, 8)
    tokens = reference(model, prompt, 1)
    with open_vision(tmp_path, mode, speculative=Watching()) as llm:
        assert tokens_of(llm, [prompt], 1) == [tokens]
        proposer = llm.engine.runner.memory.proposer
        assert isinstance(proposer, _Watching)
        for got, its in zip(proposer.states, expected, strict=True):
            torch.testing.assert_close(got[: len(its)], its, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="aux_hidden_state_layers has 99, but the model's layers"):
        open_llm("tiny", random_weights=True, device="cpu", speculative=Watching(layers=(99,)))


def test_models_that_have_none(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    checkpoint = save_tiny(config, tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="does not expose its layers' hidden states"):
        open_llm(checkpoint, device="cpu", speculative=Watching())
