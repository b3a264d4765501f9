"""Traces of requests: when each arrives, and how many tokens it has. Read, and generated.

A trace is a file of JSON lines, one request each:

    {"arrival_s": 0.25, "prompt_tokens": 812, "output_tokens": 96}

The three named workloads are drawn from the distributions stated in ``WORKLOADS``.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError
from ostinato.quoting import said, shown

_MOST_TOKENS = 2**24  # of a prompt or an output; above it is a mistake that would run for hours


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """One request: its arrival in seconds, and the tokens of its prompt and its output."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Arrivals as a Poisson process of ``rate`` a second; 0: all at once.

    Numbers of tokens are log-normal: their median, and the factor of one standard deviation.
    """

    rate: float
    prompt: tuple[float, float]
    output: tuple[float, float]
    most_prompt: int
    most_output: int


WORKLOADS = {
    "chat": Workload(
        rate=12, prompt=(300, 2.5), output=(200, 2.0), most_prompt=4000, most_output=1000
    ),
    "code-completion": Workload(
        rate=40, prompt=(1200, 2.0), output=(24, 1.8), most_prompt=6000, most_output=128
    ),
    "batch-summarisation": Workload(
        rate=0, prompt=(2500, 1.6), output=(180, 1.4), most_prompt=7000, most_output=500
    ),
}


def generate_trace(name: str, num_requests: int, seed: int = 0) -> list[TracedRequest]:
    """Draw the requests of one of ``WORKLOADS``; the same for the same seed."""
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    load, source, now = WORKLOADS[name], random.Random(f"{name} {seed}"), 0.0
    requests = []
    for _ in range(num_requests):
        now += source.expovariate(load.rate) if load.rate else 0.0
        requests.append(
            TracedRequest(
                arrival_s=round(now, 4),
                prompt_tokens=_draw(source, load.prompt, load.most_prompt),
                output_tokens=_draw(source, load.output, load.most_output),
            )
        )
    return requests


def _draw(source: random.Random, shape: tuple[float, float], most: int) -> int:
    median, factor = shape
    drawn: float = median * factor ** source.gauss(0, 1)
    return max(1, min(most, round(drawn)))


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace; raises ``ConfigError`` with the line that is not a request."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a trace from {str(path)!r}: {error}") from error
    requests = [
        _request(line, f"line {number} of {str(path)!r}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise ConfigError(f"the trace {str(path)!r} has no requests")
    return sorted(requests, key=lambda each: each.arrival_s)


def _request(line: str, where: str) -> TracedRequest:
    try:
        fields: Any = json.loads(line)
        if not isinstance(fields, dict):
            raise TypeError(f"{shown(fields)} is not an object")
        request = TracedRequest(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not a request: {said(error)}; write "
            '{"arrival_s": 0.25, "prompt_tokens": 812, "output_tokens": 96}'
        ) from error
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(request, name)
        if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
            raise ConfigError(
                f"{where}: {name} must be a positive integer of at most {_MOST_TOKENS}, got "
                f"{shown(value)}"
            )
    arrival = request.arrival_s
    if type(arrival) not in (int, float) or not 0 <= arrival <= sys.float_info.max:
        raise ConfigError(
            f"{where}: arrival_s must be a finite number of at least 0, got {shown(arrival)}"
        )
    return request
