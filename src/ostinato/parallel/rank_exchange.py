"""The communication of a sharded decoder inside a layer.

All-reduces, tokens for heads (Ulysses), and tokens for experts (expert parallel).
"""

from __future__ import annotations

import torch

from ostinato.errors import BatchError
from ostinato.graphs.capture.context import current_forward_context
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.models.native.exchange import Exchange
from ostinato.parallel.comm import Comm


class TensorExchange(Exchange):
    """The exchange of a decoder sharded by heads and by the width of its feed-forward layers."""

    def __init__(self, tensor: Comm) -> None:
        self._tensor = tensor
        self._in_order = False

    @property
    def sums(self) -> bool:
        return self._tensor.size > 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        if not self.sums:
            return partial
        if not self._in_order:
            return self._tensor.all_reduce(partial)
        first, *others = self._tensor.all_gather(partial.unsqueeze(0))
        total: torch.Tensor = first.float()
        for part in others:
            total = total + part
        return total.to(partial.dtype)

    def add_in_order(self) -> None:
        """An all-reduce may choose its order by the size of the batch; sums here do not."""
        self._in_order = True

    def mean(self, partial: torch.Tensor) -> torch.Tensor:
        return self.sum(partial) / self._tensor.size


class UlyssesExchange(TensorExchange):
    """The exchange with the tokens of a batch also split over the ranks of ``sequence``.

    A rank computes its tokens for all heads of its shard; attention needs all tokens, and is
    computed for one block of heads. One all-to-all carries query, key and value.
    """

    def __init__(self, tensor: Comm, sequence: Comm) -> None:
        super().__init__(tensor)
        self._sequence = sequence

    def tokens_for_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = [heads.shape[1] // self._sequence.size for heads in (query, key, value)]
        query, key, value = self._trade(query, key, value).split(counts, dim=1)
        return query, key, value

    def qkv_for_heads(self, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        return self._trade(*heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)).flatten(1)

    def latent_for_heads(
        self, query: torch.Tensor, row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._trade(query), self._sequence.all_gather(row)

    def _trade(self, *all_heads: torch.Tensor) -> torch.Tensor:
        # Heads are stored block after block, so a block is a range of each of query, key, value.
        blocks = [heads.unflatten(1, (self._sequence.size, -1)) for heads in all_heads]
        joined = torch.cat(blocks, dim=2)
        return self._sequence.all_to_all(joined, split_dim=1, concat_dim=0).squeeze(1)

    def own_heads(self, per_head: torch.Tensor) -> torch.Tensor:
        return per_head.chunk(self._sequence.size)[self._sequence.index]

    def heads_for_tokens(self, mixed: torch.Tensor) -> torch.Tensor:
        return self._sequence.all_to_all(mixed, split_dim=0, concat_dim=1)


class ReplicaExchange(TensorExchange):
    """The exchange with the experts of a layer spread over all ranks of all ``replicas``.

    An all-gather brings the padded batches of all replicas to each, which runs its own experts on
    them; an all-to-all takes what they add back to the tokens' replica, where the parts are added
    up. Both have the size of the padded batches, whatever the routing: nothing is read on the
    host, so graphs hold them. Replicas that run a graph run one of the same size; eager batches of
    different sizes are padded to the largest.
    """

    def __init__(self, tensor: Comm, replicas: Comm) -> None:
        super().__init__(tensor)
        self._replicas = replicas

    @property
    def gathers(self) -> bool:
        return True

    def slots_of_all(self, slots: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
        assert slots is not None, "a decoder on several ranks runs batches with a KV cache"
        largest = _largest_batch(num_tokens)
        return self._replicas.all_gather(_padded(slots, largest, value=-1))

    def tokens_of_all(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        share = slots.shape[0] // self._replicas.size
        return self._replicas.all_gather(_padded(x, share, value=0))

    def own_tokens(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        received = self._replicas.all_to_all(y, 0, 0)
        parts = received.view(self._replicas.size, -1, y.shape[1])
        return parts[:, :num_tokens].contiguous()


def _largest_batch(num_tokens: int) -> int:
    """The largest padded batch of the step's replicas, one of which has ``num_tokens``."""
    context = current_forward_context()
    if context is None or context.num_tokens_across_dp is None:
        return num_tokens
    if context.cudagraph_runtime_mode is not CUDAGraphMode.NONE:
        return num_tokens  # all run this size, and a capture reads nothing
    largest = int(context.num_tokens_across_dp.max())
    if num_tokens > largest:
        raise BatchError(
            f"this rank runs {num_tokens} tokens, but the replicas agreed on at most {largest}; "
            "all ranks must run what they agreed on"
        )
    return largest


def _padded(rows: torch.Tensor, num_rows: int, *, value: int) -> torch.Tensor:
    """``rows``, and then rows of ``value`` up to this number."""
    missing = num_rows - rows.shape[0]
    if missing == 0:
        return rows
    return torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), value)))
