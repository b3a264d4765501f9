"""Drafts of an EAGLE-3 head, against the same head in plain torch, without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tiny_models import TINY_NATIVE, save_tiny
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from workers import GlooPool

from ostinato import (
    LLM,
    ConfigError,
    EagleDrafts,
    GraphConfig,
    ModelLoadError,
    SamplingParams,
)
from ostinato.ops.decode_state import DecodeState
from ostinato.scheduling.draft_steps import SpeculationStats

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
PROMPTS = [[1, 2, 3, 1, 2], list(range(10, 75)), [7, 8], [50, 40, 50, 40, 50, 40]]
LAYERS = (0, 1)
NUM_NEW, NUM_DRAFTS = 15, 3


class Reference:
    """A random head for ``model``, and what it drafts after some tokens."""

    def __init__(self, model: Any, *, num_known: int | None) -> None:
        self.model = model
        config = self.config = transformers.LlamaConfig(**model.config.to_dict())
        config.num_hidden_layers = 1
        hidden, width = config.hidden_size, config.intermediate_size
        head_dim = config.head_dim
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        torch.manual_seed(0)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns) / columns**0.5

        def ones() -> torch.Tensor:
            return 1 + torch.randn(hidden) * 0.2

        self.tensors = {
            "fc.weight": random(hidden, len(LAYERS) * hidden),
            "midlayer.input_layernorm.weight": ones(),
            "midlayer.hidden_norm.weight": ones(),
            "midlayer.self_attn.q_proj.weight": random(queries, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": random(keys, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": random(keys, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": random(hidden, queries),
            "midlayer.post_attention_layernorm.weight": ones(),
            "midlayer.mlp.gate_proj.weight": random(width, hidden),
            "midlayer.mlp.up_proj.weight": random(width, hidden),
            "midlayer.mlp.down_proj.weight": random(hidden, width),
            "norm.weight": ones(),
            "lm_head.weight": random(num_known or config.vocab_size, hidden),
        }
        if num_known:
            known = torch.randperm(config.vocab_size)[:num_known].sort().values
            self.tensors["d2t"] = known - torch.arange(num_known)

    def save(self, path: Path) -> Path:
        path.mkdir()
        save_file(
            {name: each.contiguous() for name, each in self.tensors.items()},
            path / "model.safetensors",
        )
        (path / "config.json").write_text(json.dumps(self.config.to_dict()))
        return path

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _layer(self, next_ids: list[int], fused: torch.Tensor) -> torch.Tensor:
        """All positions at once."""
        tensors, config, count = self.tensors, self.config, len(next_ids)
        embedding = self.model.get_input_embeddings()(torch.tensor(next_ids))
        x = torch.cat(
            (
                self._normed(embedding, "midlayer.input_layernorm"),
                self._normed(fused, "midlayer.hidden_norm"),
            ),
            dim=-1,
        )
        query, key, value = (
            F.linear(x, tensors[f"midlayer.self_attn.{name}_proj.weight"])
            .view(1, count, -1, config.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(count)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        flat = attended.transpose(1, 2).reshape(count, -1)
        hidden = fused + F.linear(flat, tensors["midlayer.self_attn.o_proj.weight"])
        normed = self._normed(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (
            tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return hidden + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    @torch.no_grad()
    def drafts(self, tokens: list[int]) -> list[int]:
        """What follows ``tokens``, of which the model has computed all but the last."""
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        fused = F.linear(
            torch.cat([states[layer][0] for layer in LAYERS], dim=-1), self.tensors["fc.weight"]
        )
        next_ids, drafts = tokens[1:], list[int]()
        for _ in range(NUM_DRAFTS):
            hidden = self._layer(next_ids, fused)[-1:]
            logits = F.linear(self._normed(hidden, "norm"), self.tensors["lm_head.weight"])
            draft = int(logits.argmax())
            if "d2t" in self.tensors:
                draft += int(self.tensors["d2t"][draft])
            drafts.append(draft)
            next_ids, fused = [*next_ids, draft], torch.cat((fused, hidden))
        return drafts


def open_llm(model: Path, head: Path, **settings: Any) -> LLM:
    return LLM(
        str(model),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,  # prompts take several steps
        max_model_len=96,
        kv_cache_memory_bytes="4M",
        show_progress=False,
        speculative=EagleDrafts(model=str(head), layers=LAYERS, num_tokens=NUM_DRAFTS),
        **settings,
    )


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, **options)


def write_down_drafts(
    llm: LLM, texts: list[list[int]], num_right: int
) -> list[tuple[list[int], list[int]]]:
    """The text and the drafts of every request, step by step.

    Of the drafts that the model then verifies, ``num_right`` are replaced by what is in ``texts``.
    """
    proposer = llm.engine.runner.memory.proposer
    assert proposer is not None
    propose: Callable[[DecodeState], None] = proposer.propose
    written = []

    def propose_and_write(state: DecodeState) -> None:
        propose(state)
        for row in state.req_indices.tolist():
            end = int(state.num_computed[row]) + 1
            if row == state.padding_req_index or state.query_len == 1:
                continue
            tokens = state.token_ids[row, : end + NUM_DRAFTS].tolist()
            written.append((tokens[:end], tokens[end:]))
            (text,) = (text for text in texts if text[:end] == tokens[:end])
            right = torch.tensor(text[end : end + num_right], dtype=torch.int32)
            state.token_ids[row, end : end + len(right)] = right

    proposer.propose = propose_and_write  # type: ignore[method-assign]
    return written


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("num_right", [0, 2, NUM_DRAFTS])
@pytest.mark.parametrize("num_known", [None, 100], ids=["all tokens", "some tokens"])
def test_drafts_are_those_of_the_head(
    target: Path, model: Any, tmp_path: Path, num_known: int | None, num_right: int
) -> None:
    reference = Reference(model, num_known=num_known)
    head = reference.save(tmp_path / "head")
    texts = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW + NUM_DRAFTS,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        for prompt in PROMPTS
    ]
    with open_llm(target, head, device="cpu", graphs=GraphConfig(mode="NONE")) as llm:
        written = write_down_drafts(llm, texts, num_right)
        for result, text in zip(llm.generate(PROMPTS, greedy()), texts, strict=True):
            assert result.prompt_token_ids + result.outputs[0].token_ids == text[:-NUM_DRAFTS]
        assert llm.speculation.acceptance_length > 0.9 * (1 + num_right)
    assert len(written) >= 12
    for text, drafts in written:
        assert drafts == reference.drafts(text)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_the_same_in_every_mode(
    device: torch.device, target: Path, model: Any, tmp_path: Path, mode: str
) -> None:
    head = Reference(model, num_known=None).save(tmp_path / "head")
    params = greedy(logit_bias=dict.fromkeys((5, 6, 7), 100.0))
    results = []
    captured = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 32])
    for graphs in (GraphConfig(mode="NONE"), captured):
        with open_llm(target, head, device=str(device), graphs=graphs) as llm:
            outputs = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
            results.append((outputs, llm.speculation))
    assert results[0] == results[1]
    assert results[0][1].num_drafts > 50


def one_by_one(
    model: str, head: str, known: list[int], num_replicas: int
) -> tuple[Any, SpeculationStats]:
    """As many prompts at a time as there are replicas: one request for each.

    The model knows as few tokens as the head, so some drafts are right.
    """
    options = {"device": "cpu", "data_parallel_size": num_replicas, "enable_prefix_caching": False}
    options["data_parallel_lockstep"] = num_replicas > 1
    params = greedy(logit_bias=dict.fromkeys(known, 100.0))
    outputs = []
    with open_llm(Path(model), Path(head), **options) as llm:
        for first in range(0, len(PROMPTS), num_replicas):
            results = llm.generate(PROMPTS[first : first + num_replicas], params)
            outputs += [each.outputs[0].token_ids for each in results]
        return outputs, llm.speculation


@pytest.mark.slow
def test_drafts_are_the_same_on_every_replica(
    gloo_pool: GlooPool, target: Path, model: Any, tmp_path: Path
) -> None:
    reference = Reference(model, num_known=3)
    known = (reference.tensors["d2t"] + torch.arange(3)).tolist()
    names = str(target), str(reference.save(tmp_path / "head"))
    expected = one_by_one(*names, known, 1)
    assert gloo_pool.run(one_by_one, *names, known, 2)[0] == expected
    assert expected[1].num_accepted > 5


def test_heads_that_do_not_fit(target: Path, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EagleDrafts needs the name of a head, got ''"):
        EagleDrafts()
    reference = Reference(model, num_known=None)
    head = reference.save(tmp_path / "head")

    def open_with(**options: Any) -> LLM:
        drafts = EagleDrafts(model=str(head), **options)
        return LLM(str(target), device="cpu", speculative=drafts, show_progress=False)

    with pytest.raises(ConfigError, match="the head reads 2 different layers of the model's"):
        open_with(layers=(0, 0))
    with pytest.raises(ConfigError, match="aux_hidden_state_layers has 50"):
        open_with(layers=(0, 50))
    with pytest.raises(ConfigError, match="EagleDrafts reads hidden states inside the model"):
        open_llm(target, head, device="cpu", graphs=GraphConfig(compile="eager"))
    del reference.tensors["fc.weight"]
    other = reference.save(tmp_path / "other")
    with pytest.raises(ModelLoadError, match=r"lacks fc.weight; it is not an EAGLE-3 head"):
        LLM(
            str(target),
            device="cpu",
            speculative=EagleDrafts(model=str(other)),
            show_progress=False,
        )
