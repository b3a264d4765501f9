"""``WeightGroup``: weights from the process of a trainer, by broadcasts of torch.distributed.

A gloo group of its own: it needs no ``init_process_group``, and leaves one that exists alone. It
sends a list of names in JSON, then the values, through host memory; nothing is unpickled. Messages
are neither encrypted nor signed, so the network between the ranks must be trusted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ostinato.errors import ClosedError, CollectiveError, ConfigError
from ostinato.graphs.capture.closing import Owner
from ostinato.models.given_tensors import NamedTensors, named_tensors
from ostinato.quoting import listed, said, shown

_LONGEST_S = 10**6  # torch counts milliseconds in 32 bits
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


class WeightGroup(Owner):
    """Rank 0, the trainer, sends weights; every other rank passes the group to ``update_weights``.

    Both calls wait for the other side. Use it in ``with``, or ``close()`` it.

    Args:
        address: Host and port of rank 0, as in "10.0.0.1:29600". Rank 0 listens there.
        rank: Of this process.
        world_size: Number of ranks: the trainer, and one for each ``LLM``.
        timeout_s: How long to wait for the other ranks.
    """

    def __init__(
        self, address: str, *, rank: int, world_size: int, timeout_s: float = 300.0
    ) -> None:
        if not (type(rank) is int is type(world_size) and 0 <= rank < world_size >= 2):
            raise ConfigError(
                f"a group has at least 2 ranks, numbered from 0; got rank {shown(rank)} of "
                f"{shown(world_size)}"
            )
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
            raise ConfigError(
                f"address must be host:port, as in '10.0.0.1:29600'; got {shown(address)}"
            )
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(
                f"timeout_s must be a number of seconds above 0, at most {_LONGEST_S:,}; got "
                f"{shown(timeout_s)}"
            )
        self.rank, self.world_size = rank, world_size
        timeout = timedelta(seconds=timeout_s)
        with _failures_explained("the ranks did not meet"):
            # Rank 0's store serves the others.
            self._store: Any = dist.TCPStore(host, int(port), world_size, rank == 0, timeout)  # type: ignore[attr-defined]
            self._group: Any = dist.ProcessGroupGloo(self._store, rank, world_size, timeout)

    def send(self, weights: NamedTensors) -> None:
        """Send tensors, by their checkpoint names, to all other ranks; returns when they have them.

        On rank 0. Tensors may be on any device, and any mapping or iterable will do: a ``dict`` of
        all of them, or an iterable of pairs, whose tensors must all be there at once.
        """
        group = self._open()
        if self.rank:
            raise ConfigError(f"only rank 0 sends weights; this is rank {self.rank}")
        pairs = list(named_tensors(weights))  # checked before any rank is told of them
        if not pairs:
            raise ConfigError("there are no weights to send; has the iterator been read before?")
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise ConfigError(f"{listed(twice)} occurs twice in the weights to send")
        for name, tensor in pairs:
            if str(tensor.dtype) not in _DTYPES:
                raise ConfigError(f"the weight {name} is {tensor.dtype}; send {_floats()}")
        header = json.dumps(
            [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in pairs]
        ).encode()
        with _failures_explained("sending weights failed"):
            _broadcast(group, torch.tensor([len(header)]))
            _broadcast(group, torch.tensor(list(header), dtype=torch.uint8))
            for _, tensor in pairs:
                _broadcast(group, tensor.detach().cpu().contiguous())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What rank 0 sends next, for ``update_weights``. On every other rank."""
        group = self._open()
        if not self.rank:
            raise ConfigError("rank 0 sends weights, and the other ranks receive them; call send()")
        with _failures_explained("receiving weights failed"):
            size = torch.zeros(1, dtype=torch.int64)
            _broadcast(group, size)
            header = torch.empty(int(size.item()), dtype=torch.uint8)
            _broadcast(group, header)
            for name, dtype, shape in json.loads(bytes(header.tolist())):
                tensor = torch.empty(shape, dtype=_DTYPES[dtype])
                _broadcast(group, tensor)
                yield name, tensor

    def _open(self) -> Any:
        if self._group is None:
            raise ClosedError("the weight group is closed; build a new one on all ranks")
        return self._group

    def close(self) -> None:
        """Leave the group. Closing twice is harmless."""
        self._group = self._store = None


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _floats() -> str:
    return ", ".join(_DTYPES)


@contextmanager
def _failures_explained(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it for everything that goes wrong between ranks
        raise CollectiveError(
            f"{what}: {said(error)}; check that all ranks run, with the same address and world_size"
        ) from error
