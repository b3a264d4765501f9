"""The routes that generate and embed, and those about the model."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ostinato.engine.requests.prompt_reader import PromptReader
from ostinato.outputs import EmbeddingOutput
from ostinato.serving.http.json_body import JsonRoute
from ostinato.serving.http.limits import time_limit, unless_gone
from ostinato.serving.http.openai import generation
from ostinato.serving.http.openai.answers import TextChoices, listed
from ostinato.serving.http.openai.chat_route import chat_task
from ostinato.serving.http.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from ostinato.serving.http.openai.structure import structure_of
from ostinato.serving.http.openapi import document
from ostinato.serving.http.openapi.answer_schemas import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    EmbeddingAnswer,
    ModelAnswer,
    ModelsAnswer,
    TokenizeAnswer,
)
from ostinato.serving.http.state import Served
from ostinato.text.chat_options import ChatOptions


def create_router(served: Served) -> APIRouter:
    """All routes under ``/v1``, and ``/tokenize`` and ``/detokenize``."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=document.asked(CompletionAnswer, streams=True))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete one prompt or several."""
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        task = generation.task(
            served,
            body,
            body.prompts,
            TextChoices(),
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            structure=structure_of(body),
        )
        return await _answer(request, task, body)

    @router.post("/v1/chat/completions", responses=document.asked(ChatAnswer, streams=True))
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await _answer(request, chat_task(served, body), body)

    @router.post("/v1/embeddings", responses=document.asked(EmbeddingAnswer))
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Embed one text or several."""
        return await _embed(served, request, body)

    @router.get("/v1/models", responses=document.read(ModelsAnswer))
    async def models() -> Response:
        """The model and its adapters."""
        names = [served.name, *served.llm.adapters]
        return JSONResponse(listed([_model(served, name) for name in names]))

    @router.get("/v1/models/{name:path}", responses=document.read(ModelAnswer, 404))
    async def model(name: str) -> Response:
        """One of them."""
        served.adapter(name)
        return JSONResponse(_model(served, name))

    @router.post("/tokenize", responses=document.asked(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text or a conversation."""
        served.check_task("generate")
        served.adapter(body.model)

        def read(reader: PromptReader) -> list[int]:
            if body.messages is not None:
                options = ChatOptions(chat_template_kwargs=body.chat_template_kwargs)
                return reader.render("messages", body.messages, options)[0]
            return reader.encode("prompt", body.prompt or "", body.add_special_tokens)

        tokens = await served.llm.read(read)
        limit = served.llm.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    @router.post("/detokenize", responses=document.asked(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        served.check_task("generate")
        served.adapter(body.model)
        text = await served.llm.read(lambda reader: reader.decode("tokens", body.tokens))
        return JSONResponse({"prompt": text})

    return router


async def _answer(
    request: Request, task: generation.Task, body: CompletionRequest | ChatRequest
) -> Response:
    if body.stream:
        return await generation.streamed_answer(request, task, includes_usage=body.includes_usage)
    return await generation.whole_answer(request, task)


def _model(served: Served, name: str) -> dict[str, Any]:
    parent = None if name == served.name else served.name
    return {
        "id": name,
        "object": "model",
        "created": served.started,
        "owned_by": "ostinato",
        "parent": parent,
        "max_model_len": served.llm.max_model_len,
    }


async def _embed(served: Served, request: Request, body: EmbeddingRequest) -> Response:
    served.check_task("embed")
    served.adapter(body.model)
    seconds = served.config.request_timeout_s
    deadline = asyncio.get_running_loop().time() + seconds

    async def embed() -> list[EmbeddingOutput]:
        async with time_limit(deadline, seconds):
            return await served.llm.embed(
                body.input, dimensions=body.dimensions, truncate=body.truncate
            )

    with served.admission.enter(1):
        outputs = await unless_gone(request, embed())
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _numbers(output, as_text=as_text)}
        for index, output in enumerate(outputs)
    ]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse(listed(data, model=body.model or served.name, usage=usage))


def _numbers(output: EmbeddingOutput, *, as_text: bool) -> list[float] | str:
    """The embedding, or its float32 numbers in base64, which OpenAI's client asks for."""
    if as_text:
        return base64.b64encode(output.embedding.numpy().astype("<f4").tobytes()).decode()
    numbers: list[float] = output.embedding.tolist()
    return numbers
