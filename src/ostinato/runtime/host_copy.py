"""Results on their way from the device to the host."""

from __future__ import annotations

import torch


class HostCopy:
    """Copies of device tensors, started when it is made and waited for when they are needed.

    On CUDA the copies are enqueued behind the work that makes the tensors, into pinned memory, and
    ``wait`` waits for them alone, not for what was enqueued since. The tensors may be overwritten
    by later work on the same stream.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            # Pinned by torch, which reuses such memory only once the copy is done.
            self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copies
