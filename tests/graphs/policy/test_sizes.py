"""Which token counts get a graph: CONTRACT section 4's ladder, validation, and padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import CapturePlan, CUDAGraphMode
from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import (
    decode_sizes,
    default_mixed_sizes,
    default_sizes,
    get_cudagraph_sizes,
    padding_table,
    validate_sizes,
)

MULTIPLES_OF_8 = [
    8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128,
    136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256,
]  # fmt: skip
MULTIPLES_OF_16 = [272, 288, 304, 320, 336, 352, 368, 384, 400, 416, 432, 448, 464, 480, 496, 512]
LADDER = (1, 2, 4, *MULTIPLES_OF_8, *MULTIPLES_OF_16)


@pytest.mark.parametrize(
    ("max_num_seqs", "limit", "q", "expected"),
    [
        (256, 8192, 1, LADDER),
        (1024, 8192, 4, LADDER),
        (1, 8192, 1, (1, 2)),
        (2, 8192, 1, (1, 2, 4)),
        (3, 8192, 1, (1, 2, 4)),
        (8, 8192, 1, (1, 2, 4, 8, 16)),
        (4, 8192, 3, (1, 2, 4, 8, 16, 24)),
        (128, 8192, 1, (1, 2, 4, *MULTIPLES_OF_8)),
        (136, 8192, 1, (1, 2, 4, *MULTIPLES_OF_8, 272)),
        (135, 8192, 1, (1, 2, 4, *MULTIPLES_OF_8)),
        (256, 20, 1, (1, 2, 4, 8, 16)),
        (256, 1, 1, (1,)),
    ],
)
def test_default_ladder(max_num_seqs: int, limit: int, q: int, expected: tuple[int, ...]) -> None:
    sizes = default_sizes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=limit, decode_query_len=q
    )
    assert sizes == expected


@pytest.mark.parametrize(
    ("max_num_seqs", "limit", "expected"),
    [(256, 8192, (1, 2, 4, 8, 16)), (4, 8192, (1, 2, 4, 8)), (256, 9, (1, 2, 4, 8))],
)
def test_default_ladder_ends_at_16_on_the_cpu(
    max_num_seqs: int, limit: int, expected: tuple[int, ...]
) -> None:
    sizes = default_sizes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=limit, device_type="cpu"
    )
    assert sizes == expected


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "decode_query_len"])
@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_default_ladder_checks_its_limits(name: str, value: object) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer, got {value}"):
        default_sizes(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, (1,)),
        (16, (16,)),
        (20, (16, 20)),
        (64, (16, 32, 64)),
        (200, (16, 32, 64, 128, 192, 200)),
    ],
)
def test_sizes_of_mixed_batches_end_with_the_largest_batch(
    limit: int, expected: tuple[int, ...]
) -> None:
    assert default_mixed_sizes(limit) == expected


def test_sizes_of_mixed_batches_get_coarser() -> None:
    sizes = default_mixed_sizes(8192)
    steps = {size: after - size for size, after in pairwise(sizes) if size >= 64}
    for size, step in steps.items():
        assert step == (64 if size < 1024 else 128 if size < 2048 else 256 if size < 4096 else 512)
    assert default_mixed_sizes(5000)[-3:] == (4096, 4608, 5000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be a positive integer"):
        default_mixed_sizes(0)


def test_user_sizes_are_sorted_and_without_duplicates() -> None:
    assert validate_sizes([8, 1, 4, 8, 1], max_num_batched_tokens=8) == (1, 4, 8)
    assert validate_sizes(iter({3}), max_num_batched_tokens=None) == (3,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "capture sizes are empty"),
        ([4, -1], "capture size must be a positive integer, got -1"),
        ([0], "capture size must be a positive integer, got 0"),
        ([2.0], r"capture size must be a positive integer, got 2\.0"),
        ([True], "capture size must be a positive integer, got True"),
        (["8"], "capture size must be a positive integer, got '8'"),
        ([None], "capture size must be a positive integer, got None"),
        ("8", "must be a list of positive integers, got '8'"),
        (b"8", "must be a list of positive integers, got b'8'"),
        (8, "must be a list of positive integers, got 8"),
        ([4, 65, 8], "capture size 65 is above max_num_batched_tokens=64"),
    ],
)
def test_bad_sizes(sizes: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_sizes(sizes, max_num_batched_tokens=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "q", "max_num_seqs", "expected"),
    [
        ((1, 2, 4, 8), 1, 8, (1, 2, 4, 8)),
        ((1, 2, 4, 8), 1, 5, (1, 2, 4)),
        ((1, 2, 4, 8), 3, 8, (3, 6, 9)),
        ((1, 2, 3), 3, 8, (3,)),
        ((1, 2, 4, 8), 3, 2, (3, 6)),
        ((7,), 3, 3, (9,)),
        ((8,), 1, 7, ()),
    ],
)
def test_decode_sizes_are_whole_requests(
    sizes: tuple[int, ...], q: int, max_num_seqs: int, expected: tuple[int, ...]
) -> None:
    rounded = decode_sizes(
        sizes, query_len=q, max_num_seqs=max_num_seqs, max_num_batched_tokens=1024
    )
    assert rounded == expected


def test_decode_sizes_stay_inside_the_token_limit() -> None:
    sizes = decode_sizes((2, 4, 8), query_len=3, max_num_seqs=8, max_num_batched_tokens=8)
    assert sizes == (3, 6)


@given(st.sets(st.integers(1, 64), min_size=1))
def test_padding_table_agrees_with_a_search(size_set: set[int]) -> None:
    sizes = sorted(size_set)
    table = padding_table(sizes)
    assert len(table) == sizes[-1] + 1
    for count, index in enumerate(table):
        assert sizes[index] == min(size for size in sizes if size >= count)


def test_padding_table_of_no_sizes_is_empty() -> None:
    assert padding_table(()) == []


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=8),
    max_num_reqs=st.integers(1, 16),
    query_len=st.integers(1, 4),
)
def test_the_sizes_that_vllm_asks_for_are_those_of_dispatch(
    sizes: list[int], max_num_reqs: int, query_len: int
) -> None:
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    mixed, decode = get_cudagraph_sizes(
        sizes, max_num_reqs, 256, mode, query_len, uniform_decode_cudagraph=True
    )
    plan = CapturePlan.build(
        mode,
        sizes,
        max_num_seqs=max_num_reqs,
        max_num_batched_tokens=256,
        decode_query_lens=(query_len,),
    )
    assert mixed == {n: min(size for size in sizes if size >= n) for n in range(1, max(sizes) + 1)}
    own = plan.decode_sizes_for(query_len)
    largest = max(own, default=0)
    assert decode == {
        n: min(size for size in own if size >= n) for n in range(query_len, largest + 1)
    }
    assert get_cudagraph_sizes(sizes, max_num_reqs, 256, CUDAGraphMode.NONE) == ({}, {})
    assert get_cudagraph_sizes(None, max_num_reqs, 256, mode) == ({}, {})
    assert get_cudagraph_sizes(sizes, max_num_reqs, 256, mode)[1] == {}


@pytest.mark.parametrize("largest", [0, -8, "8", 8.0])
def test_the_largest_default_size_is_checked(largest: Any) -> None:
    with pytest.raises(ConfigError, match="the largest capture size must be a positive integer"):
        default_sizes(max_num_seqs=8, max_num_batched_tokens=64, largest=largest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_reqs", 0), ("max_num_tokens", "64"), ("uniform_decode_query_len", 0)],
)
def test_limits_of_padding_are_checked(name: str, value: Any) -> None:
    given: dict[str, Any] = {"max_num_reqs": 8, "max_num_tokens": 64, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer, got {value!r}"):
        get_cudagraph_sizes([8], cudagraph_mode=CUDAGraphMode.FULL, **given)


def test_the_mode_may_be_a_name() -> None:
    assert get_cudagraph_sizes([1], 8, 64, "none") == ({}, {})  # type: ignore[arg-type]
    assert get_cudagraph_sizes([1], 8, 64, "full") == ({1: 1}, {})  # type: ignore[arg-type]
