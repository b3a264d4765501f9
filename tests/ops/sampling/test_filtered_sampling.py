"""The full sampler's kernels against its torch reference: the same tokens, for every mix of rows.

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU. Blocks and
lists are small here, so that short rows take every path of long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.errors import BatchError
from ostinato.ops.sampling import filtered_sampling
from ostinato.ops.sampling.counter_random import spread_seed
from ostinato.ops.sampling.sampling_reference import (
    SamplingTables,
    Steps,
    processed_logits,
    sample_reference,
)

pytest.importorskip("triton")

NAN, INF = torch.nan, torch.inf
FILTERS = Steps(noise=True, filters=True, penalties=False, bias=False, min_tokens=False)
# A call takes seconds in the interpreter: nested functions are costly there.
few = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=100 if torch.cuda.is_available() else 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=["public", "kernel"])
def run(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    """The operator, as the runtime calls it or as the kernels' launch."""
    if request.param == "public":
        return filtered_sampling.sample_filtered
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")

    def launch(logits, req_indices, lengths, tables, token_ids, steps, tokens) -> None:  # type: ignore[no-untyped-def]
        filtered_sampling.triton_sample_filtered(
            logits, req_indices, lengths, *tables, token_ids, *steps, tokens
        )

    return launch


@pytest.fixture(params=[(128, 1024), (128, 16), (1024, 64)], ids=["lists", "rows", "one block"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, and lists that suffice or do not."""
    block, capacity = request.param
    monkeypatch.setattr(filtered_sampling, "_SEARCH_BLOCK", block)
    monkeypatch.setattr(filtered_sampling, "_CUTOFF_BLOCK", block)
    monkeypatch.setattr(filtered_sampling, "_SAMPLE_BLOCK", block)
    monkeypatch.setattr(filtered_sampling, "_CAPACITY", capacity)
    monkeypatch.setattr(filtered_sampling, "_SMALL_LIST", capacity // 4)


@pytest.fixture
def short_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories take several blocks and turns."""
    monkeypatch.setattr(filtered_sampling, "_HISTORY_BLOCK", 4)
    monkeypatch.setattr(filtered_sampling, "_HISTORY_CHUNKS", 2)
    monkeypatch.setattr(filtered_sampling, "_COPY_BLOCK", 16)
    monkeypatch.setattr(filtered_sampling, "_SAMPLE_BLOCK", 16)
    monkeypatch.setattr(filtered_sampling, "_SEARCH_BLOCK", 16)


class Rows:
    """What ``sample_filtered`` takes; req_indices that no row names are poisoned."""

    def __init__(self, rows: list[dict[str, Any]], logits: Tensor, device: torch.device) -> None:
        num_rows, num_slots = len(rows), len(rows) + 2
        floats = torch.full((num_slots, 6), NAN)
        ints = torch.full((num_slots, 6), 2**40)
        masks = torch.zeros((num_slots, -(-logits.shape[1] // 32)), dtype=torch.int32)
        bias_ids = torch.full((num_slots, 5), 2**40)
        bias_values = torch.full((num_slots, 5), NAN)
        stop_ids = torch.full((num_slots, 4), 2**40)
        req_indices = torch.randperm(num_slots)[:num_rows]
        self.lengths = torch.randint(4, 20, (num_rows,), dtype=torch.int32, device=device)
        for req_index, row in zip(req_indices.tolist(), rows, strict=True):
            floats[req_index] = torch.tensor(
                [
                    row.get("temperature", 1.0),
                    row.get("top_p", 1.0),
                    row.get("min_p", 0.0),
                    row.get("presence", 0.0),
                    row.get("frequency", 0.0),
                    row.get("repetition", 1.0),
                ]
            )
            ints[req_index] = torch.tensor(
                [
                    row.get("top_k", 0),
                    spread_seed(row.get("seed", req_index)),
                    row.get("prompt_len", 3),
                    row.get("min_tokens", 0),
                    0,
                    int("allowed" in row),
                ]
            )
            for token in row.get("allowed", ()):
                masks[req_index, token // 32] |= np.uint32(1 << token % 32).astype(np.int32).item()
            bias_ids[req_index] = stop_ids[req_index] = -1
            bias, stops = row.get("bias", {}), row.get("stops", [])
            bias_ids[req_index, : len(bias)] = torch.tensor([*bias], dtype=torch.int64)
            bias_values[req_index, : len(bias)] = torch.tensor([*bias.values()])
            stop_ids[req_index, : len(stops)] = torch.tensor(stops, dtype=torch.int64)
        self.logits = logits.to(device)
        self.req_indices = req_indices.to(device)
        self.tables = SamplingTables(
            *(each.to(device) for each in (floats, ints, bias_ids, bias_values, stop_ids, masks))
        )
        # Few tokens, so that some repeat, and what is no token at all.
        vocab_size = logits.shape[1]
        history = torch.randint(vocab_size, (num_slots, 20), dtype=torch.int32) % 7
        history[:, 2::5], history[:, 3::5] = vocab_size - 1, vocab_size
        history[:, 4::5] = -1
        self.token_ids = history.to(device)
        self.tokens = torch.full((num_rows,), -1, device=device)

    def check(self, run: Callable[..., None], steps: Steps = FILTERS) -> Tensor:
        """Run it; every row must have the reference's token, computed for this row alone."""
        arguments = self.tables, self.token_ids, steps
        run(self.logits, self.req_indices, self.lengths, *arguments, self.tokens)
        for row in range(len(self.req_indices)):
            one = slice(row, row + 1)
            expected = sample_reference(
                self.logits[one], self.req_indices[one], self.lengths[one], *arguments
            )
            assert self.tokens[row] == expected, row
        return self.tokens


def check_kept(batch: Rows) -> None:
    """The tokens that the kernels' cutoffs keep, against the reference, as far as noise reaches."""
    from ostinato.ops.sampling.triton.filters import CUT_KEY, CUT_TOKEN

    logits = batch.logits.float()
    kept = processed_logits(
        logits, batch.req_indices, batch.lengths, batch.tables, batch.token_ids, FILTERS
    ).isfinite()
    rows = filtered_sampling.Rows(batch.logits, batch.logits, batch.req_indices, batch.req_indices)
    fields = filtered_sampling.cutoffs(rows, batch.tables)
    temperature, top_p, min_p = batch.tables.floats[batch.req_indices, :3].T
    is_filtered = (batch.tables.ints[batch.req_indices, 0] > 0) | (top_p < 1) | (min_p > 0)
    is_filtered &= temperature > 0
    behind = logits.amax(dim=1, keepdim=True) - logits
    tokens = torch.arange(logits.shape[1], device=logits.device)
    keys = behind.view(torch.int32) & 0x7FFFFFFF  # -0.0 is 0.0
    key, last = (fields[:, column.value].unsqueeze(1) for column in (CUT_KEY, CUT_TOKEN))
    found = (keys < key) | ((keys == key) & (tokens <= last))
    found &= ~((-behind / temperature.unsqueeze(1)).exp() < min_p.unsqueeze(1))
    matters = (behind <= 26 * temperature.unsqueeze(1)) & is_filtered.unsqueeze(1)
    assert torch.equal(found & matters, kept & matters)


def check_filters(
    run: Callable[..., None], rows: list[dict[str, Any]], logits: Tensor, device: torch.device
) -> None:
    batch = Rows(rows, logits, device)
    for _ in range(10 if device.type == "cuda" else 1):  # several draws
        batch.check(run)
        batch.lengths += 1


any_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.05, 0.7, 1.0, 1.0, 3.0, 100.0, 1e30]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 40, 150, 299, 10**9]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-7, 0.9999999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.3, 1.0]),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@pytest.mark.slow
@few
@given(
    rows=st.lists(any_row, min_size=2, max_size=4),
    vocab_size=st.integers(2, 300),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 3.0, 30.0]),
    levels=st.sampled_from([0, 1, 4]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_tokens_are_the_references(
    run: Any,
    sizes: None,
    device: torch.device,
    rows: list[dict[str, Any]],
    vocab_size: int,
    scale: float,
    levels: int,
    masked: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Including ties, flat rows, and rows of which all but one token are -inf."""
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size) * scale
    if levels:
        logits = (logits * levels).round() / levels
    hidden = torch.rand(logits.shape) < masked
    hidden.scatter_(1, torch.randint(vocab_size, (len(rows), 1)), False)
    batch = Rows(rows, logits.masked_fill(hidden, -INF).to(dtype), device)
    batch.check(run)
    if run is not filtered_sampling.sample_filtered:
        check_kept(batch)


changes = st.fixed_dictionaries(
    {},
    optional={
        "presence": st.sampled_from([0.7, -2.0]),
        "frequency": st.sampled_from([0.3, -1.1]),
        "repetition": st.sampled_from([1.3, 0.4, 1e30]),
        "prompt_len": st.integers(0, 20),
        "min_tokens": st.sampled_from([0, 5, 2**31 - 1]),
        "bias": st.dictionaries(st.integers(0, 12), st.floats(-100, 100, width=32), max_size=5),
        "stops": st.lists(st.integers(0, 12), unique=True, max_size=4),
        "temperature": st.sampled_from([0.0, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "allowed": st.sets(st.integers(0, 7), min_size=1),
    },
)


@pytest.mark.slow
@settings(few, max_examples=100 if torch.cuda.is_available() else 15)
@given(
    rows=st.lists(changes, min_size=1, max_size=4),
    vocab_size=st.integers(8, 40),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    every=st.booleans(),
)
def test_changed_logits(
    run: Any,
    short_histories: None,
    device: torch.device,
    rows: list[dict[str, Any]],
    vocab_size: int,
    dtype: torch.dtype,
    every: bool,
) -> None:
    """Masks, bias, min_tokens and penalties, on rows of a batch of which others use none."""
    torch.manual_seed(0)
    steps = Steps(noise=True, filters=True, penalties=True, bias=True, min_tokens=True, masks=True)
    if not every:
        rows = [{**row, "top_k": 0} for row in rows]
        steps = Steps(
            noise=True,
            filters=False,
            penalties=any(row.keys() & {"presence", "frequency", "repetition"} for row in rows),
            bias=any(row.get("bias") for row in rows),
            min_tokens=any(row.get("min_tokens") for row in rows),
            masks=any("allowed" in row for row in rows),
        )
    batch = Rows(rows, torch.randn(len(rows), vocab_size).mul(3).to(dtype), device)
    batch.check(run, steps)
    if run is not filtered_sampling.sample_filtered and any(steps[2:]):
        arguments = batch.logits, batch.req_indices, batch.lengths, batch.tables, batch.token_ids
        changed = filtered_sampling.changed_rows(*arguments, steps)
        some = changed.is_changed != 0
        expected = processed_logits(*arguments, steps._replace(filters=False))
        assert torch.equal(changed.copies[some], expected[some])
        assert torch.equal(batch.logits[~some].float(), expected[~some])
    batch.lengths += 100  # of padding rows, and longer than any history
    batch.check(run, steps)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    # Each filter alone, each pair, and all three; more tokens to keep than there are, or one.
    [
        *((150, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2)),
        *((1, 0.6, 0.0), (1000, 0.6, 0.0), (3, 1.0, 0.2), (0, 0.6, 0.2), (3, 0.6, 0.2)),
    ],
)
def test_odd_logits(
    run: Any, sizes: None, device: torch.device, top_k: int, top_p: float, min_p: float
) -> None:
    """NaN, infinities of either sign, zeros of either sign, and what others mask with."""
    logits = torch.randn(11, 200)
    logits[0, 77] = NAN
    logits[1, [3, 150]] = INF
    logits[2] = -INF
    logits[3, 1:] = -INF
    logits[4, 150] = INF
    logits[4, 20] = NAN
    logits[5, :198] = INF
    logits[6, ::2], logits[6, 1::2] = 0.0, -0.0
    logits[7, :150] = torch.finfo(torch.float32).min
    logits[8, :150] = -1e30
    logits[9] = 1e-42 * logits[9]
    logits[10] = 1e38 * logits[10]
    rows = [{"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": 5 + i} for i in range(11)]
    check_filters(run, rows, logits, device)


@pytest.mark.slow
def test_ties_at_the_cutoff(run: Any, sizes: None, device: torch.device) -> None:
    """Top-k keeps all of them; top-p the first ones, only as many as it needs."""
    logits = torch.full((12, 300), -9.0)
    logits[:, 100:200] = 0.0
    rows: list[dict[str, Any]] = [{"top_k": 3}] * 4 + [{"top_p": 0.019}] * 8
    tokens = Rows(rows, logits, device).check(run).tolist()
    assert len(set(tokens[:4])) > 2
    assert set(tokens[4:]) == {100, 101}


@pytest.mark.slow
def test_ties_are_cut_off_at_any_token(run: Any, sizes: None, device: torch.device) -> None:
    """Flat rows, and rows with two different logits, of more tokens than lists have room for."""
    logits = torch.zeros(6, 1300)
    logits[3:, ::3] = -1.0
    rows = [{"top_p": top_p} for top_p in (0.01, 0.5, 0.95)] * 2
    batch = Rows(rows, logits, device)
    batch.check(run)
    if run is not filtered_sampling.sample_filtered:
        check_kept(batch)


@pytest.mark.slow
def test_outliers_among_many_similar_logits(run: Any, sizes: None, device: torch.device) -> None:
    """Few lower ones, which the bins leave out, and a higher one, which makes them wide."""
    torch.manual_seed(0)
    logits = torch.randn(8, 1300) * 1e-3
    logits[:4, 500] = -20.0
    logits[4:, 500] = 8.0
    rows: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_p": 0.9999}, {"top_k": 1299}, {"top_k": 40}]
    batch = Rows(rows * 2, logits, device)
    batch.check(run)
    if run is not filtered_sampling.sample_filtered:
        check_kept(batch)


@pytest.mark.slow
def test_nothing_beyond_a_cutoff_is_chosen(run: Any, device: torch.device) -> None:
    """With many tokens just beyond it, one of them would win."""
    logits = torch.full((8, 200), -1e-3)
    logits[:, 50] = 0.0
    logits[:4, 0] = -20.0  # makes the bins of a single chunk so wide that one has all others
    logits[4:] *= 1000  # exp(-1) is below 0.5
    rows: list[dict[str, Any]] = [{"top_k": 1}] * 4 + [{"min_p": 0.5}] * 4
    assert Rows(rows, logits, device).check(run).tolist() == [50] * 8


@pytest.mark.slow
def test_a_small_top_p_of_a_flat_row(
    run: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts off within the rounding of the row's total, next to the first token."""
    for name in ("_SEARCH_BLOCK", "_CUTOFF_BLOCK", "_SAMPLE_BLOCK"):
        monkeypatch.setattr(filtered_sampling, name, 4096)
    monkeypatch.setattr(filtered_sampling, "_CAPACITY", 16384)
    # The tokens are at the front of their bins, which makes the bounds of the bins' weights tight.
    front = 28 / 256 * (1 + 1.2e-7)
    logits = torch.full((1, 2 + 4 * 9496), -30.0)
    logits[0, 0] = 0.0
    for number, step in enumerate((3, 5, 6, 8)):
        logits[0, 2 + number * 9496 :][:9496] = -step * front
    total = logits.double().exp().sum().item()
    rows = [{"top_p": 1.0003 / total, "seed": seed} for seed in range(2)]
    batch = Rows(rows, logits.expand(2, -1), device)
    batch.check(run)
    if run is not filtered_sampling.sample_filtered:
        check_kept(batch)


@pytest.mark.parametrize("odd", [NAN, INF])
def test_rows_without_filters_are_as_without_the_step(
    run: Any, device: torch.device, odd: float
) -> None:
    """Even with NaN or infinity, which a filter would remove."""
    logits = torch.randn(4, 200)
    logits[:, 70] = odd
    rows: list[dict[str, Any]] = [{}, {"temperature": 0.0, "top_k": 3}, {"temperature": 0.0}]
    tokens = Rows([*rows, {"top_k": 3}], logits, device).check(run).tolist()
    assert tokens[:3] == [70] * 3
    assert tokens[3] != 70


def test_a_stop_that_is_held_back_never_wins(run: Any, device: torch.device) -> None:
    """Not even with a logit to which -inf cannot be added. Ids may repeat, or be no tokens."""
    logits = torch.randn(3, 40)
    logits[0, 7], logits[1, 7], logits[2, 7] = NAN, INF, 3e38
    row = {"temperature": 0.0, "min_tokens": 99, "stops": [7, 7, 40, 2**40], "bias": {7: 100.0}}
    steps = Steps(noise=True, filters=False, penalties=False, bias=True, min_tokens=True)
    tokens = Rows([row] * 3, logits, device).check(run, steps).tolist()
    logits[:, 7] = -INF
    assert tokens == logits.argmax(dim=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("filters", [True, False])
def test_shapes_and_strides(run: Any, device: torch.device, filters: bool) -> None:
    steps = FILTERS._replace(filters=filters)
    rows: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.4}, {}]
    batch = Rows(rows, torch.randn(3, 70), device)
    for logits in (
        torch.randn(3, 90, device=device)[:, 7:77],
        torch.randn(70, 3, device=device).T,
        torch.randn(1, 70, device=device).expand(3, -1),
        torch.randn(3, 2, device=device),
        torch.randn(3, 1, device=device),
    ):
        batch.logits = logits
        batch.check(run, steps)
    wide = torch.stack((batch.req_indices, batch.req_indices + 2**30), dim=1)
    batch.req_indices = wide[:, 0]
    batch.check(run, steps)
    none = slice(0, 0)
    run(
        batch.logits[none],
        batch.req_indices[none],
        batch.lengths[none],
        batch.tables,
        batch.token_ids,
        steps,
        batch.tokens[none],
    )


def test_a_result_with_gaps_is_refused(device: torch.device) -> None:
    batch = Rows([{}, {}], torch.randn(2, 9), device)
    gaps = torch.zeros(4, dtype=torch.int64, device=device)[::2]
    with pytest.raises(BatchError, match="out_tokens must be contiguous"):
        filtered_sampling.triton_sample_filtered(
            batch.logits,
            batch.req_indices,
            batch.lengths,
            *batch.tables,
            batch.token_ids,
            *FILTERS,
            gaps,
        )


@pytest.mark.slow
def test_the_operator_says_what_it_writes(device: torch.device) -> None:
    batch = Rows([{"top_k": 3}, {"top_p": 0.5}], torch.randn(2, 30), device)
    arguments = (batch.logits, batch.req_indices, batch.lengths, *batch.tables, batch.token_ids)
    torch.library.opcheck(
        torch.ops.ostinato.sample_filtered.default,
        (*arguments, *FILTERS, batch.tokens),
        test_utils=["test_schema", "test_faketensor"],
    )
