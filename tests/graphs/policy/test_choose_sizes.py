"""The best sizes by dynamic programming are those that trying every set of sizes finds."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.policy.choose_sizes import BatchKind, GraphLimits, choose_sizes

TOKENS = st.integers(1, 12)
SECONDS = st.integers(0, 9).map(float)


@st.composite
def kinds(draw, most_sizes=6):
    """Any costs: also graphs that are slower than eager, or than larger graphs."""
    replay = draw(st.lists(SECONDS, min_size=13, max_size=13))
    eager = draw(st.lists(SECONDS, min_size=13, max_size=13))
    pool = sorted(draw(st.lists(st.integers(0, 20), min_size=13, max_size=13)))
    return BatchKind(
        steps=draw(st.dictionaries(TOKENS, st.integers(1, 5), max_size=6)),
        sizes=draw(st.lists(TOKENS, max_size=most_sizes)),
        replay=replay.__getitem__,
        eager=eager.__getitem__,
        graph_bytes=draw(st.integers(0, 3)),
        graph_seconds=draw(st.integers(0, 3)),
        pool_bytes=pool.__getitem__,
    )


def subsets(sizes):
    return [
        chosen for count in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, count)
    ]


def allowed(kinds, chosen, limits):
    """Whether the sizes are within the limits, stated again."""
    pairs = list(zip(kinds, chosen, strict=True))
    num_graphs = sum(map(len, chosen))
    seconds = sum(kind.graph_seconds * len(sizes) for kind, sizes in pairs)
    pool = max((kind.pool_bytes(max(sizes)) for kind, sizes in pairs if sizes), default=0)
    held = pool + sum(kind.graph_bytes * len(sizes) for kind, sizes in pairs)
    return (
        num_graphs <= (math.inf if limits.max_graphs is None else limits.max_graphs)
        and seconds <= (math.inf if limits.max_seconds is None else limits.max_seconds)
        and held <= (math.inf if limits.max_bytes is None else limits.max_bytes)
    )


@given(
    kinds=st.lists(kinds(), min_size=1, max_size=2),
    limits=st.builds(
        GraphLimits,
        max_graphs=st.none() | st.integers(0, 6),
        max_bytes=st.none() | st.integers(0, 30),
        max_seconds=st.none() | st.integers(0, 12),
    ),
)
def test_the_choice_is_the_best_of_all(kinds, limits):
    def seconds(chosen):
        return sum(kind.seconds(sizes) for kind, sizes in zip(kinds, chosen, strict=True))

    everything = itertools.product(*(subsets(kind.sizes) for kind in kinds))
    best = min(seconds(chosen) for chosen in everything if allowed(kinds, chosen, limits))
    chosen = choose_sizes(kinds, limits)
    assert allowed(kinds, chosen, limits)
    assert all(set(sizes) <= set(kind.sizes) for kind, sizes in zip(kinds, chosen, strict=True))
    assert seconds(chosen) == pytest.approx(best, rel=1e-12)


def test_time_of_steps():
    kind = BatchKind(
        steps={1: 10, 3: 2, 9: 1},
        sizes=[1, 4],
        replay=float,
        eager=lambda num_tokens: 100.0 + num_tokens,
    )
    assert kind.seconds([]) == 10 * 101 + 2 * 103 + 109
    assert kind.seconds([4]) == 12 * 4 + 109
    assert kind.seconds([4, 1]) == 10 * 1 + 2 * 4 + 109


@pytest.mark.slow
def test_thousands_of_shapes_take_seconds():
    """Prompts give every step another number of tokens."""
    shapes = range(1, 4097)
    kind = BatchKind(
        steps=dict.fromkeys(shapes, 1), sizes=shapes, replay=float, eager=lambda n: 2.0 * n
    )
    (sizes,) = choose_sizes([kind], GraphLimits(max_graphs=16))
    # Equal shares are the best for equally frequent shapes whose cost is proportional.
    gaps = {after - before for before, after in itertools.pairwise((0, *sizes))}
    assert (len(sizes), sizes[-1]) == (16, 4096)
    assert gaps == {256}


@pytest.mark.parametrize("name", ["max_graphs", "max_bytes", "max_seconds"])
@pytest.mark.parametrize("value", [-1, True, float("nan"), float("inf")])
def test_an_impossible_limit_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an? (integer|number) of at least 0"):
        GraphLimits(**{name: value})


@pytest.mark.parametrize("name", ["max_graphs", "max_bytes"])
def test_a_limit_of_things_is_whole(name):
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 0, got 2.5"):
        GraphLimits(**{name: 2.5})


def test_a_size_of_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="number of tokens must be a positive integer, got 0"):
        BatchKind(steps={0: 1}, sizes=[1], replay=float, eager=float)
