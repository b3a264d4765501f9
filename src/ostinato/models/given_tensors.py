"""Tensors that a caller passes by their checkpoint names, in place of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.models.checkpoint import NO_PARTS, Checkpoint, Parts, TensorInfo, part_of
from ostinato.quoting import listed, shown

_SOURCE = Path("the given weights")  # what errors call the file
_KINDS = (
    "pairs of a checkpoint name and a tensor, a mapping from names to tensors, or the path of a "
    "safetensors file or directory"
)
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class GivenTensors(Checkpoint):
    """A checkpoint in memory. A mapping's or a list's tensors are read where they are.

    Any other iterable may reuse the memory of a tensor for the next, so each is copied to host
    memory as it comes.
    """

    def __init__(self, weights: NamedTensors) -> None:
        self.path = _SOURCE
        self.tensors = {}
        self._given: dict[str, torch.Tensor] = {}
        stays = isinstance(weights, Mapping | Sequence)
        for name, tensor in named_tensors(weights):
            if name in self._given:
                raise ModelLoadError(f"{listed([name])} occurs twice in the given weights")
            dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
            self.tensors[name] = TensorInfo(_SOURCE, tuple(tensor.shape), dtype)
            tensor = tensor.detach()
            self._given[name] = tensor if stays else tensor.to("cpu", copy=True)
        for device in {each.device for each in self._given.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # they may have been computed on any stream

    def read(
        self,
        names: Iterable[str],
        device: torch.device | None,
        parts: Mapping[str, Parts] = NO_PARTS,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors ``names`` on ``device``; None: where they are."""
        for name in names:
            tensor, wanted = self._given[self.tensors[name].stored_as or name], parts.get(name)
            part = tensor if wanted is None else part_of(tensor, wanted)
            yield name, part if device is None else part.to(device)

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        yield {
            name: self._given[info.stored_as or name].cpu() for name, info in self.tensors.items()
        }


def named_tensors(weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of ``weights``, one after another; raises ConfigError for what is none."""
    if not isinstance(weights, Iterable):
        raise ConfigError(f"weights are {_KINDS}; got {shown(weights)}")
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        yield _checked(pair)


def _checked(pair: Any) -> tuple[str, torch.Tensor]:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise ConfigError(f"weights are {_KINDS}; got {shown(pair)} in place of a pair")
    name, tensor = pair
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"the weight {listed([name])} is {shown(tensor)}, not a tensor")
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ConfigError(
            f"the weight {listed([name])} is a {type(tensor).__name__}; pass a plain tensor with "
            "all its values, as full_tensor() of a DTensor returns"
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the device meta" if tensor.is_meta else f"in the layout {tensor.layout}"
        raise ConfigError(f"the weight {listed([name])} is {kind}; pass a dense one with values")
    return name, tensor
