"""The results of a step on the host: tokens, requested log-probabilities, observed logits.

Tokens are copied through a ring of a few pinned buffers: allocating pinned memory and an event
takes torch longer than all other host work to start a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ostinato.compat import raw_stream
from ostinato.scheduling.step_plan import IntArray


@dataclass(frozen=True, kw_only=True)
class SampledLogits:
    """The ``logits`` [N, V] that one step samples from, without padding rows.

    Row i belongs to request ``request_ids[i]``; with drafts, a request has a row for its last token
    and one for each draft. Biases, penalties and temperature are not applied yet. The next step may
    overwrite them, so use them on the current stream, or clone them.
    """

    request_ids: Sequence[str]
    logits: torch.Tensor


LogitsObserver: TypeAlias = Callable[[SampledLogits], None]


class _Buffer(NamedTuple):
    """Host memory for the tokens of one step, pinned on CUDA, and the event of their arrival."""

    tensor: torch.Tensor
    array: IntArray  # the same memory
    arrived: torch.cuda.Event | None


class AllLogprobs(NamedTuple):
    """The tokens and their logprobs [rows, 1 + most] of the rows with these numbers."""

    rows: Sequence[int]
    tokens: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


class StepResult:
    """The results of one step, being copied to the host; reading them waits for that step alone.

    ``ResultRing.send`` creates it. Without a ring, it is the result of a step without samples.
    """

    def __init__(
        self,
        ring: ResultRing | None = None,
        buffer: _Buffer | None = None,
        num_tokens: int = 0,
        logprobs: Sequence[torch.Tensor] = (),
        filtered_rows: Sequence[int] | None = None,
    ) -> None:
        self._ring = ring
        self._buffer = buffer
        self._num_tokens = num_tokens
        self._token_ids: IntArray | None = None
        self._logprob_copies = logprobs
        self._filtered_rows = filtered_rows
        self._logprobs: list[np.ndarray[Any, Any]] | None = None  # the copies, once they arrived
        self._row_of: Mapping[int, int] | None = None  # in the copies; None: the same

    def token_ids(self) -> IntArray:
        """Wait for the step and return its tokens [num_samples], in plan order."""
        buffer = self._buffer
        if buffer is not None:
            if buffer.arrived is not None:
                buffer.arrived.synchronize()
            self._token_ids = buffer.array[: self._num_tokens].copy()
            assert self._ring is not None, "it lent the buffer"
            self._ring.free.append(buffer)
            self._buffer = None
        elif self._token_ids is None:
            self._token_ids = np.empty(0, dtype=np.int64)
        return self._token_ids

    def logprobs(self, row: int, num_top: int) -> list[tuple[int, float]]:
        """The logprobs of the sampled token and the ``num_top`` most likely ones of one row.

        Only for rows whose request asked for logprobs.
        """
        if self._logprobs is None:
            self.token_ids()  # they arrive together
            self._logprobs = [copy.numpy() for copy in self._logprob_copies]
            if self._filtered_rows is not None:
                self._row_of = {row: index for index, row in enumerate(self._filtered_rows)}
        index = row if self._row_of is None else self._row_of[row]
        tokens, values = (array[index, : 1 + num_top].tolist() for array in self._logprobs)
        return list(zip(tokens, values, strict=True))

    def all_logprobs(self) -> AllLogprobs | None:
        """The logprobs of all rows that have some, once ``token_ids`` has returned."""
        if not self._logprob_copies:
            return None
        tokens, values = (copy.numpy() for copy in self._logprob_copies)
        rows = range(len(tokens)) if self._filtered_rows is None else self._filtered_rows
        return AllLogprobs(rows, tokens, values)


class ResultRing:
    """Lends host memory to the results of steps, and reuses it once they have been read.

    The memory of a result that is never read is not reused: its copy may still be in flight.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self._max_num_tokens = max_num_tokens
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # the last current stream
        self.free: list[_Buffer] = []

    def send(
        self,
        token_ids: torch.Tensor,
        logprobs: tuple[torch.Tensor, torch.Tensor] | None = None,
        filtered_rows: Sequence[int] | None = None,
    ) -> StepResult:
        """Start the copy of [N] int64; later work on the stream may overwrite the source.

        ``logprobs``: tokens and values of the rows at ``filtered_rows`` (None: of all), also
        copied.
        """
        buffer = self.free.pop() if self.free else self._new_buffer()
        num_tokens = token_ids.shape[0]
        buffer.tensor[:num_tokens].copy_(token_ids, non_blocking=True)
        copies: Sequence[torch.Tensor] = ()
        if logprobs is not None:
            # Pinned by torch, which reuses such memory only once the copy is done.
            copies = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in logprobs]
        if buffer.arrived is not None:
            buffer.arrived.record(self._current_stream(token_ids.get_device()))
        return StepResult(self, buffer, num_tokens, copies, filtered_rows)

    def _current_stream(self, index: int) -> torch.cuda.Stream:
        # Reading the stream's id is quick; building a Stream object takes as long as the copy.
        stream = self._stream
        if stream is None or stream.cuda_stream != raw_stream(index):
            stream = self._stream = torch.cuda.current_stream(self._device)
        return stream

    @torch.inference_mode(False)  # the buffer must be usable outside inference mode too
    def _new_buffer(self) -> _Buffer:
        on_cuda = self._device.type == "cuda"
        tensor = torch.empty(self._max_num_tokens, dtype=torch.int64, pin_memory=on_cuda)
        return _Buffer(tensor, tensor.numpy(), torch.cuda.Event() if on_cuda else None)
