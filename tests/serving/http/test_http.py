"""The server itself: shapes of errors, the key, limits, callers that leave, metrics, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner
from serving_models import OPTIONS, listening
from typer.main import get_command

import ostinato
from ostinato import LLM, AsyncLLM, ConfigError, SamplingParams, cli
from ostinato.serving.http import run as run_module
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig

ASK = {"model": "tiny", "prompt": "w1 w2", "temperature": 0, "max_tokens": 4}
LONG = {**ASK, "max_tokens": 120, "ignore_eos": True}
SECRET = "w61 w62 w63"


@contextmanager
def http(engine: AsyncLLM, **config: Any) -> Iterator[httpx.Client]:
    app = create_app(engine, ServerConfig(served_model_name="tiny", **config))
    with listening(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# --- requests ----------------------------------------------------------------------------------

BAD: list[tuple[str, Any, int, str, str | None]] = [
    ("/v1/completions", {}, 400, "prompt is required", "prompt"),
    ("/v1/completions", {"prompt": ["w1", [1]]}, 400, "only texts or only lists of", "prompt"),
    ("/v1/completions", {"prompt": [True]}, 400, "prompt must be a text, token ids", "prompt"),
    ("/v1/completions", [], 400, "the body: Input should be", None),
    ("/v1/completions", b"{", 400, "the body is not valid JSON", None),
    ("/v1/completions", b"[" * 500_000, 400, "not valid JSON: it is nested too deeply", None),
    ("/v1/completions", b'{"prompt": "\xff"}', 400, "not valid JSON: it is not UTF-8", None),
    ("/v1/completions", b'{"n": ' + b"9" * 5000 + b"}", 400, "has too many digits", None),
    ("/v1/completions", b'{"top_p": NaN}', 400, "NaN is not a number of JSON", None),
    ("/v1/completions", b'{"top_p": 1e999}', 400, "1e999 is too large a number", None),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "lone surrogate", None),
    ("/v1/completions", {**ASK, "tempature": 1}, 400, "argument: 'tempature'", None),
    ("/v1/completions", b'{"prompt": "w1", "\\ud800": 1}', 400, "unicode", None),
    ("/v1/completions", {**ASK, "temperature": "0"}, 400, "temperature: Input", "temperature"),
    ("/v1/completions", {**ASK, "stop": 1}, 400, "stop: .* valid string or a valid list", "stop"),
    ("/v1/completions", {**ASK, "stop": ["w1", 2]}, 400, r"stop\.1: .* valid string$", "stop"),
    ("/v1/responses", {"input": ["w1"]}, 400, r"input\.0: .* valid dictionary$", "input"),
    ("/v1/completions", {**ASK, "top_p": -1}, 400, "top_p must be", "top_p"),
    ("/v1/completions", {**ASK, "max_tokens": 0}, 400, "max_tokens must be", "max_tokens"),
    ("/v1/completions", {**ASK, "n": 1000}, 400, "1000 sequences, but a request may have", "n"),
    ("/v1/completions", {**ASK, "prompt": []}, 400, "no prompts", "prompt"),
    ("/v1/completions", {**ASK, "prompt": [[]]}, 400, "is empty", None),
    ("/v1/completions", {**ASK, "prompt": ["w1", ""]}, 400, r"prompt\[1\] is empty", "prompt"),
    (
        "/v1/completions",
        {**ASK, "prompt": [[1], [2], [-1]], "stream": True},
        400,
        r"prompt\[2\] contains -1; token ids are",
        "prompt",
    ),
    ("/v1/completions", {**ASK, "prompt": [-1]}, 400, "contains -1", None),
    ("/v1/completions", {**ASK, "prompt": {"prompt": "/etc/passwd"}}, 400, "prompt", "prompt"),
    ("/v1/completions", {**ASK, "echo": True}, 400, "echo is not supported here", "echo"),
    ("/v1/completions", {**ASK, "suffix": "w3"}, 400, "suffix is not supported here", "suffix"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "w1"}], "max_completion_tokens": 0},
        400,
        "max_completion_tokens must be an integer of at least 1, got 0",
        "max_completion_tokens",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "w1"}],
            "logprobs": True,
            "top_logprobs": 65,
        },
        400,
        "top_logprobs must be an integer from 0 to 64, got 65",
        "top_logprobs",
    ),
    ("/v1/completions", {**ASK, "best_of": 3}, 400, "best_of is 3, but must equal n", None),
    ("/v1/completions", {**ASK, "logit_bias": {"w1": 1}}, 400, "token ids", "logit_bias"),
    ("/v1/completions", {**ASK, "logit_bias": {"99": 1}}, 400, "logit_bias names", "logit_bias"),
    ("/v1/completions", {**ASK, "stream_options": {}}, 400, "stream_options are for", None),
    ("/v1/chat/completions", {"messages": []}, 400, "messages: List should have", "messages"),
    ("/v1/chat/completions", {"messages": [{"role": 1}]}, 400, "has the role 1", None),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "w1"}], "top_logprobs": 2},
        400,
        "top_logprobs needs logprobs",
        None,
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "w1"}],
            "verbosity": "low",
        },
        400,
        "verbosity is not supported here, got 'low'",
        "verbosity",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/x"}}]}
            ]
        },
        400,
        "this model takes text only",
        None,
    ),
    ("/tokenize", {}, 400, "give either prompt or messages", None),
    ("/detokenize", {"tokens": [10**30]}, 400, "token", None),
    ("/nothing", {}, 404, "Not Found", None),
    ("/health", {}, 405, "Method Not Allowed", None),
]


@pytest.mark.parametrize(("path", "body", "status", "message", "param"), BAD)
def test_bad_requests(
    client: httpx.Client, path: str, body: Any, status: int, message: str, param: str | None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=data, headers={"content-type": "application/json"})
    error = error_of(response)
    assert response.status_code == status, error
    assert re.search(message, error["message"]), error
    if param is not None:
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_pages_of_other_origins_cannot_ask(client: httpx.Client, kind: str | None) -> None:
    """Browsers send these without asking the server first."""
    headers = {} if kind is None else {"content-type": kind}
    response = client.post("/v1/completions", content=json.dumps(ASK), headers=headers)
    assert response.status_code == 415
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_where_no_body_is_taken_its_type_does_not_matter(client: httpx.Client) -> None:
    assert client.post("/version", content="x").status_code == 405
    assert client.post("/nothing", content="x").status_code == 404


def test_an_answer_may_quote_lone_surrogates(client: httpx.Client) -> None:
    body = b'{"input": "w1", "max_output_tokens": 2, "metadata": {"a": "\\ud800"}}'
    response = client.post(
        "/v1/responses", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    assert response.json()["metadata"] == {"a": "\ud800"}


def test_harmless_fields_are_taken(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "w1"}], "max_completion_tokens": 2}
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "x",
        "temperature": None,
    }
    response = client.post("/v1/chat/completions", json={**chat, **harmless})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 2


def test_tokens_and_text(llm: LLM, client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "w5 w6"}).json()
    assert answer == {"count": 2, "max_model_len": 128, "tokens": [5, 6]}
    talk = [{"role": "user", "content": "w4"}]
    tokens = client.post("/tokenize", json={"messages": talk}).json()["tokens"]
    assert tokens == llm.render_chat(talk)
    assert client.post("/detokenize", json={"tokens": [5, 6]}).json() == {"prompt": "w5 w6"}


def test_variables_of_the_template(llm: LLM, client: httpx.Client) -> None:
    talk = [{"role": "user", "content": "w4"}]
    asked: Any = {"messages": talk, "chat_template_kwargs": {"style": "w3 w5"}}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    assert tokens == [7, 4, 3, 5, 9]
    chat = {**asked, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=chat).json()
    params = SamplingParams(temperature=0, max_tokens=4)
    (wanted,) = llm.chat(talk, params, chat_template_kwargs=asked["chat_template_kwargs"])
    assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    for nothing in ({}, None):
        body = {"messages": talk, "chat_template_kwargs": nothing}
        assert client.post("/tokenize", json=body).json()["tokens"] == [7, 4, 9]


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("/v1/chat/completions", {"stile": "w3"}, "template does not read; did you mean style?"),
        ("/v1/chat/completions", {"messages": []}, "cannot set 'messages'"),
        ("/v1/chat/completions", [], "valid dictionary"),
        ("/tokenize", {"stile": "w3"}, "did you mean style?"),
    ],
    ids=["misspelt", "ours", "list", "tokenize"],
)
def test_bad_variables_of_the_template(
    client: httpx.Client, path: str, given: Any, message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "w4"}], "chat_template_kwargs": given}
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "chat_template_kwargs"
    assert message in error["message"]


def test_variables_are_for_conversations(client: httpx.Client) -> None:
    body = {"prompt": "w1", "chat_template_kwargs": {}}
    assert "are for messages" in client.post("/tokenize", json=body).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing", "/v1/completions"])
def test_head_is_get_without_the_body(client: httpx.Client, path: str) -> None:
    head, got = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


def test_headers_have_a_limit(client: httpx.Client) -> None:
    """Also those that come whole in one read, which the HTTP parser lets through."""
    for path, headers in (
        ("/health", {"X": "y" * 70_000}),
        ("/" + "y" * 40_000, {"X": "y" * 40_000}),
    ):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "headers_too_large")
    assert client.get("/health", headers={"X": "y" * 50_000}).status_code == 200


def test_health_version_and_no_cors(client: httpx.Client) -> None:
    health = client.get("/health", headers={"Origin": "http://elsewhere"})
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert not [name for name in health.headers if name.startswith("access-control")]
    assert client.get("/version").json() == {"version": ostinato.__version__}


# --- access ------------------------------------------------------------------------------------


def test_the_key(engine: AsyncLLM) -> None:
    with http(engine, api_key="opensesame") as client:
        for header in ("", "Bearer", "Bearer wrong", "Basic opensesame", "Bearer opensesame2"):
            for path in ("/v1/models", "/metrics", "/version", "/nothing"):
                response = client.get(path, headers={"Authorization": header})
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer opensesame"}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/health").status_code == 200


def test_bodies_have_a_limit(engine: AsyncLLM) -> None:
    with http(engine, max_body_bytes=1000) as client:
        body = json.dumps({**ASK, "user": "x" * 1000}).encode()
        kind = {"content-type": "application/json"}
        stated = client.post("/v1/completions", content=body, headers=kind)
        several = iter([body[:600], body[600:]])
        parts = client.post("/v1/completions", content=several, headers=kind)
        for response in (stated, parts):
            assert response.status_code == 413
            assert "the body exceeds the limit of 1,000 bytes" in error_of(response)["message"]
        assert client.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.slow
def test_bodies_must_come_in_time(engine: AsyncLLM) -> None:
    with http(engine, request_timeout_s=0.2) as client:
        url = client.base_url
        with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9"
            connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{{".encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body did not come within 0.2 s (--request-timeout-s)" in answer


def test_prompts_have_a_limit(engine: AsyncLLM) -> None:
    with http(engine, max_prompt_tokens=3) as client:
        for stream in (False, True):
            response = client.post(
                "/v1/completions", json={**ASK, "prompt": [1] * 4, "stream": stream}
            )
            assert response.status_code == 400
            assert "but the limit is 3" in error_of(response)["message"]
        assert client.post("/v1/completions", json={**ASK, "prompt": [1] * 3}).status_code == 200
    engine.max_prompt_tokens = None  # of the other servers of this engine


def test_requests_are_not_in_the_logs(
    engine: AsyncLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if something fails that should not."""

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError(f"no {SECRET}")

    monkeypatch.setattr(engine, "generate", fail)
    with caplog.at_level(logging.DEBUG), http(engine) as client:
        response = client.post("/v1/completions", json={**ASK, "prompt": SECRET})
    assert response.status_code == 500
    assert "the server failed (LookupError)" in error_of(response)["message"]
    assert SECRET not in response.text
    assert "LookupError while serving a request" in caplog.text
    assert SECRET not in caplog.text


def test_a_key_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        ServerConfig(api_key="sëcret")
    assert "sëcret" not in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean port"):
        ServerConfig(prt=1)
    assert ServerConfig(host="0.0.0.0").is_exposed
    assert not ServerConfig(host="0.0.0.0", api_key="x").is_exposed
    assert not ServerConfig().is_exposed


# --- load --------------------------------------------------------------------------------------


@contextmanager
def engine_held(engine: AsyncLLM) -> Iterator[None]:
    """The engine's thread waits until the block ends."""
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: LLM) -> None:
        inside.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=lambda: asyncio.run(engine.call(hold)))
    thread.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_full_queue_says_when_to_come_back(engine: AsyncLLM) -> None:
    """8 run, 2 may wait: of 30, 20 are sent away, and the others get their answers."""

    async def ask(client: httpx.AsyncClient, stream: bool) -> httpx.Response:
        return await client.post("/v1/completions", json={**ASK, "stream": stream})

    async def ask_all(url: httpx.URL) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            with engine_held(engine):
                asked = [asyncio.create_task(ask(client, k % 2 == 0)) for k in range(30)]
                while sum(task.done() for task in asked) < 20:
                    await asyncio.sleep(0.005)
            return await asyncio.gather(*asked)

    with http(engine, max_waiting=2) as client:
        responses = asyncio.run(ask_all(client.base_url))
        assert sorted({each.status_code for each in responses}) == [200, 429]
        refused = [each for each in responses if each.status_code == 429]
        assert len(refused) == 20
        assert refused[0].headers["Retry-After"] == "1"
        assert error_of(refused[0])["type"] == "rate_limit_error"
        assert client.post("/v1/completions", json=ASK).status_code == 200  # nothing is left


@pytest.mark.slow
def test_requests_have_a_time(engine: AsyncLLM) -> None:
    with http(engine, request_timeout_s=0.2) as client, engine_held(engine):
        for stream in (False, True):
            response = client.post("/v1/completions", json={**ASK, "stream": stream})
            assert response.status_code == 504
            assert "took longer than 0.2 s" in error_of(response)["message"]
            assert response.headers["x-should-retry"] == "false"
    assert asyncio.run(engine.stats()).num_waiting == 0


@pytest.mark.slow
def test_a_stream_that_takes_too_long_ends_with_an_error(engine: AsyncLLM) -> None:
    go_on = threading.Event()

    def slow_down(llm: LLM) -> None:
        """After three steps, the next one waits."""
        runner, steps = llm.engine.runner, iter(range(3))
        run = runner.run

        def slow(plan: Any) -> Any:
            if next(steps, None) is None:
                assert go_on.wait(60)
                del runner.run  # the class's own again
            return run(plan)

        runner.run = slow

    asyncio.run(engine.call(slow_down))
    with http(engine, request_timeout_s=2) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        go_on.set()
    first, *_, last, done = lines
    assert "choices" in first
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    assert asyncio.run(engine.stats()).kv_cache_usage == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(engine: AsyncLLM, stream: bool) -> None:
    before = asyncio.run(engine.stats()).generation_tokens
    app = create_app(engine, ServerConfig(served_model_name="tiny"))
    inside = app.state.served.admission
    body = json.dumps({**LONG, "stream": stream, "n": 8}).encode()
    with listening(app) as url:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
        with engine_held(engine):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(
                    head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body
                )
                wait_until(lambda: inside.num_inside == 8)
            wait_until(lambda: inside.num_inside == 0)
    stats = asyncio.run(engine.stats())
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert stats.generation_tokens == before  # it was started and aborted between two steps


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.slow
def test_shutting_down_aborts_what_does_not_end_in_time(engine: AsyncLLM) -> None:
    app = create_app(engine, ServerConfig(served_model_name="tiny"))
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    with engine_held(engine):
        thread.start()
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        answers: list[httpx.Response] = []
        address = f"http://127.0.0.1:{port}/v1/completions"
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(address, json=LONG, timeout=60))
        )
        asking.start()
        wait_until(lambda: app.state.served.admission.num_inside == 1)
        server.should_exit = True
        thread.join(60)
        asking.join(60)
    assert not thread.is_alive()
    assert answers[0].status_code == 503
    assert error_of(answers[0])["code"] == "closing"
    assert asyncio.run(engine.stats()).num_waiting == 0


@pytest.mark.slow
def test_streams_that_a_shutdown_aborts_end_with_an_error(
    paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``listen`` runs here, in the main thread, and its client in another."""
    lines: list[str] = []
    servers: list[uvicorn.Server] = []
    start = run_module._Server.startup

    async def noted(server: uvicorn.Server, **options: Any) -> None:
        await start(server, **options)
        servers.append(server)

    monkeypatch.setattr(run_module._Server, "startup", noted)

    def ask() -> None:
        wait_until(lambda: bool(servers))
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", address, json={**LONG, "stream": True}, timeout=60) as response:
            for line in response.iter_lines():
                servers[0].should_exit = True
                lines.append(line)

    with AsyncLLM(paths[0], **OPTIONS) as engine:
        run = asyncio.run(engine.call(lambda llm: llm.engine.runner.run))

        def slowly(*args: Any, **options: Any) -> Any:
            time.sleep(0.05)
            return run(*args, **options)

        asyncio.run(engine.call(lambda llm: setattr(llm.engine.runner, "run", slowly)))
        config = ServerConfig(port=0, served_model_name="tiny", shutdown_timeout_s=0)
        asking = threading.Thread(target=ask)
        asking.start()
        run_module.listen(create_app(engine, config), config, abort=engine.aclose)
        asking.join(60)
    error, done = (line.removeprefix("data: ") for line in lines[-4::2])
    assert json.loads(error)["error"]["code"] == "closing"
    assert done == "[DONE]"


def test_an_address_in_use_is_named_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(get_command(cli.app), ["serve", "--port", str(port)])
    assert isinstance(result.exception, ConfigError)
    assert f"cannot listen on '127.0.0.1', port {port}: Address already in use" in str(
        result.exception
    )
    for host in ("\ud800", "256.1.1.1"):
        with pytest.raises(ConfigError, match="cannot listen on"):
            run_module.check_address(host, 0)


# --- metrics -----------------------------------------------------------------------------------


def metric(text: str, name: str, **labels: str) -> float:
    """The value of a sample."""
    for line in text.splitlines():
        found = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if found and found[1] == name:
            has = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            if has == {"model_name": "tiny", **labels}:
                return float(found[3])
    raise AssertionError(f"no {name} {labels} in\n{text}")


@pytest.mark.slow
def test_metrics(paths: tuple[str, str]) -> None:
    with AsyncLLM(paths[0], **OPTIONS) as engine, http(engine) as client:
        for _ in range(2):
            client.post("/v1/completions", json={**ASK, "prompt": [3] * 32})
        client.post("/v1/completions", json={})
        client.get("/secret/path")
        response = client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain")
    assert metric(text, "ostinato:prompt_tokens_total") == 64
    assert metric(text, "ostinato:generation_tokens_total") == 8
    assert metric(text, "ostinato:prefix_cache_hits_total") == 16
    assert metric(text, "ostinato:request_success_total", finished_reason="length") == 2
    assert metric(text, "ostinato:num_requests_running") == 0
    assert metric(text, "ostinato:kv_cache_usage_perc") == 0
    assert metric(text, "ostinato:time_to_first_token_seconds_count") == 2
    assert metric(text, "ostinato:request_time_per_output_token_seconds_count") == 2
    assert metric(text, "ostinato:e2e_request_latency_seconds_count") == 2
    assert metric(text, "ostinato:request_queue_time_seconds_count") == 2
    assert metric(text, "ostinato:graph_replays_total", mode="FULL") >= 6
    assert metric(text, "ostinato:graph_memory_bytes") > 0
    assert metric(text, "ostinato:graph_padding_tokens_total") >= 0
    assert metric(text, "ostinato:spec_decode_acceptance_length") == 0
    answers = {"path": "/v1/completions", "status": "200"}
    assert metric(text, "ostinato:http_requests_total", **answers) == 2
    assert metric(text, "ostinato:http_requests_total", **{**answers, "status": "400"}) == 1
    assert metric(text, "ostinato:http_requests_total", path="other", status="404") == 1
    assert "secret" not in text


@pytest.mark.slow
def test_eager_steps_have_reasons(paths: tuple[str, str]) -> None:
    options = {**OPTIONS, "graphs": ostinato.GraphConfig(mode="NONE")}
    with AsyncLLM(paths[0], **options) as engine, http(engine) as client:
        client.post("/v1/completions", json=ASK)
        text = client.get("/metrics").text
    assert metric(text, "ostinato:eager_steps_total", reason="MODE_NONE") == 4


@pytest.mark.slow
def test_a_failed_engine_is_not_healthy(paths: tuple[str, str]) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the device is gone")

    with AsyncLLM(paths[0], **OPTIONS) as engine, http(engine) as client:
        asyncio.run(engine.call(lambda llm: setattr(llm.engine.runner, "run", broken)))
        for _ in range(2):
            response = client.post("/v1/completions", json=ASK)
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_failed"
        health = client.get("/health")
        assert health.status_code == 503
        assert "the device is gone" in error_of(health)["message"]


@pytest.mark.slow
def test_a_closed_engine_is_not_healthy(paths: tuple[str, str]) -> None:
    with AsyncLLM(paths[0], **OPTIONS) as engine, http(engine) as client:
        assert client.get("/health").status_code == 200
        engine.close()
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=ASK).status_code == 503


# --- the command -------------------------------------------------------------------------------


@contextmanager
def killed_on_failure(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leaving a process's own ``with`` would wait for its end."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def answer_to_large_headers(url: httpx.URL) -> bytes:
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2_000_000)
            return connection.recv(100)
        except ConnectionError:  # it was closed before all was sent
            return b" 400 "


@pytest.mark.slow
def test_the_command_finishes_its_requests_at_sigterm(llm: LLM, paths: tuple[str, str]) -> None:
    command = [
        *(sys.executable, "-m", "ostinato", "serve", "--model", paths[0], "--port", "0"),
        *("--adapter", f"poet={paths[1]}", "--device", "cpu", "--max-model-len", "128"),
        *("--kv-cache-memory-bytes", "4M", "--sizes", "1,4", "--served-model-name", "tiny"),
        *("--max-num-seqs", "4", "--quiet"),
    ]
    environment = {**os.environ, "OSTINATO_API_KEY": "opensesame"}
    wanted = llm.generate(["w1 w2"], SamplingParams(temperature=0, max_tokens=120))[0].outputs[0]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process,
        killed_on_failure(process),
    ):
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(log))
        headers = {"Authorization": "Bearer opensesame"}
        with httpx.Client(base_url=found[1], headers=headers, timeout=60) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [
                *("tiny", "poet")
            ]
            assert b" 400 " in answer_to_large_headers(client.base_url)
            body = {**LONG, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                events = [next(lines)]
                process.send_signal(signal.SIGTERM)
                events += [line for line in lines if line]
        assert events.pop() == "data: [DONE]"
        parsed = [json.loads(each.removeprefix("data: ")) for each in events]
        assert "".join(each["choices"][0]["text"] for each in parsed) == wanted.text
        log += list(process.stderr)
        assert process.wait(60) == 0, "".join(log)
        assert not [line for line in log if "Traceback" in line]


@pytest.mark.slow
def test_the_second_signal_ends_the_process_at_once(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    app = create_app(engine, ServerConfig())
    server = run_module._Server(uvicorn.Config(app), limit_s=1, abort=None)
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, ended) == (True, [])
    assert app.state.served.admission.is_closing
    server.handle_exit(signal.SIGTERM, None)
    assert ended == [128 + signal.SIGTERM]
    with listening(app) as url:
        for response in (httpx.get(f"{url}/health"), httpx.post(f"{url}/v1/completions", json=ASK)):
            assert response.status_code in (404, 503)
        assert httpx.get(f"{url}/health").status_code == 503


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ostinato.serving.replicas.run", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    result = CliRunner().invoke(get_command(cli.app), ["serve", "--ray"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "ostinato serve --ray needs the package ray: pip install 'ostinato[ray]'"
    )


def test_the_command_refuses_bad_options() -> None:
    for arguments, message in (
        (["--adapter", "poet"], "--adapter takes NAME=DIRECTORY, got 'poet'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter gives 'a' two directories, 'x' and"),
        (["--request-timeout-s", "0"], "request_timeout_s is 0, in which no request is answered"),
        (["--otlp-traces-endpoint", "x:4318"], "otlp_traces_endpoint must be an address such as"),
        (["--port", "70000"], "port must be an integer from 0 to 65535"),
        (["--task", "dance"], "task"),
        (["--replicas", "0", "--ray"], "--replicas must be at least 1, got 0"),
        (["--replicas", "2"], "--replicas are started by Ray: add --ray"),
    ):
        result = CliRunner().invoke(get_command(cli.app), ["serve", *arguments])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


@pytest.mark.parametrize("arguments", [[], ["--api-key", ""]])
def test_an_empty_key_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("OSTINATO_API_KEY", "")
    result = CliRunner().invoke(get_command(cli.app), ["serve", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "api_key, or OSTINATO_API_KEY, is empty" in str(result.exception)
