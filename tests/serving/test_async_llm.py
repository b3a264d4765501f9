"""``AsyncLLM``: many tasks at once get what ``LLM`` gives each alone; leaving frees everything."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from serving_models import OPTIONS
from tiny_encoders import save_encoder

from ostinato import (
    LLM,
    AsleepError,
    AsyncLLM,
    ClosedError,
    CompletionOutput,
    ConcurrentUseError,
    ConfigError,
    EngineFailedError,
    RequestError,
    SamplingParams,
    TextDelta,
)
from ostinato.serving import engine_thread

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, n=3, logprobs=2)
LONG = SamplingParams(temperature=0, max_tokens=100)
TALK = [{"role": "user", "content": "w4 w5"}]
PROMPTS: list[Any] = ["w1 w2 w3", [7], list(range(10, 45)), {"prompt": "w9 w8"}]


@pytest.fixture(scope="module", params=[False, True], ids=["in-step", "overlap"])
def served(paths: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    with AsyncLLM(paths[0], **OPTIONS, async_scheduling=request.param) as served:
        asyncio.run(served.load_adapter("poet", paths[1]))
        yield served


def run(task: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(task, 60)

    return asyncio.run(limited())


async def collected(served: AsyncLLM, *args: Any, **options: Any) -> list[CompletionOutput]:
    """What a stream yields, put together."""
    outputs: dict[int, CompletionOutput] = {}
    async for delta in served.stream(*args, **options):
        output = outputs.setdefault(delta.index, CompletionOutput(index=delta.index))
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs
    return [outputs[index] for index in sorted(outputs)]


def plain(output: CompletionOutput) -> tuple[Any, ...]:
    logprobs = output.logprobs and [list(each) for each in output.logprobs]
    return output.index, output.text, output.token_ids, output.finish_reason, logprobs


def free_blocks(served: AsyncLLM) -> Any:
    return served.call(lambda llm: llm.engine.scheduler.allocator.num_free_blocks)


def test_variables_and_tools_of_the_template(llm: LLM, served: AsyncLLM) -> None:
    variables = {"style": "w3"}
    (wanted,) = llm.chat(TALK, GREEDY, chat_template_kwargs=variables)
    assert wanted.prompt_token_ids == [7, 4, 5, 3, 9]
    answer = run(served.generate(TALK, GREEDY, chat_template_kwargs=variables))
    assert answer.prompt_token_ids == wanted.prompt_token_ids
    stream = run(collected(served, TALK, GREEDY, chat_template_kwargs=variables))
    assert plain(stream[0]) == plain(answer.outputs[0]) == plain(wanted.outputs[0])
    both: Any = {"tools": [{}, {}], "chat_template_kwargs": variables}
    answer = run(served.generate(TALK, GREEDY, **both))
    assert answer.prompt_token_ids == [7, 4, 5, 2, 3, 9] == llm.render_chat(TALK, **both)
    (same,) = llm.chat(TALK, GREEDY, **both)
    assert plain(same.outputs[0]) == plain(answer.outputs[0])
    assert llm.render_chat(TALK, tools=[]) == llm.render_chat(TALK)
    for wrong in ("abc", [1], {"type": "function"}):
        with pytest.raises(RequestError, match="tools must be a list of objects in OpenAI's form"):
            llm.render_chat(TALK, tools=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="did you mean style"):
        run(served.generate(TALK, chat_template_kwargs={"stile": "w3"}))
    for name, value in (("tools", [{}]), ("chat_template_kwargs", variables)):
        with pytest.raises(RequestError, match=f"{name} are for conversations; give messages"):
            run(served.generate("w1", **{name: value}))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_many_tasks_get_what_each_gets_alone(
    llm: LLM, served: AsyncLLM, params: SamplingParams
) -> None:
    expected = [llm.generate([each], params)[0] for each in PROMPTS]
    expected += llm.chat(TALK, params)
    expected += llm.generate(["w1 w2"], params, adapter="poet")
    asked = [*((each, None) for each in [*PROMPTS, TALK]), ("w1 w2", "poet")]

    async def all_of_them() -> None:
        answers, streams = await asyncio.gather(
            asyncio.gather(*(served.generate(p, params, adapter=a) for p, a in asked)),
            asyncio.gather(*(collected(served, p, params, adapter=a) for p, a in asked)),
        )
        for wanted, answer, stream in zip(expected, answers, streams, strict=True):
            assert [plain(each) for each in answer.outputs] == [plain(o) for o in wanted.outputs]
            assert [plain(each) for each in stream] == [plain(o) for o in wanted.outputs]
            assert answer.prompt_token_ids == wanted.prompt_token_ids
            assert answer.prompt == wanted.prompt
            for ours, theirs in zip(answer.outputs, wanted.outputs, strict=True):
                assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)

    run(all_of_them())


@pytest.mark.slow
def test_thirty_two_streams(llm: LLM, served: AsyncLLM) -> None:
    """Four times as many as run at once; each starts when there is room."""
    prompts = [[1 + (7 * k + j) % 60 for j in range(1 + k % 9)] for k in range(32)]
    params = [
        SamplingParams(temperature=k % 2, seed=k, max_tokens=5 + k % 11, stop=["w3"])
        for k in range(32)
    ]
    expected = [plain(each.outputs[0]) for each in llm.generate(prompts, params)]

    async def stream_all() -> list[Any]:
        tasks = (collected(served, *each) for each in zip(prompts, params, strict=True))
        return await asyncio.gather(*tasks)

    assert [plain(each) for (each,) in run(stream_all())] == expected


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_sequence_ends_once(served: AsyncLLM, num_tokens: int) -> None:
    """Also with its first token, which goes out at once."""
    params = SamplingParams(temperature=1, n=3, max_tokens=num_tokens, ignore_eos=True)

    async def ends() -> list[int]:
        return [d.index async for d in served.stream([1], params) if d.finish_reason is not None]

    assert sorted(run(ends())) == [0, 1, 2]


@pytest.mark.slow
def test_deltas_wait_for_their_share_of_time(
    llm: LLM, served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time for deltas in between, a stream has its first token, and the rest at the end."""
    wanted = plain(llm.generate([[3, 4]], SEEDED)[0].outputs[2])
    monkeypatch.setattr(engine_thread, "_DELIVERING", 1e-9)

    async def sizes() -> tuple[list[int], Any]:
        async for _ in served.stream([1], GREEDY):
            pass  # from here on, there is no time
        deltas = [delta async for delta in served.stream([3, 4], SEEDED)]
        of_one = [delta for delta in deltas if delta.index == 2]
        joined = CompletionOutput(
            index=2,
            text="".join(delta.text for delta in of_one),
            token_ids=[token for delta in of_one for token in delta.token_ids],
            logprobs=[row for delta in of_one for row in delta.logprobs or ()],
            finish_reason=of_one[-1].finish_reason,
        )
        return [len(delta.token_ids) for delta in of_one], plain(joined)

    assert run(sizes()) == ([1, 11], wanted)
    run(served.call(lambda _: setattr(served._thread, "_next_delivery", 0.0)))


def leave_by_break(served: AsyncLLM) -> Coroutine[Any, Any, None]:
    async def leave() -> None:
        async for _ in served.stream([5, 6], LONG):
            break
        gc.collect()

    return leave()


def leave_by_closing(served: AsyncLLM) -> Coroutine[Any, Any, None]:
    async def leave() -> None:
        async with served.stream([5, 6], LONG) as stream:
            await anext(stream)
        assert [each async for each in stream] == []  # it has ended

    return leave()


def leave_by_cancelling(served: AsyncLLM) -> Coroutine[Any, Any, None]:
    async def leave() -> None:
        tasks = [
            asyncio.create_task(collected(served, [5, 6], LONG)),
            asyncio.create_task(served.generate([5, 6], LONG)),
        ]
        async with served.stream([8], LONG) as other:
            await anext(other)  # so the two are in the engine
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results)

    return leave()


def leave_by_closing_in_another_task(served: AsyncLLM) -> Coroutine[Any, Any, None]:
    """At every moment: while the prompt is read, while the request starts, while tokens come."""

    async def leave() -> None:
        for num_turns in range(8):
            stream = served.stream([5, 6], LONG)
            reading = asyncio.create_task(numbers_of_tokens(stream))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await stream.aclose()
            assert sum(await reading) < 100
        stream, has_begun = served.stream([5, 6], LONG), asyncio.Event()
        reading = asyncio.create_task(numbers_of_tokens(stream, has_begun))
        await has_begun.wait()
        await stream.aclose()
        assert 0 < sum(await reading) < 100

    return leave()


async def numbers_of_tokens(stream: Any, has_begun: asyncio.Event | None = None) -> list[int]:
    numbers = []
    async for delta in stream:
        numbers.append(len(delta.token_ids))
        if has_begun is not None:
            has_begun.set()
    return numbers


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_closing, leave_by_cancelling, leave_by_closing_in_another_task],
)
def test_leaving_frees_all_blocks(
    served: AsyncLLM, leave: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def compare() -> None:
        before = await free_blocks(served)
        await leave(served)
        # A command after the abort: both are taken between the same two steps, or it later.
        assert await free_blocks(served) == before
        stats = await served.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)

    run(compare())


def test_prefixes_are_forgotten_while_a_request_runs(served: AsyncLLM) -> None:
    async def ask() -> None:
        prompt = list(range(20, 60))
        expected = (await served.generate(prompt, LONG)).outputs[0].token_ids
        got: list[int] = []
        async for delta in served.stream(prompt, LONG):
            if not got:
                await served.reset_prefix_cache()
                assert (await served.generate(prompt, GREEDY)).num_cached_tokens == 0
            got += delta.token_ids
        assert got == expected

    run(ask())


@pytest.mark.slow
def test_sleep_and_graphs_between_requests(paths: tuple[str, str]) -> None:
    async def live(llm: AsyncLLM) -> None:
        expected = (await llm.generate([1, 2, 3], GREEDY)).outputs[0].token_ids
        stream = llm.stream([1, 2, 3], LONG)
        await anext(stream)
        with pytest.raises(RequestError, match="cannot sleep while requests are unfinished"):
            await llm.sleep()
        await llm.clear_graphs()  # the request goes on
        with pytest.raises(RequestError, match="cannot be captured while requests are unfinished"):
            await llm.capture_graphs()
        async for _ in stream:
            pass
        await llm.capture_graphs()
        await llm.sleep()
        with pytest.raises(AsleepError, match="call wake"):
            await llm.generate([1, 2, 3], GREEDY)
        await llm.wake()
        assert (await llm.generate([1, 2, 3], GREEDY)).outputs[0].token_ids == expected

    with AsyncLLM(paths[0], **OPTIONS, enable_sleep_mode=True) as llm:
        run(live(llm))


def test_the_loop_goes_on_while_the_engine_is_in_a_step(served: AsyncLLM) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: LLM) -> None:
        inside.set()
        assert go_on.wait(30)

    async def ask() -> None:
        held = asyncio.create_task(served.call(hold))
        while not inside.is_set():
            await asyncio.sleep(0)
        waiting = asyncio.create_task(served.generate([1, 2], GREEDY))
        for _ in range(100):
            await asyncio.sleep(0)  # the loop turns
        assert not waiting.done()
        go_on.set()
        await held
        assert len((await waiting).outputs[0].token_ids) == 12

    run(ask())


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("no"), ValueError),
        (type("PanicException", (BaseException,), {})("of Rust code"), BaseException),
        (GeneratorExit(), GeneratorExit),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (StopIteration("over"), RuntimeError),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_what_a_call_raises_reaches_its_caller_alone(
    served: AsyncLLM, raised: BaseException, seen: type[BaseException]
) -> None:
    def fail(_: LLM) -> None:
        raise raised

    async def ask() -> None:
        other = asyncio.create_task(served.generate([1, 2], GREEDY))
        failed = await asyncio.gather(served.call(fail), return_exceptions=True)
        assert isinstance(failed[0], seen)
        assert len((await other).outputs[0].token_ids) == 12
        assert len((await served.generate([1, 2], GREEDY)).outputs[0].token_ids) == 12

    run(ask())


def test_bad_requests_fail_alone(served: AsyncLLM) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            served.generate([999], GREEDY),
            served.generate([], GREEDY),
            collected(served, "w1", GREEDY, adapter="nobody"),
            served.generate("w1", {"temperature": 0}),  # type: ignore[arg-type]
            served.embed("w1"),
            served.generate([1, 2, 3], GREEDY),
            return_exceptions=True,
        )

    *bad, good = run(ask())
    expected = ("999", "no prompts|empty", "no adapter 'nobody'", "SamplingParams", "task='embed'")
    for error, message in zip(bad, expected, strict=True):
        with pytest.raises(RequestError, match=message):
            raise error
    assert len(good.outputs[0].token_ids) == 12


def test_several_loops_share_one(llm: LLM, served: AsyncLLM) -> None:
    expected = plain(llm.generate([[3, 4]], GREEDY)[0].outputs[0])
    results: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(run(served.generate([3, 4], GREEDY)).outputs[0])
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [plain(each) for each in results] == [expected] * 3


def test_a_loop_that_is_gone_leaves_nothing_behind(served: AsyncLLM) -> None:
    async def leave() -> Any:
        stream = served.stream([5, 6], LONG)
        await anext(stream)
        return stream  # kept, so that nothing but the end of the loop ends it

    stream = run(leave())

    async def until_free() -> None:
        while (await served.stats()).num_running:
            await asyncio.sleep(0)

    run(until_free())
    del stream


def test_a_call_that_raises_stop_iteration(served: AsyncLLM) -> None:
    """A future does not take it; those that wait for the same answers must not pay for that."""

    async def ask() -> list[Any]:
        return await asyncio.gather(
            served.call(lambda _: next(iter([]))),
            served.call(lambda _: 3),
            served.generate([1, 2], GREEDY),
            return_exceptions=True,
        )

    stopped, three, answer = run(ask())
    with pytest.raises(RuntimeError, match="StopIteration was raised") as error:
        raise stopped
    assert isinstance(error.value.__cause__, StopIteration)
    assert three == 3
    assert len(answer.outputs[0].token_ids) == 12


def test_a_stream_that_another_task_closes_before_it_starts(served: AsyncLLM) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    async def ask() -> Any:
        holding = asyncio.create_task(served.read(hold))
        while not inside.is_set():
            await asyncio.sleep(0)
        before = await served.stats()
        stream = served.stream([5, 6], LONG)
        reading = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()
        go_on.set()
        await holding
        assert await reading is None
        after = await served.stats()
        assert after.num_running == after.num_waiting == 0
        assert after.prompt_tokens == before.prompt_tokens

    run(ask())


def test_an_observer_that_fails(served: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[Any] = []

    def fail(_: Any) -> None:
        raise ValueError("mine")

    async def ask() -> list[Any]:
        return await asyncio.gather(*(served.generate([1, 2], GREEDY) for _ in range(3)))

    served.observe(fail)
    served.observe(ended.append)
    try:
        assert len(run(ask())) == len(ended) == 3
    finally:
        served._thread.observers.clear()
    assert "an observer of requests failed" in caplog.text
    assert "ValueError: mine" in caplog.text


@pytest.mark.slow
def test_stats_count_what_ran(paths: tuple[str, str]) -> None:
    async def count(served: AsyncLLM) -> None:
        records: list[Any] = []
        served.observe(records.append)
        await served.generate(list(range(1, 33)), GREEDY)
        await served.generate(list(range(1, 33)), GREEDY)
        stats = await served.stats()
        assert (stats.prompt_tokens, stats.generation_tokens) == (64, 24)
        assert stats.prefix_hit_tokens == 16  # the last block of a prompt is computed
        assert stats.prefix_query_tokens == 64
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        assert stats.replays["FULL"] >= 22
        assert stats.graph_bytes > 0
        assert [(each.num_prompt_tokens, each.num_generated_tokens) for each in records] == [
            (32, 12)
        ] * 2
        for each in records:
            assert each.arrived <= each.scheduled <= each.first_token <= each.ended
            assert each.finish_reason == "length"

    with AsyncLLM(paths[0], **OPTIONS) as served:
        run(count(served))


@pytest.mark.slow
def test_the_ledger_and_the_report_of_a_served_model(served: AsyncLLM) -> None:
    async def ask() -> None:
        await served.generate([1, 2, 3], GREEDY)
        ledger, report = await served.ledger(), await served.report()
        await served.call(lambda llm: ledger.check())
        names = {record.name for record in await served.call(lambda llm: ledger.graphs())}
        assert {row.name for row in report.graphs} <= names
        assert sum(row.replays for row in report.graphs) > 0

    run(ask())


def test_when_the_engine_fails_everybody_hears_of_it(
    paths: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(served: AsyncLLM) -> None:
        async with served.stream([5, 6], LONG) as stream:
            await anext(stream)
            waiting = [asyncio.create_task(served.generate([7], LONG)) for _ in range(3)]

            def broken(*_: Any) -> None:
                raise OSError("the device is gone")

            await served.call(lambda llm: setattr(llm.engine.runner, "run", broken))
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            for error in errors:
                assert isinstance(error, EngineFailedError)
                assert "OSError: the device is gone; all its requests are lost" in str(error)
            with pytest.raises(EngineFailedError, match="the engine failed"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineFailedError, match="the engine failed"):
            await served.generate([1], GREEDY)
        assert served.failure is not None

    with AsyncLLM(paths[0], **OPTIONS) as served:
        run(fail(served))
    assert "the engine failed with OSError, at" in caplog.text
    assert "in broken" in caplog.text  # where; what may quote a request


@pytest.mark.slow
def test_a_request_whose_text_cannot_be_decoded_fails_alone(paths: tuple[str, str]) -> None:
    async def ask(served: AsyncLLM) -> None:
        expected = await served.generate([5, 6], GREEDY)

        def spoil(llm: LLM) -> None:
            decode = llm.engine.tokenizer.decode

            def picky(token_ids: Any, *args: Any, **options: Any) -> Any:
                if broken and threading.current_thread().name == "ostinato-engine":
                    broken.clear()
                    raise ValueError("no such text")
                return decode(token_ids, *args, **options)

            llm.engine.tokenizer.decode = picky

        broken = [True]
        await served.call(spoil)
        with pytest.raises(EngineFailedError, match=r"cannot decode .*: no such text"):
            await served.generate([5, 6], GREEDY)
        broken.append(True)
        with pytest.raises(EngineFailedError, match=r"cannot decode .*: no such text"):
            await collected(served, [5, 6], GREEDY)
        again = await served.generate([5, 6], GREEDY)
        assert plain(again.outputs[0]) == plain(expected.outputs[0])
        assert (await served.stats()).kv_cache_usage == 0

    with AsyncLLM(paths[0], **OPTIONS) as served:
        run(ask(served))


def test_a_stream_has_one_reader(served: AsyncLLM) -> None:
    """The second would have waited for ever for the end that the first one got."""

    async def read_twice() -> None:
        stream = served.stream([5, 6], GREEDY)
        readers = (numbers_of_tokens(stream), numbers_of_tokens(stream))
        first, second = await asyncio.gather(*readers, return_exceptions=True)
        assert sum(first) == 12  # type: ignore[arg-type]
        assert isinstance(second, ConcurrentUseError)
        assert "two tasks read one stream" in str(second)

    run(read_twice())


def test_a_stream_stays_in_its_loop(served: AsyncLLM) -> None:
    async def read() -> None:
        async with served.stream([5, 6], LONG) as stream:
            await anext(stream)
            with pytest.raises(ConcurrentUseError, match="in another event loop"):
                await asyncio.to_thread(run, numbers_of_tokens(stream))
            assert isinstance(await anext(stream), TextDelta)

    run(read())


@pytest.mark.slow
def test_sequences_of_one_request_that_cannot_be_decoded(paths: tuple[str, str]) -> None:
    """The first ends the request; the others, which are aborted, do not end the engine."""

    async def ask(served: AsyncLLM) -> None:
        expected = await served.generate([7, 8], GREEDY)

        def spoil(llm: LLM) -> None:
            decode = llm.engine.tokenizer.decode

            def picky(token_ids: Any, *args: Any, **options: Any) -> Any:
                if not set(token_ids) <= set(expected.outputs[0].token_ids):
                    raise IndexError("piece id is out of range")
                return decode(token_ids, *args, **options)

            llm.engine.tokenizer.decode = picky

        await served.call(spoil)
        with pytest.raises(EngineFailedError, match=r"cannot decode .*: piece id is out"):
            await served.generate([5, 6], SEEDED)
        again = await served.generate([7, 8], GREEDY)
        assert plain(again.outputs[0]) == plain(expected.outputs[0])
        assert (await served.stats()).kv_cache_usage == 0

    with AsyncLLM(paths[0], **OPTIONS) as served:
        run(ask(served))


@pytest.mark.slow
def test_closing_ends_what_runs(paths: tuple[str, str]) -> None:
    async def close() -> None:
        async with AsyncLLM(paths[0], **OPTIONS) as served:
            stream = served.stream([5, 6], LONG)
            assert isinstance(await anext(stream), TextDelta)
            waiting = asyncio.create_task(served.generate("w1", LONG))
            await anext(stream)
            await served.aclose()
            with pytest.raises(ClosedError, match="the AsyncLLM is closed"):
                await waiting
            with pytest.raises(ClosedError, match="the AsyncLLM is closed"):
                async for _ in stream:
                    pass
            with pytest.raises(ClosedError, match="the AsyncLLM is closed"):
                await served.generate([1], GREEDY)
            with pytest.raises(ClosedError, match="the AsyncLLM is closed"):
                await served.stats()

    run(close())


def test_ctrl_c_while_it_is_built() -> None:
    """The model, which only the thread knows, is freed."""
    threads, closed, left = [], threading.Event(), threading.Event()

    def build() -> Any:
        threads.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert left.wait(30)
        return SimpleNamespace(task="embed", close=closed.set)

    with pytest.raises(KeyboardInterrupt):
        engine_thread.EngineThread(build)
    left.set()
    threads[0].join(30)
    assert closed.is_set()


def test_errors_of_the_start_are_raised_where_it_is_built() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM("nothing", max_num_seqs=0)
    with pytest.raises(Exception, match="nothing-here"):
        AsyncLLM("/nothing-here", device="cpu")


@pytest.mark.slow
def test_embedding(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("encoder")
    save_encoder(path, tokenizer=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "show_progress": False}
    with LLM(path, task="embed", **options) as llm, AsyncLLM(path, task="embed", **options) as ours:

        async def embed() -> None:
            both = await asyncio.gather(ours.embed("w1 w2"), ours.embed([[5, 6, 7]]))
            for (one,), prompt in zip(both, ("w1 w2", [[5, 6, 7]]), strict=True):
                assert one.embedding.tolist() == llm.embed(prompt)[0].embedding.tolist()
            with pytest.raises(RequestError, match="not to generate"):
                await ours.generate("w1")
            assert (await ours.stats()).replays

        run(embed())
