"""The operators of decode steps with drafts, and their kernels, against plain Python.

"public" is what the runtime calls; "kernel" is Triton, in its interpreter without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.ops import decode_state
from ostinato.ops.decode_state import DecodeInputs, DecodeState
from ostinato.ops.sampling import drafts
from ostinato.ops.sampling.drafts import LookUp
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.request_state import RequestState

pytest.importorskip("triton")

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDTH = 40
POISON = 77


@pytest.fixture(params=["public", "kernel"])
def find(request: pytest.FixtureRequest, device: torch.device) -> Callable[[Any, str], Any]:
    """An operator by its module and name, as the runtime calls it or as the kernel's launch."""
    if request.param == "public":
        return getattr
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, the kernels are not interpreted")
    return lambda module, name: getattr(module, f"triton_{name}")


def state_of(
    texts: list[list[int]], query_len: int, device: torch.device, *, width: int = WIDTH
) -> DecodeState:
    """Request i is in row 2 * i; one row of padding follows."""
    num_rows = 2 * len(texts) + 1
    token_ids = torch.full((num_rows, width), POISON, dtype=torch.int32)
    num_computed = torch.zeros(num_rows, dtype=torch.int32)
    for row, text in enumerate(texts):
        token_ids[2 * row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        num_computed[2 * row] = len(text) - 1
    rows = [2 * row for row in range(len(texts))]
    return DecodeState(
        torch.tensor([*rows, num_rows - 1], device=device),
        num_computed.to(device),
        token_ids.to(device),
        torch.zeros((num_rows, 4), dtype=torch.int32, device=device),
        num_rows - 1,
        16,
        query_len,
    )


def looked_up(
    text: list[int], history: list[int], count: int, min_match: int, max_match: int
) -> list[int]:
    """Every place where the last tokens occur, longest and last first; then what follows."""
    best = (0, False, 0)
    for source, is_own in ((text, True), (history, False)):
        for end in range(len(source) - 1):
            length = 0
            while (
                length < min(max_match, len(text), end + 1)
                and source[end - length] == text[len(text) - 1 - length]
            ):
                length += 1
            best = max(best, (length, is_own, end))
    length, is_own, end = best
    if length < min_match:
        return [text[-1]] * count
    if is_own:
        text = text[:]
        for _ in range(count):  # goes on in what it has just written
            end += 1
            text.append(text[end])
        return text[-count:]
    return [max(token, 0) for token in [*history[end + 1 :], *[0] * count][:count]]


tokens = st.integers(0, 2)  # few, so that much matches


@pytest.mark.slow
@few
@given(
    texts=st.lists(st.lists(tokens, min_size=1, max_size=30), min_size=1, max_size=3),
    history=st.lists(st.integers(-1, 2), max_size=30),
    count=st.integers(1, 6),
    match=st.tuples(st.integers(1, 4), st.integers(0, 5)),
)
def test_drafts_are_what_followed_the_last_time(
    find: Any,
    device: torch.device,
    texts: list[list[int]],
    history: list[int],
    count: int,
    match: tuple[int, int],
) -> None:
    min_match, max_match = match[0], sum(match)
    state = state_of(texts, count + 1, device)
    past = torch.tensor(history, dtype=torch.int32, device=device)
    find(drafts, "look_up_drafts")(state, LookUp(past, min_match, max_match))
    for row, text in enumerate(texts):
        expected = text + looked_up(text, history, count, min_match, max_match)
        assert state.token_ids[2 * row].tolist() == expected + [POISON] * (WIDTH - len(expected))
    assert set(state.token_ids[-1].tolist()) == {POISON}


def test_long_texts_are_searched_to_their_beginning(find: Any, device: torch.device) -> None:
    """More tokens than a program compares, and history than one chunk."""
    text = [5, 6, 7, 8, *range(100, 9000), 5, 6]
    state = state_of([text, [1, 2, 9]], 3, device, width=9100)
    history = torch.zeros(9000, dtype=torch.int32, device=device)
    history[:5] = torch.tensor([1, 2, 9, 3, 4])
    find(drafts, "look_up_drafts")(state, LookUp(history, 1, 4))
    assert state.token_ids[0, len(text) : len(text) + 3].tolist() == [7, 8, POISON]
    assert state.token_ids[2, 3:6].tolist() == [3, 4, POISON]


@pytest.mark.slow
@few
@given(data=st.data(), query_len=st.integers(1, 6), num_reqs=st.integers(1, 4))
def test_tokens_count_up_to_the_first_that_was_drafted_differently(
    find: Any, device: torch.device, data: st.DataObject, query_len: int, num_reqs: int
) -> None:
    lens = data.draw(st.lists(st.integers(1, 20), min_size=num_reqs, max_size=num_reqs))
    texts = [data.draw(st.lists(tokens, min_size=n, max_size=n)) for n in lens]
    state = state_of(texts, query_len, device)
    run = st.lists(tokens, min_size=query_len, max_size=query_len)
    sampled = [data.draw(run) for _ in range(num_reqs + 1)]
    inputs = [data.draw(run) for _ in range(num_reqs + 1)]
    positions = [[n - 1 + i for i in range(query_len)] for n in lens] + [[0] * query_len]
    flat = [torch.tensor(each, device=device).flatten() for each in (sampled, inputs, positions)]
    accepted = torch.full((num_reqs + 1, query_len + 1), -1, device=device)
    state.num_computed.add_(3)  # as after an earlier call in the same step
    find(drafts, "accept_drafts")(state, *flat, accepted)
    for row, text in enumerate(texts):
        count = 1
        while count < query_len and sampled[row][count - 1] == inputs[row][count]:
            count += 1
        assert accepted[row].tolist() == [*sampled[row], count]
        assert int(state.num_computed[2 * row]) == len(text) - 1 + count
        expected = text + sampled[row][:count]
        assert state.token_ids[2 * row].tolist() == expected + [POISON] * (WIDTH - len(expected))
    assert set(state.token_ids[-1].tolist()) == {POISON}


@few
@given(
    lens=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    query_len=st.integers(2, 6),
    num_padding=st.integers(0, 2),
)
def test_inputs_of_several_tokens_are_those_of_any_batch(
    find: Any, device: torch.device, lens: list[int], query_len: int, num_padding: int
) -> None:
    cache = CacheSize(num_blocks=50, block_size=4, max_model_len=30)
    state = RequestState(max_num_seqs=6, cache=cache, device=device)
    rows, num_rows = list(range(len(lens)))[::-1], len(lens) + num_padding
    state.token_ids.copy_(torch.arange(7 * 31).view(7, 31))
    state.block_table.copy_(torch.randperm(7 * 8).view(7, 8))
    state.num_computed[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
    got, expected = (
        InputBuffers(max_num_seqs=6, max_num_tokens=60, cache=cache, device=device)
        for _ in range(2)
    )
    num_tokens = num_rows * query_len
    expected.fill(state, rows, [query_len] * len(rows), num_reqs=num_rows, num_tokens=num_tokens)
    got.set_rows(rows, num_rows)
    inputs = DecodeInputs(
        got.input_ids[:num_tokens],
        got.tokens.positions[:num_tokens],
        got.tokens.seq_lens[:num_rows],
        got.tokens.query_start_loc[: num_rows + 1],
        got.tokens.block_tables[0][:num_rows],
        got.tokens.slot_mappings[0, :num_tokens],
    )
    its_rows = DecodeState(
        got.req_indices[:num_rows],
        state.num_computed,
        state.token_ids,
        state.block_table,
        6,
        cache.block_size,
        query_len,
    )
    find(decode_state, "load_decode_inputs")(its_rows, inputs)
    used = len(rows) * query_len  # padding has any valid token
    assert got.input_ids[:used].tolist() == expected.input_ids[:used].tolist()
    assert got.tokens.positions[:used].tolist() == expected.tokens.positions[:used].tolist()
    for name in ("seq_lens", "query_start_loc", "slot_mappings"):
        assert getattr(got.tokens, name).tolist() == getattr(expected.tokens, name).tolist()
    for row, length in enumerate(got.tokens.seq_lens[: len(rows)].tolist()):
        blocks = slice(-(-length // cache.block_size))
        table, oracle = (each.tokens.block_tables[0] for each in (got, expected))
        assert table[row, blocks].tolist() == oracle[row, blocks].tolist()


def test_operators_say_what_they_write(device: torch.device) -> None:
    """Schemas and fakes, as graphs and torch.compile rely on them."""
    state = state_of([[1, 2, 1], [0]], 3, device)
    past = torch.tensor([1, 2], dtype=torch.int32, device=device)
    sampled = torch.zeros(9, dtype=torch.int64, device=device)
    accepted = torch.zeros((3, 4), dtype=torch.int64, device=device)
    operators = torch.ops.ostinato
    for operator, arguments in (
        (operators.look_up_drafts, (*state, past, 1, 4)),
        (operators.accept_drafts, (*state, sampled, sampled + 1, sampled, accepted)),
    ):
        torch.library.opcheck(
            operator.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
