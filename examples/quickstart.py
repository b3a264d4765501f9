"""The demo: a small transformer with batches of any size, eager vs. graphs.

python examples/quickstart.py        (or: make demo)
"""

import random
import time

import torch
from rich.console import Console
from rich.table import Table

from ostinato import graphed
from ostinato.bench.models import Encoder


def seconds_of(function, batches: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for batch in batches:
        function(batch)
    if batches[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(num_batches: int = 300, repeats: int = 5) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    largest = 64 if device.type == "cuda" else 8
    torch.manual_seed(0)
    model = Encoder(layers=12, width=64, heads=4).to(device).eval().requires_grad_(False)

    fast = graphed(model, sizes=[1, 2, 4, *range(6, largest + 1, 2)], show_progress=True)

    sizes = random.Random(0)
    batches = [
        torch.randn(sizes.randint(1, largest), 4, 64, device=device) for _ in range(num_batches)
    ]
    batches.append(torch.randn(largest + 5, 4, 64, device=device))  # larger than every graph
    fast.capture(batches[0])
    worst = max((fast(batch) - model(batch)).abs().max().item() for batch in batches)

    # Interleaved, so that other load on the machine affects both equally.
    times = [(seconds_of(model, batches), seconds_of(fast, batches)) for _ in range(repeats)]
    eager, graphs = (min(column) for column in zip(*times, strict=True))

    stats = fast.stats()
    table = Table(title=f"{len(batches)} batches of 1 to {largest} on {device.type}")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "graphs captured": f"{stats.graphs} in {stats.capture_seconds * 1e3:.0f} ms",
        "graph memory": f"{stats.pool_bytes / 2**20:.2f} MiB",
        "replays": f"{stats.hits}",
        "padding": f"{stats.padding_fraction:.1%} of rows",
        **{f"eager: {reason}": f"{count}" for reason, count in stats.eager_calls.items()},
        "largest difference to eager": f"{worst:.1e}",
        "eager": f"{eager * 1e6 / len(batches):.0f} µs per batch",
        "through graphs": f"{graphs * 1e6 / len(batches):.0f} µs per batch",
        "speed-up": f"{eager / graphs:.2f}x",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    fast.close()


if __name__ == "__main__":
    main()
