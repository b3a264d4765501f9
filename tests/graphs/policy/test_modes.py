"""The graph mode: parsing, the halves of a pair, and CONTRACT section 1's table cell by cell."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest

from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import AttentionCGSupport, CUDAGraphMode, resolve_mode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
WHOLE = CUDAGraphMode.FULL_AND_FULL
ALWAYS, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
SINGLE, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER

# (requested, support, q): the answer with piecewise available, and without. None: ConfigError.
CHANGES = {
    (FULL, UNIFORM, 1): (BOTH, DECODE_ONLY),
    (FULL, UNIFORM, 3): (BOTH, DECODE_ONLY),
    (FULL, SINGLE, 1): (BOTH, DECODE_ONLY),
    (FULL, SINGLE, 3): (PIECEWISE, NONE),
    (FULL, NEVER, 1): (None, None),
    (FULL, NEVER, 3): (None, None),
    (BOTH, SINGLE, 3): (PIECEWISE, NONE),
    (BOTH, NEVER, 1): (PIECEWISE, NONE),
    (BOTH, NEVER, 3): (PIECEWISE, NONE),
    (WHOLE, UNIFORM, 1): (BOTH, DECODE_ONLY),
    (WHOLE, UNIFORM, 3): (BOTH, DECODE_ONLY),
    (WHOLE, SINGLE, 1): (BOTH, DECODE_ONLY),
    (WHOLE, SINGLE, 3): (PIECEWISE, NONE),
    (WHOLE, NEVER, 1): (PIECEWISE, NONE),
    (WHOLE, NEVER, 3): (PIECEWISE, NONE),
    (DECODE_ONLY, SINGLE, 3): (PIECEWISE, NONE),
    (DECODE_ONLY, NEVER, 1): (PIECEWISE, NONE),
    (DECODE_ONLY, NEVER, 3): (PIECEWISE, NONE),
}
CELLS = list(product(CUDAGraphMode, AttentionCGSupport, (1, 3), (True, False)))


def cell_name(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("requested", "support", "q", "piecewise"), CELLS, ids=cell_name)
def test_mode_table(
    requested: CUDAGraphMode, support: AttentionCGSupport, q: int, piecewise: bool
) -> None:
    expected = CHANGES.get((requested, support, q), (requested, requested))[0 if piecewise else 1]
    if expected is None:
        with pytest.raises(ConfigError, match=r"FULL needs attention .* declares NEVER"):
            resolve_mode(requested, support, decode_query_len=q, piecewise_available=piecewise)
        return
    resolved = resolve_mode(requested, support, decode_query_len=q, piecewise_available=piecewise)
    assert resolved.mode is expected
    assert resolved.requested is requested
    assert (resolved.reason is None) == (expected is requested)


def test_table_has_every_cell() -> None:
    assert len(CELLS) == 6 * 4 * 2 * 2


@pytest.mark.parametrize(
    ("support", "q", "piecewise", "becomes", "why"),
    [
        (UNIFORM, 1, True, BOTH, "uniform decode batches only, and the model can be split"),
        (UNIFORM, 1, False, DECODE_ONLY, "uniform decode batches only, and the model cannot"),
        (SINGLE, 3, True, PIECEWISE, "one token per request, not 3, and the model can be split"),
    ],
)
def test_change_is_logged_once_with_both_names_and_the_reason(
    caplog: pytest.LogCaptureFixture,
    support: AttentionCGSupport,
    q: int,
    piecewise: bool,
    becomes: CUDAGraphMode,
    why: str,
) -> None:
    with caplog.at_level(logging.DEBUG):
        resolved = resolve_mode(FULL, support, decode_query_len=q, piecewise_available=piecewise)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"FULL becomes {becomes.name}: " in message
    assert why in message
    assert resolved.reason is not None
    assert resolved.reason in message


def test_no_change_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        resolve_mode(BOTH, ALWAYS, piecewise_available=True)
        resolve_mode(PIECEWISE, NEVER, piecewise_available=True)
    assert caplog.records == []


def test_modes_and_supports_may_come_by_name_and_number() -> None:
    assert resolve_mode("full", UNIFORM, piecewise_available=True).mode is BOTH
    assert resolve_mode(FULL, 3, piecewise_available=True).mode is FULL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requested": "fast"}, "unknown graph mode 'fast'"),
        ({"requested": None}, "graph mode must be text or CUDAGraphMode, got None"),
        ({"support": "ALWAYS"}, "an AttentionCGSupport, got 'ALWAYS'; choose one of NEVER, UNI"),
        ({"support": 4}, "an AttentionCGSupport, got 4"),
        ({"decode_query_len": 0}, "decode_query_len must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_resolved_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"requested": FULL, "support": UNIFORM, "piecewise_available": True}
    with pytest.raises(ConfigError, match=message):
        resolve_mode(**{**given, **changes})


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=cell_name)
def test_parse_ignores_case(mode: CUDAGraphMode) -> None:
    name = mode.name
    for text in (name, name.lower(), name.title(), f"  {name} "):
        assert CUDAGraphMode.parse(text) is mode
    assert CUDAGraphMode.parse(mode) is mode


@pytest.mark.parametrize("text", ["FULL_AND_FAST", "", "full-decode-only"])
def test_unknown_name_lists_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CUDAGraphMode.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    known = message.split("choose one of ")[1].split(", ")
    assert known[:3] == ["NONE", "PIECEWISE", "FULL"]
    assert known[3:] == ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]


@pytest.mark.parametrize("value", [None, 2, True])
def test_parse_of_something_else_than_text(value: object) -> None:
    with pytest.raises(ConfigError, match="must be text or CUDAGraphMode") as caught:
        CUDAGraphMode.parse(value)  # type: ignore[arg-type]
    assert "FULL_DECODE_ONLY" in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate"),
    [
        (NONE, NONE, NONE, False),
        (PIECEWISE, PIECEWISE, PIECEWISE, False),
        (FULL, FULL, FULL, False),
        (DECODE_ONLY, FULL, NONE, True),
        (BOTH, FULL, PIECEWISE, True),
        (WHOLE, FULL, FULL, True),
    ],
    ids=cell_name,
)
def test_halves(
    mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode, separate: bool
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    assert mode.is_valid_runtime_mode() is not separate
    assert {
        runtime for runtime in CUDAGraphMode.valid_runtime_modes() if mode.has_mode(runtime)
    } == {decode, mixed}


def test_runtime_modes_are_ordered_and_pairs_are_not() -> None:
    assert NONE.rank < PIECEWISE.rank < FULL.rank
    for pair in (DECODE_ONLY, BOTH, WHOLE):
        with pytest.raises(ConfigError, match=f"{pair.name} is a pair of modes"):
            _ = pair.rank


def test_weakest_attention_backend_counts() -> None:
    assert ALWAYS > UNIFORM > SINGLE > NEVER
    assert AttentionCGSupport.weakest([ALWAYS, SINGLE, UNIFORM]) is SINGLE
    assert AttentionCGSupport.weakest([NEVER, ALWAYS]) is NEVER
    assert AttentionCGSupport.weakest([]) is ALWAYS


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_questions_that_vllm_asks(mode: CUDAGraphMode) -> None:
    halves = {mode.decode_mode(), mode.mixed_mode()}
    assert bool(mode) is (halves != {NONE})
    assert str(mode) == mode.name
    assert mode.has_full_cudagraphs() is (FULL in halves)
    assert mode.has_piecewise_cudagraphs() is (PIECEWISE in halves)
    assert mode.requires_piecewise_compilation() is (PIECEWISE in halves)
    assert mode.is_valid_runtime_mode() is (mode in CUDAGraphMode.valid_runtime_modes())
    order = (FULL, PIECEWISE, NONE)
    assert mode.max_cudagraph_mode() is next(each for each in order if each in halves)
    for each in CUDAGraphMode.valid_runtime_modes():
        assert mode.has_mode(each) is (each in halves)
    with pytest.raises(ConfigError, match="FULL_AND_PIECEWISE is a pair"):
        mode.has_mode(BOTH)
