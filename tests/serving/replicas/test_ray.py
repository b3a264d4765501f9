"""Replicas on a local Ray cluster; skipped where Ray is not installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("fastapi")

import ray
from serving_models import OPTIONS as SERVED
from serving_models import listening, save_served

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.replicas.gateway import create_gateway
from ostinato.serving.replicas.run import count_running, deployed, resources_of

pytestmark = pytest.mark.slow

OPTIONS = {**SERVED, "max_model_len": 2048, "kv_cache_memory_bytes": "16M"}
ASK = {"prompt": "w1 w2", "temperature": 0, "max_tokens": 100, "ignore_eos": True}
LONG = {**ASK, "max_tokens": 1000}  # seconds, however fast the machine
SECONDS = 120


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    model, adapter = save_served(tmp_path_factory.mktemp("served"))
    file = Path(model, "config.json")
    config = {**json.loads(file.read_text()), "max_position_embeddings": 2048}
    file.write_text(json.dumps(config))
    return model, adapter


@pytest.fixture(scope="module")
def url(paths: tuple[str, str]) -> Iterator[str]:
    """A gateway before two replicas."""
    engine = EngineConfig(model=paths[0], **OPTIONS)
    config = ServerConfig(served_model_name="tiny", api_key="opensesame", max_body_bytes=100_000)
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces for good
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with deployed(engine, config, {"poet": paths[1]}, num_replicas=2) as handle:
            ask = handle.options(stream=True).answer.remote
            with listening(create_gateway(ask, count_running, config)) as url:
                yield url
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    key = {"Authorization": "Bearer opensesame"}
    with httpx.Client(base_url=url, headers=key, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def wanted_long(paths: tuple[str, str]) -> str:
    with LLM(paths[0], **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=LONG["max_tokens"], ignore_eos=True)
        return llm.generate(["w1 w2"], params)[0].outputs[0].text


@pytest.fixture(scope="module")
def wanted(wanted_long: str) -> str:
    return " ".join(wanted_long.split(" ")[: ASK["max_tokens"]])


def replicas() -> list[Any]:
    names = ray.util.list_named_actors(all_namespaces=True)
    return [
        ray.get_actor(each["name"], namespace=each["namespace"])
        for each in names
        if "Replica" in each["name"]
    ]


def answered(client: httpx.Client) -> list[int]:
    """How many completions each replica has answered."""
    counts = []
    for number in range(2):
        text = client.get("/metrics", params={"replica": number}).text
        lines = [each for each in text.splitlines() if "http_requests_total{" in each]
        of_path = [each for each in lines if 'path="/v1/completions"' in each]
        counts.append(round(sum(float(each.rsplit(" ", 1)[1]) for each in of_path)))
    return counts


def test_answers_are_those_of_one_engine(client: httpx.Client, wanted: str) -> None:
    assert client.get("/health").json() == {"status": "ok", "replicas": 2}
    answer = client.post("/v1/completions", json=ASK)
    assert answer.json()["choices"][0]["text"] == wanted
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "poet"]
    with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        *events, done = [line for line in stream.iter_lines() if line]
    parts = [json.loads(each.removeprefix("data: ")) for each in events]
    assert "".join(each["choices"][0]["text"] for each in parts) == wanted
    assert done == "data: [DONE]"


def test_errors_are_those_of_one_engine(client: httpx.Client, url: str) -> None:
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/health").status_code == 200
    for answer, status, message in (
        (client.post("/v1/completions", json={**ASK, "n": 0}), 400, "n must be"),
        (client.post("/v1/completions", content="x"), 415, "must be JSON"),
        (client.post("/v1/completions", json={**ASK, "user": "x" * 10**5}), 413, "max-body-bytes"),
        (client.get("/nothing"), 404, "Not Found"),
        (client.get("/metrics?replica=x"), 400, "replica must be a number from 0 on"),
    ):
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


def test_requests_follow_their_prefix_and_spread_without(client: httpx.Client) -> None:
    before = answered(client)
    for number in range(6):
        prompt = [*range(1, 61), *range(1, 55), number]  # 256 characters and more, as JSON
        body = {**ASK, "max_tokens": 2, "prompt": prompt}
        assert client.post("/v1/completions", json=body).status_code == 200
    after = answered(client)
    assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 6]

    async def at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=client.base_url, headers=client.headers, timeout=SECONDS
        ) as many:
            asked = [many.post("/v1/completions", json=ASK) for _ in range(16)]
            return await asyncio.gather(*asked)

    before = answered(client)
    assert {each.status_code for each in asyncio.run(at_once())} == {200}
    assert min(now - then for now, then in zip(answered(client), before, strict=True)) >= 4


def test_a_client_that_leaves_aborts_its_request(client: httpx.Client) -> None:
    body = {**ASK, "stream": True, "n": 8}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    end = time.monotonic() + SECONDS
    while any(
        client.get("/dashboard/data", params={"replica": number}).json()["in_flight"]
        for number in range(2)
    ):
        assert time.monotonic() < end


def test_a_killed_replica_loses_only_what_had_begun(
    client: httpx.Client, wanted: str, wanted_long: str
) -> None:
    """Last: the cluster has one replica less for a while."""
    killed = asyncio.Event()

    async def whole(many: httpx.AsyncClient) -> str:
        answer = await many.post("/v1/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def streamed(many: httpx.AsyncClient, begun: asyncio.Event) -> str:
        """The text, or the error that it ends with."""
        text = ""
        async with many.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                begun.set()
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert set(event["error"]) == {"message", "type", "param", "code"}
                    assert killed.is_set()
                    error: str = event["error"]["code"]
                    return error
                text += event["choices"][0]["text"]
        assert line == "" or line == "data: [DONE]"
        return text

    async def load() -> tuple[list[str], list[str]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=client.base_url, headers=client.headers, timeout=SECONDS, limits=limits
        ) as many:
            begun = [asyncio.Event() for _ in range(6)]
            streams = [asyncio.create_task(streamed(many, each)) for each in begun]
            wholes = [asyncio.create_task(whole(many)) for _ in range(36)]
            await asyncio.gather(*(each.wait() for each in begun))  # so on both replicas
            killed.set()
            os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*wholes), await asyncio.gather(*streams)

    pid = ray.get(replicas()[0].__ray_call__.remote(lambda _: os.getpid()))
    wholes, streams = asyncio.run(load())
    assert set(wholes) == {wanted}
    assert set(streams) == {wanted_long, "replica_died"}
    end = time.monotonic() + SECONDS
    while client.get("/health").json().get("replicas") != 2:  # Ray starts another
        assert time.monotonic() < end
        time.sleep(0.5)
    assert client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == wanted


def test_a_cluster_that_is_too_small_is_named() -> None:
    engine = EngineConfig(model="tiny", random_weights=True, tensor_parallel_size=2, device="cuda")
    assert resources_of(engine, {"CPU": 8, "GPU": 4}, 2) == {"CPU": 2, "GPU": 2}
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks need 6 GPUs, and the Ray cluster"):
        resources_of(engine, {"CPU": 8, "GPU": 4}, 3)
    with pytest.raises(ConfigError, match="has 0; use fewer replicas"):
        resources_of(engine, {"CPU": 8}, 1)
    on_one = EngineConfig(model="tiny", random_weights=True, device="cuda:1")
    with pytest.raises(ConfigError, match="Ray chooses the GPUs of each replica"):
        resources_of(on_one, {"CPU": 8, "GPU": 4}, 1)
