"""A step that is interrupted, or fails, while tokens reach the outputs: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_models import save_talking

from ostinato import LLM, RequestFailedError, SamplingParams, TextDelta
from ostinato.engine.emitter import Emitter
from ostinato.engine.requests.completion import Completion
from ostinato.scheduling.scheduler import Scheduler

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12], [13]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    SamplingParams(temperature=0.5, seed=1, max_tokens=8, stop="w99"),  # which there is not
    SamplingParams(temperature=0, max_tokens=6, logprobs=0),
]
OTHER = SamplingParams(temperature=0, max_tokens=12)
UNREADABLE = r"cannot decode token ids \[.*\]: piece id is out of range; .* with logit_bias"


@pytest.fixture(scope="module", params=[None, "ngram"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_talking(tmp_path_factory.mktemp("talking"), None)
    with LLM(
        str(path),
        device="cpu",
        max_num_seqs=5,
        max_model_len=64,
        enforce_eager=True,
        show_progress=False,
        speculative=request.param,
    ) as llm:
        yield llm


def interrupt(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int, error: type[BaseException]
) -> None:
    """Raise in the ``number``-th call from now on, before it or after it in turns."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and number % 2:
            raise error("injected")
        result = original(*args, **options)
        if calls == number:
            raise error("injected")
        return result

    monkeypatch.setattr(owner, name, broken)


def join(deltas: list[TextDelta]) -> list[tuple[list[int], str, str | None]]:
    outputs: list[tuple[list[int], str, str | None]] = [([], "", None) for _ in PROMPTS]
    for delta in deltas:
        tokens, text, reason = outputs[delta.prompt_index]
        assert reason is None, "it had ended"
        joined = tokens + delta.token_ids, text + delta.text, delta.finish_reason
        outputs[delta.prompt_index] = joined
    return outputs


@pytest.mark.sweep
@pytest.mark.parametrize("number", [1, 2, 7, 10, 13, 16, 17, 19])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Completion, "read_text"), (Completion, "tell"), (Emitter, "_take_in"), (Scheduler, "_end")],
    ids=["read_text", "tell", "take_in", "end"],
)
def test_an_interrupted_call_takes_nothing_from_a_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    """The stream's requests run in the steps of the other call too."""
    wanted = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    stream = llm.stream(PROMPTS, PARAMS)
    deltas = [next(stream)]
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, number, KeyboardInterrupt)
        try:
            llm.generate([20, 21], OTHER)
        except KeyboardInterrupt:
            pass
        else:
            assert owner is Scheduler, "it only ends something a few times"
    for delta in stream:
        deltas.append(delta)
        assert len(deltas) < 100
    assert join(deltas) == [(each.token_ids, each.text, "length") for each in wanted]
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert llm.engine.scheduler.allocator.num_free_blocks == (
        llm.engine.scheduler.allocator.num_blocks - 1
    )


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(1, 12))
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Completion, "read_text"), (Emitter, "_decode_token"), (Scheduler, "finish")],
    ids=["read_text", "decode_token", "finish"],
)
def test_steps_go_on_after_an_interrupt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    """With all tokens, log-probabilities and text, and every end is returned once."""
    wanted = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    pairs = zip(PROMPTS, PARAMS, strict=True)
    completions = [llm.engine.prepare_request(*pair)[0] for pair in pairs]
    for completion in completions:
        llm.engine.add(completion)
    ended = []
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, number, KeyboardInterrupt)
        while llm.engine.has_unfinished:
            try:
                ended += llm.engine.step()
            except KeyboardInterrupt:
                continue
    if owner is not Scheduler:  # an end that was interrupted is an end, but is not returned
        assert sorted(map(id, ended)) == sorted(map(id, completions))
    for completion, its in zip(completions, wanted, strict=True):
        got = completion.output
        assert (got.token_ids, got.text, got.finish_reason) == (
            *(its.token_ids, its.text),
            its.finish_reason,
        )
        assert (got.logprobs is None) == (its.logprobs is None)
        if got.logprobs is not None and its.logprobs is not None:
            assert [list(row) for row in got.logprobs] == [list(row) for row in its.logprobs]
            values = [
                [value.logprob for row in each for value in row.values()]
                for each in (got.logprobs, its.logprobs)
            ]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
            assert got.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)


def test_a_text_that_cannot_be_decoded_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted, with its tokens so far; the engine goes on with all others."""
    wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    pairs = zip(PROMPTS, PARAMS, strict=True)
    completions = [llm.engine.prepare_request(*pair)[0] for pair in pairs]
    for completion in completions:
        llm.engine.add(completion)
    broken, read_text = completions[1], Completion.read_text

    def fails(completion: Completion, **options: Any) -> str | None:
        if completion is broken and len(completion.output.token_ids) > 3:
            raise UnicodeError("injected")
        return read_text(completion, **options)

    monkeypatch.setattr(Completion, "read_text", fails)
    num_failures = 0
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except UnicodeError:
            num_failures += 1
    assert num_failures == 1
    assert broken.output.finish_reason == "abort"
    assert broken.output.token_ids == wanted[1][: len(broken.output.token_ids)]
    others = [each for each in completions if each is not broken]
    assert [each.output.token_ids for each in others] == wanted[:1] + wanted[2:]
    allocator = llm.engine.scheduler.allocator
    assert allocator.num_free_blocks == allocator.num_blocks - 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnicodeError])
def test_a_call_that_fails_leaves_nothing_unfinished(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """All its sequences end at once; the first that is read ends the call, and the others too."""
    params = SamplingParams(temperature=0, max_tokens=4)
    with monkeypatch.context() as patch:
        interrupt(patch, Emitter, "_take_in", 1, error)
        with pytest.raises(error, match="injected"):
            llm.generate(PROMPTS, params)
    assert not llm.engine.has_unfinished
    llm.capture_graphs()  # refused while a request is unfinished


def test_texts_that_cannot_be_decoded_are_all_aborted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer that raises for a token raises again when the sequence is aborted."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    params = SamplingParams(temperature=0, max_tokens=6)
    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "decode", _refuse)
        with pytest.raises(RequestFailedError, match=UNREADABLE):
            llm.generate(prompts, params)
        stream = llm.stream(prompts, params)
        with pytest.raises(RequestFailedError, match=UNREADABLE):
            next(stream)
        (completion,) = llm.engine.prepare_request(PROMPTS[0], params)
        llm.engine.add(completion)
        llm.engine.step()
        llm.engine.abort(completion)
        assert completion.output.finish_reason == "abort"
    assert "the text of a sequence that was aborted ends early (IndexError)" in caplog.text
    assert not llm.engine.has_unfinished
    allocator = llm.engine.scheduler.allocator
    assert allocator.num_free_blocks == allocator.num_blocks - 1


def _refuse(*args: Any, **options: Any) -> str:
    raise IndexError("piece id is out of range")
