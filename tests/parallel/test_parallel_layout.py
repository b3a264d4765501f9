"""Ranks, groups and ownership of heads, tokens and vocabulary, for all sizes, in plain Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.parallel.layout import HeadLayout, ParallelLayout, vocabulary

layouts = st.builds(ParallelLayout, st.integers(1, 6), st.integers(1, 6))


@st.composite
def head_layouts(draw: st.DrawFn) -> HeadLayout:
    """Both kinds: several KV heads per rank, and one KV head shared by several ranks."""
    layout = draw(layouts)
    world = layout.world_size
    if draw(st.booleans()):
        num_kv_heads = world * draw(st.integers(1, 4))
        return layout.heads(num_kv_heads * draw(st.integers(1, 4)), num_kv_heads)
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return layout.heads(world * draw(st.integers(1, 4)), draw(st.sampled_from(divisors)))


# --- ranks and groups ---


def test_two_by_two_written_out() -> None:
    layout = ParallelLayout(sp=2, tp=2)
    assert [layout.coordinates(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [layout.tensor_group(r) for r in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [layout.sequence_group(r) for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert layout.shift_group == (0, 2, 1, 3)
    assert [layout.shift_index(r) for r in range(4)] == [0, 2, 1, 3]


def test_shift_group_and_shift_index_are_inverse_not_equal() -> None:
    layout = ParallelLayout(sp=2, tp=3)
    assert layout.shift_group == (0, 3, 1, 4, 2, 5)
    assert tuple(layout.shift_index(r) for r in range(6)) == (0, 2, 4, 1, 3, 5)


def test_a_layout_is_a_value() -> None:
    assert ParallelLayout() == ParallelLayout(1, 1)
    assert {ParallelLayout(2, 1): "a"}[ParallelLayout(sp=2, tp=1)] == "a"
    assert ParallelLayout(2, 1) != ParallelLayout(1, 2)
    assert len({ParallelLayout(2, 2).heads(8, 4), ParallelLayout(2, 2).heads(8, 4)}) == 1


@given(layouts)
def test_coordinates_and_ranks_are_inverse(layout: ParallelLayout) -> None:
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert sorted(coordinates) == [(s, t) for s in range(layout.sp) for t in range(layout.tp)]
    assert [layout.rank_of(s, t) for s, t in coordinates] == list(range(layout.world_size))


@given(layouts)
def test_groups_partition_the_world(layout: ParallelLayout) -> None:
    world = list(range(layout.world_size))
    for group_of, size in ((layout.tensor_group, layout.tp), (layout.sequence_group, layout.sp)):
        groups = {group_of(rank) for rank in world}
        assert sorted(rank for group in groups for rank in group) == world
        assert all(len(group) == size for group in groups)
        assert all(rank in group_of(rank) for rank in world)
    for rank in world:
        s, t = layout.coordinates(rank)
        assert layout.tensor_group(rank)[t] == rank
        assert layout.sequence_group(rank)[s] == rank
        assert set(layout.tensor_group(rank)) & set(layout.sequence_group(rank)) == {rank}


@given(layouts)
def test_shift_group_is_all_ranks_in_order_of_shift_index(layout: ParallelLayout) -> None:
    assert sorted(layout.shift_group) == list(range(layout.world_size))
    assert [layout.shift_index(r) for r in layout.shift_group] == list(range(layout.world_size))


# --- heads ---


@given(head_layouts())
def test_every_query_head_is_owned_once(heads: HeadLayout) -> None:
    world = heads.layout.world_size
    owned = [head for i in range(world) for head in heads.query_heads(i)]
    assert owned == list(range(heads.num_heads))


@given(head_layouts())
def test_a_block_owns_exactly_the_kv_heads_its_query_heads_need(heads: HeadLayout) -> None:
    group = heads.num_heads // heads.num_kv_heads
    for i in range(heads.layout.world_size):
        needed = sorted({head // group for head in heads.query_heads(i)})
        assert list(heads.kv_heads(i)) == needed


@given(head_layouts())
def test_every_kv_head_is_owned_equally_often(heads: HeadLayout) -> None:
    world = heads.layout.world_size
    owned = [head for i in range(world) for head in heads.kv_heads(i)]
    copies = max(1, world // heads.num_kv_heads)
    assert owned == [head for head in range(heads.num_kv_heads) for _ in range(copies)]


@given(head_layouts())
def test_base_shards_are_their_blocks_in_order(heads: HeadLayout) -> None:
    sp, tp = heads.layout.sp, heads.layout.tp
    for t in range(tp):
        blocks = range(t * sp, (t + 1) * sp)
        assert heads.base_query_heads(t) == tuple(h for i in blocks for h in heads.query_heads(i))
        assert heads.base_kv_heads(t) == tuple(h for i in blocks for h in heads.kv_heads(i))
    whole = tuple(range(heads.num_heads))
    assert sum((heads.base_query_heads(t) for t in range(tp)), ()) == whole
    assert len({len(heads.base_kv_heads(t)) for t in range(tp)}) == 1


def test_a_shared_kv_head_is_there_once_per_block() -> None:
    heads = ParallelLayout(sp=4, tp=1).heads(8, 2)
    assert [list(heads.kv_heads(i)) for i in range(4)] == [[0], [0], [1], [1]]
    assert heads.base_kv_heads(0) == (0, 0, 1, 1)
    assert heads.base_query_heads(0) == tuple(range(8))


# --- tokens for heads: the all-to-all of Ulysses ---

Cells = list[list[tuple[int, int]]]  # [token][head] of (token number, head number)


def trade(layout: ParallelLayout, before: dict[int, Cells]) -> dict[int, Cells]:
    """Equal parts of the heads to the members of the sequence group, tokens in order."""
    after: dict[int, Cells] = {}
    for rank in range(layout.world_size):
        group = layout.sequence_group(rank)
        place = group.index(rank)
        after[rank] = []
        for member in group:
            width, rest = divmod(len(before[member][0]), layout.sp)
            assert rest == 0
            after[rank] += [row[place * width : (place + 1) * width] for row in before[member]]
    return after


@pytest.mark.slow
@given(head_layouts(), st.integers(1, 40))
def test_the_all_to_all_gives_each_rank_its_block(heads: HeadLayout, num_tokens: int) -> None:
    layout = heads.layout
    for base, block in (
        (heads.base_query_heads, heads.query_heads),
        (heads.base_kv_heads, heads.kv_heads),
    ):
        before: dict[int, Cells] = {}
        for rank in range(layout.world_size):
            s, t = layout.coordinates(rank)
            share = layout.padded_tokens(num_tokens) // layout.sp
            tokens = range(s * share, (s + 1) * share)
            before[rank] = [[(n, h) for h in base(t)] for n in tokens]
        after = trade(layout, before)
        for rank in range(layout.world_size):
            own = block(layout.shift_index(rank))
            tokens = range(layout.padded_tokens(num_tokens))
            assert after[rank] == [[(n, h) for h in own] for n in tokens]


def kv_after_all_to_all(heads: HeadLayout, rank: int) -> list[int]:
    s, t = heads.layout.coordinates(rank)
    base = heads.base_kv_heads(t)
    width = len(base) // heads.layout.sp
    return list(base[s * width : (s + 1) * width])


@pytest.mark.parametrize("num_kv_heads", [2, 4, 8])
def test_the_naive_order_breaks_kv_ownership(num_kv_heads: int) -> None:
    layout = ParallelLayout(sp=2, tp=2)
    heads = layout.heads(8, num_kv_heads)
    cached = [kv_after_all_to_all(heads, rank) for rank in range(4)]
    assert [list(heads.kv_heads(layout.shift_index(rank))) for rank in range(4)] == cached
    naive = [list(heads.kv_heads(rank)) for rank in range(4)]  # i = s * TP + t
    wrong = [rank for rank in range(4) if naive[rank] != cached[rank]]
    assert wrong == [1, 2]


def test_a_single_kv_head_cannot_show_a_wrong_order() -> None:
    heads = ParallelLayout(sp=2, tp=2).heads(8, 1)
    assert all(kv_after_all_to_all(heads, r) == list(heads.kv_heads(r)) == [0] for r in range(4))


# --- tokens and vocabulary ---


@given(layouts, st.integers(0, 100))
def test_a_padded_batch_has_equal_shares(layout: ParallelLayout, num_tokens: int) -> None:
    padded = layout.padded_tokens(num_tokens)
    assert num_tokens <= padded < num_tokens + layout.sp
    assert padded % layout.sp == 0


def test_token_counts_that_do_not_divide() -> None:
    layout = ParallelLayout(sp=4, tp=2)
    assert [layout.padded_tokens(num_tokens) for num_tokens in (0, 2, 10, 12)] == [0, 4, 12, 12]


@given(st.integers(1, 300), st.integers(1, 9))
def test_vocabulary_shards_cover_it_once(vocab_size: int, parts: int) -> None:
    shards = [vocabulary(vocab_size, parts, index) for index in range(parts)]
    assert [token for shard in shards for token in shard] == list(range(vocab_size))
    rows = len(shards[0])
    # A token is at row `token % rows` of shard `token // rows`: no table is needed.
    assert all(token // rows == i for i, shard in enumerate(shards) for token in shard)
    assert rows * parts < vocab_size + parts


def test_the_last_shards_of_a_small_vocabulary_are_shorter() -> None:
    assert [len(vocabulary(10, 4, index)) for index in range(4)] == [3, 3, 3, 1]
    assert [len(vocabulary(5, 4, index)) for index in range(4)] == [2, 2, 1, 0]


# --- errors ---


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_sizes_are_positive_ints(value: object) -> None:
    with pytest.raises(ConfigError, match=r"\(sp\) must be an int of at least 1, got "):
        ParallelLayout(sp=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\(tp\) must be an int of at least 1, got "):
        ParallelLayout(tp=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 6, 1.0])
def test_a_rank_out_of_range_is_named(rank: int) -> None:
    layout = ParallelLayout(sp=2, tp=3)
    for question in (
        layout.coordinates,
        layout.tensor_group,
        layout.sequence_group,
        layout.shift_index,
        layout.heads(6, 6).query_heads,
        layout.heads(6, 6).kv_heads,
    ):
        with pytest.raises(ConfigError, match=rf"0 to 5 \(sp=2, tp=3\), got {rank}"):
            question(rank)


def test_coordinates_out_of_range_are_named() -> None:
    layout = ParallelLayout(sp=2, tp=3)
    with pytest.raises(ConfigError, match=r"coordinate s must be an int from 0 to 1 .*got 2"):
        layout.rank_of(2, 0)
    with pytest.raises(ConfigError, match=r"coordinate t must be an int from 0 to 2 .*got 3"):
        layout.rank_of(0, 3)
    with pytest.raises(ConfigError, match=r"coordinate s must be an int from 0 to 1 .*got -1"):
        layout.rank_of(-1, 0)
    for shard in (layout.heads(6, 6).base_query_heads, layout.heads(6, 6).base_kv_heads):
        with pytest.raises(ConfigError, match=r"coordinate t must be an int from 0 to 2 .*got 3"):
            shard(3)


@pytest.mark.parametrize(
    ("sp", "tp", "num_heads", "num_kv_heads", "message"),
    [
        (2, 2, 9, 3, r"9 query heads .* sp=2 x tp=2 = 4 ranks.*sp x tp can be 1, 3, 9$"),
        (
            2,
            2,
            12,
            6,
            r"6 KV heads \(num_heads=12\) do not fit sp=2 x tp=2 = 4 .* can be 1, 2, 3, 6, 12$",
        ),
        (1, 3, 12, 4, r"4 KV heads .* sp=1 x tp=3 = 3 ranks.* can be 1, 2, 4, 12$"),
        (1, 1, 9, 2, r"num_heads=9 is not a multiple of num_kv_heads=2"),
        (8, 1, 4, 4, r"4 query heads .* 8 ranks.* can be 1, 2, 4$"),
        (1, 1, 0, 1, r"num_heads must be an int of at least 1, got 0"),
        (1, 1, 4, 0, r"num_kv_heads must be an int of at least 1, got 0"),
    ],
)
def test_heads_that_cannot_be_dealt_out(
    sp: int, tp: int, num_heads: int, num_kv_heads: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(sp, tp).heads(num_heads, num_kv_heads)


@given(layouts, st.integers(1, 24), st.integers(1, 24))
def test_heads_are_refused_exactly_when_they_do_not_divide(
    layout: ParallelLayout, num_heads: int, num_kv_heads: int
) -> None:
    world = layout.world_size
    fits = num_heads % num_kv_heads == 0 and num_heads % world == 0
    if fits and (num_kv_heads % world == 0 or world % num_kv_heads == 0):
        layout.heads(num_heads, num_kv_heads)
        return
    with pytest.raises(ConfigError) as refused:
        layout.heads(num_heads, num_kv_heads)
    assert str(num_heads) in str(refused.value)
    assert str(num_kv_heads) in str(refused.value)
    if num_heads % num_kv_heads == 0:
        for works in map(int, str(refused.value).rpartition("can be ")[2].split(", ")):
            ParallelLayout(tp=works).heads(num_heads, num_kv_heads)


def test_bad_token_and_vocabulary_counts() -> None:
    with pytest.raises(ConfigError, match="num_tokens must be an int of at least 0, got -1"):
        ParallelLayout(sp=2).padded_tokens(-1)
    with pytest.raises(ConfigError, match="vocab_size must be an int of at least 1, got 0"):
        vocabulary(0, 1, 0)
    with pytest.raises(ConfigError, match=r"parts of the vocabulary must be .* got 0"):
        vocabulary(10, 0, 0)
    with pytest.raises(ConfigError, match=r"from 0 to 3 \(vocab_size=10\), got 4"):
        vocabulary(10, 4, 4)
