"""Which memory a graph holds, whose it is, and what happens when it moves.

Two ways: graphs of graphed(), on any device, and a torch.cuda.CUDAGraph captured by hand, on a GPU.

python examples/graph_ledger.py
"""

import torch
from torch import nn

from ostinato import StaleGraphError, graphed, inspect_graph


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(device).eval().requires_grad_(False)


def reload_badly(model: nn.Module) -> None:
    """What many loaders do: a new tensor takes the place of the old one."""
    model[0].weight.data = torch.randn_like(model[0].weight)


def with_graphed(device: torch.device) -> None:
    model = build(device)
    with graphed(model, sizes=[4]) as fast:
        fast(torch.randn(3, 32, device=device))
        ledger = fast.ledger()
        print(ledger)
        reload_badly(model)
        try:
            ledger.check()
        except StaleGraphError as error:
            print(f"refused: {error}")
        fast.clear_graphs()  # the next call captures again, at the new address
        fast(torch.randn(3, 32, device=device))
        ledger.check()


def by_hand(device: torch.device) -> None:
    model, x = build(device), torch.randn(4, 32, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x)  # warm up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        model(x)
    ledger = inspect_graph(graph, {"model": model, "x": x})
    print(ledger)
    reload_badly(model)
    for stale in ledger.stale():
        print(f"stale: {stale}")


def main() -> None:
    if torch.cuda.is_available():
        with_graphed(torch.device("cuda"))
        by_hand(torch.device("cuda"))
    else:
        with_graphed(torch.device("cpu"))
        print("a graph captured by hand needs a GPU")


if __name__ == "__main__":
    main()
