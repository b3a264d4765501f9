"""Overloads a server for minutes while clients leave: is anything lost, wrong, stuck or leaked?

Starts ``ostinato serve`` in a process of its own, measures how many requests a second it answers
when clients always wait, then sends ``--load`` times as many, at random times: streams and whole
answers, of which a share leaves at a random moment. How much the server can answer changes with
whatever else the machine does, so the rate follows what was answered of late. Requests beyond the
queue get 429, as they should. Every answer is compared, token by token, with the one that ``LLM``
gives offline; what a client that left has read must be a prefix of it.

At the end nothing may be in flight, no KV block may be held, no more files and threads may be open
than before, and the server's memory must not have grown: the mean of the last quarter is compared
with that of the second. Uses float32, because half precision rounds differently in batches of
another size.

    PYTHONPATH=src python benchmarks/serve_soak.py --minutes 20 --output result.json

Exits with 1 if anything of this does not hold, or if the clients did not send what they should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.bench.timing.measure import machine

VOCAB = 256  # ids that every model has
NUM_DISTINCT = 200
MAX_NEW_TOKENS = 48
MAX_NUM_SEQS = 16
MAX_WAITING = 48
KV_CACHE_TOKENS = 1024  # fewer than MAX_NUM_SEQS requests may need, so that some are preempted
CAPACITY_S = 20.0
SAMPLE_S = 2.0
RATE_S = 10.0  # between changes of the rate
SENT = 0.97  # of --load, at least
GROWTH = 0.03  # of the server's memory, between two quarters of the run
DRAIN_S = 120.0
SETTLE_S = 2.0


@dataclass(frozen=True)
class Asked:
    """A request, and what it must be answered with."""

    prompt: list[int]
    max_tokens: int
    tokens: list[str]

    @property
    def body(self) -> dict[str, Any]:
        # Without a tokenizer, log-probabilities show which tokens there are.
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logprobs": 0,
        }


@dataclass
class Seen:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    @property
    def num_taken(self) -> int:
        """Requests that the server took, until they were answered or their clients left."""
        return self.counts["200"] + self.counts["left"]

    @property
    def unexpected(self) -> dict[str, int]:
        known = {"200", "429", "left", "tokens", "stuck"}
        return {name: count for name, count in self.counts.items() if name not in known}

    def compare(self, asked: Asked, tokens: list[str], *, whole: bool) -> None:
        wanted = asked.tokens if whole else asked.tokens[: len(tokens)]
        if tokens != wanted:
            self.differences.append(f"{asked.prompt[:8]}...: {tokens} instead of {wanted}")


def draw(options: argparse.Namespace) -> list[Asked]:
    """Distinct requests, some with shared prefixes, answered offline."""
    chance = random.Random(options.seed)
    shared = [[chance.randrange(VOCAB) for _ in range(64)] for _ in range(4)]
    prompts = []
    for _ in range(NUM_DISTINCT):
        own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 64))]
        prompts.append([*chance.choice(shared), *own] if chance.random() < 0.5 else own)
    params = [
        SamplingParams(temperature=0, max_tokens=chance.randint(1, MAX_NEW_TOKENS), logprobs=0)
        for _ in prompts
    ]
    with LLM(
        options.model,
        random_weights=True,
        device=options.device,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=MAX_NUM_SEQS,
        graphs=GraphConfig(capture_sizes=[1, 4, 16]),
        show_progress=False,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        Asked(prompt, each.max_tokens or 0, [f"token_id:{t}" for t in output.outputs[0].token_ids])
        for prompt, each, output in zip(prompts, params, outputs, strict=True)
    ]


def start_server(options: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    command = [
        *("nice", "-n", "5"),  # so that the clients send in time on a busy machine
        *(sys.executable, "-m", "ostinato", "serve", "--model", options.model, "--random-weights"),
        *("--device", options.device, "--dtype", "float32", "--max-model-len", "256"),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--sizes", "1,4,16", "--port", "0", "--quiet"),
        *("--kv-cache-tokens", str(KV_CACHE_TOKENS)),
        *("--max-waiting", str(MAX_WAITING), "--request-timeout-s", "120"),
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            return process, found[1]
    raise SystemExit("the server did not start")


async def ask(
    client: httpx.AsyncClient, asked: Asked, seen: Seen, *, stream: bool, stay_s: float | None
) -> None:
    """One request; ``stay_s``: when its client leaves."""
    tokens: list[str] = []
    try:
        async with asyncio.timeout(stay_s):
            status = await _read(client, asked, tokens, stream=stream)
    except TimeoutError:
        seen.counts["left"] += 1
        seen.compare(asked, tokens, whole=False)
        return
    except httpx.HTTPError as error:
        seen.counts[type(error).__name__] += 1
        return
    seen.counts[str(status)] += 1
    if status == 200:
        seen.counts["tokens"] += len(tokens)
        seen.compare(asked, tokens, whole=True)


async def _read(client: httpx.AsyncClient, asked: Asked, tokens: list[str], *, stream: bool) -> int:
    body = {**asked.body, "stream": stream}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200 or not stream:
            await answer.aread()
            if answer.status_code == 200:
                tokens += answer.json()["choices"][0]["logprobs"]["tokens"]
            return answer.status_code
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                tokens += event["choices"][0]["logprobs"]["tokens"]
    return answer.status_code


async def capacity(client: httpx.AsyncClient, all_asked: list[Asked], seen: Seen) -> float:
    """Requests per second when as many clients as may run and wait do nothing else."""
    start, before = time.monotonic(), seen.counts["200"]
    chance = random.Random(0)

    async def go_on() -> None:
        while time.monotonic() < start + CAPACITY_S:
            await ask(client, chance.choice(all_asked), seen, stream=True, stay_s=None)

    await asyncio.gather(*(go_on() for _ in range(2 * MAX_NUM_SEQS)))
    return (seen.counts["200"] - before) / (time.monotonic() - start)


async def overload(
    client: httpx.AsyncClient, all_asked: list[Asked], seen: Seen, options: Any, rate: float
) -> int:
    """Send requests, at first ``rate`` per second; returns how many."""
    chance = random.Random(options.seed + 1)
    running: set[asyncio.Task[None]] = set()
    longest_stay_s = options.load * 2 * MAX_NUM_SEQS / rate  # what an answer took before the load
    end, next_at, num_sent = time.monotonic() + 60 * options.minutes, time.monotonic(), 0
    changed_at, num_taken = time.monotonic(), 0
    while time.monotonic() < end:
        if (passed := time.monotonic() - changed_at) > RATE_S:
            rate = options.load * max(1, seen.num_taken - num_taken) / passed
            changed_at, num_taken = time.monotonic(), seen.num_taken
        next_at += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        leaves = chance.random() < options.leaving
        work = ask(
            client,
            chance.choice(all_asked),
            seen,
            stream=chance.random() < 0.7,
            stay_s=chance.uniform(0.0, longest_stay_s) if leaves else None,
        )
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        num_sent += 1
    done, stuck = await asyncio.wait(running, timeout=DRAIN_S) if running else (set(), set())
    seen.counts["stuck"] += len(stuck)
    for task in done:
        task.result()
    return num_sent


async def watch(pid: int, seen: Seen) -> None:
    """Sample the server's resident memory."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        seen.rss.append(int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024)
        await asyncio.sleep(SAMPLE_S)


def held(pid: int) -> dict[str, int]:
    """Open files and threads of the server."""
    return {each: len(list(Path(f"/proc/{pid}/{each}").iterdir())) for each in ("fd", "task")}


async def soak(url: str, pid: int, all_asked: list[Asked], options: Any) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    before, seen = Seen(), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=DRAIN_S, limits=limits) as client:
        could = await capacity(client, all_asked, before)
    await asyncio.sleep(SETTLE_S)  # until the server has closed its connections
    held_before = held(pid)
    async with httpx.AsyncClient(base_url=url, timeout=DRAIN_S, limits=limits) as client:
        watching = asyncio.create_task(watch(pid, seen))
        sent = await overload(client, all_asked, seen, options, could * options.load)
        watching.cancel()
    await asyncio.sleep(SETTLE_S)
    held_after = held(pid)
    async with httpx.AsyncClient(base_url=url, timeout=DRAIN_S) as client:
        data = (await client.get("/dashboard/data")).json()
        healthy = (await client.get("/health")).status_code == 200
    quarter = max(1, len(seen.rss) // 4)
    early, late = mean(seen.rss[quarter : 2 * quarter]), mean(seen.rss[-quarter:])
    differences = before.differences + seen.differences
    return {
        "capacity_requests_per_s": round(could, 1),
        "taken_requests_per_s": round(seen.num_taken / (60 * options.minutes), 1),
        "sent_requests_per_s": round(sent / (60 * options.minutes), 1),
        "requests": sent,
        "seen": dict(seen.counts),
        "unexpected": {**before.unexpected, **seen.unexpected},
        "held_before": held_before,
        "held_after": held_after,
        "preemptions": data["stats"]["num_preemptions"],
        "prefix_hit_tokens": data["stats"]["prefix_hit_tokens"],
        "rss_mib": [round(each / 2**20, 1) for each in seen.rss[:: max(1, len(seen.rss) // 40)]],
        "rss_growth": round(late / early - 1, 4),
        "in_flight_at_the_end": len(data["in_flight"]),
        "kv_cache_usage_at_the_end": data["stats"]["kv_cache_usage"],
        "healthy_at_the_end": healthy,
        "differences": len(differences),
        "first_differences": differences[:10],
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What does not hold."""
    seen = result["seen"]
    found = [f"{count} times {each}" for each, count in sorted(result["unexpected"].items())]
    if seen.get("stuck"):
        found.append(f"{seen['stuck']} requests got no answer")
    if result["sent_requests_per_s"] < SENT * result["load"] * result["taken_requests_per_s"]:
        found.append(f"the clients did not reach {result['load']} times what the server can answer")
    if not (seen.get("200") and seen.get("429") and seen.get("left")):
        found.append("the server was not overloaded, or no client left")
    if result["differences"]:
        found.append(f"{result['differences']} answers differ from the offline ones")
    if result["in_flight_at_the_end"] or result["kv_cache_usage_at_the_end"]:
        found.append("requests or KV blocks are left over")
    for each, before in result["held_before"].items():
        if result["held_after"][each] > before:
            found.append(f"{each}: {before} before, {result['held_after'][each]} after")
    if result["rss_growth"] > GROWTH:
        found.append(f"memory grew by {result['rss_growth']:.1%}")
    if not result["healthy_at_the_end"] or result["exit_code"] != 0:
        found.append("the server was not well at the end")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a named shape, with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=1.2, help="of what it can answer")
    parser.add_argument("--leaving", type=float, default=0.2, help="share of clients that leave")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    all_asked = draw(options)
    process, url = start_server(options)
    try:
        result = asyncio.run(soak(url, process.pid, all_asked, options))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DRAIN_S)
    result = {
        "command": " ".join(["python", "benchmarks/serve_soak.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "model": options.model,
        "minutes": options.minutes,
        "load": options.load,
        **result,
        "exit_code": process.returncode,
    }
    result["faults"] = faults(result)
    print(json.dumps(result, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
