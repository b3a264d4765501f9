"""From the state of the requests to the inputs of a step, against the same in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import BatchShape, GraphPool, SamplingParams
from ostinato.attention.base import AttentionSpec
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.kv_cache import CacheSize, KVCache
from ostinato.runner.request_state import RequestState
from ostinato.scheduling.request import Request
from ostinato.scheduling.step_plan import DecodePlan, ScheduledRequest, SchedulePlan

MAX_NUM_SEQS = 6
MAX_NUM_TOKENS = 40
POISON = 2**30
# The last block is not full, and the longest request reaches into it.
CACHE = CacheSize(num_blocks=50, block_size=4, max_model_len=30)

same_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def new_state(device: torch.device) -> RequestState:
    """With garbage in every row, as earlier requests leave it, and in the row of padding.

    Only that padding has computed nothing is relied on.
    """
    state = RequestState(max_num_seqs=MAX_NUM_SEQS, cache=CACHE, device=device)
    for tensor in (state.token_ids, state.block_table, state.num_computed):
        tensor.fill_(POISON)
    state.num_computed[state.padding_req_index] = 0
    return state


def new_buffers(device: torch.device) -> InputBuffers:
    buffers = InputBuffers(
        max_num_seqs=MAX_NUM_SEQS, max_num_tokens=MAX_NUM_TOKENS, cache=CACHE, device=device
    )
    tokens = buffers.tokens
    for tensor in (
        buffers.req_indices,
        buffers.query_lens,
        tokens.query_start_loc[1:],
        tokens.seq_lens,
        tokens.block_tables[0],
        tokens.slot_mappings,
        tokens.positions,
        buffers.input_ids,
    ):
        tensor.fill_(POISON)
    return buffers


@dataclass
class Row:
    """A running request as the host knows it."""

    req_index: int
    tokens: list[int]
    blocks: list[int]
    computed: int
    query_len: int

    def write(self, state: RequestState) -> None:
        state.token_ids[self.req_index, : len(self.tokens)] = torch.tensor(self.tokens).to(
            state.device
        )
        state.block_table[self.req_index, : len(self.blocks)] = torch.tensor(self.blocks).to(
            state.device
        )
        state.num_computed[self.req_index] = self.computed


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], int, int]:
    """Requests, and the padded numbers of requests and tokens."""
    req_indices = draw(st.permutations(range(MAX_NUM_SEQS)))
    num_reqs = draw(st.integers(1, MAX_NUM_SEQS))
    blocks = iter(draw(st.permutations(range(1, CACHE.num_blocks))))
    rows = []
    budget = MAX_NUM_TOKENS - num_reqs
    for req_index in req_indices[:num_reqs]:
        length = draw(st.integers(1, CACHE.max_model_len))
        query_len = draw(st.integers(1, min(length, budget + 1)))
        budget -= query_len - 1
        end = draw(st.integers(query_len, length))
        tokens = draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        held = [next(blocks) for _ in range(-(-end // CACHE.block_size))]
        rows.append(Row(req_index, tokens, held, end - query_len, query_len))
    num_tokens = sum(row.query_len for row in rows)
    padded_reqs = draw(st.integers(num_reqs, MAX_NUM_SEQS))
    return rows, padded_reqs, draw(st.integers(num_tokens, MAX_NUM_TOKENS))


def fill(buffers: InputBuffers, state: RequestState, rows: list[Row], *padded: int) -> None:
    buffers.fill(
        state,
        [row.req_index for row in rows],
        [row.query_len for row in rows],
        num_reqs=padded[0],
        num_tokens=padded[1],
    )


def check(buffers: InputBuffers, rows: list[Row], padded_reqs: int, padded_tokens: int) -> None:
    """Everything the step reads, computed token by token."""
    ids, positions, slot_mapping, starts = [], [], [], [0]
    for row in rows:
        for position in range(row.computed, row.computed + row.query_len):
            ids.append(row.tokens[position])
            positions.append(position)
            block = row.blocks[position // CACHE.block_size]
            slot_mapping.append(block * CACHE.block_size + position % CACHE.block_size)
        starts.append(len(ids))
    num_tokens, extra_reqs = len(ids), padded_reqs - len(rows)
    tokens = buffers.tokens
    assert buffers.input_ids[:num_tokens].tolist() == ids
    assert tokens.positions[:num_tokens].tolist() == positions
    padding = [-1] * (padded_tokens - num_tokens)
    assert tokens.slot_mappings[0, :padded_tokens].tolist() == slot_mapping + padding
    starts += [num_tokens] * extra_reqs
    assert tokens.query_start_loc[: padded_reqs + 1].tolist() == starts
    lengths = [row.computed + row.query_len for row in rows]
    assert tokens.seq_lens[:padded_reqs].tolist() == lengths + [0] * extra_reqs
    table = tokens.block_tables[0][: len(rows)].tolist()
    assert [line[: len(row.blocks)] for line, row in zip(table, rows, strict=True)] == [
        row.blocks for row in rows
    ]
    # Padding tokens are run through the model: their positions must be some that exist.
    assert all(0 <= p < CACHE.max_model_len for p in tokens.positions[:padded_tokens].tolist())


@pytest.mark.slow
@same_device
@given(batch=batches())
def test_any_batch(device: torch.device, batch: tuple[list[Row], int, int]) -> None:
    rows, *padded = batch
    state, buffers = new_state(device), new_buffers(device)
    for row in rows:
        row.write(state)
    fill(buffers, state, rows, *padded)
    check(buffers, rows, *padded)
    # Padding tokens get an id of some real request, or that of the padding row; nothing else.
    num_tokens = sum(row.query_len for row in rows)
    known = {token for row in rows for token in row.tokens} | {POISON}
    assert set(buffers.input_ids[num_tokens : padded[1]].tolist()) <= known
    # What is beyond the padded sizes belongs to no request, and stays as it was.
    tokens = buffers.tokens
    for tensor in (buffers.input_ids, tokens.positions, tokens.slot_mappings[0]):
        assert (tensor[padded[1] :] == POISON).all()
    for tensor in (tokens.seq_lens, tokens.block_tables[0], tokens.query_start_loc[1:]):
        assert (tensor[padded[0] :] == POISON).all()


@pytest.mark.slow
@same_device
@given(first=batches(), second=batches())
def test_nothing_of_the_batch_before_is_left(
    device: torch.device, first: tuple[list[Row], int, int], second: tuple[list[Row], int, int]
) -> None:
    state, buffers = new_state(device), new_buffers(device)
    for rows, *padded in (first, second):
        for row in rows:
            row.write(state)
        fill(buffers, state, rows, *padded)
        check(buffers, rows, *padded)


def test_after_reset_nothing_is_written_to_the_cache(device: torch.device) -> None:
    buffers = new_buffers(device)
    buffers.reset()
    tokens = buffers.tokens
    assert (tokens.slot_mappings == -1).all()
    assert (buffers.req_indices == MAX_NUM_SEQS).all()  # padding's row, which a decode graph skips
    for tensor in (
        buffers.query_lens,
        tokens.query_start_loc,
        tokens.seq_lens,
        tokens.block_tables[0],
        tokens.positions,
        buffers.input_ids,
    ):
        assert not tensor.any()


def test_filling_can_be_captured(device: torch.device, pool: GraphPool) -> None:
    """All of it but the copy from the host: a replay follows the state."""
    state, buffers = new_state(device), new_buffers(device)
    padded = (4, 16)
    before = [Row(3, list(range(20)), [9, 8, 7, 6, 5], 2, 9), Row(0, [5], [4], 0, 1)]
    after = [
        Row(1, list(range(100, 130)), [*range(20, 28)], 29, 1),
        Row(5, [7] * 8, [30, 31], 0, 8),
    ]
    for row in before + after:
        row.write(state)
    buffers.set_queries([3, 0], [9, 1])
    with torch.inference_mode():
        captured = pool.capture(
            lambda: buffers.load(state, num_reqs=padded[0], num_tokens=padded[1])
        )
    check(buffers, before, *padded)
    buffers.set_queries([1, 5], [1, 8])
    pool.replay(captured.tape)
    check(buffers, after, *padded)


def test_requests_that_sample_do_so_from_their_last_tokens(device: torch.device) -> None:
    buffers = new_buffers(device)
    buffers.set_queries([3, 0, 5], [4, 1, 2], [True, False, True])
    tokens, req_indices = buffers.sampling_rows(2)
    assert (tokens.tolist(), req_indices.tolist()) == ([3, 6], [3, 5])
    assert buffers.req_indices.tolist()[:4] == [3, 0, 5, MAX_NUM_SEQS]  # then padding
    buffers.set_queries([], [])
    assert (buffers.req_indices == MAX_NUM_SEQS).all()
    assert not buffers.query_lens.any()


def test_metadata_is_a_view_of_the_buffers(device: torch.device) -> None:
    """Graphs read these addresses."""
    buffers = new_buffers(device)
    spec = AttentionSpec(layer=0, num_heads=2, num_kv_heads=1, head_dim=8, value_dim=4, scale=1.0)
    cache = KVCache([spec], num_blocks=2, block_size=4, dtype=torch.float32, device=device)
    backend = TorchPagedAttention()
    metadata = buffers.metadata(
        num_reqs=3, num_tokens=7, max_query_len=5, max_seq_len=9, kv_cache=cache, backend=backend
    )
    tokens = buffers.tokens
    for view, whole, shape in (
        (metadata.query_start_loc, tokens.query_start_loc, (4,)),
        (metadata.seq_lens, tokens.seq_lens, (3,)),
        (metadata.block_table, tokens.block_tables[0], (3, 8)),
        (metadata.slot_mapping, tokens.slot_mappings, (7,)),
    ):
        assert view.shape == shape
        assert view.data_ptr() == whole.data_ptr()
    assert (metadata.max_query_len, metadata.max_seq_len) == (5, 9)
    assert metadata.kv_caches is cache.layers
    assert metadata.backend is backend


# --- the state itself -----------------------------------------------------------------------------


def scheduled(req_index: int, **changes: Any) -> ScheduledRequest:
    """A new request with 10 tokens, three of them generated, after a preemption; 4 are cached."""
    request = Request(
        request_id=str(req_index),
        prompt_token_ids=[req_index, 1, 2, 3, 4, 5, 6],
        params=SamplingParams(temperature=0.5, top_k=req_index + 1),
        max_total_tokens=30,
        output_token_ids=[70, 80, 90],
        block_ids=[11, 12, 13],
    )
    item = {"start": 4, "num_tokens": 6, "new_blocks": [11, 12, 13], "first_new_block": 0}
    rest = {"is_new": True, "samples": True, "admission": 0}
    return ScheduledRequest(request, req_index, **{**item, **rest, **changes})


def plan_of(*items: ScheduledRequest) -> SchedulePlan:
    return SchedulePlan(
        requests=list(items),
        num_tokens=sum(item.num_tokens for item in items),
        num_samples=sum(item.samples for item in items),
        max_query_len=max(item.num_tokens for item in items),
        preempted=[],
    )


def contents(state: RequestState) -> dict[str, list[Any]]:
    names = ("token_ids", "num_computed", "block_table")
    return {name: getattr(state, name).tolist() for name in names}


def test_a_new_request_gets_its_row_and_no_other(device: torch.device) -> None:
    state = new_state(device)
    expected = contents(state)
    state.update(plan_of(scheduled(2), scheduled(4)))
    for req_index in (2, 4):
        expected["token_ids"][req_index][:10] = [req_index, 1, 2, 3, 4, 5, 6, 70, 80, 90]
        expected["block_table"][req_index][:3] = [11, 12, 13]
        expected["num_computed"][req_index] = 4
    assert contents(state) == expected
    assert state.sampling.top_k.tolist() == [0, 0, 3, 0, 5, 0, 0]


def test_blocks_are_appended(device: torch.device) -> None:
    state = new_state(device)
    state.update(plan_of(scheduled(2), scheduled(4), scheduled(0)))
    expected = contents(state)
    grown = {"is_new": False, "start": 10, "num_tokens": 1, "first_new_block": 3}
    state.update(
        plan_of(
            scheduled(4, **{**grown, "new_blocks": [21, 22]}),
            scheduled(2, **{**grown, "new_blocks": []}),
            scheduled(0, **{**grown, "new_blocks": [23]}),
            scheduled(5),
        )
    )
    expected["block_table"][4][3:5] = [21, 22]
    expected["block_table"][0][3] = 23
    expected["block_table"][5][:3] = [11, 12, 13]
    expected["token_ids"][5][:10] = [5, 1, 2, 3, 4, 5, 6, 70, 80, 90]
    expected["num_computed"][5] = 4
    assert contents(state) == expected


def test_blocks_are_appended_in_the_steady_state(device: torch.device) -> None:
    state = new_state(device)
    items = [scheduled(2), scheduled(4), scheduled(0)]
    state.update(plan_of(*items))
    expected = contents(state)
    plan = DecodePlan(
        num_tokens=3,
        shape=BatchShape(3, 3, 1),
        members=[item.request for item in items],
        req_indices=np.array([2, 4, 0]),
        starts=np.array([10, 10, 10]),
        new_blocks=[(1, 3, 21), (2, 3, 22)],
    )
    state.update(plan)
    expected["block_table"][4][3], expected["block_table"][0][3] = 21, 22
    assert contents(state) == expected
    state.update(replace(plan, new_blocks=[]))
    assert contents(state) == expected


def test_tokens_are_counted_and_appended(device: torch.device) -> None:
    state = new_state(device)
    state.update(plan_of(scheduled(2), scheduled(4), scheduled(0)))
    expected = contents(state)
    req_indices = torch.tensor([4, 0], device=device)
    state.advance(req_indices, torch.tensor([6, 3], dtype=torch.int32, device=device))
    expected["num_computed"][4], expected["num_computed"][0] = 10, 7
    assert contents(state) == expected
    lengths = state.num_computed[req_indices[:1]]
    state.append(req_indices[:1], lengths, torch.tensor([123], device=device))
    expected["token_ids"][4][10] = 123
    assert contents(state) == expected


def test_the_token_at_the_length_limit_has_a_place(device: torch.device) -> None:
    state = new_state(device)
    req_indices = torch.tensor([1], device=device)
    state.num_computed[1] = CACHE.max_model_len
    state.append(req_indices, state.num_computed[req_indices], torch.tensor([9], device=device))
    assert state.token_ids[1, CACHE.max_model_len] == 9
    assert state.token_ids[2, 0] == POISON


def test_padding_has_the_last_row(device: torch.device) -> None:
    state = RequestState(max_num_seqs=MAX_NUM_SEQS, cache=CACHE, device=device)
    assert state.padding_req_index == MAX_NUM_SEQS
    assert state.token_ids.shape == (MAX_NUM_SEQS + 1, CACHE.max_model_len + 1)
    assert state.block_table.shape == (MAX_NUM_SEQS + 1, 8)
    assert not any(
        tensor[state.padding_req_index].any() for tensor in (state.token_ids, state.block_table)
    )
    assert state.num_computed[state.padding_req_index] == 0
