"""Mixes of requests for ``ostinato bench throughput`` and ``serve``, and when each request arrives.

Everything is drawn from a seed. A mix does not depend on the others that are measured with it, nor
do its prompts and lengths depend on how they arrive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int

ARRIVALS = ("all", "poisson")
_MOST_SCALE = 1_000_000  # lengths beyond any model's


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Lengths are drawn uniformly, ends included. Groups of ``group_size`` share a prefix.

    ``prompt_lens`` excludes the shared prefix.
    """

    name: str
    num_requests: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    prefix_len: int = 0
    group_size: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be drawn, prompt and output."""
        return self.prefix_len + self.prompt_lens[1] + self.output_lens[1]

    def scaled(self, scale: float) -> Mix:
        """Multiply all lengths; none becomes less than one token."""

        def times(low: int, high: int) -> tuple[int, int]:
            return max(1, round(low * scale)), max(1, round(high * scale))

        return replace(
            self,
            prompt_lens=times(*self.prompt_lens),
            output_lens=times(*self.output_lens),
            prefix_len=round(self.prefix_len * scale),
        )


MIXES = {
    mix.name: mix
    for mix in (
        Mix(name="chat", num_requests=400, prompt_lens=(32, 1024), output_lens=(32, 384)),
        Mix(
            name="long-in-short-out",
            num_requests=100,
            prompt_lens=(2048, 8192),
            output_lens=(16, 64),
        ),
        Mix(
            name="short-in-long-out",
            num_requests=256,
            prompt_lens=(16, 128),
            output_lens=(256, 1024),
        ),
        Mix(
            name="shared-prefix",
            num_requests=256,
            prompt_lens=(32, 256),
            output_lens=(32, 128),
            prefix_len=1024,
            group_size=16,
        ),
        Mix(name="prompts", num_requests=32, prompt_lens=(2048, 2048), output_lens=(1, 1)),
    )
}


@dataclass(frozen=True, kw_only=True)
class TimedRequest:
    """A prompt, the number of tokens to generate, and when it arrives after the start."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float


def choose_mixes(
    names: Sequence[str], *, num_requests: int | None = None, scale: float = 1.0
) -> list[Mix]:
    """The mixes with these names. ``num_requests`` None: each mix's own number."""
    if not names:
        raise ConfigError(f"no mix to measure; choose from {', '.join(MIXES)}")
    unknown = [name for name in names if name not in MIXES]
    if unknown:
        raise ConfigError(f"unknown mixes {unknown}; choose from {', '.join(MIXES)}")
    if num_requests is not None:
        check_positive_int("num_requests", num_requests)
    check_positive_number("scale", scale)
    if scale > _MOST_SCALE:
        raise ConfigError(f"scale must be at most {_MOST_SCALE:,}, got {scale}")
    mixes = [MIXES[name].scaled(scale) for name in dict.fromkeys(names)]
    return [replace(mix, num_requests=num_requests or mix.num_requests) for mix in mixes]


def draw_requests(
    mix: Mix, *, vocab_size: int, seed: int, arrival: str = "all", rate: float | None = None
) -> list[TimedRequest]:
    """The requests of a mix, in order of arrival. ``rate``: requests per second, on average."""
    source = random.Random(f"{mix.name} {seed}")
    vocabulary = range(vocab_size)
    num_groups = -(-mix.num_requests // mix.group_size)
    prefixes = [source.choices(vocabulary, k=mix.prefix_len) for _ in range(num_groups)]
    groups = [number // mix.group_size for number in range(mix.num_requests)]
    source.shuffle(groups)  # requests that share a prefix are seldom next to each other
    arrivals = arrival_times(mix.num_requests, seed=seed, arrival=arrival, rate=rate)
    return [
        TimedRequest(
            prompt_token_ids=prefixes[group]
            + source.choices(vocabulary, k=source.randint(*mix.prompt_lens)),
            output_len=source.randint(*mix.output_lens),
            arrival_s=arrival_s,
        )
        for group, arrival_s in zip(groups, arrivals, strict=True)
    ]


def check_room(mixes: Sequence[Mix], max_model_len: int) -> None:
    """Raise if a mix can draw a sequence that the engine has no room for."""
    longest = max(mixes, key=lambda mix: mix.longest)
    if longest.longest > max_model_len:
        raise ConfigError(
            f"the mix {longest.name!r} has sequences of up to {longest.longest} tokens, but the "
            f"engine takes at most {max_model_len} (max_model_len); raise it, leave the mix out or "
            "give a --scale below 1"
        )


def arrival_times(count: int, *, seed: int, arrival: str, rate: float | None) -> list[float]:
    """Seconds after the start, which is the first arrival."""
    check_arrival(arrival, rate)
    if rate is None:
        return [0.0] * count
    source, times = random.Random(f"arrivals {seed}"), [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times


def check_arrival(arrival: str, rate: float | None) -> None:
    if arrival not in ARRIVALS:
        raise ConfigError(f"unknown arrival {arrival!r}; choose from {', '.join(ARRIVALS)}")
    if rate is not None:
        check_positive_number("rate", rate)
    if arrival == "poisson" and rate is None:
        raise ConfigError("arrival 'poisson' needs a rate; give --rate, in requests per second")
    if arrival == "all" and rate is not None:
        raise ConfigError(
            f"rate {rate:g} has no effect on arrival 'all'; give --arrival poisson or omit --rate"
        )


def check_positive_number(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
