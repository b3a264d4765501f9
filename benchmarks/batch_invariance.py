"""Shows that ``batch_invariant`` holds to the bit, and what it costs.

Requests with every kind of sampler run alone, in one engine; these are the reference. Then they run
in batches of 7, 64 and 256, with and without prefix reuse, with prompts in chunks of 1, 33 and 512
tokens, in every graph mode. Logits are compared to the bit, and so are tokens and
log-probabilities. At last, decode steps and prompts are timed with the option off and on. The exit
status is 1 if anything differs.

    PYTHONPATH=src python benchmarks/batch_invariance.py --output result.json
    PYTHONPATH=src python benchmarks/batch_invariance.py --device cpu --shape tiny --requests 10

Other chunks than the reference's run in its mode, and other modes with its chunks; with
``--every-pair`` all modes run with all chunks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.outputs import RequestOutput
from ostinato.runner.step_result import SampledLogits

REFERENCE = ("FULL_AND_PIECEWISE", 512)
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_FULL")
CHUNKS = (1, 33)
BATCHES = (7, 64, 256)
NEW_TOKENS = 8
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 5},
)

Rows = list[torch.Tensor]  # of each request, the logits that its tokens were sampled from
Said = list[tuple[tuple[int, ...], str]]  # of each request, its tokens and log-probabilities


class Case:
    """The requests, the same for every engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        draw = random.Random(0)
        self.device, self.shape = options.device, options.shape
        self.longest = 96 if options.device == "cpu" else 640
        self.prompts = [
            [draw.randrange(500) for _ in range(draw.randint(1, self.longest))]
            for _ in range(options.requests)
        ]
        self.params = [
            SamplingParams(seed=i, max_tokens=NEW_TOKENS, ignore_eos=True, **SAMPLERS[i % 8])
            for i in range(options.requests)
        ]

    def engine(self, mode: str, chunk: int) -> LLM:
        on_cpu = self.device == "cpu"
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        return LLM(
            self.shape,
            random_weights=True,
            batch_invariant=True,
            device=self.device,
            max_num_seqs=16 if on_cpu else 256,
            max_num_batched_tokens=512 if on_cpu else 8192,
            max_model_len=1024,
            kv_cache_memory_bytes="32MiB" if on_cpu else "24GiB",
            long_prefill_token_threshold=chunk,
            graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else sizes),
            tune="off",
            show_progress=False,
        )

    def run(self, llm: LLM, batch: int) -> tuple[Rows, Said]:
        kept: dict[str, Rows] = defaultdict(list)

        def keep(sampled: SampledLogits) -> None:
            for name, row in zip(sampled.request_ids, sampled.logits.clone(), strict=True):
                kept[name].append(row)

        llm.engine.runner.on_logits = keep
        results: list[RequestOutput] = []
        for first in range(0, len(self.prompts), batch):
            part = slice(first, first + batch)
            results += llm.generate(self.prompts[part], self.params[part])
        llm.engine.runner.on_logits = None
        rows = [torch.stack(kept.pop(f"{result.request_id}.0")) for result in results]
        outputs = [result.outputs[0] for result in results]
        return rows, [(tuple(each.token_ids), repr(each.logprobs)) for each in outputs]


def compared(got: tuple[Rows, Said], want: tuple[Rows, Said]) -> dict[str, int]:
    """How many requests differ, in which respect."""
    rows, said = got
    wanted_rows, wanted = want
    bits = torch.int16 if rows[0].itemsize == 2 else torch.int32
    return {
        "requests": len(rows),
        "logits_differ": sum(
            not torch.equal(a.view(bits), b.view(bits))
            for a, b in zip(rows, wanted_rows, strict=True)
        ),
        "tokens_differ": sum(a[0] != b[0] for a, b in zip(said, wanted, strict=True)),
        "logprobs_differ": sum(a[1] != b[1] for a, b in zip(said, wanted, strict=True)),
    }


def proof(case: Case, engines: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """One result for each engine and size of batch, as soon as it is known."""
    reference: tuple[Rows, Said] | None = None
    for mode, chunk in engines:
        start = time.perf_counter()
        with case.engine(mode, chunk) as llm:
            ready = time.perf_counter() - start
            if reference is None:
                reference = case.run(llm, 1)
            for batch in BATCHES if chunk > 1 else BATCHES[1:]:  # that takes a step per token
                llm.reset_prefix_cache()
                for reuse in (False, True):
                    if reuse and batch != BATCHES[1]:
                        continue
                    result = compared(case.run(llm, batch), reference)
                    about = {"mode": mode, "chunk": chunk, "batch": batch, "prefix_reuse": reuse}
                    yield {**about, **result}
        seconds = time.perf_counter() - start
        print(f"  {mode}, chunks of {chunk}: ready in {ready:.1f} s, all in {seconds:.1f} s")


def timed(shape: str, batch_invariant: bool) -> dict[str, float]:
    """Milliseconds of a decode step by batch, and prompt tokens per second."""
    results: dict[str, float] = {}
    draw = random.Random(1)
    with LLM(
        shape,
        random_weights=True,
        batch_invariant=batch_invariant,
        device="cuda",
        max_model_len=9000,
        enable_prefix_caching=False,
        graphs=GraphConfig(capture_sizes=[1, 32, 256]),
        show_progress=False,
    ) as llm:

        def seconds(num_prompts: int, length: int, new_tokens: int) -> float:
            prompts = [[draw.randrange(500) for _ in range(length)] for _ in range(num_prompts)]
            params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - start

        def median(*case: int) -> float:
            seconds(*case)
            return statistics.median(seconds(*case) for _ in range(3))

        for batch in (1, 32, 256):
            steps = 96
            spent = median(batch, 128, steps + 1) - median(batch, 128, 1)
            results[f"decode_{batch}_ms"] = 1000 * spent / steps
        for count, length in ((16, 1024), (4, 2048), (1, 8192)):
            results[f"prompts_{count}x{length}"] = count * length / median(count, length, 1)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--modes", nargs="*", default=MODES, help="besides that of the reference")
    parser.add_argument("--chunks", nargs="*", type=int, default=CHUNKS, help="likewise")
    parser.add_argument("--every-pair", action="store_true", help="all modes with all chunks")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"shape": options.shape, "torch": torch.__version__, "proof": []}
    mode, chunk = REFERENCE
    engines = [REFERENCE, *((mode, each) for each in options.chunks)]
    chunks = (chunk, *options.chunks) if options.every_pair else (chunk,)
    engines += [(each, of) for each in options.modes for of in chunks]

    def save() -> None:
        if options.output is not None:
            options.output.write_text(json.dumps(report, indent=1))

    if options.device != "cpu" and not options.no_timing:
        report["device"] = torch.cuda.get_device_name()
        report["off"], report["on"] = (timed(options.shape, on) for on in (False, True))
        for name, off in report["off"].items():
            print(f"{name:20} {off:10.2f} {report['on'][name]:10.2f}", flush=True)
        save()
    for result in proof(Case(options), engines):
        report["proof"].append(result)
        print(*result.values(), flush=True)
        save()
    differ = sum(
        each[name]
        for each in report["proof"]
        for name in ("logits_differ", "tokens_differ", "logprobs_differ")
    )
    print("all equal to the bit" if differ == 0 else f"{differ} differences")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
