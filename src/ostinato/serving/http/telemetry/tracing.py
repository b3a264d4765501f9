"""A span of OpenTelemetry for each request, as part of the trace that its client began.

It is written when the request has ended, from the times that are noted anyway: nothing is traced
while it runs. Attributes have the names of OpenTelemetry's conventions for generative AI, and
vLLM's; no text of the request is among them.
"""

from __future__ import annotations

import time

from opentelemetry import context
from opentelemetry.trace import SpanKind, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato import __version__
from ostinato.serving.records import RequestRecord


class TakeTraceParent:
    """Takes W3C's ``traceparent`` from a request's headers into its context."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = context.attach(self._propagator.extract(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class Tracing:
    """Writes the spans. Its events say when a request began to queue, to prefill and to decode."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._tracer = provider.get_tracer("ostinato", __version__)
        self._model_name = model_name

    def observe(self, record: RequestRecord) -> None:
        """Write the span of a request that has ended. Called in the engine's thread."""
        record.context.run(self._write, record)  # there, its client's span is the current one

    def _write(self, record: RequestRecord) -> None:
        since_epoch = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return round((moment + since_epoch) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            start_time=nanoseconds(record.arrived),
            attributes=_attributes(record, self._model_name),
        )
        phases = {
            "queue": record.arrived,
            "prefill": record.scheduled,
            "decode": record.first_token,
        }
        for name, began in phases.items():
            if began is not None:
                span.add_event(name, timestamp=nanoseconds(began))
        span.end(nanoseconds(record.ended))


def _attributes(record: RequestRecord, model_name: str) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.model": model_name,
        "gen_ai.request.choice.count": record.num_sequences,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_generated_tokens,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.latency.e2e": record.ended - record.arrived,
    }
    if record.scheduled is not None:
        attributes["gen_ai.latency.time_in_queue"] = record.scheduled - record.arrived
    if record.time_to_first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = record.time_to_first_token
    return attributes
