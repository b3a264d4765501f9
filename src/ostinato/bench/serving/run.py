"""``ostinato bench serve``: requests at random times, as independent users send them.

An open loop: a request is sent when it is due, whether or not earlier ones are answered, so a
server that falls behind shows it. Over HTTP: a server that is started here, then the baselines, one
after the other and with the same requests; or one that runs already (``url``). In this process:
``in_process``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.bench.mixes import (
    Mix,
    TimedRequest,
    check_positive_number,
    check_room,
    choose_mixes,
    draw_requests,
)
from ostinato.bench.serving import in_process
from ostinato.bench.serving.answer import Limits, summarize
from ostinato.bench.serving.open_loop import run_open_loop
from ostinato.bench.serving.words import VOCABULARY
from ostinato.bench.throughput import warm_up
from ostinato.bench.timing.baselines import reason
from ostinato.bench.timing.measure import machine, model_name
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, MeasurementError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.progress import ProgressBar
from ostinato.serving.async_llm import AsyncLLM
from ostinato.serving.switch_interval import short_switch_interval

if TYPE_CHECKING:
    from ostinato.bench.serving.http_client import Client

_WARM_UP = 4  # a server without batching takes a while for each


@dataclass(frozen=True, kw_only=True)
class Load:
    """Which requests are sent, how fast, and for how long.

    ``rate``: requests per second, on average; infinite: all at once. After ``max_seconds`` a run
    ends, and unanswered requests count as failures.
    """

    mix: str = "chat"
    num_requests: int = 64
    scale: float = 1.0
    rate: float = 4.0
    seed: int = 0
    max_seconds: float = 300.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_positive_number("max-seconds", self.max_seconds)
        if not math.isinf(self.rate) or self.rate < 0:
            check_positive_number("rate", self.rate)
        self.chosen_mix()

    def chosen_mix(self) -> Mix:
        (mix,) = choose_mixes([self.mix], num_requests=self.num_requests, scale=self.scale)
        return mix

    def draw(self, vocab_size: int) -> list[TimedRequest]:
        at_once = math.isinf(self.rate)
        return draw_requests(
            self.chosen_mix(),
            vocab_size=vocab_size,
            seed=self.seed,
            arrival="all" if at_once else "poisson",
            rate=None if at_once else self.rate,
        )


def run_in_process(
    config: EngineConfig, load: Load, *, repeats: int = 3, show_progress: bool = False
) -> dict[str, Any]:
    """Measure ``AsyncLLM`` against the engine without a loop, and ``LLM.generate``."""
    check_positive_int("repeats", repeats)
    if config.max_model_len is not None:
        check_room([load.chosen_mix()], config.max_model_len)  # before the model is loaded
    with AsyncLLM.from_config(config) as llm:
        if llm.task != "generate":
            raise ConfigError(f"this model was loaded to {llm.task}, and has no streams")
        check_room([load.chosen_mix()], llm.max_model_len)
        vocab_size = asyncio.run(llm.call(lambda llm: llm.engine.model.vocab_size))
        with ProgressBar(total=3 * (repeats + 1), disable=not show_progress) as bar:
            measuring = in_process.measure(
                llm,
                load.draw(vocab_size),
                limits=load.limits,
                max_seconds=load.max_seconds,
                repeats=repeats,
                bar=bar,
            )
            with short_switch_interval():
                rows = asyncio.run(measuring)
        engine = {"max_num_seqs": llm.max_num_seqs, "max_model_len": llm.max_model_len}
        has_text = llm.tokenizer is not None
    speeds = {row["server"]: row["output_tokens_per_s"] for row in rows}
    streams = speeds[in_process.STREAMS]
    return {
        **_described(config, load),
        **engine,
        "has_text": has_text,
        "repeats": repeats,
        "of_engine": streams / speeds[in_process.LOOP],
        "of_offline": streams / speeds[in_process.OFFLINE],
        "rows": rows,
    }


def run_over_http(
    config: EngineConfig,
    load: Load,
    *,
    baselines: Sequence[str] = (),
    show_progress: bool = False,
) -> dict[str, Any]:
    """Start a server, measure it, end it; then the same for each baseline."""
    from ostinato.bench.serving import servers  # needs httpx

    unknown = sorted(set(baselines) - set(servers.BASELINES))
    if unknown:
        raise ConfigError(f"unknown baselines {unknown}; choose from {list(servers.BASELINES)}")
    if config.max_model_len is not None:
        check_room([load.chosen_mix()], config.max_model_len)

    def measure(server: servers.Server, model: str | None) -> dict[str, Any]:
        row = asyncio.run(
            _measure(server.url, None, server.extra, model, load, server.name, show_progress)
        )
        del row["model"]  # a directory of this machine; the result names the model once
        return row

    def ours(log: Path) -> servers.Server:
        return servers.Ostinato(log, config, max_waiting=load.num_requests)

    with servers.running(ours) as server:
        rows = [measure(server, None)]
    failed: dict[str, str] = {}
    for name in dict.fromkeys(baselines):
        try:
            with servers.running(partial(servers.build_baseline, name, config)) as server:
                rows.append(measure(server, str(servers.checkpoint(config))))
        except MeasurementError as error:
            failed[name] = reason(error)
    return {**_described(config, load), "rows": rows, "failed": failed}


def run_against(
    url: str,
    load: Load,
    *,
    api_key: str | None = None,
    allow_remote: bool = False,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure a server that runs already, and knows ``ignore_eos``: Ostinato's, or vLLM's."""
    from ostinato.bench.serving.http_client import check_url
    from ostinato.bench.serving.servers import Ostinato

    url = check_url(url, allow_remote=allow_remote)
    row = asyncio.run(_measure(url, api_key, Ostinato.extra, None, load, url, show_progress))
    return {**_described(None, load), "model": row.pop("model"), "rows": [row], "failed": {}}


async def _measure(
    url: str,
    api_key: str | None,
    extra: dict[str, Any],
    model: str | None,
    load: Load,
    name: str,
    show_progress: bool,
) -> dict[str, Any]:
    from ostinato.bench.serving.http_client import FAILURES, Client

    requests = load.draw(VOCABULARY)
    async with Client(url, api_key=api_key, extra=extra) as client:
        if not await client.is_ready():
            raise MeasurementError(f"no server answers at {url}/health")
        chosen = await client.choose_model(model)
        await _warm_up(client, requests, load, FAILURES)
        with ProgressBar(total=len(requests), desc=name, disable=not show_progress) as bar:
            answers = await run_open_loop(
                requests, client.send, max_seconds=load.max_seconds, failures=FAILURES, bar=bar
            )
    row = {"server": name, **summarize(answers, load.limits), "model": chosen}
    if not row["whole"]:
        raise MeasurementError(f"{name} answered no request: {row['failures']}")
    return row


async def _warm_up(
    client: Client,
    requests: Sequence[TimedRequest],
    load: Load,
    failures: tuple[type[Exception], ...],
) -> None:
    answers = await run_open_loop(
        warm_up(requests)[:_WARM_UP], client.send, max_seconds=load.max_seconds, failures=failures
    )
    wrong = [each.failure for each in answers if each.failure is not None]
    if len(wrong) == len(answers):
        raise MeasurementError(f"the first requests failed: {wrong[0]}")


def _described(config: EngineConfig | None, load: Load) -> dict[str, Any]:
    return {
        "command": "ostinato bench serve",
        "machine": machine(),
        "model": None if config is None else str(model_name(config)),
        "dtype": None if config is None else _dtype(config),
        "random_weights": config is not None and config.random_weights,
        "mix": load.mix,
        "scale": load.scale,
        "rate": None if math.isinf(load.rate) else load.rate,
        "seed": load.seed,
        "max_seconds": load.max_seconds,
        "ttft_limit_ms": load.limits.ttft_ms,
        "tpot_limit_ms": load.limits.tpot_ms,
    }


def _dtype(config: EngineConfig) -> str:
    return str(config.torch_dtype(config.torch_device())).removeprefix("torch.")
