"""``ostinato bench throughput``: mixes of requests through one engine, and when tokens arrive.

A loop adds requests when they are due, steps the engine, and notes the time at which each token of
each request arrives. Outputs have fixed lengths. Each run starts with an empty prefix cache, so
that repeats do the same work; the median run is reported, as a whole.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.bench.mixes import (
    TimedRequest,
    check_arrival,
    check_room,
    choose_mixes,
    draw_requests,
)
from ostinato.bench.timing.measure import about, synchronize
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.llm import LLM
from ostinato.progress import ProgressBar
from ostinato.runner.sampling.sampler_graphs import SamplerStats
from ostinato.sampling_params import SamplingParams
from ostinato.serving.percentiles import percentiles

_WARM_UP_REQUESTS = 16
_WARM_UP_TOKENS = 8


@dataclass(kw_only=True)
class Served:
    """A request that was served: when it and its tokens arrived, in seconds after the start."""

    arrival_s: float
    prompt_len: int
    token_ids: list[int]
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From the arrival to the first token, so waiting in the queue counts."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


def run(
    config: EngineConfig,
    *,
    mixes: Sequence[str],
    num_requests: int | None = None,
    scale: float = 1.0,
    arrival: str = "all",
    rate: float | None = None,
    seed: int = 0,
    repeats: int = 3,
    show_progress: bool = False,
    observe: Callable[[LLM], None] | None = None,
) -> dict[str, Any]:
    """Measure each mix with one engine. Progress goes to stderr.

    ``observe``: called with the engine after the last run.
    """
    chosen = choose_mixes(mixes, num_requests=num_requests, scale=scale)
    check_arrival(arrival, rate)
    check_positive_int("repeats", repeats)
    if config.max_model_len is not None:
        check_room(chosen, config.max_model_len)  # before the model is loaded
    rows = []
    with LLM.from_config(config) as llm:
        engine = llm.engine
        check_room(chosen, engine.max_model_len)
        with ProgressBar(total=len(chosen) * (repeats + 1), disable=not show_progress) as bar:
            for mix in chosen:
                bar.set_description(mix.name)
                requests = draw_requests(
                    mix,
                    vocab_size=engine.model.vocab_size,
                    seed=seed,
                    arrival=arrival,
                    rate=rate,
                )
                runs = []
                for given in (warm_up(requests), *[requests] * repeats):
                    runs.append(_measure(engine, given))
                    bar.update()
                rows.append({"mix": mix.name, **median_run(runs[1:])})
        if observe is not None:
            observe(llm)
        return {
            **about("throughput", llm),
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "max_num_batched_tokens": engine.scheduler.max_num_batched_tokens,
            "max_model_len": engine.max_model_len,
            "arrival": arrival,
            "rate": rate,
            "seed": seed,
            "scale": scale,
            "repeats": repeats,
            "rows": rows,
        }


# --- one run --------------------------------------------------------------------------------------


def serve(engine: Engine, requests: Sequence[TimedRequest]) -> list[Served]:
    """Run requests, given in order of arrival, as they become due; return them in that order."""
    to_come = deque(requests)
    running: list[tuple[list[int], list[float]]] = []  # tokens so far, and when they arrived
    all_served, completions = [], []
    synchronize()
    start = time.perf_counter()
    while to_come or engine.has_unfinished:
        now = time.perf_counter() - start
        while to_come and to_come[0].arrival_s <= now:
            request = to_come.popleft()
            params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
            (completion,) = engine.prepare_request(request.prompt_token_ids, params)
            engine.add(completion)
            # The engine appends to this list. Reading its length leaves the engine in the state
            # that it has without streaming; watching every token would not.
            tokens = completion.output.token_ids
            served = Served(
                arrival_s=request.arrival_s,
                prompt_len=len(request.prompt_token_ids),
                token_ids=tokens,
            )
            running.append((tokens, served.token_times_s))
            all_served.append(served)
            completions.append(completion)
        if not engine.has_unfinished:
            time.sleep(to_come[0].arrival_s - now)
            continue
        ended = engine.step()
        now = time.perf_counter() - start
        for tokens, times in running:
            if len(tokens) > len(times):
                times += [now] * (len(tokens) - len(times))
        if ended:
            done = {id(completion.output.token_ids) for completion in ended}
            running = [each for each in running if id(each[0]) not in done]
    for served, completion in zip(all_served, completions, strict=True):
        served.num_preemptions = completion.request.num_preemptions
        served.num_cached_tokens = completion.request.num_cached_tokens
    return all_served


def warm_up(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """The first requests, all at once, with short outputs."""
    return [
        replace(each, arrival_s=0.0, output_len=min(each.output_len, _WARM_UP_TOKENS))
        for each in requests[:_WARM_UP_REQUESTS]
    ]


def _measure(engine: Engine, requests: Sequence[TimedRequest]) -> dict[str, Any]:
    def measure() -> dict[str, Any]:
        engine.scheduler.allocator.reset_prefix_cache()
        runner = engine.runner
        runner.stats.reset()
        runner.samplers.stats.reset()
        served = serve(engine, requests)
        return {**summarize(served), **_how_it_ran(runner.stats, runner.samplers.stats)}

    return engine.sharing.call(measure)


# --- results --------------------------------------------------------------------------------------


def summarize(served: Sequence[Served]) -> dict[str, Any]:
    """Throughput and latency of one run. Requests with a single token have no time per token."""
    seconds = max(each.token_times_s[-1] for each in served)
    prompt_tokens = sum(each.prompt_len for each in served)
    output_tokens = sum(len(each.token_ids) for each in served)
    gaps = [each.gaps_s for each in served if len(each.token_times_s) > 1]
    return {
        "num_requests": len(served),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "duration_s": seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "tokens_per_s": (prompt_tokens + output_tokens) / seconds,
        "requests_per_s": len(served) / seconds,
        "ttft_ms": percentiles([each.ttft_s * 1e3 for each in served]),
        "tpot_ms": percentiles([sum(each) / len(each) * 1e3 for each in gaps]),
        "longest_gap_ms": max((max(each) * 1e3 for each in gaps), default=None),
        "preemptions": sum(each.num_preemptions for each in served),
        "prefix_hit_tokens": sum(each.num_cached_tokens for each in served),
    }


def _how_it_ran(stats: DispatchStats, sampler: SamplerStats) -> dict[str, Any]:
    """Steps by graph mode, eager ones by reason, what was padding, and how the sampler ran."""
    # Only keys of FULL graphs have a number of requests.
    full = sum(count for key, count in stats.replays.items() if key.num_reqs is not None)
    return {
        "steps": {"FULL": full, "PIECEWISE": stats.hits - full, "eager": stats.misses},
        "eager_reasons": {reason.name: count for reason, count in stats.eager.items()},
        "padding_tokens": stats.padding_tokens,
        "padding_fraction": stats.padding_fraction,
        "full_sampler": {
            "replays": sampler.replays,
            "captures": sampler.captures,
            "capture_seconds": sampler.capture_seconds,
            "launches": {reason.name: count for reason, count in sampler.launches.items()},
            "masked_steps": sampler.masked_steps,
        },
    }


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median duration (of an even number, the slower), and all durations."""
    durations = [each["duration_s"] for each in runs]
    median = sorted(runs, key=lambda each: float(each["duration_s"]))[len(runs) // 2]
    return {**median, "durations_s": durations}
