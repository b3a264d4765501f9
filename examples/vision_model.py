"""A small convolutional network: graphs are not only for language models.

python examples/vision_model.py
"""

import torch
from torch import nn

from ostinato import graphed

SIZES = [1, 2, 4]


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    layers = [*stage(3, 16), *stage(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 10)).to(device).eval()


def make_batch(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    images = torch.randn(rows, 3, 16, 16, device=device)
    return (images.contiguous(memory_format=torch.channels_last),)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = graphed(build(device), sizes=SIZES, copy_outputs=True)
    scores = [network(*make_batch(rows, device)) for rows in (1, 3, 4, 2)]
    print("scores:", [tuple(score.shape) for score in scores])
    print(network.stats())


if __name__ == "__main__":
    main()
