"""The runtime's view of recurrent layers: a spec per layer, their states, a batch.

Beside or instead of keys and values, such a layer keeps a state of fixed size for each request: the
last inputs of a convolution, and often a matrix. It is kept at the request's row, as everything
else about a running request is, so the scheduler need not know of it. A layer calls ``recur``; it
finds the batch in the forward context, as attention does. A request whose first tokens are in the
batch starts from zeros, whatever its row holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from ostinato.graphs.capture.context import get_forward_context
from ostinato.graphs.capture.segments import eager_break
from ostinato.graphs.policy.modes import AttentionCGSupport
from ostinato.recurrent.chunks import Chunks


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """One recurrent layer: its index among them, and the state of a request.

    ``window``: the number of earlier inputs of its convolution, and their channels. ``matrix``: the
    shape of its recurrent state, in float32; None if the convolution is all it has.
    """

    layer: int
    window: tuple[int, int]
    matrix: tuple[int, ...] | None = None

    @property
    def support(self) -> AttentionCGSupport:
        """Which batches it can be captured for.

        Scans of prompts follow their lengths, which the host must know.
        """
        if self.matrix is None:
            return AttentionCGSupport.ALWAYS
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class LayerState(NamedTuple):
    """The states of one layer: [rows, *window] and, in float32, [rows, *matrix]."""

    window: torch.Tensor
    matrix: torch.Tensor | None


class RecurrentStates:
    """Owns the memory of all layers' states, by request row."""

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],
        *,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        self.layers = [
            LayerState(
                zeros(spec.window, dtype),
                None if spec.matrix is None else zeros(spec.matrix, torch.float32),
            )
            for spec in specs
        ]


def bytes_per_row(specs: Sequence[RecurrentSpec], dtype: torch.dtype) -> int:
    """The bytes of one request's state in all layers together."""
    total = 0
    for spec in specs:
        total += spec.window[0] * spec.window[1] * dtype.itemsize
        if spec.matrix is not None:
            total += torch.Size(spec.matrix).numel() * torch.float32.itemsize
    return total


class ConvIndices(NamedTuple):
    """Where a convolution finds its inputs, in the batch's tokens and windows together.

    ``inputs``: for each token [T], from the earliest in its window to itself. ``last`` [R, W]: what
    becomes the window of each request.
    """

    inputs: tuple[torch.Tensor, ...]
    last: torch.Tensor


def initial_state(
    state: torch.Tensor, req_indices: torch.Tensor, is_fresh: torch.Tensor
) -> torch.Tensor:
    """A copy of the ``state`` of these requests: zeros for those that are fresh."""
    # Not by multiplication: a row may hold anything, NaN included.
    return state[req_indices].masked_fill_(is_fresh.view(-1, *[1] * (state.dim() - 1)), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentBatch:
    """One batch as recurrent layers see it; R requests, T tokens, both padded.

    ``states``: by layer. ``req_indices`` [R] int64: the row of each request. ``query_start_loc``
    [R + 1], ``seq_lens`` [R] and ``uniform_decode``: as in ``AttentionMetadata``. ``query_lens``:
    the tokens of each request, without padding, for the host.
    """

    states: Sequence[LayerState]
    req_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    uniform_decode: bool
    query_lens: Sequence[int] | None = None
    conv_indices: dict[int, ConvIndices] = field(default_factory=dict)  # by width of the window

    @property
    def num_reqs(self) -> int:
        return self.req_indices.shape[0]

    @cached_property
    def is_fresh(self) -> torch.Tensor:
        """Which requests have computed nothing before this batch [R]; padding never has."""
        if self.uniform_decode:
            return self.seq_lens <= 1
        return self.seq_lens <= self.query_start_loc.diff()

    @cached_property
    def chunks(self) -> Chunks:
        """The batch's prompts in chunks."""
        lens = self.query_lens
        if lens is None:  # not a step: a capture in pieces, or a measurement
            lens = self.query_start_loc.diff().tolist()
        return Chunks.of(lens, self.req_indices.device)


class RecurrentLayer(Protocol):
    """What a model's layer does between its projections."""

    spec: RecurrentSpec

    def run(self, batch: RecurrentBatch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Advance the states of the batch by ``inputs``, each [T, ...], and write all of ``out``.

        Rows of tokens that belong to no request become finite values, if the inputs are.
        """


def recur(layer: RecurrentLayer, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Run ``layer`` for the batch in the forward context; returns ``out``.

    A piecewise graph breaks here, as it does at ``attend``.
    """
    _recur_into(layer, list(inputs), out)
    return out


@eager_break
def _recur_into(layer: RecurrentLayer, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    layer.run(get_forward_context().attn_metadata.recurrent, inputs, out)
