"""Sends requests when they are due, however many are unanswered by then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ostinato.bench.mixes import TimedRequest
from ostinato.bench.serving.answer import Answer
from ostinato.bench.timing.baselines import reason
from ostinato.errors import OstinatoError
from ostinato.progress import ProgressBar

TIME_IS_UP = "time is up"

Clock = Callable[[], float]  # seconds after the start
# Sends one request and notes in the answer what comes of it.
Send = Callable[[TimedRequest, Answer, Clock], Awaitable[None]]


async def run_open_loop(
    requests: Sequence[TimedRequest],
    send: Send,
    *,
    max_seconds: float,
    failures: tuple[type[Exception], ...] = (),
    bar: ProgressBar | None = None,
) -> list[Answer]:
    """Send every request at its ``arrival_s``; the answers, in the same order.

    After ``max_seconds`` what is unanswered is cancelled. ``failures``, and errors of this package,
    end one answer; any other ends the run.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    expected: tuple[type[Exception], ...] = (OstinatoError, *failures)
    answers = [Answer(arrival_s=each.arrival_s) for each in requests]

    def clock() -> float:
        return loop.time() - start

    async def run_one(request: TimedRequest, answer: Answer) -> None:
        await asyncio.sleep(request.arrival_s - clock())
        try:
            await send(request, answer, clock)
        except expected as error:
            answer.failure = reason(error)
        if bar is not None:
            bar.update()

    try:
        async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as group:
            for request, answer in zip(requests, answers, strict=True):
                group.create_task(_until_cancelled(run_one(request, answer), answer))
    except TimeoutError:
        pass  # each unfinished answer says so
    return answers


async def _until_cancelled(work: Awaitable[None], answer: Answer) -> None:
    try:
        await work
    except asyncio.CancelledError:
        answer.failure = TIME_IS_UP
        raise
