"""Grammars and their masks, compared with llguidance's own matcher."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from spelling_models import VOCAB, save_spelling

from ostinato import RequestError, StructuredOutputsParams
from ostinato.structured.constraint import Constraint
from ostinato.structured.grammars import Grammars, mask_width

llguidance = pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = save_spelling(tmp_path_factory.mktemp("spelling"))
    return transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB, frozenset({tokenizer.eos_token_id}))


def allowed(mask: np.ndarray[Any, Any]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def new_mask() -> np.ndarray[Any, Any]:
    return np.zeros(mask_width(VOCAB), dtype=np.int32)


def fill(constraint: Constraint, mask: np.ndarray[Any, Any]) -> None:
    Constraint.fill([constraint], mask[None])


def test_masks_are_the_librarys_own(grammars: Grammars, tokenizer: Any) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    ours = grammars.constraint(StructuredOutputsParams(json=schema), ignore_eos=False)
    theirs = llguidance.LLMatcher(
        llguidance.hf.from_tokenizer(tokenizer, n_vocab=VOCAB),
        llguidance.LLMatcher.grammar_from_json_schema(schema),
    )
    mask, tokens = new_mask(), []
    for token in tokenizer.encode('{"a": 17, "b": [2]}'):
        fill(ours, mask)
        its_mask = np.frombuffer(theirs.compute_bitmask(), dtype=np.int32)
        assert np.array_equal(mask, its_mask[: len(mask)])
        assert token in allowed(mask)
        assert max(allowed(mask)) < len(tokenizer)
        assert not ours.is_complete
        tokens.append(token)
        ours.follow(tokens)
        theirs.consume_token(token)
    assert ours.is_complete


def test_masks_of_several_are_those_of_each(grammars: Grammars, tokenizer: Any) -> None:
    texts = {"[ab]+": "ab", "x{3}": "x", "y": "z"}  # the last has failed
    constraints = []
    for regex, text in texts.items():
        params = StructuredOutputsParams(regex=regex)
        constraints.append(grammars.constraint(params, ignore_eos=False))
        constraints[-1].follow(tokenizer.encode(text))
    masks = np.zeros((3, mask_width(VOCAB)), dtype=np.int32)
    Constraint.fill(constraints, masks)
    for constraint, mask in zip(constraints, masks, strict=True):
        alone = new_mask()
        fill(constraint, alone)
        assert np.array_equal(mask, alone)
    assert allowed(masks[1]) == {tokenizer.encode("x")[0]}
    assert (masks[2] == -1).all()


def test_a_shorter_text_is_taken_back(grammars: Grammars, tokenizer: Any) -> None:
    constraint = grammars.constraint(StructuredOutputsParams(choice=["abx", "zz"]), ignore_eos=True)
    mask, tokens = new_mask(), tokenizer.encode("abx")
    for count in (1, 2, 1, 2, 0, 1, 2):
        constraint.follow(tokens[:count])
        assert constraint.is_complete == (count == len(tokens))
        fill(constraint, mask)
        nexts = {token for token in allowed(mask) if token != tokenizer.eos_token_id}
        assert nexts == [set(tokenizer.encode("az")) | {tokens[0]}, {tokens[1]}, set()][count]


def test_an_ignored_end_is_allowed_only_where_nothing_else_is(
    grammars: Grammars, tokenizer: Any
) -> None:
    params, end = StructuredOutputsParams(regex="x{1,2}"), tokenizer.eos_token_id
    (x,) = tokenizer.encode("x")
    mask = new_mask()
    for ignores, expected in ((False, {x, end}), (True, {x})):
        constraint = grammars.constraint(params, ignore_eos=ignores)
        constraint.follow([x])
        fill(constraint, mask)
        assert allowed(mask) == expected
        constraint.follow([x, x])
        assert constraint.is_complete


def test_texts_that_are_added_tokens_can_be_spelled(grammars: Grammars, tokenizer: Any) -> None:
    """Where a text is forced, llguidance proposes the added token, and then does not take it."""
    params = StructuredOutputsParams(choice=["é<tool_call>x"])
    constraint = grammars.constraint(params, ignore_eos=False)
    mask, tokens = new_mask(), []
    while not constraint.is_complete:
        fill(constraint, mask)
        tokens.append(min(allowed(mask)))
        constraint.follow(tokens)
        assert constraint.failure is None
    assert tokenizer.decode(tokens) == "é<tool_call>x"


@pytest.mark.parametrize(
    ("params", "text"),
    [({"choice": [f"x{n} é" for n in range(5000)]}, "x4999 é"), ({"json": True}, '["a"]')],
    ids=["choice", "json"],
)
def test_many_choices_and_any_json(
    grammars: Grammars, tokenizer: Any, params: dict[str, Any], text: str
) -> None:
    constraint = grammars.constraint(StructuredOutputsParams(**params), ignore_eos=False)
    constraint.follow(tokenizer.encode(text))
    assert constraint.failure is None
    assert constraint.is_complete


def test_a_token_that_the_grammar_forbids_is_a_failure(grammars: Grammars) -> None:
    constraint = grammars.constraint(StructuredOutputsParams(regex="x"), ignore_eos=False)
    constraint.follow([3])
    assert constraint.failure is not None
    assert constraint.failure.startswith("the grammar cannot go on: ")
    mask = new_mask()
    fill(constraint, mask)
    assert (mask == -1).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a("}, "this regex cannot be used: .*unclosed group"),
        ({"json": {"type": "bogus"}}, "this json cannot be used: Invalid type: bogus"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"grammar": "start: foo"}, "this grammar cannot be used: .*unknown name"),
        ({"grammar": 'start: "a" ::= ??'}, "this grammar cannot be used"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable schema"),
    ],
)
def test_what_cannot_be_compiled_says_why(
    given: dict[str, Any], message: str, grammars: Grammars
) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.compile(StructuredOutputsParams(**given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "grammar", "regex"])
def test_long_chains_and_deep_nesting_do_not_end_the_process(kind: str, grammars: Grammars) -> None:
    """llguidance recurses on the stack; without a large one each of these is a crash."""
    count = 5500
    if kind == "json":
        links = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(count)}
        params = StructuredOutputsParams(
            json={"$defs": {**links, f"a{count}": {}}, "$ref": "#/$defs/a0"}
        )
    elif kind == "grammar":
        rules = "\n".join(f"r{n}: r{n + 1}" for n in range(3 * count))
        params = StructuredOutputsParams(grammar=f'start: r0\n{rules}\nr{3 * count}: "a"')
    else:
        params = StructuredOutputsParams(regex="(" * 100_000 + "a" + ")" * 100_000)
    if kind == "regex":
        with pytest.raises(RequestError, match="this regex cannot be used"):
            grammars.compile(params)
    else:
        constraint = grammars.constraint(params, ignore_eos=False)
        fill(constraint, new_mask())
        assert constraint.failure is None


def test_without_the_library_the_error_says_what_to_install(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'ostinato\[structured\]'"):
        Grammars(tokenizer, VOCAB, frozenset()).compile(StructuredOutputsParams(regex="a"))


def test_models_without_a_fitting_tokenizer_say_so() -> None:
    with pytest.raises(RequestError, match="and this model has none"):
        Grammars(None, VOCAB, frozenset()).compile(StructuredOutputsParams(regex="a"))


def test_engines_that_compile_at_once_leave_the_stack_size_alone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the process's: the second must not take the first one's for what it was before."""
    start, others_start, first_done = threading.Thread.start, threading.Event(), threading.Event()
    starting: list[threading.Thread] = []

    def slow(thread: threading.Thread) -> None:
        if thread.name == "ostinato-grammar":
            starting.append(thread)
            if len(starting) == 1:
                others_start.wait(0.1)
            else:
                others_start.set()
                first_done.wait(0.1)
        start(thread)

    def compile_one(name: str) -> None:
        own = Grammars(tokenizer, VOCAB, frozenset({tokenizer.eos_token_id}))
        own.compile(StructuredOutputsParams(regex=name))
        first_done.set()

    before = threading.stack_size()
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(threading.Thread, "start", slow)
        list(pool.map(compile_one, ["a+", "b+"]))
    assert len(starting) == 2
    assert threading.stack_size() == before


def test_without_room_for_its_thread_a_grammar_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RequestError, match=r"cannot start \(can't start new.* raise ulimit -v"):
            grammars.compile(StructuredOutputsParams(regex="none so far"))
    assert threading.stack_size() == before
    grammars.compile(StructuredOutputsParams(regex="none so far"))
