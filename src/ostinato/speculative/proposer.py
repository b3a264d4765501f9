"""``Proposer``: the runner's protocol for a source of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.ops.decode_state import DecodeState
from ostinato.sampling.sampling_state import SamplingState
from ostinato.scheduling.request import Request

KVLayers: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What a proposer is built for: ``num_rows`` request rows of ``max_model_len`` tokens.

    All its memory is on ``device``. A request has up to ``blocks_per_request`` blocks, and up to
    ``max_num_drafts`` drafts in a step. ``vocab_size``: of the model. ``sampling``: how each row is
    sampled. ``new_kv_cache`` allocates keys and values of a model's layers, in the blocks of the
    requests, for ``backend``. ``aux_hidden_states``: for each of the options'
    ``aux_hidden_state_layers`` its input [T, hidden_size], at a fixed address, for the tokens of
    the model's last batch.
    """

    device: torch.device
    num_rows: int
    max_model_len: int
    blocks_per_request: int
    max_num_drafts: int
    vocab_size: int
    sampling: SamplingState
    backend: AttentionBackend
    new_kv_cache: Callable[[Sequence[AttentionSpec]], KVLayers]
    aux_hidden_states: Sequence[torch.Tensor] = ()


class Proposer(Protocol):
    """Writes drafts into the request state. Proposers derive from it, for its defaults.

    A wrong draft costs nothing but the chance of a right one: the output never depends on drafts.
    """

    def propose(self, state: DecodeState) -> None:
        """Write ``state.query_len - 1`` drafts behind the last token of each real row.

        Request r has tokens 0 to ``num_computed[r]`` in ``token_ids``, and drafts follow. Runs in
        every decode step, inside its graph: at fixed addresses and
        without reading anything on the host. Rows of ``padding_req_index`` may be written.
        """

    @property
    def drafts_are_valid(self) -> bool:
        """Whether every draft is sure to be a token id of the model.

        If not, what is not a token id is replaced by one, at a few more operators per step.
        """
        return False

    def admit(self, req_index: int, request: Request) -> None:
        """``request`` starts, or goes on after a preemption, in row ``req_index`` of the state."""
        return

    def learn(self, token_ids: Sequence[int]) -> None:
        """A request has ended with the output ``token_ids``."""
        return

    @property
    def reads_all_tokens(self) -> bool:
        """Whether it computes something for every token, as a model with a KV cache does.

        Then ``propose`` runs in decode steps without drafts too, and ``read`` after all others.
        """
        return False

    def observe(self, state: DecodeState, positions: torch.Tensor) -> None:
        """The model has computed the tokens of a decode step, at ``positions`` [R * Q].

        Runs inside the step's graph, if it ``reads_all_tokens``.
        """
        return

    def read(
        self,
        state: DecodeState,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """A step with prompts is done, of the rows in ``state``.

        ``input_ids`` and ``positions`` [T] are its tokens, ``metadata`` is what attention saw.
        The next token of each, sampled or given, is in ``state.token_ids``.
        """
        return

    def close(self) -> None:
        """Drop models and memory; nothing runs after this."""
        return

    def tensors(self) -> Sequence[torch.Tensor]:
        """All tensors that ``propose`` reads."""
        return ()
