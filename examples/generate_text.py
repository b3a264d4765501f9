"""The demo: a real language model, with graphs and eagerly, on the hardware of this machine.

python examples/generate_text.py        (or: make demo)
"""

import sys
import time

from rich.console import Console
from rich.table import Table

from ostinato import LLM, GraphConfig, SamplingParams

QUESTION = "What is an ostinato in music? Answer in two sentences."
PROMPTS = [
    "The capital of France is",
    "A CUDA graph is",
    "Once upon a time",
    "The three primary colours are",
]


def tokens_per_second(llm: LLM, num_tokens: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.generate(PROMPTS, params)  # warms up code, caches and the prefix cache for both
    start = time.perf_counter()
    results = llm.generate(PROMPTS, params)
    seconds = time.perf_counter() - start
    return len(PROMPTS) * num_tokens / seconds, [each.outputs[0].token_ids for each in results]


def main(answer_tokens: int = 48, measured_tokens: int = 24) -> None:
    limits = {"max_num_seqs": 8, "max_model_len": 512}
    console = Console()
    with LLM(**limits) as llm:
        console.print(f"[bold]{QUESTION}[/bold]")
        prompt = llm.render_chat([{"role": "user", "content": QUESTION}])
        greedy = SamplingParams(temperature=0, max_tokens=answer_tokens)
        for delta in llm.stream(prompt, greedy):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n\n")
        through_graphs, tokens = tokens_per_second(llm, measured_tokens)
        runner, device = llm.engine.runner, llm.engine.model.device
        stats, report = runner.stats, runner.capture_report
    with LLM(**limits, graphs=GraphConfig(mode="NONE")) as llm:
        eager, eager_tokens = tokens_per_second(llm, measured_tokens)

    table = Table(title=f"SmolLM2-135M-Instruct on {device.type}, {len(PROMPTS)} prompts at once")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "graphs captured": f"{report.num_graphs} in {report.seconds:.2f} s",
        "replays": f"{stats.hits}",
        "padding": f"{stats.padding_fraction:.1%} of rows",
        **{f"eager steps: {why.value}": f"{count}" for why, count in stats.eager.items()},
        "same tokens as eager": "yes" if tokens == eager_tokens else "NO",
        "through graphs": f"{through_graphs:.1f} tokens/s",
        "eager": f"{eager:.1f} tokens/s",
        "speed-up": f"{through_graphs / eager:.2f}x",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


if __name__ == "__main__":
    main()
