"""How many blocks there are, and the memory behind them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from ostinato import ConfigError, DraftModel, GraphConfig
from ostinato.attention.base import AttentionSpec
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.config import EngineConfig
from ostinato.loading.load import load_model
from ostinato.runner import startup
from ostinato.runner.kv_cache import CacheSize, KVCache, bytes_per_block, size_cache
from ostinato.runner.startup import kv_budget
from ostinato.runner.startup.graph_plans import plan_graphs
from ostinato.runner.startup.kv_budget import activation_bytes, kv_cache_budget

CPU = torch.device("cpu")
# Two layers that differ, with values narrower than keys.
SPECS = [
    AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=1.0),
    AttentionSpec(layer=1, num_heads=4, num_kv_heads=1, head_dim=24, value_dim=8, scale=1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_costs_is_what_is_allocated(device: torch.device, dtype: torch.dtype) -> None:
    cache = KVCache(SPECS, num_blocks=7, block_size=4, dtype=dtype, device=device)
    assert [[tuple(tensor.shape) for tensor in layer] for layer in cache.layers] == [
        [(7, 4, 2, 16), (7, 4, 2, 16)],
        [(7, 4, 1, 24), (7, 4, 1, 8)],
    ]
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert all(tensor.dtype is dtype and tensor.device == device for tensor in tensors)
    assert not any(tensor.any() for tensor in tensors)
    per_block = bytes_per_block(SPECS, 4, dtype)
    assert per_block == 4 * (2 * 32 + 32) * dtype.itemsize
    assert cache.num_bytes == 7 * per_block == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_of_a_request(length: int, blocks: int) -> None:
    assert CacheSize(num_blocks=9, block_size=16, max_model_len=length).blocks_per_request == blocks


SETTINGS = st.fixed_dictionaries(
    {
        "budget": st.integers(0, 20_000),
        "bytes_per_block": st.integers(1, 500),
        "block_size": st.integers(1, 40),
        "model_limit": st.integers(1, 3000),
        "max_model_len": st.none() | st.integers(1, 3000),
        "max_num_seqs": st.integers(1, 20),
    }
)


def cost_of_one(num_tokens: int, asked: dict[str, Any]) -> int:
    """Bytes for one request of that length, and the reserved block."""
    return (1 + -(-num_tokens // asked["block_size"])) * int(asked["bytes_per_block"])


def why_not(asked: dict[str, Any]) -> list[str]:
    """What the error must say, if the length asked for (or any at all) cannot be had."""
    length, limit, budget = asked["max_model_len"], asked["model_limit"], asked["budget"]
    if length is not None and length > limit:
        return [f"max_model_len {length} exceeds the model's limit of {limit}; lower it"]
    if budget >= cost_of_one(length or 1, asked):
        return []
    needed = cost_of_one(length or limit, asked)
    return [f"{budget:,} bytes", f"one request of {length or limit} tokens", f"({needed:,} bytes"]


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=SETTINGS)
def test_any_budget(asked: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    if texts := why_not(asked):
        with pytest.raises(ConfigError) as error:
            size_cache(**asked)
        assert all(text in str(error.value) for text in texts)
        return
    size = size_cache(**asked)
    budget, limit, length = asked["budget"], asked["model_limit"], size.max_model_len
    # All that can be used, as far as it can be afforded; and the longest request fits alone.
    useful = 1 + asked["max_num_seqs"] * size.blocks_per_request
    assert size.block_size == asked["block_size"]
    assert size.num_blocks == min(useful, budget // asked["bytes_per_block"])
    assert size.num_blocks > size.blocks_per_request > 0
    # The length asked for, the model's own, or the longest that fits, with a warning.
    if asked["max_model_len"] is not None or budget >= cost_of_one(limit, asked):
        assert length == (asked["max_model_len"] or limit)
        assert not caplog.records
        return
    assert cost_of_one(length, asked) <= budget < cost_of_one(length + 1, asked)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"max_model_len is {length} instead of the model's {limit}" in record.message


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (64, 4), (10**9, 8)])
def test_a_limit_in_tokens(tokens: int, blocks: int, caplog: pytest.LogCaptureFixture) -> None:
    """In whole blocks, however many fit; without a given length the longest request is shorter."""
    asked: dict[str, Any] = {"bytes_per_block": 100, "block_size": 16, "max_num_seqs": 2}
    size = size_cache(10**9, max_tokens=tokens, max_model_len=None, model_limit=64, **asked)
    assert size.num_blocks == blocks + 1  # one is reserved
    assert size.max_model_len == min(64, blocks * 16)
    raised = "raise kv_cache_tokens for more" in caplog.text
    assert raised == (blocks < 4)
    # Memory limits it still, and is then named.
    caplog.clear()
    assert (
        size_cache(200, max_tokens=64, max_model_len=None, model_limit=64, **asked).num_blocks == 2
    )
    assert "(100 bytes); raise kv_cache_memory_bytes for more" in caplog.text


def test_the_errors_say_what_to_do() -> None:
    asked = {"bytes_per_block": 100, "block_size": 16, "model_limit": 4096, "max_num_seqs": 8}
    message = (
        "the KV cache has 1,050 bytes, room for 9 blocks of 16 tokens, but one request of 2048 "
        "tokens needs 128 blocks (12,900 bytes with the reserved one); raise "
        "kv_cache_memory_bytes or lower max_model_len"
    )
    with pytest.raises(ConfigError) as error:
        size_cache(1050, max_model_len=2048, **asked)
    assert str(error.value) == message
    # Nothing was asked for, but not even one block is left.
    with pytest.raises(ConfigError, match=r"has 199 bytes, room for 0 blocks of 16 tokens"):
        size_cache(199, max_model_len=None, **asked)


@pytest.mark.parametrize(
    ("given_memory", "budget"), [(None, 512 * 2**20), (12345, 12345), ("2MiB", 2 * 2**20)]
)
def test_the_budget_on_the_cpu(given_memory: int | str | None, budget: int) -> None:
    """A setting or a constant; the model is not run for it."""
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=given_memory)
    device, backend = torch.device("cpu"), TorchPagedAttention()
    plans = plan_graphs(config, device, backend, selects_tokens=False)
    model: Any = SimpleNamespace(device=device)
    assert kv_cache_budget(config, model, plans.model, backend) == budget


def test_a_gpu_without_memory_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(kv_budget, "activation_bytes", lambda *args: 40)
    config = EngineConfig(
        device="cuda", gpu_memory_utilization=0.7, graphs=GraphConfig(mode="NONE")
    )
    device, backend = torch.device("cuda"), TorchPagedAttention()
    plans = plan_graphs(config, device, backend, selects_tokens=False)
    model: Any = SimpleNamespace(device=device)
    with pytest.raises(ConfigError, match=r"of 1,000 bytes, 700 are in use, a step needs 40 and"):
        kv_cache_budget(config, model, plans.model, backend)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (341, 1000))
    assert kv_cache_budget(config, model, plans.model, backend) == 1


@pytest.mark.slow
def test_a_draft_model_needs_memory_to_read_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = 8192
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    LlamaConfig(
        vocab_size=512, intermediate_size=wide, num_hidden_layers=1, **sizes
    ).save_pretrained(tmp_path)
    drafts = DraftModel(model=str(tmp_path), random_weights=True, num_tokens=2)
    config = EngineConfig(
        model="tiny",
        random_weights=True,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        speculative=drafts,
    )
    model = startup.load(config).model
    backend, load = TorchPagedAttention(), partial(load_model, device=CPU, dtype=torch.float32)
    plan = plan_graphs(config, CPU, backend, selects_tokens=False).model
    alone, both = (
        activation_bytes(model, plan, 64, config, backend, speculation)
        for speculation in (None, drafts.load(model, load))
    )
    gate_and_up = 64 * 2 * wide * 4
    assert alone < gate_and_up
    assert gate_and_up < both < 3 * gate_and_up
