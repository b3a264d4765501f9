"""Attention for some tokens of a batch, over keys and values that are already in the cache.

To a backend the selected tokens are a decode batch: each is a request of one token, which sees the
keys up to its own position. All shapes follow from their number, so a graph can contain it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break


@dataclass(frozen=True, kw_only=True)
class SelectedTokens:
    """S tokens of a batch, padding included, and the decode batch that attention sees.

    ``rows`` [S] int64: their rows in the batch; 0 for padding. ``targets`` [S]: the same, but for
    padding the number of the batch's tokens. Padding has a ``seq_lens`` of 0.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor  # -1: nothing is written

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The selected rows of ``tokens`` [T, ...]; for padding, rows of another token."""
        return tokens.index_select(0, self.rows)

    def put_back(self, selected: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [T, D] with the selected rows replaced; a new tensor. Padding is dropped."""
        # One extra row, to which padding is written.
        extended = torch.cat((tokens, tokens.new_zeros(1, tokens.shape[1])))
        return extended.index_copy_(0, self.targets, selected)[:-1]


def select_tokens(metadata: AttentionMetadata, num_tokens: int) -> SelectedTokens | None:
    """The tokens that ``metadata.logits_indices`` asks for, of ``num_tokens``; None: all of them.

    Indices that belong to no request count as padding. Reads nothing back to the host.
    """
    indices = metadata.logits_indices
    if indices is None:
        return None
    ends = metadata.query_start_loc[1:]
    rows = indices.clamp(min=0)
    request = torch.searchsorted(ends, rows.to(ends.dtype), right=True)
    is_token = (indices >= 0) & (request < ends.shape[0])
    request = request.clamp(max=ends.shape[0] - 1)
    behind = ends.index_select(0, request) - 1 - rows  # tokens of its request that come after it
    seq_lens = metadata.seq_lens.index_select(0, request) - behind
    device, num_selected = indices.device, indices.shape[0]
    return SelectedTokens(
        rows=torch.where(is_token, rows, 0),
        targets=torch.where(is_token, rows, num_tokens),
        query_start_loc=torch.arange(num_selected + 1, dtype=torch.int32, device=device),
        seq_lens=torch.where(is_token, seq_lens, 0).to(torch.int32),
        block_table=metadata.block_table.index_select(0, request),
        slot_mapping=torch.full_like(indices, -1),
    )


def attend_selected(
    spec: AttentionSpec, query: torch.Tensor, selected: SelectedTokens
) -> torch.Tensor:
    """Attention of one layer for the selected tokens -> [S, num_heads, value_dim].

    ``query`` [S, num_heads, head_dim]. The layer's keys and values of all tokens of the batch must
    be stored (``store_kv``). A graph breaks here as it does at ``attend``. Not for code under
    torch.compile.
    """
    out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
    _attend_selected_into(spec, query, selected, out)
    return out


@eager_break
def _attend_selected_into(
    spec: AttentionSpec, query: torch.Tensor, selected: SelectedTokens, out: torch.Tensor
) -> None:
    metadata: AttentionMetadata = get_forward_context().attn_metadata
    batch = replace(
        metadata,
        query_start_loc=selected.query_start_loc,
        seq_lens=selected.seq_lens,
        block_table=selected.block_table,
        slot_mapping=selected.slot_mapping,
        max_query_len=1,
        logits_indices=None,
        uniform_decode=True,
    )
    # Backends take keys and values to store. Without slots, these are never read.
    num_rows, num_kv_heads = query.shape[0], spec.num_kv_heads
    key = query.new_empty((num_rows, num_kv_heads, spec.head_dim))
    value = query.new_empty((num_rows, num_kv_heads, spec.value_dim))
    metadata.backend.forward(spec, query, key, value, batch, out)


def last_tokens(query_start_loc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``logits_indices`` for the last token of each request to ``out``; returns it.

    ``query_start_loc`` [R + 1]; ``out`` [S] int64, S at least R. Requests with no tokens, and the
    entries from R on, become -1. Reads nothing back to the host.
    """
    num_reqs = query_start_loc.shape[0] - 1
    ends = query_start_loc[1:].to(out.dtype) - 1
    out.fill_(-1)
    out[:num_reqs].copy_(torch.where(query_start_loc.diff() > 0, ends, -1))
    return out
