"""Traces: a span per request, in its client's trace, or none at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_models import listening

from ostinato import AsyncLLM
from ostinato.errors import ConfigError
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.http.telemetry.trace_export import open_tracing

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY: dict[str, Any] = {"prompt": "w1 w2 w3", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(engine: AsyncLLM, exporter: Any) -> Iterator[str]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with listening(create_app(engine, ServerConfig(served_model_name="tiny"), provider)) as url:
        yield url


@pytest.fixture
def spans(exporter: Any) -> Any:
    exporter.clear()
    return exporter.get_finished_spans


def ask(url: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    answer = httpx.post(
        url + "/v1/completions", json={**BODY, **fields}, headers=headers, trust_env=False
    )
    answer.raise_for_status()


def test_a_span_in_the_trace_of_its_client(traced: str, spans: Any) -> None:
    ask(traced, {"traceparent": f"00-{TRACE}-{PARENT}-01"}, n=2)
    (span,) = spans()
    assert span.name == "llm_request"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 10
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert times[0] == times[1]
    taken = (span.end_time - span.start_time) / 1e9
    assert taken == pytest.approx(span.attributes["gen_ai.latency.e2e"], abs=1e-6)
    assert not any("w1" in str(value) for value in span.attributes.values())


@pytest.mark.slow
@pytest.mark.parametrize("headers", [None, {"traceparent": "nonsense"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_of_its_own(
    traced: str, spans: Any, headers: dict[str, str] | None, stream: bool
) -> None:
    ask(traced, headers, stream=stream)
    (span,) = spans()
    assert span.parent is None


def test_requests_do_not_share_a_trace(traced: str, spans: Any) -> None:
    ask(traced, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    ask(traced)
    first, second = spans()
    assert first.context.trace_id != second.context.trace_id


def test_every_prompt_has_a_span(traced: str, spans: Any) -> None:
    ask(traced, {"traceparent": f"00-{TRACE}-{PARENT}-01"}, prompt=["w1", "w2 w3"])
    tokens = sorted(each.attributes["gen_ai.usage.input_tokens"] for each in spans())
    assert tokens == [1, 2]
    assert {f"{each.context.trace_id:032x}" for each in spans()} == {TRACE}


# --- where they go --------------------------------------------------------------------------------


def test_off_unless_there_is_a_place_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with open_tracing(None) as provider:
        assert provider is None


def test_an_option_or_a_variable_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with open_tracing(None) as provider:
        assert isinstance(provider, sdk.TracerProvider)
    with open_tracing("http://127.0.0.1:9/v1/traces") as provider:
        assert isinstance(provider, sdk.TracerProvider)


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    message = r"otlp_traces_endpoint needs the package .*: pip install 'ostinato\[otel\]'"
    with pytest.raises(ConfigError, match=message), open_tracing("http://127.0.0.1:9"):
        raise AssertionError("it was opened")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level("WARNING"), open_tracing(None) as provider:
        assert provider is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but there are no traces" in caplog.text
