"""Collectives between processes, on torch.distributed: NCCL for CUDA tensors, gloo for the CPU.

Torch may sort the ranks of a new group, depending on its version, so its order is never relied on:
each member's index in torch's order is looked up once, and data is permuted to the order that the
group was given. This module starts no processes and does not initialise torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.errors import ClosedError, CollectiveError, ConfigError
from ostinato.graphs.capture.closing import Owner
from ostinato.parallel import collectives
from ostinato.parallel.comm import equal_parts


class DistributedComm(Owner):
    """A process group of ``ranks``, in this order.

    Creation is collective: every rank of the world creates one at the same time, with the group
    that it belongs to (several disjoint groups, or one of all). If the ranks disagree about a
    group's members or order, all of them raise ``ConfigError``. ``torch.distributed`` must be
    initialised, and, if ``device`` is a GPU, ``torch.cuda.set_device`` called.

    The constructor runs every collective once, so that the communicator is connected before a graph
    is captured. It must outlive the graphs that contain its collectives; call ``close()`` after
    them.

    Args:
        ranks: Global ranks of the group, this one included.
        device: Where the tensors are. CUDA means NCCL, the CPU means gloo.
        timeout_s: When a collective fails that some rank never joins. None uses torch's default.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device | str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() on every rank first, or use NoComm for one"
            )
        self.ranks = tuple(ranks)
        self.device = torch.device(device)
        groups = _agree_on_groups(self.ranks)
        before = self._untracked_bytes()
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank())
        # Torch requires every rank of the world to create every group, in the same order.
        made = {members: self._new_group(members, timeout_s) for members in groups}
        own = made[self.ranks]
        assert own is not None, "this rank is a member"
        self._group: dist.ProcessGroup | None = own
        self._number = collectives.register(own)
        torch_order = dist.get_process_group_ranks(own)
        self._places = tuple(torch_order.index(rank) for rank in self.ranks)
        self._connect()
        # Memory of the device that NCCL allocated for its buffers.
        self.num_bytes = max(0, self._untracked_bytes() - before)

    def _untracked_bytes(self) -> int:
        """Memory in use on the device that torch's allocator does not know of."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def _new_group(
        self, members: tuple[int, ...], timeout_s: float | None
    ) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = dist.new_group(
            list(members),
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            backend="nccl" if self.device.type == "cuda" else "gloo",
        )
        return group

    def _connect(self) -> None:
        """Run every collective once, and verify the order."""
        mine = torch.full((self.size,), dist.get_rank(), device=self.device)
        gathered = self.all_gather(mine[:1])
        traded = self.all_to_all(mine, 0, 0)
        total = self.all_reduce(mine[:1])
        expected = (list(self.ranks), list(self.ranks), sum(self.ranks))
        found = (gathered.tolist(), traded.tolist(), total.item())
        if found != expected:
            raise CollectiveError(
                f"the group of ranks {self.ranks} does not exchange in that order: all_gather, "
                f"all_to_all and all_reduce of the rank numbers gave {found}, not {expected}"
            )

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            collectives.all_reduce(tensor, self._open())
            return tensor
        dense = tensor.contiguous()
        collectives.all_reduce(dense, self._open())
        return tensor.copy_(dense)

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        received = tensor.new_empty((self.size * tensor.numel(),))
        collectives.all_gather(received, tensor.contiguous().view(-1), self._open())
        return self._joined(received, list(tensor.shape), dim)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        parts = equal_parts(tensor, self.size, split_dim)
        part_shape = list(parts[0].shape)
        if self._in_torch_order and split_dim % tensor.dim() == 0:
            sent = tensor.contiguous()  # the parts are already consecutive
        else:
            by_place: list[Tensor] = [tensor] * self.size
            for part, place in zip(parts, self._places, strict=True):
                by_place[place] = part
            sent = torch.stack(by_place)
        received = torch.empty_like(sent)
        collectives.all_to_all(received.view(-1), sent.view(-1), self._open())
        return self._joined(received.view(-1), part_shape, concat_dim)

    def broadcast(self, tensor: Tensor) -> None:
        """Send the first member's ``tensor``, which is contiguous, to all. Not for graphs."""
        self._open()
        dist.broadcast(tensor, src=self.ranks[0], group=self._group)

    def send(self, tensor: Tensor, index: int) -> dist.Work:
        """Start to send ``tensor``, which is contiguous, to a member. Not for graphs.

        Waiting for the returned work waits until that member has received it; keep ``tensor`` until
        then.
        """
        self._open()
        work = dist.isend(tensor, dst=self.ranks[index], group=self._group)
        assert work is not None, "this rank is a member"
        return work

    def receive(self, tensor: Tensor, index: int) -> None:
        """Wait for what a member sends next, of the same size as ``tensor``."""
        self._open()
        dist.recv(tensor, src=self.ranks[index], group=self._group)

    def wait_for_all(self, timeout_s: float) -> None:
        """Return when all members have called this; raise if they do not in time. gloo only."""
        self._open()
        dist.monitored_barrier(self._group, timeout=timedelta(seconds=timeout_s))

    @property
    def num_calls(self) -> int:
        """How many collectives this rank has begun, except broadcasts and replays on a GPU."""
        return collectives.num_calls(self._number)

    @property
    def _in_torch_order(self) -> bool:
        return self._places == tuple(range(self.size))

    def _joined(self, received: Tensor, shape: list[int], dim: int) -> Tensor:
        """Concatenate parts of ``shape``, received in torch's order, in group order."""
        dim %= len(shape)
        if self._in_torch_order and dim == 0:
            return received.view(self.size * shape[0], *shape[1:])
        parts = received.view(self.size, *shape)
        return torch.cat([parts[place] for place in self._places], dim)

    # --- the end ---------------------------------------------------------------------------------

    def _open(self) -> int:
        """The number of the group; raises if it is closed."""
        if self._group is None:
            raise ClosedError(f"the group of ranks {self.ranks} was closed")
        return self._number

    def abort(self) -> None:
        """End collectives that wait for a lost rank. The group is unusable afterwards.

        May be called from a thread other than the waiting one.
        """
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Release the communicator. Graphs that contain its collectives must be closed first."""
        collectives.release(self._number)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _agree_on_groups(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The distinct groups of all ranks, gathered, in the same order on all ranks.

    All ranks check the same list, so on an error all of them raise, and none waits for another.
    """
    sizes = [size for (size,) in gather_numbers([len(ranks)])]
    padded = [*ranks, *[0] * (max(1, *sizes) - len(ranks))]
    gathered = gather_numbers(padded)
    given = [tuple(group[:size]) for group, size in zip(gathered, sizes, strict=True)]
    for rank, group in enumerate(given):
        if rank not in group or len(set(group)) != len(group):
            raise ConfigError(
                f"rank {rank} gave the group {group}: a group lists each of its ranks once, and "
                "must include the rank that creates it"
            )
        for member in group:
            if not 0 <= member < len(given):
                raise ConfigError(
                    f"rank {rank} gave the group {group}, but the world has only ranks 0 to "
                    f"{len(given) - 1}"
                )
            if given[member] != group:
                raise ConfigError(
                    f"rank {rank} gave the group {group} and rank {member} gave {given[member]}: "
                    "all members of a group must give the same ranks in the same order"
                )
    return sorted(set(given))


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """All ranks' ``numbers`` (the same count on each), in rank order.

    torch's object collectives would do this too, but they unpickle whatever arrives.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [each.tolist() for each in gathered]
