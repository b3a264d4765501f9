"""The same arrivals through ``AsyncLLM``, in this process, beside the engine without a loop.

Needs no HTTP server. One engine runs everything, in turns: streams of an ``AsyncLLM`` as they
arrive; the same arrivals added to the engine by the thread that steps it; and all requests at once
through ``LLM.generate``, the offline throughput. What the first lacks of the others is what the
event loop, its streams and the hand-over between threads cost.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ostinato.bench import throughput
from ostinato.bench.mixes import TimedRequest
from ostinato.bench.serving.answer import Answer, Limits, summarize
from ostinato.bench.serving.open_loop import Clock, run_open_loop
from ostinato.bench.timing.measure import synchronize
from ostinato.errors import MeasurementError
from ostinato.llm import LLM
from ostinato.progress import ProgressBar
from ostinato.sampling_params import SamplingParams
from ostinato.serving.async_llm import AsyncLLM

STREAMS, LOOP, OFFLINE = "AsyncLLM", "engine", "LLM.generate"

_LATENCIES = ("ttft_ms", "tpot_ms", "longest_gap_ms", "good", "goodput_requests_per_s")

Subject = Callable[[Sequence[TimedRequest]], Awaitable[list[Answer]]]


async def measure(
    llm: AsyncLLM,
    requests: Sequence[TimedRequest],
    *,
    limits: Limits,
    max_seconds: float,
    repeats: int,
    bar: ProgressBar,
) -> list[dict[str, Any]]:
    """One row per subject: its median run by duration, and the durations of all."""

    async def streams(requests: Sequence[TimedRequest]) -> list[Answer]:
        async def send(request: TimedRequest, answer: Answer, clock: Clock) -> None:
            await _read_stream(llm, request, answer, clock)

        return await run_open_loop(requests, send, max_seconds=max_seconds)

    async def engine(requests: Sequence[TimedRequest]) -> list[Answer]:
        return await llm.call(lambda llm: _step_through(llm, requests))

    async def offline(requests: Sequence[TimedRequest]) -> list[Answer]:
        return await llm.call(lambda llm: _generate(llm, requests))

    subjects: dict[str, Subject] = {STREAMS: streams, LOOP: engine, OFFLINE: offline}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    for number in range(repeats + 1):
        for name, subject in subjects.items():
            given = requests if number else throughput.warm_up(requests)
            await llm.call(lambda llm: llm.engine.scheduler.allocator.reset_prefix_cache())
            summary = summarize(await subject(given), limits)
            if summary["failures"]:
                raise MeasurementError(
                    f"{name}: {summary['failures']}; a ratio of throughputs needs every answer: "
                    "give more --max-seconds, or fewer --num-requests"
                )
            if name == OFFLINE:  # nothing is known before all is done
                summary |= dict.fromkeys(_LATENCIES)
            if number:
                runs[name].append(summary)
            bar.update()
    return [{"server": name, **throughput.median_run(its_runs)} for name, its_runs in runs.items()]


async def _read_stream(llm: AsyncLLM, request: TimedRequest, answer: Answer, clock: Clock) -> None:
    answer.prompt_tokens = len(request.prompt_token_ids)
    async for delta in llm.stream(request.prompt_token_ids, _params(request)):
        answer.note(clock())
        answer.output_tokens += len(delta.token_ids)


def _step_through(llm: LLM, requests: Sequence[TimedRequest]) -> list[Answer]:
    """By the thread that steps the engine: nothing is handed over, and no text is read."""
    answers = []
    for served in throughput.serve(llm.engine, requests):
        answer = Answer(
            arrival_s=served.arrival_s,
            prompt_tokens=served.prompt_len,
            output_tokens=len(served.token_ids),
        )
        for time_s in served.token_times_s:
            answer.note(time_s)
        answers.append(answer)
    return answers


def _generate(llm: LLM, requests: Sequence[TimedRequest]) -> list[Answer]:
    """All at once. ``generate`` returns at the end, so that is when every token has come."""
    prompts = [each.prompt_token_ids for each in requests]
    params = [_params(each) for each in requests]
    synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    answers = []
    for output in outputs:
        answer = Answer(
            arrival_s=0.0,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=len(output.outputs[0].token_ids),
        )
        answer.note(seconds)
        answers.append(answer)
    return answers


def _params(request: TimedRequest) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
