"""A rank's process is killed: every client learns it within seconds, and so does ``/health``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from serving_models import listening

from ostinato import LLM, AsyncLLM, GraphConfig
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "random_weights": True,
    "device": "cpu",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "graphs": GraphConfig(capture_sizes=[1, 4]),
    "show_progress": False,
    "rank_timeout_s": 8.0,
}
LONG = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True}
WHY = "the process of rank 1 was killed by signal 9"
SECONDS = 30  # "within seconds", on a machine that is busy with other tests


@contextmanager
def serving(**options: Any) -> Iterator[tuple[AsyncLLM, str]]:
    """An engine whose ranks are processes, and its address; closing it must not raise."""
    with (
        AsyncLLM(**OPTIONS, **options) as llm,
        listening(create_app(llm, ServerConfig(max_waiting=8))) as url,
    ):
        yield llm, url


def kill_rank_1(llm: AsyncLLM) -> None:
    def pid(llm: LLM) -> int:
        ranks: Any = llm.engine.runner._world._dead_rank.__self__  # type: ignore[attr-defined]
        number: int = ranks._processes[0].pid
        return number

    os.kill(asyncio.run(llm.call(pid)), signal.SIGKILL)


async def ask(client: httpx.AsyncClient, begun: asyncio.Event, *, stream: bool) -> dict[str, Any]:
    """The error that a request ends with."""
    async with client.stream("POST", "/v1/completions", json={**LONG, "stream": stream}) as answer:
        if not stream:
            assert await answer.aread()
            assert answer.status_code == 503
            error: dict[str, Any] = answer.json()["error"]
            return error
        events = []
        async for line in answer.aiter_lines():
            begun.set()
            events.append(line)
        *_, last, done = [each for each in events if each]
        assert done == "data: [DONE]"
        return json.loads(last.removeprefix("data: "))["error"]


async def kill_under_load(llm: AsyncLLM, url: str) -> list[dict[str, Any]]:
    """Four requests run and five wait, some of them streams; the errors of all."""
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        begun = asyncio.Event()
        asked = [asyncio.create_task(ask(client, begun, stream=n % 3 != 2)) for n in range(9)]
        async with asyncio.timeout(SECONDS):
            await begun.wait()
            await asyncio.to_thread(kill_rank_1, llm)
            return await asyncio.gather(*asked)


def check_it_says_so(url: str) -> None:
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        for answer in (
            client.get("/health"),
            client.get("/metrics"),
            client.post("/v1/completions", json=LONG),
            client.post("/v1/completions", json={**LONG, "stream": True}),
        ):
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert WHY in error["message"]
            assert error["code"] == "engine_failed"
            assert error["type"] == "service_unavailable_error"
        assert client.get("/version").status_code == 200


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "data_parallel_size"])
def test_under_load_every_client_gets_the_error(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with serving(**{kind: 2}) as (llm, url):
        for error in asyncio.run(kill_under_load(llm, url)):
            assert WHY in error["message"]
            assert error["code"] == "engine_failed"
        check_it_says_so(url)


def test_it_is_noticed_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with serving(tensor_parallel_size=2) as (llm, url):
        assert httpx.get(f"{url}/health").status_code == 200
        kill_rank_1(llm)
        end = time.monotonic() + SECONDS
        while httpx.get(f"{url}/health").status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        check_it_says_so(url)
