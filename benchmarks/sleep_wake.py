"""What sleep and wake cost, and what they give back.

    python benchmarks/sleep_wake.py --model llama-3.1-8b

Times of each level, twice, because the first sleep allocates pinned host memory; memory of the
device by mem_get_info; and, in engines with and without sleep mode, the start and a decode step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ostinato import LLM, GraphConfig, SamplingParams

PROMPTS = [[(7 * row + 3 * column) % 97 + 3 for column in range(32)] for row in range(32)]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a named shape, with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache", default="32G", help="bytes of KV cache")
    options = parser.parse_args()
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for _ in range(2):
        for enabled in (False, True):
            start = time.perf_counter()
            with build(options, enabled) as llm:
                built = time.perf_counter() - start
                first = tokens_of(llm)
                steps = [timed(lambda: tokens_of(llm)) / 64 for _ in range(5)]
                step = statistics.median(steps)
                name = f"enable_sleep_mode={enabled}"
                print(f"{name:24} start {built:6.2f} s, 32 requests {step * 1e3:.3f} ms per step")
                if enabled:
                    rounds(llm, first)


def build(options: argparse.Namespace, enabled: bool) -> LLM:
    return LLM(
        options.model,
        random_weights=True,
        device=options.device,
        enable_sleep_mode=enabled,
        max_model_len=2048,
        max_num_seqs=512,
        kv_cache_memory_bytes=options.kv_cache,
        show_progress=False,
        graphs=GraphConfig(capture_sizes=[1, 8, 32, 256]),
    )


def rounds(llm: LLM, first: list[Any]) -> None:
    for level in (1, 1, 2, 2):
        before = used_bytes()
        asleep = timed(lambda: llm.sleep(level))  # noqa: B023
        freed = before - used_bytes()
        awake = timed(llm.wake)
        print(
            f"  level {level}: sleep {asleep * 1e3:7.1f} ms, wake {awake * 1e3:7.1f} ms, "
            f"{freed / 2**30:.2f} GiB freed of {before / 2**30:.2f}"
        )
        if level == 1:
            assert tokens_of(llm) == first


def tokens_of(llm: LLM) -> list[Any]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def timed(run: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
