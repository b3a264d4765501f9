"""The inputs a token batch is captured with, as CONTRACT section 5 lays them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.graphs.capture.capture_inputs import (
    CaptureInputs,
    TokenBuffers,
    prepare_inputs_to_capture,
)
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry

MAX_SEQS, MAX_TOKENS, MAX_MODEL_LEN = 6, 16, 777
POISON = -7  # nothing that the layout writes


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=device)


def make_buffers(device: torch.device, **changes: Any) -> TokenBuffers:
    fields: dict[str, Any] = {
        "query_start_loc": poisoned(MAX_SEQS + 1, device=device),
        "seq_lens": poisoned(MAX_SEQS, device=device),
        "block_tables": [
            poisoned(MAX_SEQS, 5, device=device),
            poisoned(MAX_SEQS, 3, device=device),
        ],
        "slot_mappings": poisoned(2, MAX_TOKENS, device=device, dtype=torch.int64),
        "positions": poisoned(MAX_TOKENS, device=device, dtype=torch.int64),
        "input_ids": poisoned(MAX_TOKENS, device=device),
    }
    return TokenBuffers(**{**fields, **changes})


def make_plan(mode: CUDAGraphMode, *query_lens: int) -> CapturePlan:
    return CapturePlan.build(
        mode,
        (2, 8, 15),
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        decode_query_lens=query_lens or (1,),
    )


def prepare(
    plan: CapturePlan, buffers: TokenBuffers, num_tokens: int, uniform: bool = False, **rest: Any
) -> CaptureInputs:
    entry = next(
        entry
        for entry in plan.entries
        if (entry.descriptor.num_tokens, entry.descriptor.uniform) == (num_tokens, uniform)
    )
    return prepare_inputs_to_capture(entry, plan, buffers, max_model_len=MAX_MODEL_LEN, **rest)


# (mode, q, uniform, tokens): requests, query length, and the whole of query_start_loc.
LAYOUTS = [
    (CUDAGraphMode.FULL_DECODE_ONLY, 1, True, 2, 2, 1, [0, 1, 2, 2, 2, 2, 2]),
    (CUDAGraphMode.FULL_DECODE_ONLY, 3, True, 3, 1, 3, [0, 3, 3, 3, 3, 3, 3]),
    (CUDAGraphMode.FULL_DECODE_ONLY, 3, True, 15, 5, 3, [0, 3, 6, 9, 12, 15, 15]),
    (CUDAGraphMode.FULL, 1, False, 2, 2, 1, [0, 1, 2, 2, 2, 2, 2]),
    (CUDAGraphMode.FULL, 1, False, 8, 6, 1, [0, 1, 2, 3, 4, 5, 8]),
    (CUDAGraphMode.FULL, 3, False, 15, 6, 2, [0, 2, 4, 6, 8, 10, 15]),
    (CUDAGraphMode.PIECEWISE, 1, False, 15, 6, 2, [0, 2, 4, 6, 8, 10, 15]),
    (CUDAGraphMode.PIECEWISE, 3, False, 2, 2, 1, [0, 1, 2, 2, 2, 2, 2]),
]


@pytest.mark.parametrize(("mode", "q", "uniform", "n", "r", "query_len", "starts"), LAYOUTS)
def test_layout_of_requests(
    device: torch.device,
    mode: CUDAGraphMode,
    q: int,
    uniform: bool,
    n: int,
    r: int,
    query_len: int,
    starts: list[int],
) -> None:
    buffers = make_buffers(device, dcp_local_seq_lens=poisoned(MAX_SEQS, device=device))
    inputs = prepare(make_plan(mode, q), buffers, n, uniform)
    assert (inputs.num_tokens, inputs.num_reqs) == (n, r)
    assert (inputs.max_query_len, inputs.max_seq_len) == (query_len, MAX_MODEL_LEN)
    lengths = [n] * r + [0] * (MAX_SEQS - r)
    assert buffers.query_start_loc.tolist() == starts
    assert buffers.seq_lens.tolist() == lengths
    assert buffers.dcp_local_seq_lens is not None
    assert buffers.dcp_local_seq_lens.tolist() == lengths


def test_unfinished_last_request_of_a_decode_batch(device: torch.device) -> None:
    # r = ceil(n / q): no plan has such a key today, but the contract lays it out.
    plan = make_plan(CUDAGraphMode.FULL_DECODE_ONLY, 3)
    key = BatchDescriptor(7, num_reqs=3, uniform=True)
    entry = PlanEntry(mode=CUDAGraphMode.FULL, descriptor=key)
    buffers = make_buffers(device)
    inputs = prepare_inputs_to_capture(entry, plan, buffers, max_model_len=MAX_MODEL_LEN)
    assert (inputs.num_reqs, inputs.max_query_len) == (3, 3)
    assert buffers.query_start_loc.tolist() == [0, 3, 6, 7, 7, 7, 7]
    assert buffers.seq_lens.tolist() == [7, 7, 7, 0, 0, 0]


def test_query_length_comes_from_the_key_when_there_are_several(device: torch.device) -> None:
    plan = make_plan(CUDAGraphMode.FULL_DECODE_ONLY, 1, 2)
    buffers = make_buffers(device)
    by_query_len = {}
    for entry in plan.entries:
        if entry.descriptor.num_tokens == 2:
            inputs = prepare_inputs_to_capture(entry, plan, buffers, max_model_len=MAX_MODEL_LEN)
            by_query_len[inputs.max_query_len] = inputs.num_reqs
    assert by_query_len == {1: 2, 2: 1}


def test_a_smaller_layout_leaves_nothing_of_a_larger_one(device: torch.device) -> None:
    plan, buffers = make_plan(CUDAGraphMode.FULL), make_buffers(device)
    prepare(plan, buffers, 15)
    prepare(plan, buffers, 2)
    assert buffers.query_start_loc.tolist() == [0, 1, 2, 2, 2, 2, 2]
    assert buffers.seq_lens.tolist() == [2, 2, 0, 0, 0, 0]


def assert_cut(cut: torch.Tensor | None, static: torch.Tensor | None, *shape: int) -> None:
    assert cut is not None
    assert static is not None
    assert cut.shape == shape
    assert cut.data_ptr() == static.data_ptr()
    assert cut.stride() == static.stride()


def test_inputs_are_the_static_buffers_cut_to_size(device: torch.device) -> None:
    buffers = make_buffers(device, dcp_local_seq_lens=poisoned(MAX_SEQS, device=device))
    inputs = prepare(make_plan(CUDAGraphMode.FULL_DECODE_ONLY, 3), buffers, 9, uniform=True)
    assert_cut(inputs.query_start_loc, buffers.query_start_loc, 4)
    assert_cut(inputs.seq_lens, buffers.seq_lens, 3)
    assert_cut(inputs.dcp_local_seq_lens, buffers.dcp_local_seq_lens, 3)
    for cut, static, blocks in zip(inputs.block_tables, buffers.block_tables, (5, 3), strict=True):
        assert_cut(cut, static, 3, blocks)
    assert_cut(inputs.slot_mappings, buffers.slot_mappings, 2, 9)
    assert_cut(inputs.positions, buffers.positions, 9)
    assert_cut(inputs.input_ids, buffers.input_ids, 9)


def test_only_the_layout_is_written(device: torch.device) -> None:
    buffers = make_buffers(device)
    prepare(make_plan(CUDAGraphMode.FULL), buffers, 8)
    untouched = [buffers.slot_mappings, buffers.positions, buffers.input_ids, *buffers.block_tables]
    assert all((tensor == POISON).all() for tensor in untouched if tensor is not None)


def test_optional_buffers_stay_none(device: torch.device) -> None:
    inputs = prepare(make_plan(CUDAGraphMode.FULL), make_buffers(device), 8)
    assert inputs.dcp_local_seq_lens is None
    assert inputs.inputs_embeds is None
    assert inputs.attn_metadata is None


def test_positions_of_three_dimensions(device: torch.device) -> None:
    buffers = make_buffers(device, positions=poisoned(3, MAX_TOKENS, device=device))
    inputs = prepare(make_plan(CUDAGraphMode.FULL), buffers, 8)
    assert_cut(inputs.positions, buffers.positions, 3, 8)


def test_embeddings_instead_of_ids(device: torch.device) -> None:
    embeds = torch.zeros(MAX_TOKENS, 12, device=device)
    buffers = make_buffers(device, input_ids=None, inputs_embeds=embeds)
    inputs = prepare(make_plan(CUDAGraphMode.FULL), buffers, 8)
    assert inputs.input_ids is None
    assert_cut(inputs.inputs_embeds, embeds, 8, 12)


@pytest.mark.parametrize("both", [True, False])
def test_ids_and_embeddings_exclude_each_other(device: torch.device, both: bool) -> None:
    ids, embeds = poisoned(MAX_TOKENS, device=device), torch.zeros(MAX_TOKENS, 12, device=device)
    given = {"input_ids": ids, "inputs_embeds": embeds} if both else {"input_ids": None}
    with pytest.raises(ConfigError, match="input_ids or as inputs_embeds, exactly one"):
        make_buffers(device, **given)


@pytest.mark.parametrize(
    ("mode", "q", "n", "uniform", "r", "query_len"),
    [
        (CUDAGraphMode.FULL_DECODE_ONLY, 3, 9, True, 3, 3),
        (CUDAGraphMode.FULL, 1, 15, False, 6, 2),
    ],
)
def test_metadata_is_built_from_the_laid_out_inputs(
    device: torch.device,
    mode: CUDAGraphMode,
    q: int,
    n: int,
    uniform: bool,
    r: int,
    query_len: int,
) -> None:
    seen: list[CaptureInputs] = []
    lengths: list[list[int]] = []

    def build(inputs: CaptureInputs) -> str:
        seen.append(inputs)
        lengths.append(inputs.seq_lens.tolist())
        return "metadata"

    buffers = make_buffers(device)
    inputs = prepare(make_plan(mode, q), buffers, n, uniform, build_attn_metadata=build)
    assert inputs.attn_metadata == "metadata"
    assert len(seen) == 1
    assert (seen[0].num_reqs, seen[0].num_tokens) == (r, n)
    assert (seen[0].max_query_len, seen[0].max_seq_len) == (query_len, MAX_MODEL_LEN)
    assert seen[0].attn_metadata is None
    assert_cut(seen[0].query_start_loc, buffers.query_start_loc, r + 1)
    assert lengths == [[n] * r]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("query_start_loc", (MAX_SEQS,)),  # one entry less than requests and their end
        ("seq_lens", (MAX_SEQS - 1,)),
        ("dcp_local_seq_lens", (MAX_SEQS - 1,)),
        ("slot_mappings", (2, 14)),
        ("positions", (14,)),
        ("positions", (3, 14)),
        ("input_ids", (14,)),
    ],
)
def test_buffers_that_are_too_small_are_named(
    device: torch.device, name: str, shape: tuple[int, ...]
) -> None:
    buffers = make_buffers(device, **{name: poisoned(*shape, device=device)})
    plan = make_plan(CUDAGraphMode.FULL)
    message = (
        rf"{name} is \({', '.join(map(str, shape))},?\), but a batch of 15 tokens of 6 requests"
    )
    with pytest.raises(ConfigError, match=message):
        prepare(plan, buffers, 15)
    assert torch.equal(buffers.seq_lens, make_buffers(device).seq_lens[: len(buffers.seq_lens)])
    prepare(plan, make_buffers(device), 15)


def test_a_block_table_with_too_few_rows_is_named(device: torch.device) -> None:
    tables = [poisoned(MAX_SEQS, 5, device=device), poisoned(MAX_SEQS - 1, 5, device=device)]
    buffers = make_buffers(device, block_tables=tables)
    with pytest.raises(ConfigError, match=r"block_tables is \(5, 5\), .* needs 6 in dimension 0"):
        prepare(make_plan(CUDAGraphMode.FULL), buffers, 15)
