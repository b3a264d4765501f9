"""Which batches an engine runs: from a trace through the scheduler, or a running engine's counts.

The trace runs through the engine's own scheduler, without a model: every step takes as long as a
replay of its exact size, and samples the tokens that the trace says.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.errors import ConfigError
from ostinato.planner.graphs.step_costs import StepCosts, curve
from ostinato.planner.graphs.trace import TracedRequest
from ostinato.quoting import shown
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.request import Request
from ostinato.scheduling.scheduler import Scheduler

_BLOCK_SIZE = 16
_MOST_STEPS = 2**53  # floats count no further

# How many steps had each number of tokens, of decode batches and of mixed ones.
StepShapes = dict[str, Counter[int]]


def shapes_of_trace(requests: Sequence[TracedRequest], costs: StepCosts) -> StepShapes:
    """The steps that run ``requests``, with room for all of them in the KV cache."""
    lengths = sorted(each.prompt_tokens + each.output_tokens for each in requests)
    longest, together = lengths[-1], lengths[-costs.max_num_seqs :]
    num_blocks = sum(-(-length // _BLOCK_SIZE) for length in together) + 1
    scheduler = Scheduler(
        BlockAllocator(num_blocks, _BLOCK_SIZE, enable_prefix_caching=False),
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_num_batched_tokens,
        max_model_len=longest,
    )
    seconds = {"decode": curve(costs.decode.replay), "mixed": curve(costs.mixed.replay)}
    shapes: StepShapes = {"decode": Counter(), "mixed": Counter()}
    waiting, now = deque(enumerate(requests)), 0.0
    while waiting or scheduler.has_unfinished:
        while waiting and waiting[0][1].arrival_s <= now:
            scheduler.add(_request(*waiting.popleft()))
        plan = scheduler.schedule()
        if not plan.num_tokens:
            now = waiting[0][1].arrival_s
            continue
        kind = "decode" if plan.is_decode else "mixed"
        shapes[kind][plan.num_tokens] += 1
        now += seconds[kind](plan.num_tokens)
        scheduler.prepare_commit(plan)
        scheduler.commit(plan, np.zeros(plan.num_samples, dtype=np.int64))
    return shapes


def _request(number: int, traced: TracedRequest) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=[0] * traced.prompt_tokens,
        params=SamplingParams(max_tokens=traced.output_tokens),
        max_total_tokens=traced.prompt_tokens + traced.output_tokens,
    )


def read_shapes(path: Path) -> StepShapes:
    """Read ``LLM.step_shapes()`` from a JSON file."""
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        return {
            kind: Counter({int(size): _checked(count) for size, count in fields[kind].items()})
            for kind in ("decode", "mixed")
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read step shapes from {str(path)!r}: {error!r}; write LLM.step_shapes() there "
            "as JSON"
        ) from error


def _checked(count: Any) -> int:
    if type(count) is not int or not 0 <= count <= _MOST_STEPS:
        raise ValueError(f"a number of steps is from 0 to {_MOST_STEPS}, not {shown(count)}")
    return count
