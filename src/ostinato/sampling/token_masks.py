"""``TokenMasks``: which tokens each constrained request may sample next, on the device.

The sampler reads a row's mask when it runs, in a graph too. The host writes the masks of a step
between its forward and its sampler, so that the device computes while the host still works on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ostinato.errors import ConfigError


class TokenMasks:
    """``on_device`` [num_rows, ceil(V / 32)] int32, one bit per token; all ones until written.

    It is a placeholder until ``allocate``, since most engines never need it.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = device
        self.on_device = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._packed: torch.Tensor | None = None  # on the device
        self._staging = self._row_numbers = torch.empty(0)

    def allocate(self) -> None:
        """Allocate, unless that was done before."""
        if self._packed is not None:
            return
        if not self._vocab_size:
            raise ConfigError("this sampling state has no masks; build it with vocab_size=...")
        shape = self._num_rows, -(-self._vocab_size // 32)
        pin = self._device.type == "cuda"
        with torch.inference_mode(False):
            self.on_device = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            self._staging = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
            self._row_numbers = torch.empty(shape[0], dtype=torch.int64, pin_memory=pin)
            self._packed = torch.empty_like(self.on_device)  # last: now all is there

    def write(
        self, req_indices: Sequence[int], fill: Callable[[npt.NDArray[np.int32]], None]
    ) -> None:
        """Write the masks of these rows; ``fill`` writes them to an array with a row for each.

        The copies are enqueued on the current stream and not waited for. The next call reuses their
        memory, so the host must have waited for work behind them by then.
        """
        assert self._packed is not None, "a constrained request was written"
        count = len(req_indices)
        fill(self._staging.numpy()[:count])
        self._row_numbers[:count] = torch.tensor(req_indices)
        rows = self._row_numbers[:count].to(self._device, non_blocking=True)
        packed = self._packed[:count]
        packed.copy_(self._staging[:count], non_blocking=True)
        self.on_device.index_copy_(0, rows, packed)
