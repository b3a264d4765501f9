"""The route ``/v1/responses``: a response, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ostinato.serving.async_stream import AsyncStream
from ostinato.serving.http.errors import ApiError, api_error
from ostinato.serving.http.json_body import JsonRoute, QuotingResponse
from ostinato.serving.http.limits import unless_gone
from ostinato.serving.http.openai import generation
from ostinato.serving.http.openai.answers import TextChoices, Usage
from ostinato.serving.http.openai.responses.response_body import ResponseBody
from ostinato.serving.http.openai.responses.response_request import ResponseRequest
from ostinato.serving.http.openai.sse import EventStream, named_lines
from ostinato.serving.http.openai.structure import Structure, structure_of, text_format
from ostinato.serving.http.openapi import document
from ostinato.serving.http.openapi.response_schemas import ResponseAnswer
from ostinato.serving.http.state import Served


def create_responses_router(served: Served) -> APIRouter:
    """The route that creates a response; there is none to fetch one, since none is stored."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses", responses=document.asked(ResponseAnswer, streams=True))
    async def responses(request: Request, body: ResponseRequest) -> Response:
        """Answer a text or a conversation."""
        body.check_stateless()
        task = generation.task(
            served,
            body,
            [body.messages],
            TextChoices(),
            max_tokens=body.max_output_tokens,
            logprobs=None,
            structure=_structure(body),
            names={"max_tokens": "max_output_tokens"},
        )
        answer = ResponseBody(task.envelope.model, body)
        if body.stream:
            streams, resources = await generation.start_streams(request, task)
            events = _events(task, streams[0], answer)
            return EventStream(events, resources, deadline=task.deadline, lines=named_lines)
        return await _whole(request, task, answer)

    return router


def _structure(body: ResponseRequest) -> Structure | None:
    """What ``text.format`` asks for, or vLLM's ``structured_outputs``."""
    structure = structure_of(body)
    form = None if body.format is None else text_format("text.format", body.format)
    if structure is not None and form is not None:
        raise ApiError(400, "give text.format or structured_outputs, not both", param="text")
    return structure if form is None else Structure("text.format", form)


async def _whole(request: Request, task: generation.Task, answer: ResponseBody) -> Response:
    llm = task.served.llm
    with task.served.admission.enter(1):
        work = llm.generate(task.prompts[0], task.params, adapter=task.adapter)
        output = await unless_gone(request, task.limited(work))
    (choice,) = output.outputs
    generation.check_end(choice)
    usage = Usage(completion_tokens=len(choice.token_ids))
    generation.count_prompt(usage, output)
    return QuotingResponse(answer.whole(choice.text, choice.finish_reason, usage))


async def _events(
    task: generation.Task, stream: AsyncStream, answer: ResponseBody
) -> AsyncIterator[dict[str, Any]]:
    usage, text, finish_reason = Usage(), "", "stop"
    try:
        for event in answer.begin():
            yield event
        async for _, delta in generation.merged([stream], task.limited):
            usage.completion_tokens += len(delta.token_ids)
            text += delta.text
            finish_reason = delta.finish_reason or finish_reason
            if delta.text:
                yield answer.delta(delta.text)
            generation.check_end(delta)
    except Exception as error:
        yield answer.error(api_error(error).body["error"])
        return
    generation.count_prompt(usage, stream.output)
    for event in answer.end(text, finish_reason, usage):
        yield event
