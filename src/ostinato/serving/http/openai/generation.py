"""Answers completions and chats: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ostinato.errors import ConfigError, RequestError
from ostinato.outputs import CompletionOutput, RequestOutput, TextDelta
from ostinato.sampling_params import SamplingParams
from ostinato.serving.async_stream import AsyncStream
from ostinato.serving.http.errors import ApiError
from ostinato.serving.http.limits import time_limit, unless_gone
from ostinato.serving.http.openai.answers import Choices, Envelope, Usage
from ostinato.serving.http.openai.sse import EventStream
from ostinato.serving.http.openai.structure import Structure
from ostinato.serving.http.state import Served
from ostinato.text.chat_options import NO_CHAT_OPTIONS, ChatOptions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One HTTP request for text: its prompts, each with ``params.n`` choices."""

    served: Served
    prompts: Sequence[Any]
    params: SamplingParams
    adapter: str | None
    choices: Choices
    model: str | None
    deadline: float  # a time of the loop
    chat: ChatOptions = NO_CHAT_OPTIONS
    structure: Structure | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of ``AsyncLLM.generate`` and ``stream``."""
        return {"adapter": self.adapter, **vars(self.chat)}

    @property
    def num_sequences(self) -> int:
        return self.served.check_sequences(len(self.prompts), self.params.n)

    @property
    def envelope(self) -> Envelope:
        return Envelope(kind=self.choices.kind, model=self.model or self.served.name)

    async def limited(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` within the time of the request."""
        try:
            async with time_limit(self.deadline, self.served.config.request_timeout_s):
                return await work
        except RequestError as error:
            if self.structure is None:
                raise
            raise self.structure.explain(error) from None


def task(
    served: Served,
    body: Any,
    prompts: Sequence[Any],
    choices: Choices,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structure: Structure | None = None,
    chat: ChatOptions = NO_CHAT_OPTIONS,
    names: Mapping[str, str] | None = None,
) -> Task:
    """Check a request as far as possible without the engine.

    ``chat``: those of a conversation. ``names``: how the client calls parameters that have other
    names in ``SamplingParams``.
    """
    served.check_task("generate")
    try:
        params = served.params(
            body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            structure=None if structure is None else structure.params,
        )
    except ConfigError as error:
        message = str(error)
        for ours, theirs in (names or {}).items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        param = message.partition(" ")[0].partition("[")[0].rstrip(":")
        raise ApiError(
            400, message, param=param if param in type(body).model_fields else None
        ) from None
    return Task(
        served=served,
        prompts=prompts,
        params=params,
        chat=chat,
        structure=structure,
        adapter=served.adapter(body.model),
        choices=choices,
        model=body.model,
        deadline=asyncio.get_running_loop().time() + served.config.request_timeout_s,
    )


async def whole_answer(request: Request, task: Task) -> Response:
    """Wait for all of the text. If the client disconnects, the requests are aborted."""
    llm = task.served.llm

    def start(prompt: Any) -> Coroutine[Any, Any, RequestOutput]:
        return llm.generate(prompt, task.params, **task.options)

    with task.served.admission.enter(task.num_sequences):
        work = _all(_numbered([start(prompt) for prompt in task.prompts]))
        outputs = await unless_gone(request, task.limited(work))
    usage, choices = Usage(), []
    for number, output in enumerate(outputs):
        count_prompt(usage, output)
        for each in output.outputs:
            check_end(each)
            usage.completion_tokens += len(each.token_ids)
            choices.append(task.choices.whole(number * task.params.n + each.index, each))
    return JSONResponse({**task.envelope.of(choices), "usage": usage.body})


def check_end(output: CompletionOutput | TextDelta) -> None:
    """Raise if a sequence was not generated to its end."""
    if output.finish_reason == "abort" and output.stop_reason is not None:
        raise ApiError(400, f"the request was aborted: {output.stop_reason}", code="aborted")
    if output.finish_reason == "abort":
        raise ApiError(503, "the request was aborted; try again", code="aborted")


async def streamed_answer(request: Request, task: Task, *, includes_usage: bool) -> Response:
    """Start the requests, then stream."""
    streams, resources = await start_streams(request, task)
    return EventStream(_events(task, streams, includes_usage), resources, deadline=task.deadline)


async def start_streams(request: Request, task: Task) -> tuple[list[AsyncStream], AsyncExitStack]:
    """Start the requests, so that what is wrong with them is an answer of its own.

    Returns the streams of their prompts, and what to close at the end.
    """
    llm = task.served.llm
    resources = AsyncExitStack()
    try:
        resources.enter_context(task.served.admission.enter(task.num_sequences))
        streams = [llm.stream(each, task.params, **task.options) for each in task.prompts]
        for stream in streams:
            resources.push_async_callback(stream.aclose)
        starts = _all(_numbered([stream.start() for stream in streams]))
        await unless_gone(request, task.limited(starts))
    except BaseException:
        await resources.aclose()
        raise
    return streams, resources


async def _events(
    task: Task, streams: list[AsyncStream], includes_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    envelope, choices, usage = task.envelope, task.choices, Usage()
    no_usage: dict[str, Any] = {"usage": None} if includes_usage else {}
    shows_all = task.served.llm.tokenizer is None  # then no token has a text

    def part(choice: dict[str, Any]) -> dict[str, Any]:
        return {**envelope.of([choice], is_part=True), **no_usage}

    for index in range(task.num_sequences):
        first = choices.first(index)
        if first is not None:
            yield part(first)
    async for number, delta in merged(streams, task.limited):
        usage.completion_tokens += len(delta.token_ids)
        if delta.text or delta.finish_reason or delta.logprobs or shows_all:
            yield part(choices.part(number * task.params.n + delta.index, delta))
    if includes_usage:
        for stream in streams:
            count_prompt(usage, stream.output)
        yield {**envelope.of([], is_part=True), "usage": usage.body}


def count_prompt(usage: Usage, output: RequestOutput) -> None:
    usage.prompt_tokens += len(output.prompt_token_ids)
    usage.cached_tokens += output.num_cached_tokens


async def merged(
    streams: list[AsyncStream],
    limited: Callable[[Coroutine[Any, Any, TextDelta | None]], Coroutine[Any, Any, Any]],
) -> AsyncIterator[tuple[int, TextDelta]]:
    """The deltas of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        while (delta := await limited(_next(streams[0]))) is not None:
            yield 0, delta
        return
    waiting = {
        asyncio.ensure_future(limited(_next(stream))): number
        for number, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                number = waiting.pop(each)
                delta = each.result()
                if delta is not None:
                    again = asyncio.ensure_future(limited(_next(streams[number])))
                    waiting[again] = number
                    yield number, delta
    finally:
        await _cancel(list(waiting))


async def _next(stream: AsyncStream) -> TextDelta | None:
    return await anext(stream, None)


def _numbered(work: list[Coroutine[Any, Any, T]]) -> list[Coroutine[Any, Any, T]]:
    """``work`` for each prompt, whose errors say which if there are several."""
    if len(work) == 1:
        return work

    async def named(number: int, each: Coroutine[Any, Any, T]) -> T:
        try:
            return await each
        except RequestError as error:
            its_own, is_about_it, what = str(error).partition("the prompt ")
            if its_own or not is_about_it:
                raise
            raise ApiError(400, f"prompt[{number}] {what}", param="prompt") from None

    return [named(number, each) for number, each in enumerate(work)]


async def _all(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error cancels the rest."""
    if len(work) == 1:
        return [await work[0]]
    doing = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*doing)
    finally:
        await _cancel(doing)


async def _cancel(doing: Sequence[asyncio.Future[Any]]) -> None:
    for each in doing:
        each.cancel()
    await asyncio.gather(*doing, return_exceptions=True)
