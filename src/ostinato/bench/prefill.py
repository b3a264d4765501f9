"""``ostinato bench prefill``: time to first token of one prompt, eagerly and through graphs.

All modes are open at once and measured in turns, on new tokens each time, so that neither machine
drift nor the prefix cache favours one of them. So their KV caches hold one prompt each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ostinato.bench.timing.measure import machine, model_name, synchronize
from ostinato.bench.timing.room import with_kv_cache_for, with_room
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.llm import LLM
from ostinato.sampling_params import SamplingParams

EAGER = "NONE"


def run(
    config: EngineConfig, *, lengths: Sequence[int], modes: Sequence[str], repeats: int = 10
) -> dict[str, Any]:
    """Median time to first token per prompt length and mode, always including eager."""
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"prompt lengths must be positive integers, got {list(lengths)}")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    longest = max(lengths) + 1  # the first token
    num_seqs, _ = config.batch_limits(config.torch_device())  # decides which sizes have graphs
    config = with_room(config, num_seqs=num_seqs, length=longest, why="the longest prompt and 1")
    config = with_kv_cache_for(config, num_seqs=1, length=longest)
    names = [EAGER, *(CUDAGraphMode.parse(mode).name for mode in modes)]
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                LLM.from_config(
                    replace(config, graphs=replace(config.graphs, mode=CUDAGraphMode[name]))
                )
            )
            for name in dict.fromkeys(names)
        }
        rows = [_measure(llms, length, repeats) for length in lengths]
        startup = [
            {
                "mode": name,
                "graphs": llm.engine.runner.capture_report.num_graphs,
                "capture_s": llm.engine.runner.capture_report.seconds,
                "bytes": llm.engine.runner.capture_bytes,
            }
            for name, llm in llms.items()
        ]
    return {
        "command": "ostinato bench prefill",
        "machine": machine(),
        "model": model_name(config),
        "repeats": repeats,
        "rows": rows,
        "startup": startup,
    }


def _measure(llms: dict[str, LLM], length: int, repeats: int) -> dict[str, Any]:
    source = random.Random(length)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    samples: dict[str, list[float]] = {name: [] for name in llms}
    tokens: dict[str, list[int]] = {name: [] for name in llms}
    vocab_size = next(iter(llms.values())).engine.model.vocab_size
    for _ in range(repeats + 1):
        prompt = [source.randrange(vocab_size) for _ in range(length)]
        for name, llm in llms.items():
            synchronize()
            start = time.perf_counter()
            (result,) = llm.generate([prompt], params)
            samples[name].append(time.perf_counter() - start)
            tokens[name] += result.outputs[0].token_ids
    times = {name: statistics.median(values[1:]) for name, values in samples.items()}  # first: warm
    return {
        "prompt_len": length,
        "ttft_ms": {name: seconds * 1e3 for name, seconds in times.items()},
        "fraction_of_eager": {name: seconds / times[EAGER] for name, seconds in times.items()},
        "same_tokens_as_eager": {name: tokens[name] == tokens[EAGER] for name in llms},
        "steps": {name: _how_it_ran(llm) for name, llm in llms.items()},
    }


def _how_it_ran(llm: LLM) -> dict[str, int]:
    """Steps so far, by graph mode or by the reason for running eagerly."""
    stats = llm.engine.runner.stats
    return {"replayed": stats.hits, **{why.name: count for why, count in stats.eager.items()}}
