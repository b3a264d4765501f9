"""Results on their way from the device to the host."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ostinato.compat import raw_stream


class Awaited(Protocol):
    """Copies of device tensors, started already; the tensors may be overwritten by later work on
    the same stream."""

    def wait(self) -> list[torch.Tensor]:
        """The copies, once they are done. Waits for them alone, not for what was enqueued since."""


class HostCopy:
    """Copies of any tensors, each into memory of its own, pinned on CUDA."""

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


class _Box(NamedTuple):
    pinned: torch.Tensor
    arrived: torch.cuda.Event


class Mailbox:
    """Copies of the tokens of a step, into the same few pieces of pinned memory over and over.

    Finding pinned memory and an event anew takes torch longer than all else the host does to start
    a decode step.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # the one that was current last
        self._free: list[_Box] = []

    def send(self, token_ids: torch.Tensor) -> Awaited:
        """Start the copy of [N] int64."""
        if self._device.type != "cuda":
            return HostCopy(token_ids)
        box = self._free.pop() if self._free else self._new_box()
        box.pinned[: token_ids.shape[0]].copy_(token_ids, non_blocking=True)
        box.arrived.record(self._current_stream(token_ids.get_device()))
        return _Letter(box, token_ids.shape[0], self._free)

    def _current_stream(self, index: int) -> torch.cuda.Stream:
        # Its number is found in a moment; making an object of it takes as long as the copy.
        stream = self._stream
        if stream is None or stream.cuda_stream != raw_stream(index):
            stream = self._stream = torch.cuda.current_stream(self._device)
        return stream

    @torch.inference_mode(False)  # it must be usable in and out of inference mode
    def _new_box(self) -> _Box:
        pinned = torch.empty(self._max_num_tokens, dtype=torch.int64, pin_memory=True)
        return _Box(pinned, torch.cuda.Event())


class NoMailbox(Mailbox):
    """For ranks whose tokens nobody reads: nothing is sent."""

    def send(self, token_ids: torch.Tensor) -> Awaited:
        return HostCopy()


class _Letter:
    """Tokens in a box, which is free for others when they have been read.

    Of one that nobody reads the box is not used again: its copy may still be on its way.
    """

    def __init__(self, box: _Box, count: int, free: list[_Box]) -> None:
        self._box = box
        self._count = count
        self._free = free
        self._read: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        if self._read is None:
            self._box.arrived.synchronize()
            self._read = [self._box.pinned[: self._count].clone()]
            self._free.append(self._box)
        return self._read
