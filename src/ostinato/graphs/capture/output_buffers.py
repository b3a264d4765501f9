"""The output buffers of a manager's FULL graphs: one set for all sizes.

The output of a forward is checked here, before the buffers are allocated and again in every
capture: a wrong result raises, naming the result and its batch.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from ostinato.errors import CaptureError

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]


class OutputBuffers:
    """Hidden states, or hidden states and a list of auxiliary ones, [``max_rows``, ...] each.

    The first size's output (``allocate``) determines their number, dtypes and trailing shapes. They
    never move, so ``views`` of earlier calls show later results.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._has_aux = False

    @property
    def allocated(self) -> bool:
        return bool(self._buffers)

    def allocate(self, output: object, num_tokens: int) -> None:
        """Allocate the buffers from the output of a batch padded to ``num_tokens``."""
        tensors = self._checked(output, num_tokens)
        self._has_aux = not isinstance(output, torch.Tensor)
        self._buffers = [
            torch.empty(
                (self._max_rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self._device
            )
            for _, tensor in tensors
        ]

    def copy_in(self, output: object, num_tokens: int) -> None:
        """Copy the output of a batch padded to ``num_tokens``, as the last work of a graph."""
        tensors = self._checked(output, num_tokens)
        got = _counted(len(tensors), has_aux=not isinstance(output, torch.Tensor))
        expected = _counted(len(self._buffers), has_aux=self._has_aux)
        if got != expected:
            raise CaptureError(
                f"the forward returned {got} for a batch padded to {num_tokens} tokens, but "
                f"{expected} for the first size; return the same number for every size"
            )
        for buffer, (name, tensor) in zip(self._buffers, tensors, strict=True):
            shape = (num_tokens, *buffer.shape[1:])
            if tensor.shape != shape or tensor.dtype != buffer.dtype:
                raise CaptureError(
                    f"the forward returned {tuple(tensor.shape)} {tensor.dtype} as {name} for a "
                    f"batch padded to {num_tokens} tokens, where {shape} {buffer.dtype} was "
                    "expected from the first size; return the same dtype and trailing shape for "
                    "every size"
                )
            buffer[:num_tokens].copy_(tensor)

    def views(self, num_tokens: int) -> Output:
        """The first ``num_tokens`` rows of each, in the structure that the forward returned."""
        hidden, *aux = (buffer[:num_tokens] for buffer in self._buffers)
        return (hidden, aux) if self._has_aux else hidden

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers, by what they hold."""
        return [
            (f"auxiliary hidden state {index - 1}" if index else "hidden states", buffer)
            for index, buffer in enumerate(self._buffers)
        ]

    def clear(self) -> None:
        """Free the memory, until the next ``allocate``."""
        self._buffers.clear()

    def _checked(self, output: object, num_tokens: int) -> list[tuple[str, torch.Tensor]]:
        """The tensors of an output by name, each with a row for every token."""
        tensors = []
        for name, value in _named(output, num_tokens):
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"the forward returned {_described(value)} as {name} for a batch padded to "
                    f"{num_tokens} tokens; return a tensor [{num_tokens}, ...]"
                )
            if value.dim() == 0 or value.shape[0] != num_tokens:
                raise CaptureError(
                    f"the forward returned {tuple(value.shape)} {value.dtype} as {name} for a "
                    f"batch padded to {num_tokens} tokens; return a row for every token, padding "
                    f"included: [{num_tokens}, ...]"
                )
            if value.device != self._device:
                raise CaptureError(
                    f"the forward returned a tensor on {value.device} as {name}, but the graphs "
                    f"are on {self._device}; return results on {self._device}"
                )
            tensors.append((name, value))
        return tensors


def _named(output: object, num_tokens: int) -> list[tuple[str, object]]:
    if isinstance(output, torch.Tensor):
        return [("its output", output)]
    # An auxiliary list may be a tuple: its tensors are copied, not kept.
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], (list, tuple)):
        hidden, aux = output
        named = [(f"auxiliary hidden state {index}", value) for index, value in enumerate(aux)]
        return [("its hidden states", hidden), *named]
    raise CaptureError(
        f"the forward returned {_described(output)} for a batch padded to {num_tokens} tokens; "
        f"return a tensor [{num_tokens}, ...], or a tuple of such a tensor and a list of auxiliary "
        "ones"
    )


def _described(value: object) -> str:
    if isinstance(value, (list, tuple)):
        inside = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _counted(count: int, *, has_aux: bool) -> str:
    return f"hidden states and {count - 1} auxiliary ones" if has_aux else "hidden states alone"
