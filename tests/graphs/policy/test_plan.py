"""The capture plan: its order, its keys, its LoRA cases, and that it is a comparable value."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from ostinato.errors import ConfigError
from ostinato.graphs.capture.capture_loop import EntryReport
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry, sequence_parallel_sizes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
WHOLE = CUDAGraphMode.FULL_AND_FULL


def build(mode: CUDAGraphMode = BOTH, sizes: Any = (1, 2, 4), **limits: Any) -> CapturePlan:
    return CapturePlan.build(
        mode, sizes, **{"max_num_seqs": 4, "max_num_batched_tokens": 64, **limits}
    )


def tokens_by_phase(plan: CapturePlan) -> list[tuple[str, int]]:
    return [(entry.phase, entry.descriptor.num_tokens) for entry in plan.entries]


def test_order_is_piecewise_before_full_and_largest_first() -> None:
    assert tokens_by_phase(build(sizes=(4, 1, 2))) == [
        ("mixed, PIECEWISE", 4),
        ("mixed, PIECEWISE", 2),
        ("mixed, PIECEWISE", 1),
        ("decode, FULL", 4),
        ("decode, FULL", 2),
        ("decode, FULL", 1),
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (NONE, []),
        (PIECEWISE, [("mixed, PIECEWISE", 8), ("mixed, PIECEWISE", 3)]),
        (FULL, [("mixed, FULL", 8), ("mixed, FULL", 3)]),
        (DECODE_ONLY, [("decode, FULL", 4)]),
        (BOTH, [("mixed, PIECEWISE", 8), ("mixed, PIECEWISE", 3), ("decode, FULL", 4)]),
        (WHOLE, [("mixed, FULL", 8), ("mixed, FULL", 3), ("decode, FULL", 4)]),
    ],
)
def test_entries_of_each_mode(mode: CUDAGraphMode, expected: list[tuple[str, int]]) -> None:
    plan = build(mode, (3, 8), decode_query_lens=(2,), max_num_seqs=3)
    assert tokens_by_phase(plan) == expected


@pytest.mark.parametrize(
    ("mode", "count"), [(NONE, 0), (DECODE_ONLY, 1), (PIECEWISE, 1), (BOTH, 2), (WHOLE, 2)]
)
def test_one_size_as_in_the_contract(mode: CUDAGraphMode, count: int) -> None:
    plan = build(mode, [100], max_num_seqs=128, max_num_batched_tokens=512)
    assert len(plan.entries) == count


def test_piecewise_keys_leave_the_number_of_requests_open() -> None:
    plan = build(PIECEWISE, (1, 8))
    assert [entry.descriptor for entry in plan.entries] == [BatchDescriptor(8), BatchDescriptor(1)]


def test_full_keys_set_the_number_of_requests() -> None:
    plan = build(FULL, (2, 8))
    keys = [BatchDescriptor(8, num_reqs=4), BatchDescriptor(2, num_reqs=2)]
    assert [entry.descriptor for entry in plan.entries] == keys


def test_mixed_and_decode_graphs_of_one_size_have_different_keys() -> None:
    plan = build(WHOLE, (4,), max_loras=1)
    assert len({entry.descriptor for entry in plan.entries}) == len(plan.entries) == 4


def test_mixed_batches_may_have_their_own_sizes() -> None:
    plan = build(WHOLE, (4, 1), mixed_sizes=(64, 16, 16))
    assert (plan.sizes, plan.mixed_sizes) == ((1, 4), (16, 64))
    assert tokens_by_phase(plan) == [
        ("mixed, FULL", 64),
        ("mixed, FULL", 16),
        ("decode, FULL", 4),
        ("decode, FULL", 1),
    ]
    assert plan.sizes_without_decode == ()
    assert hash(plan) == hash(build(WHOLE, (1, 4), mixed_sizes=(16, 64)))
    assert build(WHOLE).mixed_sizes == build(BOTH).mixed_sizes == (1, 2, 4)
    pieces = build(BOTH, (1,), mixed_sizes=(16,))
    assert tokens_by_phase(pieces) == [("mixed, PIECEWISE", 16), ("decode, FULL", 1)]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE, DECODE_ONLY])
def test_own_sizes_need_graphs_of_mixed_batches_alone(mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=f"{mode.name} has no separate graphs of mixed batches"):
        build(mode, mixed_sizes=(16,))


def test_decode_keys_hold_whole_requests() -> None:
    plan = build(DECODE_ONLY, (1, 4), decode_query_lens=[3])
    keys = [
        BatchDescriptor(6, num_reqs=2, uniform=True),
        BatchDescriptor(3, num_reqs=1, uniform=True),
    ]
    assert [entry.descriptor for entry in plan.entries] == keys
    assert plan.query_len_of(keys[0]) == 3


def test_several_query_lengths_are_part_of_the_key() -> None:
    plan = build(DECODE_ONLY, (2, 6), decode_query_lens=(3, 1, 3), max_num_seqs=6)
    keys = [(e.descriptor.num_tokens, e.descriptor.query_len) for e in plan.entries]
    assert keys == [(6, 3), (6, 1), (3, 3), (2, 1)]
    assert [e.descriptor.num_reqs for e in plan.entries] == [2, 6, 1, 2]
    assert [plan.query_len_of(e.descriptor) for e in plan.entries] == [3, 1, 3, 1]
    assert plan.decode_query_lens == (1, 3)


def test_mixed_keys_never_carry_a_query_length() -> None:
    plan = build(BOTH, (2, 6), decode_query_lens=(1, 3))
    mixed = [entry.descriptor for entry in plan.entries if not entry.descriptor.uniform]
    assert [key.query_len for key in mixed] == [None, None]


@pytest.mark.parametrize(
    ("max_loras", "cases"),
    [
        (0, (0,)),
        (1, (0, 1)),
        (2, (0, 1, 2)),
        (3, (0, 1, 2, 3)),
        (4, (0, 1, 2, 4)),
        (5, (0, 1, 2, 4, 5)),
        (8, (0, 1, 2, 4, 8)),
        (9, (0, 1, 2, 4, 8, 9)),
    ],
)
def test_lora_cases(max_loras: int, cases: tuple[int, ...]) -> None:
    plan = build(max_loras=max_loras)
    assert plan.lora_cases == cases
    assert len(plan.entries) == (3 + 3) * len(cases)


def test_every_phase_has_every_lora_case() -> None:
    plan = build(BOTH, (4,), max_loras=2)
    keys = [(e.phase, e.descriptor.num_active_loras, e.descriptor.has_lora) for e in plan.entries]
    assert keys == [
        ("mixed, PIECEWISE", 2, True),
        ("mixed, PIECEWISE", 1, True),
        ("mixed, PIECEWISE", 0, False),
        ("decode, FULL", 2, True),
        ("decode, FULL", 1, True),
        ("decode, FULL", 0, False),
    ]


@pytest.mark.parametrize(
    ("max_loras", "cases"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (16, [0, 1, 16])]
)
def test_separate_sizes_of_whole_graphs_have_at_most_three_lora_cases(
    max_loras: int, cases: list[int]
) -> None:
    plan = build(WHOLE, (1, 4), mixed_sizes=(2, 8), max_loras=max_loras)
    mixed = [e.descriptor for e in plan.entries if not e.descriptor.uniform]
    expected = [(size, case) for size in (8, 2) for case in reversed(cases)]
    assert [(key.num_tokens, key.num_active_loras) for key in mixed] == expected
    assert len(plan.entries) - len(mixed) == 2 * len(plan.lora_cases)
    plan = build(WHOLE, (1, 4), max_loras=max_loras)
    assert len(plan.entries) == 2 * 2 * len(plan.lora_cases)


def test_no_entry_appears_twice() -> None:
    plan = build(BOTH, (1, 2, 3, 4), decode_query_lens=(2, 3), max_loras=3)
    assert len(set(plan.entries)) == len(plan.entries)


def test_equal_plans_are_one_value() -> None:
    plan, twin = build(sizes=[4, 1, 2, 2]), build(sizes=(1, 2, 4))
    assert plan == twin
    assert plan.digest == twin.digest
    assert hash(plan) == hash(twin)
    assert {plan: "graphs"}[twin] == "graphs"


@pytest.mark.parametrize(
    "change",
    [
        {"mode": PIECEWISE},
        {"sizes": (1, 2)},
        {"mixed_sizes": (1, 2)},
        {"mode": WHOLE},
        {"max_num_seqs": 5},
        {"max_num_batched_tokens": 63},
        {"decode_query_lens": (2,)},
        {"decode_query_lens": (1, 2)},
        {"max_loras": 1},
    ],
    ids=str,
)
def test_digest_tells_plans_apart(change: dict[str, Any]) -> None:
    assert build(**change).digest != build().digest


def test_digest_is_the_same_in_every_process() -> None:
    code = (
        "from ostinato import CapturePlan, CUDAGraphMode;"
        "print(CapturePlan.build(CUDAGraphMode.FULL_AND_PIECEWISE, (1, 2, 4),"
        " max_num_seqs=4, max_num_batched_tokens=64).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1234"},
    )
    assert other.stdout.strip() == build().digest


def test_mode_none_needs_no_sizes() -> None:
    plan = build(NONE, ())
    assert plan.entries == ()
    assert plan.sizes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": ()}, "capture sizes are empty"),
        ({"mixed_sizes": ()}, "capture sizes are empty"),
        ({"mixed_sizes": (65,)}, "capture size 65 is above max_num_batched_tokens=64"),
        ({"sizes": (65,)}, "capture size 65 is above max_num_batched_tokens=64"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
        ({"max_num_batched_tokens": 1.0}, "max_num_batched_tokens must be a positive integer"),
        ({"decode_query_lens": ()}, "decode_query_lens is empty"),
        ({"decode_query_lens": 2}, "decode_query_lens must be a list of query lengths, got 2"),
        ({"decode_query_lens": (0,)}, "decode query length must be a positive integer, got 0"),
        ({"decode_query_lens": (True,)}, "decode query length must be .* got True"),
        ({"decode_query_lens": (1, True)}, "decode query length must be .* got True"),
        ({"decode_query_lens": (1, "3")}, "decode query length must be .* got '3'"),
        ({"max_loras": -1}, "max_loras must be 0 or a positive integer, got -1"),
        ({"max_loras": True}, "max_loras must be 0 or a positive integer, got True"),
        ({"mode": "fastest"}, "unknown graph mode 'fastest'"),
    ],
    ids=str,
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**change)


def test_nothing_to_capture_is_an_error() -> None:
    with pytest.raises(ConfigError, match="FULL_DECODE_ONLY has nothing to capture") as caught:
        build(DECODE_ONLY, (8, 16))
    for value in ("[8, 16]", "[1] tokens a request", "4 requests", "64 tokens"):
        assert value in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "sizes", "limits", "without"),
    [
        (BOTH, [100], {"max_num_seqs": 16}, (100,)),
        (BOTH, [100], {"max_num_seqs": 100}, ()),
        (BOTH, [4, 16, 17, 100], {"max_num_seqs": 16}, (17, 100)),
        (DECODE_ONLY, [4, 16, 17, 100], {"max_num_seqs": 16}, (17, 100)),
        (WHOLE, [4, 16, 17, 100], {"max_num_seqs": 16}, (17, 100)),
        (FULL, [100], {"max_num_seqs": 16}, ()),
        (PIECEWISE, [100], {"max_num_seqs": 16}, ()),
        # 5 and 6 tokens are two requests of 3; 7 would be three.
        (BOTH, [5, 6, 7], {"max_num_seqs": 2, "decode_query_lens": (3,)}, (7,)),
        # What one query length cannot use, another can.
        (BOTH, [5, 6, 7], {"max_num_seqs": 2, "decode_query_lens": (3, 4)}, ()),
        # Whole requests of 3 do not fill 128 tokens.
        (BOTH, [126, 127], {"max_num_seqs": 99, "decode_query_lens": (3,)}, (127,)),
    ],
    ids=str,
)
def test_sizes_without_a_decode_graph(
    mode: CUDAGraphMode, sizes: list[int], limits: dict[str, Any], without: tuple[int, ...]
) -> None:
    plan = build(mode, sizes, max_num_batched_tokens=128, **limits)
    assert plan.sizes_without_decode == without
    decode = {e.descriptor.num_tokens for e in plan.entries if e.descriptor.uniform}
    for size in without:
        assert all(held < size for held in decode)


def test_decode_batches_without_a_graph_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    build(BOTH, [100], max_num_seqs=16, max_num_batched_tokens=128)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        "capture sizes [100] get no decode graph: a decode batch has at most 16 tokens (1 a "
        "request), by max_num_seqs=16 and max_num_batched_tokens=128. Decode batches of 1 to 16 "
        "tokens run in pieces; add size 16"
    ]


@pytest.mark.parametrize("mixed_sizes", [None, (64, 128)])
def test_decode_batches_in_graphs_of_mixed_batches_are_a_warning(
    caplog: pytest.LogCaptureFixture, mixed_sizes: Any
) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 128}
    build(WHOLE, [1, 2, 4], mixed_sizes=mixed_sizes, **limits)
    (text,) = caplog.messages
    assert "of 3 tokens run through graphs of mixed batches, without sampling" in text
    caplog.clear()
    with caplog.at_level("INFO"):
        build(WHOLE, [1, 2, 3, 4], mixed_sizes=mixed_sizes, **limits)
    assert len(caplog.messages) == (mixed_sizes is None)  # what mixed batches use is known


def test_each_query_length_without_graphs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    limits = {"decode_query_lens": (1, 3), "max_num_batched_tokens": 10}
    build(DECODE_ONLY, [2, 10], max_num_seqs=5, **limits)
    (text,) = caplog.messages
    assert "at most 5 tokens (1 a request) or 9 tokens (3 a request)" in text
    assert "batches of 3 to 5 tokens run eagerly; add size 5" in text
    assert "batches of 6 to 9 tokens run eagerly; add size 9" in text


def test_sizes_for_mixed_batches_alone_are_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        build(BOTH, [1, 4, 64])
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "capture sizes [64] get no decode graph" in record.getMessage()
    assert "mixed batches use these sizes" in record.getMessage()
    caplog.clear()
    with caplog.at_level("INFO"):
        for mode in (NONE, PIECEWISE, FULL):
            build(mode, [1, 64])
        build(BOTH, [1, 2, 4])
    assert not caplog.records


@pytest.mark.parametrize("mode", [PIECEWISE, FULL, DECODE_ONLY, BOTH, WHOLE])
def test_a_size_may_be_the_token_limit(mode: CUDAGraphMode) -> None:
    plan = build(mode, [64], max_num_seqs=64)
    assert {entry.descriptor.num_tokens for entry in plan.entries} == {64}
    assert plan.decode_sizes_for(1) == (64,)
    totals = sequence_parallel_sizes([16, 32], sp=2, threshold=32, max_num_batched_tokens=64)
    assert totals == (64,)


@pytest.mark.parametrize("multiple", [0, -2, 1.5, True])
def test_tokens_are_split_over_a_positive_number_of_ranks(multiple: Any) -> None:
    with pytest.raises(ConfigError, match="token_multiple must be a positive integer"):
        build().with_sizes((2, 4), token_multiple=multiple)


def test_without_speculation_a_request_decodes_one_token() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    bare = CapturePlan.without_sizes(BOTH, **limits)
    assert (bare.decode_query_lens, bare.max_loras, bare.entries) == ((1,), 0, ())
    assert bare.with_sizes((1, 2, 4)) == CapturePlan.build(BOTH, (1, 2, 4), **limits) == build()


VALUES = [
    PlanEntry(mode=PIECEWISE, descriptor=BatchDescriptor(4)),
    Choice(mode=NONE, descriptor=BatchDescriptor(4), reason=Reason.MODE_NONE),
    EntryReport(
        entry=PlanEntry(mode=PIECEWISE, descriptor=BatchDescriptor(4)),
        num_graphs=1,
        num_bytes=0,
        seconds=0.0,
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_keys_and_choices_do_not_change_and_are_built_by_name(value: Any) -> None:
    name = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises(TypeError, match="positional"):
        type(value)(*(getattr(value, field.name) for field in fields(value)))


def test_sizes_split_evenly() -> None:
    with pytest.raises(ConfigError, match=r"sizes \[3, 5\] are not multiples of 2"):
        build().with_sizes((2, 3, 5), token_multiple=2)
    with pytest.raises(ConfigError, match=r"sizes \[7\] are not multiples of 2"):
        build().with_sizes((2, 4), mixed_sizes=(4, 7), token_multiple=2)


def test_phase_names() -> None:
    mixed = PlanEntry(mode=PIECEWISE, descriptor=BatchDescriptor(4))
    decode = PlanEntry(mode=FULL, descriptor=BatchDescriptor(4, num_reqs=4, uniform=True))
    assert mixed.phase == "mixed, PIECEWISE"
    assert decode.phase == "decode, FULL"


def test_a_query_length_may_be_for_small_batches_only() -> None:
    plan = CapturePlan.build(
        CUDAGraphMode.FULL_DECODE_ONLY,
        [1, 2, 4, 8, 16, 32],
        max_num_seqs=16,
        max_num_batched_tokens=64,
        decode_query_lens={1: 16, 5: 3, 2: 40},
    )
    assert plan.decode_max_reqs == (16, 16, 3)
    sizes = {length: plan.decode_sizes_for(length) for length in plan.decode_query_lens}
    assert sizes == {1: (1, 2, 4, 8, 16), 2: (2, 4, 8, 16, 32), 5: (5, 10, 15)}
    assert plan.largest_decode_batch(5) == 15
    with pytest.raises(ConfigError, match="most requests of a decode query length must be"):
        CapturePlan.without_sizes(
            CUDAGraphMode.FULL,
            max_num_seqs=4,
            max_num_batched_tokens=4,
            decode_query_lens={1: 0},
        )
