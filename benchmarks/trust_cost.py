"""What the features that make graphs trustworthy cost, each against a run without it.

    python benchmarks/trust_cost.py --model llama-3.2-1b --batch 8 --output trust.txt

Decode steps of one batch, through ``LLM.generate``. What is compared takes turns, and medians are
reported: samples of memory for run reports, and ``verify`` of sampled steps. Then what happens
once: capture with and without ``verify``, reading and checking the ledger, and making a report and
its page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.report.page import report_page
from ostinato.report.run_file import report_text

VERIFY = ("off", "sample:0.001", "sample:0.01")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a named shape, with random weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="decode steps of a run")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    lines = [f"{device_name()}, torch {torch.__version__}", f"{options}"]
    lines += steps(options)
    lines += once(options)
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def steps(options: argparse.Namespace) -> list[str]:
    """The time of a decode step with each feature; all engines live at once and take turns."""
    with ExitStack() as stack:
        engines = {verify: stack.enter_context(build(options, verify)) for verify in VERIFY}
        cases: dict[str, Callable[[], float]] = {
            "report sampling off": lambda: step_ms(engines["off"], options, samples=False),
            "report sampling on (default)": lambda: step_ms(engines["off"], options),
        }
        for verify in VERIFY[1:]:
            cases[f"verify={verify}"] = lambda llm=engines[verify]: step_ms(llm, options)
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.repeats + 1):
            for name, run in cases.items():
                found[name].append(run())
    medians = {name: statistics.median(runs[1:]) for name, runs in found.items()}
    spreads = {name: max(runs[1:]) - min(runs[1:]) for name, runs in found.items()}
    first = next(iter(medians.values()))
    return [
        f"{name:32} {median:8.4f} ms a step, {100 * (median / first - 1):+6.2f}%, "
        f"spread {spreads[name]:.4f} ms"
        for name, median in medians.items()
    ]


def step_ms(llm: LLM, options: argparse.Namespace, *, samples: bool = True) -> float:
    """Milliseconds per decode step of one call."""
    memory = llm.engine.memory
    period = memory.period
    if not samples:
        memory.period = 2**62
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=0)
    prompts = [[1 + number, 2, 3] for number in range(options.batch)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    memory.period = period
    return seconds / options.tokens * 1e3


def once(options: argparse.Namespace) -> list[str]:
    """What happens once per start, check or report."""
    lines = []
    for verify in ("off", "capture"):
        llm, seconds = timed(lambda verify=verify: build(options, verify))
        report = llm.engine.runner.capture_report
        lines.append(
            f"start with verify={verify}: {seconds:.2f} s, of which {report.seconds:.2f} s capture "
            f"{report.num_graphs} graphs; {llm.verification.num_compared} comparisons"
        )
        if verify == "capture":
            llm.close()
            continue
        with llm:
            step_ms(llm, options)
            ledger = llm.ledger()
            takes = [timed(llm.engine.memory.take)[1] for _ in range(64)]
            lines += [
                f"ledger.graphs(): {timed(ledger.graphs)[1] * 1e3:.1f} ms",
                f"ledger.check(): {timed(ledger.check)[1] * 1e3:.2f} ms",
                f"a sample of memory: {statistics.median(takes) * 1e6:.1f} us",
            ]
            made, seconds = timed(llm.report)
            text, page = report_text(made), report_page(made)
            lines.append(
                f"LLM.report(): {seconds * 1e3:.0f} ms, run.json {len(text):,} bytes, "
                f"page {len(page):,} bytes"
            )
    return lines


def build(options: argparse.Namespace, verify: str) -> LLM:
    return LLM(
        options.model,
        random_weights=True,
        device=options.device,
        max_num_seqs=max(16, options.batch),
        max_model_len=options.tokens + 64,
        kv_cache_memory_bytes="1G" if options.device != "cpu" else "16M",
        graphs=GraphConfig(capture_sizes=[1, 2, 4, 8, 16]),
        verify=verify,
        show_progress=False,
    )


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
