"""What a backend must do. The rest of the package knows nothing else about the device.

The semantics are those of a CUDA graph, whatever the device: fixed addresses, no Python and no
control flow on replay, no reading of values on the host, and memory that a later capture may use
again once nothing refers to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ostinato.errors import ReplayMismatchError


class Graph(Protocol):
    """Recorded work. Owns nothing of the pool's memory: the backend does."""

    @property
    def num_nodes(self) -> int | None:
        """Operations replayed (kernels on CUDA, operators on the CPU); None if unknown."""

    def replay(self) -> None:
        """Run the recorded work on the current stream. Does not synchronise."""

    def close(self) -> None:
        """Release the recording. A closed graph must not be replayed."""


class GraphBackend(Protocol):
    """Records on one device, into one memory pool that all its graphs share.

    ``begin`` and ``end`` bracket one recording in the calling thread; recordings do not nest. When
    ``end`` returns, the recorded work has been run exactly once (enqueued, on CUDA), so captured
    outputs hold real values on every backend.
    """

    device: torch.device
    # What captured work may draw from: the device's default one, and those that were registered.
    generators: tuple[torch.Generator, ...]

    def capture_scope(self) -> AbstractContextManager[None]:
        """Everything of one capture runs inside, also what runs between two recordings."""

    def trusting(self) -> AbstractContextManager[None]:
        """Captures inside need not be watched operator by operator: their like was captured before.

        What a graph cannot contain is still refused, but the error may not name the operator.
        """

    def begin(self) -> None: ...

    def end(self) -> Graph: ...

    def abort(self, error: BaseException) -> BaseException:
        """Drop the open recording after ``error`` and return the error to raise in its place."""

    def follow_stream(self) -> bool:
        """Put what the current stream does next behind the pool's last use; whether it moved."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory belongs to the pool."""

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias that does not keep the pool's memory reserved; other tensors are returned as is.

        The alias is valid until the pool is closed; a later capture may place other data there.
        """

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor in the pool's memory, for what is computed between recordings."""

    def reserve(self, num_bytes: int) -> None:
        """Have so much memory in one piece, where the backend's pool is made of pieces."""

    def pool_bytes(self) -> int:
        """Memory the pool holds."""

    def release_unused(self) -> None:
        """Give back memory that no graph needs, the pool's and what warm-ups left, as far as the
        device allows."""

    def close(self) -> None:
        """Drop the pool. All its graphs must have been closed."""


def replay_closed() -> None:
    """What a closed graph has in place of its replay."""
    raise ReplayMismatchError("this graph was closed; capture it again before replaying it")
