"""Ranks that must step together: the rule, the messages, and the refusal of unequal starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.parallel.agreement import (
    Agreement,
    StepAgreement,
    StepWish,
    agree,
    check_same,
    decode,
    encode,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

modes = st.sampled_from([NONE, PIECEWISE, FULL])
lengths = st.integers(1, 5)
decodes = st.builds(
    lambda reqs, length: StepWish(FULL, reqs * length, query_len=length),
    st.integers(1, 2**30),
    lengths,
)
wishes = st.one_of(
    st.builds(StepWish, modes, st.integers(1, 2**40)), decodes, st.builds(StepWish.idle, modes)
)
groups = st.lists(wishes, min_size=1, max_size=8)


class SentError(Exception):
    """Ends a rank's first pass once its message is known."""


class FakeComm:
    """One rank of a group: records what it sends, or returns the sum if it is known."""

    def __init__(self, index: int, size: int, total: torch.Tensor | None = None) -> None:
        self.index, self.size, self.total = index, size, total
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.clone())
        if self.total is None:
            raise SentError
        return tensor.copy_(self.total)


def run(
    ranks: Callable[[FakeComm, int], Any], size: int, indices: list[int] | None = None
) -> list[Any]:
    """The result or error of every rank, each of which made exactly one all-reduce."""
    indices = list(range(size)) if indices is None else indices
    first = [FakeComm(index, size) for index in indices]
    for rank, comm in enumerate(first):
        with pytest.raises(SentError):
            ranks(comm, rank)
    sent = [comm.sent[0] for comm in first]
    assert {(tensor.dtype, tensor.shape) for tensor in sent} == {(torch.int64, sent[0].shape)}
    results: list[Any] = []
    for rank, index in enumerate(indices):
        comm = FakeComm(index, size, torch.stack(sent).sum(0))
        try:
            results.append(ranks(comm, rank))
        except ConfigError as error:
            results.append(error)
        assert len(comm.sent) == 1
    return results


# --- the rule ---


def test_any_eager_rank_makes_all_eager() -> None:
    agreed = agree([StepWish(FULL, 8), StepWish(NONE, 700), StepWish(PIECEWISE, 16)])
    assert agreed.mode is NONE
    assert agreed.tokens_by_rank == (8, 700, 16)


def test_otherwise_the_least_mode_and_the_largest_batch() -> None:
    agreed = agree([StepWish(FULL, 64), StepWish(PIECEWISE, 16), StepWish(PIECEWISE, 8)])
    assert agreed == StepAgreement(mode=PIECEWISE, num_tokens=64, tokens_by_rank=(64, 16, 8))


def test_a_rank_without_work_holds_no_other_back() -> None:
    agreed = agree([StepWish.idle(), StepWish(FULL, 4)])
    assert agreed == StepAgreement(mode=FULL, num_tokens=4, tokens_by_rank=(0, 4))


def test_the_lengths_of_decode_batches_are_known_to_all() -> None:
    group = [StepWish(FULL, 6, query_len=3), StepWish.idle(), StepWish(FULL, 4, query_len=1)]
    assert agree(group) == StepAgreement(
        mode=FULL,
        num_tokens=6,
        tokens_by_rank=(6, 0, 4),
        query_lens=frozenset({1, 3}),
        is_decode=True,
    )
    assert not agree([*group, StepWish(FULL, 2)]).is_decode


def test_a_rank_without_work_and_without_graphs_still_counts() -> None:
    agreed = agree([StepWish.idle(PIECEWISE), StepWish(FULL, 4)])
    assert agreed.mode is PIECEWISE


def test_no_work_anywhere_is_no_step() -> None:
    agreed = agree([StepWish.idle(), StepWish.idle(PIECEWISE)])
    assert not agreed.has_work
    assert agreed == StepAgreement(mode=NONE, num_tokens=0, tokens_by_rank=(0, 0))


def test_one_rank_gets_its_wish() -> None:
    assert agree([StepWish(FULL, 3)]) == StepAgreement(mode=FULL, num_tokens=3, tokens_by_rank=(3,))


@given(groups)
def test_agreement_holds_for_all_ranks(group: list[StepWish]) -> None:
    agreed = agree(group)
    assert agreed.tokens_by_rank == tuple(wish.num_tokens for wish in group)
    assert agreed.has_work == any(wish.has_work for wish in group)
    if not agreed.has_work:
        return
    assert all(agreed.mode.rank <= wish.mode.rank for wish in group)
    assert agreed.mode in [wish.mode for wish in group]
    assert agreed.num_tokens == max(wish.num_tokens for wish in group)
    assert agreed.query_lens == {wish.query_len for wish in group} - {None}


def test_wish_of_a_choice() -> None:
    shape = BatchShape(9, 3, 3)
    mixed = Choice(mode=FULL, descriptor=BatchDescriptor(16, num_reqs=16), reason=Reason.MIXED)
    assert StepWish.of(mixed, shape) == StepWish(FULL, 9)
    key = BatchDescriptor(12, num_reqs=4, uniform=True)
    decode = Choice(mode=FULL, descriptor=key, reason=Reason.UNIFORM_DECODE)
    assert StepWish.of(decode, shape) == StepWish(FULL, 9, query_len=3)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ((CUDAGraphMode.FULL_AND_PIECEWISE, 1), "got FULL_AND_PIECEWISE"),
        ((FULL, -1), "got -1"),
        ((FULL, 2.0), r"got 2\.0"),
        ((FULL, 0), "num_tokens=0 with has_work=True"),
        ((FULL, 3, False), "num_tokens=3 with has_work=False"),
        ((PIECEWISE, 4, True, 2), "query_len=2 with mode PIECEWISE"),
        ((FULL, 4, True, 0), "query_len=0 with mode FULL and num_tokens=4"),
        ((FULL, 4, True, 3), "query_len=3 with mode FULL and num_tokens=4"),
        ((FULL, 4, True, 8), "only FULL decode batches have a query length"),
        ((FULL, 4, True, 2.0), r"query_len=2\.0"),
    ],
)
def test_impossible_wishes(wish: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        StepWish(*wish)


def test_a_group_has_a_rank() -> None:
    with pytest.raises(BatchError, match="at least one rank"):
        agree([])


# --- what travels ---


@given(groups)
def test_the_sum_of_all_encodings_is_all_wishes(group: list[StepWish]) -> None:
    vectors = [encode(wish, rank, len(group)) for rank, wish in enumerate(group)]
    columns = list(zip(*vectors, strict=True))
    assert all(sum(value != 0 for value in column) <= 1 for column in columns)
    assert decode([sum(column) for column in columns]) == tuple(group)
    assert len(columns) == 3 * len(group)


@given(groups)
def test_every_rank_comes_to_the_same_agreement_by_one_all_reduce(group: list[StepWish]) -> None:
    agreement = Agreement()
    results = run(lambda comm, rank: agreement.step(comm, group[rank]), len(group))
    assert results == [agree(group)] * len(group)


def test_the_exchange_runs_on_the_device(device: torch.device) -> None:
    comm = FakeComm(0, 1, torch.tensor(encode(StepWish(FULL, 4), 0, 1), device=device))
    assert Agreement(device).step(comm, StepWish(FULL, 4)).num_tokens == 4
    assert comm.sent[0].device.type == device.type


def test_two_ranks_in_one_place_are_found() -> None:
    results = run(lambda comm, rank: Agreement().step(comm, StepWish.idle(NONE)), 3, [0, 1, 1])
    assert len(results) == 3
    for error in results:
        assert isinstance(error, ConfigError)
        assert "the entry of rank 2 holds [0, 0, 0]" in str(error)


@pytest.mark.parametrize("summed", [[], [1], [1, 1], [1, 1, 0, 0]])
def test_a_message_of_another_length_is_refused(summed: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"got {len(summed)} integers .* not 3 for each"):
        decode(summed)


@pytest.mark.parametrize(
    "row", [(4, 1, 0), (0, 0, 0), (1, -1, 0), (3, 4, -1), (3, 4, 3), (2, 4, 2), (3, 0, 1)]
)
def test_what_is_no_sum_of_wishes_is_refused(row: tuple[int, ...]) -> None:
    message = rf"the entry of rank 1 holds \[{row[0]}, {row[1]}, {row[2]}\]"
    with pytest.raises(ConfigError, match=message):
        decode([1, 1, 0, *row])


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} is not in a group of 2"):
        encode(StepWish(FULL, 1), rank, 2)


# --- equal starts ---


def check(values: list[str], name: str = "plan", indices: list[int] | None = None) -> list[Any]:
    return run(lambda comm, rank: check_same(comm, name, values[rank]), len(values), indices)


@pytest.mark.slow
@given(st.text(), st.integers(1, 5))
def test_equal_values_pass(value: str, size: int) -> None:
    assert check([value] * size) == [None] * size


@given(st.lists(st.text(max_size=3), min_size=2, max_size=5))
def test_values_pass_exactly_when_equal(values: list[str]) -> None:
    failed = [isinstance(result, ConfigError) for result in check(values)]
    assert failed == [len(set(values)) > 1] * len(values)


def test_every_rank_says_which_ranks_differ_and_in_what() -> None:
    values = ["sp=2, tp=2", "sp=2, tp=2", "sp=4, tp=1", "sp=2, tp=2"]
    errors = check(values, name="parallel config")
    for rank, error in enumerate(errors):
        assert isinstance(error, ConfigError)
        assert "ranks differ in parallel config" in str(error)
        assert "ranks 0, 1, 3 have 'sp=2, tp=2'" in str(error)
        assert "rank 2 has 'sp=4, tp=1'" in str(error)
        assert f"this is rank {rank} of 4" in str(error)


def test_long_values_that_differ_at_the_end_differ() -> None:
    start = "x" * 5000
    errors = check([start + "a", start + "b"], name="weights")
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "rank 0 has" in str(error)
        assert "rank 1 has" in str(error)
        assert len(str(error)) < 500
        # The beginnings are equal, so the digests must distinguish them.
        digests = [part[:8] for part in str(error).split("(sha256 ")[1:]]
        assert len(set(digests)) == 2


def test_trailing_nul_is_a_difference() -> None:
    assert all(isinstance(result, ConfigError) for result in check(["a", "a\0"]))


def test_a_rank_that_did_not_take_part_is_found() -> None:
    results = check(["same", "same", "same"], indices=[0, 0, 2])
    assert len(results) == 3
    assert all(isinstance(r, ConfigError) and "entry of rank" in str(r) for r in results)
