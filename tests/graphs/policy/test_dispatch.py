"""Dispatch: a property test against a search over the plan, and every reason a batch can get."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import AttentionCGSupport, CUDAGraphMode, resolve_mode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
WHOLE = CUDAGraphMode.FULL_AND_FULL
MIXED_HALF = {
    NONE: NONE,
    PIECEWISE: PIECEWISE,
    FULL: FULL,
    DECODE_ONLY: NONE,
    BOTH: PIECEWISE,
    WHOLE: FULL,
}


# --- the property ------------------------------------------------------------------------------

# Modes without graphs of their own say little, so they come up less often.
REQUESTED = [BOTH, FULL, DECODE_ONLY, WHOLE, BOTH, FULL, DECODE_ONLY, WHOLE, PIECEWISE, NONE]
SUPPORT = [AttentionCGSupport.ALWAYS, AttentionCGSupport.ALWAYS, *AttentionCGSupport]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of changed modes and unused sizes are no news here."""
    loggers = [logging.getLogger(f"ostinato.graphs.{name}") for name in ("modes", "plan")]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger in loggers:
        logger.setLevel(logging.NOTSET)


class Setup(NamedTuple):
    """One random engine: everything a plan follows from."""

    sizes: list[int]
    mixed_sizes: list[int] | None  # None: the same
    query_lens: list[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    requested: CUDAGraphMode
    support: AttentionCGSupport
    piecewise_available: bool
    max_loras: int


@st.composite
def setups(draw: st.DrawFn, max_loras: int = 0) -> Setup:
    limit = draw(st.integers(1, 24))
    too_large = draw(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 3]))
    return Setup(
        sizes=draw(st.lists(st.integers(1, limit + too_large), min_size=1, max_size=6)),
        mixed_sizes=draw(st.none() | st.lists(st.integers(1, limit), min_size=1, max_size=6)),
        query_lens=draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        max_num_seqs=draw(st.integers(1, 12)),
        max_num_batched_tokens=limit,
        requested=draw(st.sampled_from(REQUESTED)),
        support=draw(st.sampled_from(SUPPORT)),
        piecewise_available=draw(st.booleans()),
        max_loras=draw(st.integers(0, max_loras)),
    )


def planned(setup: Setup) -> CapturePlan | None:
    """The plan of a setup, or None where the documents say there is none."""
    try:
        resolved = resolve_mode(
            setup.requested,
            setup.support,
            decode_query_len=max(setup.query_lens),
            piecewise_available=setup.piecewise_available,
        )
    except ConfigError:
        assert setup.requested is FULL
        assert setup.support is AttentionCGSupport.NEVER
        return None
    try:
        return CapturePlan.build(
            resolved.mode,
            setup.sizes,
            mixed_sizes=setup.mixed_sizes if resolved.mode in (BOTH, WHOLE) else None,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            decode_query_lens=setup.query_lens,
            max_loras=setup.max_loras,
        )
    except ConfigError:
        assert has_no_plan(setup, resolved.mode)
        return None


def has_no_plan(setup: Setup, mode: CUDAGraphMode) -> bool:
    size_too_large = mode is not NONE and max(setup.sizes) > setup.max_num_batched_tokens
    no_decode_size = not any(decode_sizes(setup, q) for q in setup.query_lens)
    return size_too_large or (mode is DECODE_ONLY and no_decode_size)


def decode_sizes(setup: Setup, q: int) -> list[int]:
    """Sizes rounded up to whole requests, as CONTRACT section 4 has it, by counting upwards."""
    largest = min(q * setup.max_num_seqs, setup.max_num_batched_tokens)
    return [
        tokens
        for tokens in range(q, largest + 1, q)
        if any(tokens - q < size <= tokens for size in setup.sizes)
    ]


class Oracle:
    """What CONTRACT sections 1, 2 and 4 say a batch runs through, found by linear search."""

    def __init__(self, setup: Setup, mode: CUDAGraphMode) -> None:
        self.max_num_seqs = setup.max_num_seqs
        self.several = len(set(setup.query_lens)) > 1
        self.mixed = MIXED_HALF[mode]
        self.mixed_sizes = sorted(set(setup.sizes))
        self.decode: dict[int, list[int]] = {}
        if mode in (BOTH, WHOLE) and setup.mixed_sizes is not None:
            self.mixed_sizes = sorted(set(setup.mixed_sizes))
        if mode in (DECODE_ONLY, BOTH, WHOLE):
            self.decode = {q: decode_sizes(setup, q) for q in setup.query_lens}
        below = [case for case in (1, 2, 4, 8) if case < setup.max_loras]
        self.lora_cases = self.mixed_lora_cases = sorted({0, *below, setup.max_loras})
        if mode is WHOLE and self.mixed_sizes != sorted(set(setup.sizes)):
            self.mixed_lora_cases = sorted({0, min(1, setup.max_loras), setup.max_loras})

    def entry(self, shape: BatchShape) -> PlanEntry | None:
        """The planned entry, or None for eager."""
        tokens, reqs, query_len, loras, blocked, has_prompts = shape
        case = smallest(self.lora_cases, loras)
        if case is None:
            return None
        lora: dict[str, Any] = {"has_lora": loras > 0, "num_active_loras": case}
        decodes = tokens == query_len * reqs and not has_prompts
        if not blocked and query_len in self.decode and decodes:
            size = smallest(self.decode[query_len], tokens)
            if size is not None:
                key: dict[str, Any] = {"query_len": query_len} if self.several else {}
                key |= {"num_reqs": size // query_len, "uniform": True}
                return PlanEntry(mode=FULL, descriptor=BatchDescriptor(size, **key, **lora))
        size = smallest(self.mixed_sizes, tokens)
        if size is None or self.mixed is NONE or (self.mixed is FULL and blocked):
            return None
        num_reqs = min(size, self.max_num_seqs) if self.mixed is FULL else None
        lora["num_active_loras"] = smallest(self.mixed_lora_cases, loras)
        descriptor = BatchDescriptor(size, num_reqs=num_reqs, **lora)
        return PlanEntry(mode=self.mixed, descriptor=descriptor)


def smallest(sizes: list[int], at_least: int) -> int | None:
    return next((size for size in sizes if size >= at_least), None)


def legal_shapes(setup: Setup) -> Iterator[BatchShape]:
    """Uniform and mixed batches of every token count the engine can be asked for."""
    loras = range(setup.max_loras + 2) if setup.max_loras else (0,)
    for tokens in range(1, setup.max_num_batched_tokens + 1):
        most = min(tokens, setup.max_num_seqs)
        layouts = {(1, tokens), (most, tokens - most + 1), ((most + 1) // 2, tokens)}
        for q in setup.query_lens:
            if tokens % q == 0 and tokens // q <= setup.max_num_seqs:
                layouts.add((tokens // q, q))
        for (reqs, query_len), active, blocked in product(layouts, loras, (False, True)):
            shape = BatchShape(tokens, reqs, query_len, active, blocked)
            yield shape
            if tokens == query_len * reqs and not blocked:
                yield shape._replace(has_prompts=True)


def check_every_shape(setup: Setup) -> None:
    plan = planned(setup)
    if plan is None:
        return
    dispatcher, oracle = Dispatcher(plan), Oracle(setup, plan.mode)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    entries, reached = set(plan.entries), set()
    for shape in legal_shapes(setup):
        choice = dispatcher.dispatch(shape)
        check_fits(choice, shape)
        if choice.mode is NONE:
            assert oracle.entry(shape) is None, shape
            continue
        chosen = PlanEntry(mode=choice.mode, descriptor=choice.descriptor)
        assert chosen in entries, shape
        assert chosen == oracle.entry(shape), shape
        reached.add(chosen)
    assert reached == entries


def check_fits(choice: Choice, shape: BatchShape) -> None:
    key = choice.descriptor
    assert choice.reason.is_eager == (choice.mode is NONE)
    assert key.num_tokens >= shape.num_tokens
    assert key.num_reqs is None or key.num_reqs >= shape.num_reqs
    if choice.mode is NONE:
        assert key == BatchDescriptor.eager(shape.num_tokens, shape.num_active_loras)
    if shape.attention_blocks_full:
        assert choice.mode is not FULL


@settings(max_examples=200, deadline=None)
@given(setups(max_loras=2))
def test_a_choice_says_whether_it_is_a_decode_step_and_of_how_many_rows(setup: Setup) -> None:
    plan = planned(setup)
    if plan is None:
        return
    dispatcher = captured(plan)
    for query_len, num_reqs, blocked in product((1, 2, 3), (1, 2, 3, 5), (False, True)):
        shape = BatchShape(query_len * num_reqs, num_reqs, query_len, 0, blocked)
        if num_reqs > plan.max_num_seqs:
            continue
        choice, mixed = (dispatcher.dispatch(s) for s in (shape, shape._replace(has_prompts=True)))
        assert not mixed.uniform_decode
        if choice.mode is FULL:
            assert choice.uniform_decode == choice.descriptor.uniform
            assert choice.padded_num_reqs == choice.descriptor.num_reqs
        else:
            rows, rest = divmod(choice.padded_num_tokens, query_len)
            fits = not rest and rows <= plan.max_num_seqs
            assert choice.uniform_decode == (query_len in plan.decode_query_lens and fits)
            assert choice.padded_num_reqs == (rows if choice.uniform_decode else None)
        assert choice.padded_num_reqs is None or choice.padded_num_reqs >= num_reqs


def test_pieces_may_have_a_fixed_number_of_rows() -> None:
    plan = plan_of(PIECEWISE, max_num_seqs=3)
    for fixed_reqs, rows in ((False, {2: None, 4: None, 8: None}), (True, {2: 2, 4: 3, 8: 3})):
        dispatcher = Dispatcher(plan, fixed_reqs=fixed_reqs)
        for entry in plan.entries:
            dispatcher.mark_captured(entry)
        for size, padded in rows.items():
            assert dispatcher.dispatch(BatchShape(size, 1, size)).padded_num_reqs == padded
        assert dispatcher.dispatch(BatchShape(9, 1, 9)).padded_num_reqs is None  # eager


def test_a_choice_says_which_model_runs_it() -> None:
    dispatcher = Dispatcher(plan_of(), model=1)
    assert dispatcher.dispatch(BatchShape(2, 2, 1)).model == 1  # eager
    for entry in dispatcher.plan.entries:
        dispatcher.mark_captured(entry)
    assert {dispatcher.dispatch(BatchShape(2, n, 2 // n)).model for n in (1, 2)} == {1}


@pytest.mark.slow
@settings(max_examples=1000)
@given(setups())
def test_every_shape_finds_the_smallest_graph_and_every_graph_a_shape(setup: Setup) -> None:
    check_every_shape(setup)


@pytest.mark.slow
def test_the_same_holds_for_many_more_setups() -> None:
    """Drawn without hypothesis, which takes longer to draw one than it takes to check it."""
    source = random.Random(0)

    def some(least: int, most: int, longest: int) -> list[int]:
        return [source.randint(least, most) for _ in range(source.randint(1, longest))]

    for _ in range(9000):
        limit = source.randint(1, 24)
        setup = Setup(
            sizes=some(1, limit + source.choice([0, 0, 0, 0, 0, 0, 0, 3]), 6),
            mixed_sizes=source.choice([None, some(1, limit, 6)]),
            query_lens=some(1, 5, 3),
            max_num_seqs=source.randint(1, 12),
            max_num_batched_tokens=limit,
            requested=source.choice(REQUESTED),
            support=source.choice(SUPPORT),
            piecewise_available=source.random() < 0.5,
            max_loras=0,
        )
        try:
            check_every_shape(setup)
        except AssertionError as error:
            error.add_note(f"{setup}")
            raise


@pytest.mark.slow
@settings(max_examples=300)
@given(setups(max_loras=5))
def test_the_same_holds_with_adapters(setup: Setup) -> None:
    check_every_shape(setup)


# --- reasons -----------------------------------------------------------------------------------


def plan_of(mode: CUDAGraphMode = BOTH, sizes: Any = (2, 4, 8), **limits: Any) -> CapturePlan:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits}
    return CapturePlan.build(mode, sizes, **limits)


def captured(plan: CapturePlan) -> Dispatcher:
    dispatcher = Dispatcher(plan)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    return dispatcher


def entry_of(plan: CapturePlan, num_tokens: int, *, uniform: bool) -> PlanEntry:
    return next(
        entry
        for entry in plan.entries
        if entry.descriptor.num_tokens == num_tokens and entry.descriptor.uniform == uniform
    )


DECODE = BatchShape(num_tokens=3, num_reqs=3, max_query_len=1)
MIXED = BatchShape(num_tokens=3, num_reqs=2, max_query_len=2)


def assert_eager(choice: Choice, num_tokens: int, reason: Reason, num_loras: int = 0) -> None:
    expected = BatchDescriptor(num_tokens, has_lora=num_loras > 0, num_active_loras=num_loras)
    assert (choice.mode, choice.descriptor) == (NONE, expected)
    assert choice.reason is reason


@pytest.mark.parametrize("mode", [PIECEWISE, FULL, DECODE_ONLY, BOTH, WHOLE])
def test_before_capture_everything_is_eager(mode: CUDAGraphMode) -> None:
    dispatcher = Dispatcher(plan_of(mode))
    for tokens in range(1, 9):
        shape = BatchShape(tokens, tokens, 1)
        assert_eager(dispatcher.dispatch(shape), tokens, Reason.NOT_CAPTURED)


@pytest.mark.parametrize(
    ("mode", "shape", "reason"),
    [
        (NONE, DECODE, Reason.MODE_NONE),
        (NONE, MIXED, Reason.MODE_NONE),
        (NONE, DECODE._replace(attention_blocks_full=True), Reason.MODE_NONE),
        (NONE, DECODE._replace(num_active_loras=1), Reason.MODE_NONE),
        (DECODE_ONLY, MIXED, Reason.MIXED_NOT_PLANNED),
        (DECODE_ONLY, BatchShape(30, 2, 29), Reason.MIXED_NOT_PLANNED),
        (DECODE_ONLY, BatchShape(9, 9, 1), Reason.TOO_LARGE),
        (DECODE_ONLY, DECODE._replace(has_prompts=True), Reason.MIXED_NOT_PLANNED),
        (DECODE_ONLY, BatchShape(9, 9, 1, has_prompts=True), Reason.MIXED_NOT_PLANNED),
        (DECODE_ONLY, DECODE._replace(attention_blocks_full=True), Reason.ATTENTION),
        (FULL, BatchShape(9, 3, 5), Reason.TOO_LARGE),
        (FULL, MIXED._replace(attention_blocks_full=True), Reason.ATTENTION),
        (FULL, MIXED._replace(num_active_loras=1), Reason.TOO_MANY_LORAS),
        (PIECEWISE, BatchShape(9, 3, 5), Reason.TOO_LARGE),
        (PIECEWISE, BatchShape(9, 3, 5, attention_blocks_full=True), Reason.TOO_LARGE),
        (BOTH, BatchShape(9, 9, 1), Reason.TOO_LARGE),
        (BOTH, DECODE._replace(num_active_loras=1), Reason.TOO_MANY_LORAS),
        (WHOLE, BatchShape(9, 9, 1), Reason.TOO_LARGE),
        (WHOLE, BatchShape(9, 3, 5), Reason.TOO_LARGE),
        (WHOLE, DECODE._replace(attention_blocks_full=True), Reason.ATTENTION),
        (WHOLE, MIXED._replace(attention_blocks_full=True), Reason.ATTENTION),
    ],
    ids=str,
)
def test_reasons_to_run_eagerly(mode: CUDAGraphMode, shape: BatchShape, reason: Reason) -> None:
    choice = captured(plan_of(mode)).dispatch(shape)
    assert_eager(choice, shape.num_tokens, reason, shape.num_active_loras)


def test_decode_batch_beyond_its_requests_is_too_large() -> None:
    # The list of sizes goes on, but no decode size holds more than max_num_seqs requests.
    dispatcher = captured(plan_of(DECODE_ONLY, (2, 8), decode_query_lens=(2,), max_num_seqs=3))
    assert dispatcher.dispatch(BatchShape(2, 1, 2)).mode is FULL
    assert_eager(dispatcher.dispatch(BatchShape(6, 3, 2)), 6, Reason.TOO_LARGE)


@pytest.mark.parametrize(
    ("mode", "shape", "expected", "reason"),
    [
        (FULL, DECODE, BatchDescriptor(4, num_reqs=4), Reason.MIXED),
        (FULL, MIXED, BatchDescriptor(4, num_reqs=4), Reason.MIXED),
        (PIECEWISE, DECODE, BatchDescriptor(4), Reason.MIXED),
        (PIECEWISE, MIXED._replace(attention_blocks_full=True), BatchDescriptor(4), None),
        (BOTH, DECODE, BatchDescriptor(4, num_reqs=4, uniform=True), Reason.UNIFORM_DECODE),
        (BOTH, MIXED, BatchDescriptor(4), Reason.MIXED),
        (BOTH, DECODE._replace(has_prompts=True), BatchDescriptor(4), Reason.MIXED),
        (FULL, DECODE._replace(has_prompts=True), BatchDescriptor(4, num_reqs=4), Reason.MIXED),
        (BOTH, DECODE._replace(attention_blocks_full=True), BatchDescriptor(4), None),
        (DECODE_ONLY, DECODE, BatchDescriptor(4, num_reqs=4, uniform=True), Reason.UNIFORM_DECODE),
        (WHOLE, DECODE, BatchDescriptor(4, num_reqs=4, uniform=True), Reason.UNIFORM_DECODE),
        (WHOLE, MIXED, BatchDescriptor(4, num_reqs=4), Reason.MIXED),
        (WHOLE, DECODE._replace(has_prompts=True), BatchDescriptor(4, num_reqs=4), Reason.MIXED),
    ],
    ids=str,
)
def test_choices(
    mode: CUDAGraphMode, shape: BatchShape, expected: BatchDescriptor, reason: Reason | None
) -> None:
    choice = captured(plan_of(mode)).dispatch(shape)
    assert choice.descriptor == expected
    assert choice.reason is (reason or Reason.FULL_BLOCKED)
    assert choice.mode is (PIECEWISE if expected.num_reqs is None else FULL)


def test_batch_of_another_query_length_is_mixed() -> None:
    dispatcher = captured(plan_of(decode_query_lens=(3,)))
    assert dispatcher.dispatch(BatchShape(6, 2, 3)).reason is Reason.UNIFORM_DECODE
    for not_uniform in (BatchShape(6, 3, 2), BatchShape(5, 2, 3), BatchShape(6, 6, 1)):
        assert dispatcher.dispatch(not_uniform).reason is Reason.MIXED


@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_chunks_of_prompts_as_long_as_decode_queries_are_mixed(query_len: int) -> None:
    dispatcher = captured(plan_of(decode_query_lens=(query_len,)))
    decode = BatchShape(2 * query_len, 2, query_len)
    assert dispatcher.dispatch(decode).descriptor.uniform
    chunks = dispatcher.dispatch(decode._replace(has_prompts=True))
    assert (chunks.mode, chunks.reason) == (PIECEWISE, Reason.MIXED)


@pytest.mark.parametrize("mode", [FULL, BOTH, DECODE_ONLY, PIECEWISE])
@pytest.mark.parametrize("num_reqs", [4, 5, 8])
def test_no_full_graph_takes_more_requests_than_it_was_captured_with(
    mode: CUDAGraphMode, num_reqs: int
) -> None:
    """A plan for 4 requests that is asked for more: mixed FULL graphs have 4 rows for them."""
    dispatcher = captured(plan_of(mode, max_num_seqs=4))
    shape = BatchShape(num_reqs, num_reqs, 1)
    if mode is FULL and num_reqs > 4:
        with pytest.raises(BatchError, match=rf"num_reqs={num_reqs}.*the plan is for at most 4 "):
            dispatcher.dispatch(shape)
        return
    choice = dispatcher.dispatch(shape)
    if mode is not PIECEWISE:
        assert (choice.mode is FULL) == (num_reqs == 4)
    assert choice.descriptor.num_reqs in (None, 4)


def test_several_query_lengths_have_graphs_of_their_own() -> None:
    dispatcher = captured(plan_of(sizes=(6,), decode_query_lens=(1, 3)))
    one, three = (dispatcher.dispatch(BatchShape(6, 6 // q, q)).descriptor for q in (1, 3))
    assert one == BatchDescriptor(6, num_reqs=6, uniform=True, query_len=1)
    assert three == BatchDescriptor(6, num_reqs=2, uniform=True, query_len=3)


def test_choices_of_ever_new_sizes_are_not_all_kept() -> None:
    plan = CapturePlan.build(FULL, [4], max_num_seqs=4, max_num_batched_tokens=4)
    dispatcher = Dispatcher(plan)
    first = dispatcher.dispatch(BatchShape(5, 1, 5))
    assert dispatcher.dispatch(BatchShape(5, 1, 5)) is first
    kept = weakref.ref(first)
    del first
    for num_tokens in range(6, 10_000):
        dispatcher.dispatch(BatchShape(num_tokens, 1, num_tokens))
    assert kept() is None


def test_partial_capture_opens_one_size() -> None:
    plan = plan_of(DECODE_ONLY)
    dispatcher = Dispatcher(plan)
    entry = entry_of(plan, 4, uniform=True)
    dispatcher.mark_captured(entry)
    assert dispatcher.captured == {entry}
    assert dispatcher.dispatch(DECODE).descriptor == entry.descriptor
    # A larger captured size is no stand-in: which graph runs may not depend on the progress.
    assert_eager(dispatcher.dispatch(BatchShape(2, 2, 1)), 2, Reason.NOT_CAPTURED)
    assert_eager(dispatcher.dispatch(BatchShape(5, 5, 1)), 5, Reason.NOT_CAPTURED)


def test_decode_without_its_graph_falls_back_to_the_pieces() -> None:
    plan = plan_of(BOTH)
    dispatcher = Dispatcher(plan)
    dispatcher.mark_captured(entry_of(plan, 4, uniform=False))
    choice = dispatcher.dispatch(DECODE)
    assert (choice.mode, choice.descriptor) == (PIECEWISE, BatchDescriptor(4))
    assert choice.reason is Reason.MIXED


def test_decode_above_its_own_sizes_uses_the_pieces() -> None:
    dispatcher = captured(plan_of(BOTH, (2, 8), max_num_seqs=4))
    choice = dispatcher.dispatch(BatchShape(3, 3, 1))
    assert (choice.mode, choice.descriptor) == (PIECEWISE, BatchDescriptor(8))


@pytest.mark.parametrize("reason", [Reason.CAPTURE_FAILED, Reason.DISABLED])
def test_refused_entry_runs_eagerly_with_its_reason(reason: Reason) -> None:
    plan = plan_of(FULL)
    dispatcher = captured(plan)
    dispatcher.mark_refused(entry_of(plan, 4, uniform=False), reason)
    assert_eager(dispatcher.dispatch(DECODE), 3, reason)
    assert dispatcher.dispatch(BatchShape(2, 1, 2)).mode is FULL


def test_refused_decode_entry_uses_the_pieces_while_they_exist() -> None:
    plan = plan_of(BOTH)
    dispatcher = captured(plan)
    dispatcher.mark_refused(entry_of(plan, 4, uniform=True), Reason.DISABLED)
    assert dispatcher.dispatch(DECODE).mode is PIECEWISE
    dispatcher.mark_refused(entry_of(plan, 4, uniform=False), Reason.CAPTURE_FAILED)
    # The reason is that of the first choice, which was the FULL graph.
    assert_eager(dispatcher.dispatch(DECODE), 3, Reason.DISABLED)
    assert_eager(dispatcher.dispatch(MIXED), 3, Reason.CAPTURE_FAILED)


def test_states_of_an_entry() -> None:
    plan = plan_of(FULL)
    dispatcher, entry = Dispatcher(plan), plan.entries[0]
    assert dispatcher.is_open(entry)
    dispatcher.mark_refused(entry, Reason.CAPTURE_FAILED)
    assert not dispatcher.is_open(entry)
    dispatcher.mark_captured(entry)
    assert not dispatcher.is_open(entry)
    assert dispatcher.dispatch(BatchShape(8, 1, 8)).mode is FULL
    dispatcher.mark_refused(entry, Reason.DISABLED)
    assert dispatcher.captured == frozenset()


def test_reset_forgets_captures_and_refusals() -> None:
    plan = plan_of(FULL)
    dispatcher = captured(plan)
    dispatcher.mark_refused(plan.entries[0], Reason.DISABLED)
    dispatcher.reset()
    assert all(dispatcher.is_open(entry) for entry in plan.entries)
    assert_eager(dispatcher.dispatch(BatchShape(8, 1, 8)), 8, Reason.NOT_CAPTURED)


def test_unplanned_entry_cannot_be_marked() -> None:
    dispatcher = Dispatcher(plan_of(FULL))
    stranger = PlanEntry(mode=FULL, descriptor=BatchDescriptor(5, num_reqs=5))
    with pytest.raises(ConfigError, match=r"num_tokens=5.* is not in the plan"):
        dispatcher.mark_captured(stranger)
    with pytest.raises(ConfigError, match=r"num_tokens=5.* is not in the plan"):
        dispatcher.mark_refused(stranger, Reason.DISABLED)


def test_refusal_needs_a_reason_to_run_eagerly() -> None:
    plan = plan_of(FULL)
    with pytest.raises(ConfigError, match="MIXED is not a reason to run eagerly"):
        Dispatcher(plan).mark_refused(plan.entries[0], Reason.MIXED)


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 1, 1), (1, 0, 1), (-1, 1, 1), (1, 1, 1, -1)])
@pytest.mark.parametrize("mode", [NONE, BOTH])
def test_empty_batch_is_an_error(mode: CUDAGraphMode, shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match=rf"num_tokens={shape[0]}, num_reqs={shape[1]}.*skip"):
        captured(plan_of(mode)).dispatch(BatchShape(*shape))


# --- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("active", "case"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 5), (6, None)]
)
@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=["decode", "mixed"])
def test_batch_uses_the_smallest_case_that_holds_its_adapters(
    shape: BatchShape, active: int, case: int | None
) -> None:
    choice = captured(plan_of(BOTH, max_loras=5)).dispatch(shape._replace(num_active_loras=active))
    if case is None:
        assert_eager(choice, 3, Reason.TOO_MANY_LORAS, active)
        return
    assert choice.descriptor.num_tokens == 4
    assert choice.descriptor.num_active_loras == case
    assert choice.descriptor.has_lora == (case > 0)


@pytest.mark.parametrize(("active", "case"), [(0, 0), (1, 1), (2, 5), (5, 5)])
def test_separate_sizes_of_whole_graphs_have_few_cases(active: int, case: int) -> None:
    dispatcher = captured(plan_of(WHOLE, (1, 4), mixed_sizes=(8,), max_loras=5))
    mixed = dispatcher.dispatch(MIXED._replace(num_active_loras=active)).descriptor
    assert (mixed.num_tokens, mixed.uniform, mixed.num_active_loras) == (8, False, case)
    decode = dispatcher.dispatch(DECODE._replace(num_active_loras=active)).descriptor
    assert (decode.num_tokens, decode.uniform, decode.num_active_loras) == (4, True, active)


def test_adapter_cases_are_captured_one_by_one() -> None:
    plan = plan_of(FULL, (4,), max_loras=1)
    dispatcher = Dispatcher(plan)
    with_adapter, without = plan.entries
    dispatcher.mark_captured(with_adapter)
    assert dispatcher.dispatch(MIXED._replace(num_active_loras=1)).mode is FULL
    assert_eager(dispatcher.dispatch(MIXED), 3, Reason.NOT_CAPTURED)
    dispatcher.mark_captured(without)
    assert dispatcher.dispatch(MIXED).descriptor == without.descriptor


def test_a_quarantined_graph_is_not_replaced_by_another() -> None:
    """What is wrong with it may be wrong with the pieces of the same size, too."""
    plan = CapturePlan.build(BOTH, [4], max_num_seqs=4, max_num_batched_tokens=8)
    dispatcher = Dispatcher(plan)
    for entry in plan.entries:
        dispatcher.mark_captured(entry)
    decode = next(entry for entry in plan.entries if entry.mode is FULL)
    dispatcher.mark_refused(decode, Reason.QUARANTINED)
    choice = dispatcher.dispatch(BatchShape(3, 3, 1))
    assert (choice.mode, choice.reason) == (NONE, Reason.QUARANTINED)
    dispatcher.mark_refused(decode, Reason.CAPTURE_FAILED)
    assert dispatcher.dispatch(BatchShape(3, 3, 1)).mode is PIECEWISE
    mixed = dispatcher.dispatch(BatchShape(3, 1, 3, has_prompts=True))
    assert mixed.mode is PIECEWISE
