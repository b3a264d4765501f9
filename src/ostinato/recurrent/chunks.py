"""A batch's prompts in chunks of equal size, so that a scan is a few GEMMs per chunk.

Chunks of one request follow each other in time; the n-th chunks of all requests run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHUNK_SIZE = 64


def most_chunks(num_tokens: int, num_reqs: int) -> list[int]:
    """Numbers of tokens of requests whose scan takes the most memory: short prompts, a long one."""
    num_short = min(num_reqs, num_tokens // 2) - 1
    return [2] * num_short + [num_tokens - 2 * num_short] if num_short > 0 else [num_tokens]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """The chunks of a batch: all first ones, all second ones, ...; N in all, for P requests.

    ``num_single``: leading requests with one token each, which need no chunks. ``requests`` [P]:
    the others that have tokens, longest first. ``sizes``: how many of these have an n-th chunk.
    ``tokens`` [N, CHUNK_SIZE]: indices in the batch; ``is_token`` is False at the end of a
    request's last chunk, where its last token is repeated. ``places``: the index among all
    N * CHUNK_SIZE of each token after the first ``num_single``; padding has none.
    """

    num_single: int
    sizes: list[int]
    requests: torch.Tensor
    tokens: torch.Tensor
    is_token: torch.Tensor
    places: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the batch, without padding."""
        return self.num_single + self.places.shape[0]

    @classmethod
    def of(cls, query_lens: Sequence[int], device: torch.device) -> Chunks:
        """The chunks of requests with these numbers of tokens, one behind the other."""
        lens = np.asarray(query_lens, dtype=np.int64)
        others = np.flatnonzero(lens != 1)
        num_single = int(others[0]) if len(others) else len(lens)
        starts = lens.cumsum() - lens
        requests = np.argsort(-lens[num_single:], kind="stable") + num_single
        requests = requests[lens[requests] > 0]
        counts = -(-lens[requests] // CHUNK_SIZE)  # descending
        sizes = [int((counts > n).sum()) for n in range(counts.max(initial=0))]
        owners = np.concatenate([requests[:size] for size in sizes] or [requests])
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        offsets = numbers[:, None] * CHUNK_SIZE + np.arange(CHUNK_SIZE)
        is_token = offsets < lens[owners, None]
        tokens = starts[owners, None] + np.minimum(offsets, lens[owners, None] - 1)
        places = np.empty(lens[num_single:].sum(), dtype=np.int64)
        places[tokens[is_token] - num_single] = np.flatnonzero(is_token)
        # One copy; the source is staged before it returns, so nothing waits for the device.
        parts = [requests, tokens.ravel(), is_token.ravel(), places]
        packed = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
        on_device = packed.split([len(part) for part in parts])
        return cls(
            num_single=num_single,
            sizes=sizes,
            requests=on_device[0],
            tokens=on_device[1].view(-1, CHUNK_SIZE),
            is_token=on_device[2].view(-1, CHUNK_SIZE).bool(),
            places=on_device[3],
        )
