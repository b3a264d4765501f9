"""``explain_batch``: the answer is that of the engine, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import BatchError, ConfigError, CUDAGraphMode, GraphConfig, Reason
from ostinato.config import EngineConfig
from ostinato.engine.explain import explain_batch


def explain(
    num_tokens: int, num_reqs: int, max_query_len: int | None = None, **graphs: Any
) -> dict[str, Any]:
    options = {"capture_sizes": [1, 2, 4, 8, 16], **graphs}
    config = EngineConfig(
        device="cpu",
        attention="torch",
        graphs=GraphConfig(**options),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    return explain_batch(
        config, num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=max_query_len
    )


EAGER = "eagerly"
CASES: list[tuple[str, tuple[int, ...], str, int, Reason]] = [
    ("FULL_AND_PIECEWISE", (7, 7), "FULL graph", 8, Reason.UNIFORM_DECODE),
    ("FULL_AND_PIECEWISE", (7, 2), "PIECEWISE graph", 8, Reason.MIXED),
    ("FULL_AND_PIECEWISE", (17, 8), EAGER, 17, Reason.TOO_LARGE),
    ("FULL_AND_FULL", (7, 7), "FULL graph", 8, Reason.UNIFORM_DECODE),
    ("FULL_AND_FULL", (7, 2), "FULL graph", 8, Reason.MIXED),
    ("FULL_AND_FULL", (17, 8), EAGER, 17, Reason.TOO_LARGE),
    ("FULL_DECODE_ONLY", (8, 8), "FULL graph", 8, Reason.UNIFORM_DECODE),
    ("FULL_DECODE_ONLY", (8, 7), EAGER, 8, Reason.MIXED_NOT_PLANNED),
    ("FULL", (3, 3), "FULL graph", 4, Reason.MIXED),
    ("FULL", (13, 2), "FULL graph", 16, Reason.MIXED),
    ("PIECEWISE", (3, 3), "PIECEWISE graph", 4, Reason.MIXED),
    ("NONE", (3, 3), EAGER, 3, Reason.MODE_NONE),
]


@pytest.mark.parametrize(("mode", "batch", "runs", "padded_to", "reason"), CASES)
def test_how_a_batch_runs(
    mode: str, batch: tuple[int, ...], runs: str, padded_to: int, reason: Reason
) -> None:
    answer = explain(*batch, mode=mode)
    assert answer["runs"] == runs
    assert answer["padded_to"] == padded_to
    assert answer["padding"] == padded_to - batch[0]
    assert answer["reason"] == reason.value
    replays = answer["full_sampler"].startswith("replayed")
    assert replays == (reason is Reason.UNIFORM_DECODE)
    assert answer["requested_mode"] == answer["mode_in_force"] == mode
    assert (answer["key"] == "-") == (runs == EAGER)
    assert answer["captured_sizes"] == ([] if mode == "NONE" else [1, 2, 4, 8, 16])
    assert answer["fits_one_step"] == "yes"


def test_an_answer_in_full() -> None:
    assert explain(3, 3) == {
        "batch": "3 tokens, 3 requests, longest query 1",
        "fits_one_step": "yes",
        "requested_mode": "FULL_AND_PIECEWISE",
        "mode_in_force": "FULL_AND_PIECEWISE",
        "mode_changed_because": "-",
        "attention": "torch, capturable: ALWAYS",
        "prefix_caching": "on",
        "runs": "FULL graph",
        "padded_to": 4,
        "padding": 1,
        "key": "BatchDescriptor(num_tokens=4, num_reqs=4, uniform=True, has_lora=False, "
        "num_active_loras=0, query_len=None)",
        "reason": "uniform decode batch with a captured graph",
        "full_sampler": "replayed; captured when a batch of this size needs it for the second time",
        "captured_sizes": [1, 2, 4, 8, 16],
        "sizes_without_decode_graph": [16],
    }


def test_sizes_that_no_decode_batch_reaches_are_listed() -> None:
    answer = explain(6, 6, capture_sizes=[4, 50])
    assert (answer["runs"], answer["padded_to"]) == ("PIECEWISE graph", 50)
    assert answer["sizes_without_decode_graph"] == [50]
    assert explain(6, 6, capture_sizes=[4, 50], mode="FULL")["sizes_without_decode_graph"] == []


def test_the_longest_query_counts() -> None:
    """Four tokens of two requests: an even split, unless something else is said."""
    assert "longest query 2" in explain(4, 2)["batch"]
    assert "longest query 3" in explain(4, 2, 3)["batch"]


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [(65, 3), (40, 9)])
def test_more_than_a_step_takes(num_tokens: int, num_reqs: int) -> None:
    assert explain(num_tokens, num_reqs)["fits_one_step"] == (
        "no: a step takes at most 64 tokens (max_num_batched_tokens) and 8 requests (max_num_seqs)"
    )


BAD: list[tuple[tuple[int, ...], str]] = [
    ((0, 0), "num_tokens is 0 and num_reqs is 0, but every request has at least one"),
    ((3, 4), "num_tokens is 3 and num_reqs is 4, but every request has at least one"),
    ((3, 0), "num_tokens is 3 and num_reqs is 0, but every request has at least one"),
    ((8, 3, 2), "max_query_len is 2, but the longest query of 3 requests with 8 tokens has 3 to 6"),
    ((8, 3, 7), "max_query_len is 7, but the longest query of 3 requests with 8 tokens has 3 to 6"),
    ((8, 3, 0), "max_query_len is 0, but the longest query of 3 requests with 8 tokens has 3 to 6"),
]


@pytest.mark.parametrize(("batch", "message"), BAD)
def test_batches_that_do_not_exist(batch: tuple[int, ...], message: str) -> None:
    with pytest.raises(BatchError) as error:
        explain(*batch)
    assert str(error.value).startswith(message)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="capture size 128 is above max_num_batched_tokens=64"):
        explain(3, 3, capture_sizes=[128])


@given(data=st.data(), mode=st.sampled_from(list(CUDAGraphMode)))
def test_every_batch_has_an_answer(data: st.DataObject, mode: CUDAGraphMode) -> None:
    num_tokens = data.draw(st.integers(1, 64))
    num_reqs = data.draw(st.integers(1, min(num_tokens, 8)))
    longest = data.draw(st.integers(-(-num_tokens // num_reqs), num_tokens - num_reqs + 1))
    answer = explain(num_tokens, num_reqs, longest, mode=mode)
    uniform = num_tokens == num_reqs
    runs = mode.decode_mode() if uniform else mode.mixed_mode()
    if runs is CUDAGraphMode.NONE or num_tokens > 16:
        assert (answer["runs"], answer["padded_to"]) == ("eagerly", num_tokens)
        assert Reason(answer["reason"]).is_eager
    else:
        smallest = next(size for size in (1, 2, 4, 8, 16) if size >= num_tokens)
        assert (answer["runs"], answer["padded_to"]) == (f"{runs.name} graph", smallest)
        assert not Reason(answer["reason"]).is_eager
