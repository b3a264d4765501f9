"""One ``LLM`` and several threads: one is served, the others are refused, nothing is left behind.

The engine is held inside a step by a runner that waits, so that the others are sure to meet it.
"""

from __future__ import annotations

import gc
import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from interrupts import thread_state
from tiny_models import TINY_GENERIC, save_talking, save_tiny

from ostinato import LLM, ClosedError, ConcurrentUseError, GraphConfig, SamplingParams
from ostinato.engine.thread_use import Hold
from ostinato.graphs.policy.counters import compilation_counter

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [[1, 2, 3], [7], list(range(10, 45))]
TEMPLATE = "w7 {% for message in messages %}{{ message['content'] }} {% endfor %}w9"
TALK = [{"role": "user", "content": "w4 w5"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_talking(tmp_path_factory.mktemp("talking"), TEMPLATE))


def open_llm(checkpoint: str, **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "4M",
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[1, 4, 8]),
    }
    return LLM(checkpoint, **{**options, **settings})


@pytest.fixture(scope="module", params=[False, True], ids=["in-step", "overlap"])
def llm(checkpoint: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(checkpoint, async_scheduling=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    """The prompts and the conversation, each alone and eagerly."""
    with open_llm(checkpoint, graphs=GraphConfig(mode="NONE"), enable_prefix_caching=False) as llm:
        return [generated(llm, prompt) for prompt in PROMPTS] + [chatted(llm)]


def generated(llm: LLM, prompt: Any) -> list[int]:
    return llm.generate([prompt], GREEDY)[0].outputs[0].token_ids


def chatted(llm: LLM) -> list[int]:
    return llm.chat(TALK, GREEDY)[0].outputs[0].token_ids


def streamed(llm: LLM, prompt: Any) -> list[int]:
    return [token for delta in llm.stream([prompt], GREEDY) for token in delta.token_ids]


def stepped(llm: LLM, prompt: Any) -> list[int]:
    engine = llm.engine
    (completion,) = engine.prepare_request(prompt, GREEDY)
    try:
        engine.add(completion)
        while not completion.finished:
            engine.step()
    finally:
        abort(llm, completion)
    return completion.output.token_ids


def aborted(llm: LLM, prompt: Any) -> list[int]:
    (completion,) = llm.engine.prepare_request(prompt, GREEDY)
    try:
        llm.engine.add(completion)
        llm.engine.step()
    finally:
        abort(llm, completion)
    return completion.output.token_ids


def abort(llm: LLM, completion: Any) -> None:
    """However often another thread is in the way."""
    while True:
        try:
            return llm.engine.abort(completion)
        except ConcurrentUseError:
            continue


def check_unharmed(llm: LLM, expected: list[list[int]]) -> None:
    assert not llm.engine.has_unfinished
    free = llm.engine.scheduler.allocator.num_free_blocks
    assert free == llm.engine.runner.cache.num_blocks - 1
    assert [generated(llm, prompt) for prompt in PROMPTS] + [chatted(llm)] == expected


# What a thread can be in the middle of, with the name that the others are told.
FIRST: dict[str, Callable[[LLM], list[int]]] = {
    "LLM.generate": lambda llm: generated(llm, PROMPTS[0]),
    "LLM.chat": chatted,
    "LLM.stream": lambda llm: streamed(llm, PROMPTS[0]),
    "Engine.step": lambda llm: stepped(llm, PROMPTS[0]),
}

# Everything that touches the engine.
SECOND: dict[str, Callable[[LLM, Any], Any]] = {
    "LLM.generate": lambda llm, left: llm.generate([[5]], GREEDY),
    "LLM.chat": lambda llm, left: llm.chat(TALK, GREEDY),
    "LLM.render_chat": lambda llm, left: llm.render_chat(TALK),
    "LLM.stream": lambda llm, left: llm.stream([[5]], GREEDY),
    "LLM.close": lambda llm, left: llm.close(),
    "LLM.__exit__": lambda llm, left: llm.__exit__(None, None, None),
    "Engine.prepare_request": lambda llm, left: llm.engine.prepare_request([5], GREEDY),
    "Engine.add": lambda llm, left: llm.engine.add(left),
    "Engine.abort": lambda llm, left: llm.engine.abort(left),
    "Engine.step": lambda llm, left: llm.engine.step(),
    "Engine.close": lambda llm, left: llm.engine.close(),
}


@contextmanager
def held_in_a_step(llm: LLM) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first step sets the one event and waits for the other."""
    inside, go_on = threading.Event(), threading.Event()
    run = llm.engine.runner.run

    def waiting(plan: Any) -> Any:
        llm.engine.runner.run = run  # type: ignore[method-assign]
        inside.set()
        assert go_on.wait(60)
        return run(plan)

    llm.engine.runner.run = waiting  # type: ignore[method-assign]
    try:
        yield inside, go_on
    finally:
        go_on.set()
        llm.engine.runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("first", FIRST)
def test_a_second_thread_is_refused_at_once(
    llm: LLM, expected: list[list[int]], first: str
) -> None:
    (left,) = llm.engine.prepare_request([9], GREEDY)
    other = llm.stream([[9]], GREEDY)
    later: dict[str, Callable[[LLM, Any], Any]] = {
        **SECOND,
        "LLM.stream, read": lambda llm, left: next(other),
        "TextStream.close": lambda llm, left: other.close(),
    }
    with held_in_a_step(llm) as (inside, go_on), ThreadPoolExecutor(1, "first") as pool:
        answer = pool.submit(FIRST[first], llm)
        assert inside.wait(60)
        for name, call in later.items():
            called = name.replace("__exit__", "close").removesuffix(", read")
            with pytest.raises(
                ConcurrentUseError,
                match=rf"thread 'MainThread' called {called} while thread 'first_0' was in {first};"
                " only one thread at a time may use an LLM: use one LLM per thread, or hand",
            ):
                call(llm, left)
        go_on.set()
        assert answer.result(60) == expected[-1 if first == "LLM.chat" else 0]
    check_unharmed(llm, expected)


@pytest.mark.parametrize("second", SECOND)
def test_an_open_stream_keeps_other_threads_out(
    llm: LLM, expected: list[list[int]], second: str
) -> None:
    (left,) = llm.engine.prepare_request([9], GREEDY)
    stream = llm.stream(PROMPTS[:1], GREEDY)
    tokens = list(next(stream).token_ids)
    with ThreadPoolExecutor(1, "second") as pool:
        refused = pool.submit(SECOND[second], llm, left).exception(60)
        assert isinstance(refused, ConcurrentUseError)
        assert "while a stream of thread 'MainThread' was open; read it to its end" in str(refused)
        assert generated(llm, PROMPTS[1]) == expected[1]  # in the thread that reads it
        for delta in stream:
            tokens += delta.token_ids
        assert tokens == expected[0]
        assert pool.submit(generated, llm, PROMPTS[2]).result(60) == expected[2]
    check_unharmed(llm, expected)


def test_a_stream_that_has_not_begun_keeps_nothing_out(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[:1], GREEDY)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(generated, llm, PROMPTS[1]).result(60) == expected[1]
    assert [token for delta in stream for token in delta.token_ids] == expected[0]


def test_a_stream_can_be_handed_on(llm: LLM, expected: list[list[int]]) -> None:
    """As event loops do, which read each delta in another thread of a pool."""
    stream, tokens = llm.stream(PROMPTS[:1], GREEDY), []
    for _ in range(len(expected[0])):
        reader = threading.Thread(target=lambda: tokens.extend(next(stream).token_ids))
        reader.start()
        reader.join(60)
    assert tokens == expected[0]
    with pytest.raises(StopIteration):
        next(stream)
    check_unharmed(llm, expected)


@pytest.mark.parametrize("how", ["closed", "left by with", "dropped", "dropped in a cycle"])
def test_a_stream_that_was_left_frees_the_llm(
    llm: LLM, expected: list[list[int]], how: str
) -> None:
    stream: Any = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if how == "closed":
        stream.close()
        stream.close()
    elif how == "left by with":
        with stream:
            next(stream)
    elif how == "dropped in a cycle":
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle
    stream = None
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gc.collect).result(60)  # in another thread
        pool.submit(check_unharmed, llm, expected).result(60)


def test_a_stream_whose_thread_has_ended_keeps_nothing_out(
    llm: LLM, expected: list[list[int]]
) -> None:
    streams = []

    def begin() -> None:
        streams.append(llm.stream(PROMPTS[:1], GREEDY))
        next(streams[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(60)
    assert generated(llm, PROMPTS[1]) == expected[1]
    streams.clear()
    check_unharmed(llm, expected)


def test_a_stream_dropped_in_the_middle_of_a_step_ends_after_it(
    llm: LLM, expected: list[list[int]]
) -> None:
    """Finalisers run anywhere, also where the schedule is half made."""
    streams = [llm.stream(PROMPTS[:1], GREEDY)]
    next(streams[0])
    run = llm.engine.runner.run
    free: list[int] = []

    def dropping(plan: Any) -> Any:
        llm.engine.runner.run = run  # type: ignore[method-assign]
        free.append(llm.engine.scheduler.allocator.num_free_blocks)
        streams.clear()
        free.append(llm.engine.scheduler.allocator.num_free_blocks)
        return run(plan)

    llm.engine.runner.run = dropping  # type: ignore[method-assign]
    assert generated(llm, PROMPTS[1]) == expected[1]
    assert free[0] == free[1]
    check_unharmed(llm, expected)


def test_errors_name_calls_as_users_write_them(llm: LLM) -> None:
    """Those too that are defined in a base of ``LLM``."""
    names = [name for name in dir(LLM) if hasattr(getattr(LLM, name), "__wrapped__")]
    public = {name for name in names if not name.startswith("_") and name != "from_config"}
    assert {"generate", "load_adapter", "sleep", "capture_next", "embed", "score"} <= public
    inside = Hold("a callback")
    llm.use.enter(inside)
    try:
        for name in public:
            with pytest.raises(ConcurrentUseError, match=rf"^LLM\.{name} was called inside a call"):
                getattr(llm, name)()
    finally:
        inside.done = True
    assert len(generated(llm, PROMPTS[0])) == 8


@pytest.mark.parametrize("second", ["LLM.generate", "LLM.close", "Engine.step"])
def test_a_call_inside_a_step_is_refused(llm: LLM, expected: list[list[int]], second: str) -> None:
    """A signal handler runs in the middle of what its thread is doing."""
    run, refused = llm.engine.runner.run, []

    def on_signal(number: int, frame: Any) -> None:
        with pytest.raises(ConcurrentUseError) as raised:
            SECOND[second](llm, None)
        refused.append(str(raised.value))

    def signalled(plan: Any) -> Any:
        llm.engine.runner.run = run  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGUSR1)
        return run(plan)

    previous = signal.signal(signal.SIGUSR1, on_signal)
    llm.engine.runner.run = signalled  # type: ignore[method-assign]
    try:
        assert generated(llm, PROMPTS[0]) == expected[0]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert refused == [
        f"{second} was called inside LLM.generate of the same thread, from a signal handler, a "
        "finaliser or a callback; call it after that has returned"
    ]
    check_unharmed(llm, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finaliser
def test_an_interrupt_anywhere_leaves_the_llm_usable(llm: LLM, expected: list[list[int]]) -> None:
    """Alarms go off at points of their own; wherever that is, what follows is right."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    delays, num_interrupted, before = random.Random(0), 0, thread_state()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(40):
            answer = generated if number % 2 else streamed
            try:
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 0.02))
                for _ in range(20):
                    assert answer(llm, PROMPTS[2]) == expected[2]
            except KeyboardInterrupt:
                num_interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert answer(llm, PROMPTS[2]) == expected[2]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_interrupted > 20
    assert thread_state() == before
    check_unharmed(llm, expected)


# --- races ----------------------------------------------------------------------------------------

RACES: dict[str, Callable[[LLM], list[int]]] = {
    **FIRST,
    "stream, left": lambda llm: next(llm.stream(PROMPTS[:1], GREEDY)).token_ids,
    "abort": lambda llm: aborted(llm, PROMPTS[0]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("names", [*itertools.combinations_with_replacement(RACES, 2)], ids=str)
@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_that_race_are_right_or_refused(
    llm: LLM, expected: list[list[int]], names: tuple[str, str], num_threads: int
) -> None:
    barrier = threading.Barrier(num_threads)
    rounds = 15

    def race(name: str) -> list[list[int] | None]:
        results: list[list[int] | None] = []
        for _ in range(rounds):
            barrier.wait(60)
            try:
                results.append(RACES[name](llm))
            except ConcurrentUseError:
                results.append(None)
        return results

    racing = list(itertools.islice(itertools.cycle(names), num_threads))
    with ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(race, racing))
    for name, got in zip(racing, results, strict=True):
        whole = expected[-1] if name == "LLM.chat" else expected[0]
        for tokens in got:
            if tokens is not None and name in FIRST:
                assert tokens == whole
            elif tokens is not None:
                assert tokens == whole[: len(tokens)]
    if "Engine.step" not in names and "abort" not in names:
        for tokens_of_round in zip(*results, strict=True):  # one is served in each
            assert any(tokens is not None for tokens in tokens_of_round)
    check_unharmed(llm, expected)


def test_closing_while_another_thread_generates(checkpoint: str, expected: list[list[int]]) -> None:
    """Either comes first and the other is refused; in the end it is closed."""
    for _ in range(5):
        llm = open_llm(checkpoint, graphs=GraphConfig(mode="NONE"))
        barrier = threading.Barrier(2)

        def generate(llm: LLM = llm, barrier: threading.Barrier = barrier) -> list[int]:
            barrier.wait(60)
            return generated(llm, PROMPTS[0])

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(generate)
            barrier.wait(60)
            try:
                llm.close()
            except ConcurrentUseError:
                assert answer.result(60) == expected[0]
            refused = answer.exception(60)
            assert isinstance(refused, ConcurrentUseError | ClosedError | None)
            assert refused or answer.result() == expected[0]
        llm.close()
        with pytest.raises(ClosedError, match="closed"):
            llm.generate(PROMPTS, GREEDY)


@pytest.mark.slow
def test_two_llms_in_two_threads(checkpoint: str, expected: list[list[int]]) -> None:
    """Loading, capturing, generating and closing at the same time."""
    barrier = threading.Barrier(2)
    before = compilation_counter.num_cudagraph_captured

    def life(mode: str) -> tuple[int, list[list[int]]]:
        results: list[list[int]] = []
        for _ in range(3):
            barrier.wait(120)
            graphs = GraphConfig(mode=mode, capture_sizes=[1, 4, 8])
            with open_llm(checkpoint, graphs=graphs) as llm:
                captured = llm.engine.runner.capture_report.num_graphs
                barrier.wait(120)
                results = [generated(llm, prompt) for prompt in PROMPTS] + [chatted(llm)]
                assert results == expected
                assert [streamed(llm, prompt) for prompt in PROMPTS] == expected[:-1]
        return captured, results

    with ThreadPoolExecutor(2) as pool:
        lives = [pool.submit(life, mode) for mode in ("FULL_AND_PIECEWISE", "FULL")]
        captured = [each.result(300)[0] for each in lives]
    assert compilation_counter.num_cudagraph_captured - before == 3 * sum(captured)


@pytest.mark.slow
def test_llms_of_transformers_modules_start_in_several_threads(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """transformers builds modules under a default dtype and device of the whole process."""
    paths = {}
    for name in ("stablelm", "gpt2"):
        paths[name] = str(save_tiny(TINY_GENERIC[name](), tmp_path_factory.mktemp(name)))
    kinds = list(itertools.product(paths, (False, True), ("float32", "bfloat16")))

    def answer(kind: tuple[str, bool, str]) -> list[int]:
        name, random_weights, dtype = kind
        graphs = GraphConfig(capture_sizes=[1, 4])
        settings: dict[str, Any] = {"random_weights": random_weights, "dtype": dtype}
        with open_llm(paths[name], graphs=graphs, **settings) as llm:
            return generated(llm, PROMPTS[0])

    alone = [answer(kind) for kind in kinds]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, kinds * 2)) == alone * 2
