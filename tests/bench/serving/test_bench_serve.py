"""``ostinato bench serve``: when requests are sent, and what runs against real servers report."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_models import OPTIONS, listening
from tiny_models import save_talking

from ostinato import AsyncLLM
from ostinato.bench.mixes import TimedRequest
from ostinato.bench.serving.answer import Answer, Limits
from ostinato.bench.serving.open_loop import TIME_IS_UP, Clock, run_open_loop
from ostinato.bench.serving.run import Load, run_against, run_in_process, run_over_http
from ostinato.bench.serving.servers import Transformers, running
from ostinato.config import EngineConfig, GraphConfig
from ostinato.errors import ConfigError, MeasurementError, RequestError
from ostinato.serving.http.server_config import ServerConfig

LOAD = Load(mix="chat", scale=0.02, num_requests=6, rate=500.0, limits=Limits(ttft_ms=60_000))


def requests(*arrivals: float) -> list[TimedRequest]:
    return [TimedRequest(prompt_token_ids=[1], output_len=1, arrival_s=each) for each in arrivals]


# --- the open loop --------------------------------------------------------------------------------


def test_requests_are_sent_while_others_are_unanswered() -> None:
    sent: list[float] = []

    async def send(request: TimedRequest, answer: Answer, clock: Clock) -> None:
        sent.append(request.arrival_s)
        assert clock() >= request.arrival_s
        while len(sent) < 3:
            await asyncio.sleep(0)
        answer.note(clock())

    answers = asyncio.run(run_open_loop(requests(0.0, 0.01, 0.02), send, max_seconds=60))
    assert sent == [0.0, 0.01, 0.02]
    assert all(each.is_whole for each in answers)


def test_a_run_ends_when_its_time_is_up() -> None:
    async def send(request: TimedRequest, answer: Answer, clock: Clock) -> None:
        answer.note(clock())
        if request.arrival_s:
            await asyncio.sleep(3600)

    answers = asyncio.run(run_open_loop(requests(0.0, 0.001, 3600.0), send, max_seconds=0.05))
    assert [each.failure for each in answers] == [None, TIME_IS_UP, TIME_IS_UP]


def test_an_error_ends_one_answer_if_it_is_expected() -> None:
    async def send(request: TimedRequest, answer: Answer, clock: Clock) -> None:
        if request.arrival_s:
            raise OSError("reset")
        raise RequestError("too long")

    first, second = asyncio.run(
        run_open_loop(requests(0.0, 0.001), send, max_seconds=60, failures=(OSError,))
    )
    assert (first.failure, second.failure) == ("RequestError: too long", "OSError: reset")
    with pytest.raises(ExceptionGroup):
        asyncio.run(run_open_loop(requests(0.001), send, max_seconds=60))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, r"rate must be a positive number, got 0\.0"),
        ({"rate": float("-inf")}, "rate must be a positive number, got -inf"),
        ({"max_seconds": 0.0}, r"max-seconds must be a positive number, got 0\.0"),
        ({"mix": "talk"}, r"unknown mixes \['talk'\]; choose from chat"),
        ({"num_requests": 0}, "num_requests must be a positive integer, got 0"),
    ],
    ids=str,
)
def test_bad_loads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**options)


def test_an_infinite_rate_sends_all_at_once() -> None:
    drawn = Load(num_requests=4, rate=float("inf")).draw(512)
    assert [each.arrival_s for each in drawn] == [0.0] * 4


# --- in this process ------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_process() -> None:
    config = EngineConfig(
        "tiny",
        random_weights=True,
        device="cpu",
        max_model_len=256,
        max_num_seqs=4,
        graphs=GraphConfig(capture_sizes=[1, 4]),
        show_progress=False,
    )
    results = run_in_process(config, LOAD, repeats=2)
    num_tokens = sum(each.output_len for each in LOAD.draw(512))
    streams, engine, offline = results["rows"]
    for row in results["rows"]:
        assert row["whole"] == row["num_requests"] == 6
        assert row["output_tokens"] == num_tokens
        assert len(row["durations_s"]) == 2
    for row in (streams, engine):
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        assert row["good"] == 6
    assert offline["ttft_ms"] is offline["good"] is None
    speeds = [row["output_tokens_per_s"] for row in results["rows"]]
    assert results["of_engine"] == speeds[0] / speeds[1]
    assert results["of_offline"] == speeds[0] / speeds[2]
    with pytest.raises(ConfigError, match=r"sequences of up to 1408 tokens, but .* at most 256"):
        run_in_process(config, Load(num_requests=4))


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking(tmp_path_factory.mktemp("talking"), None)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    from ostinato.serving.http.app import create_app

    with AsyncLLM(str(model), **OPTIONS) as llm:
        server = ServerConfig(served_model_name="tiny", max_waiting=64, max_prompt_tokens=10)
        with listening(create_app(llm, server)) as url:
            yield url


def test_a_server_that_runs_already(url: str) -> None:
    results = run_against(url + "/", LOAD)
    drawn = LOAD.draw(8)
    (row,) = results["rows"]
    assert results["model"] == "tiny"
    assert row["server"] == url
    # The longest prompt is longer than the server allows.
    short = [each for each in drawn if len(each.prompt_token_ids) <= 10]
    assert 0 < len(short) < 6
    assert row["whole"] == row["good"] == len(short)
    assert sum(row["failures"].values()) == 6 - len(short)
    assert all("HTTP 400" in failure for failure in row["failures"])
    assert row["output_tokens"] == sum(each.output_len for each in short)
    assert row["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in short)


def test_a_server_that_answers_nothing(url: str) -> None:
    load = Load(mix="prompts", scale=0.02, num_requests=2, rate=float("inf"))
    with pytest.raises(MeasurementError, match=r"the first requests failed: .*HTTP 400"):
        run_against(url, load)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "--url takes an address such as http://127.0.0.1:8000, got"),
        ("ftp://127.0.0.1", "--url takes an address such as"),
        ("http://192.0.2.1:8000", r"'192\.0\.2\.1' is a remote host; .* --allow-remote"),
        ("http://127.0.0.1.example.com", "is a remote host"),
    ],
)
def test_other_addresses(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_against(url, LOAD)


def test_no_server_is_there() -> None:
    with pytest.raises(
        MeasurementError, match=r"no server answers at http://127\.0\.0\.1:9/health"
    ):
        run_against("http://127.0.0.1:9", LOAD)


@pytest.mark.slow
def test_servers_of_its_own(model: Path) -> None:
    config = EngineConfig(
        str(model), device="cpu", max_model_len=128, max_num_seqs=4, enforce_eager=True
    )
    results = run_over_http(config, LOAD)
    (row,) = results["rows"]
    assert row["server"] == "ostinato"
    assert row["whole"] == 6
    assert results["failed"] == {}
    with pytest.raises(ConfigError, match=r"unknown baselines \['vllm'\]; choose from"):
        run_over_http(config, LOAD, baselines=["vllm"])


class Broken(Transformers):
    """A server that ends at once."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, EngineConfig("somewhere", device="cpu"))
        self._command = [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]


def test_a_server_that_does_not_start() -> None:
    message = "the server transformers ended; it printed:\nno such model"
    with pytest.raises(MeasurementError, match=message), running(Broken):
        raise AssertionError("it runs")


def test_a_baseline_needs_a_checkpoint(tmp_path: Path) -> None:
    config = EngineConfig("tiny", random_weights=True, device="cpu")
    with pytest.raises(MeasurementError, match="transformers serve needs a checkpoint"):
        Transformers(tmp_path / "log.txt", config)
