"""Settings for several ranks: what is refused, and that the command line offers them."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import LLM, GraphConfig
from ostinato.config import EngineConfig
from ostinato.engine.explain import explain_batch
from ostinato.errors import ConfigError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive integer, got 0"),
    (
        {"ulysses_sequence_parallel_size": True},
        "ulysses_sequence_parallel_size must be a positive integer, got True",
    ),
    ({"rank_timeout_s": 0}, "rank_timeout_s must be a positive number, got 0"),
    ({"rank_timeout_s": True}, "rank_timeout_s must be a positive number, got True"),
    (
        {"rank_timeout_s": float("inf")},
        "rank_timeout_s must be at most 31,536,000 (a year), got inf",
    ),
    (
        {"ulysses_sequence_parallel_size": 2, "shift_parallel_threshold": 0},
        "shift_parallel_threshold must be a positive integer, got 0",
    ),
    (
        {"tensor_parallel_size": 2, "shift_parallel_threshold": 8},
        "shift_parallel_threshold is 8, but ulysses_sequence_parallel_size is 1, so no tokens are "
        "split",
    ),
    (
        {"tensor_parallel_size": 2, "graphs": GraphConfig(compile=True)},
        "compile=True supports one device, not 2 ranks",
    ),
    (
        {"ulysses_sequence_parallel_size": 4, "graphs": GraphConfig(eager_fallback=True)},
        "eager_fallback supports one device, not 4 ranks",
    ),
    (
        {"decode_context_parallel_size": 0},
        "decode_context_parallel_size must be a positive integer, got 0",
    ),
    (
        {"dcp_kv_cache_interleave_size": 3},
        "dcp_kv_cache_interleave_size 3 does not divide block_size 16",
    ),
    (
        {"decode_context_parallel_size": 2},
        "decode_context_parallel_size 2 must divide tensor_parallel_size, which is 1",
    ),
    (
        {
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "ulysses_sequence_parallel_size": 2,
        },
        "decode_context_parallel_size 2 does not work with ulysses_sequence_parallel_size 2; leave "
        "one of them out",
    ),
    (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "attention": "numba"},
        "attention 'numba' does not work with decode_context_parallel_size 2",
    ),
    (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "swiftkv_layers": 1},
        "swiftkv_layers does not work with decode_context_parallel_size 2",
    ),
    ({"data_parallel_size": 0}, "data_parallel_size must be a positive integer, got 0"),
    (
        {"data_parallel_lockstep": True},
        "data_parallel_lockstep is on, but data_parallel_size is 1",
    ),
    (
        {
            "data_parallel_size": 2,
            "data_parallel_lockstep": True,
            "ulysses_sequence_parallel_size": 2,
            "shift_parallel_threshold": 8,
        },
        "shift_parallel_threshold 8 does not work with data_parallel_lockstep",
    ),
    (
        {"enable_expert_parallel": True},
        "enable_expert_parallel spreads experts over ranks, but there is only one",
    ),
    (
        {"enable_expert_parallel": True, "ulysses_sequence_parallel_size": 2},
        "ulysses_sequence_parallel_size 2 does not work with enable_expert_parallel",
    ),
    (
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_lora": True},
        "enable_lora supports one rank per replica, not 2",
    ),
    (
        {"data_parallel_size": 2, "graphs": GraphConfig(compile=True)},
        "compile=True supports one device, not 2 ranks",
    ),
    (
        {"tensor_parallel_size": 2, "device": "cuda:1"},
        "device 'cuda:1' names one device, but there are 2 ranks; write 'cuda'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert str(error.value).startswith(message)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="needs 2 GPUs, but torch finds 1"):
        LLM("tiny", random_weights=True, device="cuda", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="x data_parallel_size 2 needs 2 GPUs, but torch finds 1"):
        LLM("tiny", random_weights=True, device="cuda", data_parallel_size=2)


def test_replicas_that_exchange_tokens_run_in_lockstep() -> None:
    assert EngineConfig(data_parallel_size=2, enable_expert_parallel=True).data_parallel_lockstep
    alone = EngineConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    assert not alone.data_parallel_lockstep


@pytest.mark.parametrize(("world_size", "rank"), [("3", "0"), ("1", "0")])
def test_a_world_of_the_wrong_size(
    monkeypatch: pytest.MonkeyPatch, world_size: str, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    message = f"ulysses_sequence_parallel_size 1 needs 2 ranks, but this world has {world_size}"
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", random_weights=True, device="cpu", tensor_parallel_size=2)


def test_explain_names_the_model() -> None:
    config = EngineConfig(
        device="cpu",
        ulysses_sequence_parallel_size=2,
        shift_parallel_threshold=3,
        graphs=GraphConfig(capture_sizes=[1, 2, 4]),
    )
    small = explain_batch(config, num_tokens=3, num_reqs=3)
    assert (small["model"], small["padded_to"]) == ("shift", 4)
    large = explain_batch(config, num_tokens=5, num_reqs=1)
    assert (large["model"], large["padded_to"], large["captured_sizes"]) == ("base", 8, [4, 8])
    assert explain_batch(config, num_tokens=9, num_reqs=1)["padded_to"] == 10  # eager, by two
