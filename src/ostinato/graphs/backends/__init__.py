"""How work is recorded and replayed: on a CUDA device, or on the CPU with the same semantics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.backends.base import Graph, GraphBackend
from ostinato.quoting import shown

__all__ = ["Graph", "GraphBackend", "check_generators", "create_backend"]


def check_generators(generators: object) -> None:
    """Raise unless they are a sequence of random generators."""
    if not isinstance(generators, Sequence) or not all(
        isinstance(each, torch.Generator) for each in generators
    ):
        raise ConfigError(f"generators must be a list of torch.Generator, got {shown(generators)}")


def create_backend(
    device: torch.device | str, *, generators: Sequence[torch.Generator] = ()
) -> GraphBackend:
    """Create a backend for ``device``, with its own memory pool."""
    check_generators(generators)
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"device must be a torch.device or its name, got {shown(device)}; pass 'cpu', 'cuda' "
            "or 'cuda:1'"
        ) from error
    if device.type == "cpu":
        from ostinato.graphs.backends.cpu.backend import CpuBackend

        return CpuBackend(generators=generators)
    if device.type == "cuda":
        from ostinato.graphs.backends.cuda.backend import CudaBackend

        return CudaBackend(device, generators=generators)
    raise ConfigError(f"graphs run on CUDA devices and on the CPU, not on {device}")
