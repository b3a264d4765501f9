"""The HTTP application: OpenAI's routes around an ``AsyncLLM``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from ostinato import __version__
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.http.access import OPEN_PATHS, Guard
from ostinato.serving.http.errors import ApiError, add_handlers
from ostinato.serving.http.openai.responses.response_route import create_responses_router
from ostinato.serving.http.openai.routes import create_router
from ostinato.serving.http.openapi import document
from ostinato.serving.http.openapi.answer_schemas import HealthAnswer, VersionAnswer
from ostinato.serving.http.page import create_page_router
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.http.state import Served
from ostinato.serving.http.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def create_app(
    llm: AsyncLLM, config: ServerConfig, tracer_provider: TracerProvider | None = None
) -> FastAPI:
    """An ASGI application that serves ``llm``, which stays the caller's to close.

    ``app.state.served`` is what its routes share, ``app.state.admission`` its queue.
    ``tracer_provider``: of OpenTelemetry, for a span per request; None: no traces.
    """
    served = Served(llm, config)
    app = FastAPI(
        title="Ostinato",
        version=__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.served = served
    app.state.admission = served.admission
    app.include_router(create_router(served))
    app.include_router(create_responses_router(served))
    app.include_router(create_page_router(served))

    @app.get("/health", responses=document.read(HealthAnswer))
    async def health() -> Response:
        """Whether the engine takes requests."""
        if llm.failure is not None:
            raise ApiError(503, llm.failure, code="engine_failed")
        if served.admission.is_closing or llm.is_closed:
            raise ApiError(503, "the server is shutting down; try another one", code="closing")
        return JSONResponse({"status": "ok"})

    @app.get("/version", responses=document.read(VersionAnswer))
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", responses=document.text(CONTENT_TYPE_LATEST), response_class=Response)
    async def metrics() -> Response:
        """For Prometheus; waits for the end of the engine's current step."""
        return Response(counted.text(await llm.stats()), media_type=CONTENT_TYPE_LATEST)

    add_handlers(app)
    open_paths = None if config.api_key is None else OPEN_PATHS
    counted = Metrics(served.name, document.complete(app, open_paths=open_paths)["paths"])
    llm.observe(counted.observe)
    if tracer_provider is not None:
        from ostinato.serving.http.telemetry.tracing import (  # needs OpenTelemetry
            TakeTraceParent,
            Tracing,
        )

        llm.observe(Tracing(tracer_provider, served.name).observe)
        app.add_middleware(TakeTraceParent)
    app.add_middleware(
        Guard,
        api_key=config.api_key,
        max_body_bytes=config.max_body_bytes,
        max_body_s=config.request_timeout_s,
        count=counted.count_answer,
    )
    return app
