"""Where traces go: a collector that an option or OpenTelemetry's own variables name; else nowhere.

Without the extra ``ostinato[otel]`` there are no traces, which is an error only if an option asked
for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_log = logging.getLogger("ostinato.serving")


@contextmanager
def open_tracing(endpoint: str | None) -> Iterator[TracerProvider | None]:
    """A provider that sends spans to ``endpoint``, until the end of the ``with``; or None."""
    named = [name for name in _VARIABLES if os.environ.get(name)]
    if endpoint is None and not named:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        hint = f"needs the package {error.name}: pip install 'ostinato[otel]'"
        if endpoint is not None:
            raise ConfigError(f"otlp_traces_endpoint {hint}") from error
        _log.warning("%s is set, but there are no traces: it %s", named[0], hint)
        yield None
        return
    name = os.environ.get("OTEL_SERVICE_NAME", "ostinato")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield provider
    finally:
        provider.shutdown()  # sends what is left
