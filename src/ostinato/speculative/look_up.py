"""Proposes what followed the last tokens of a request before: in its own text or in past output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.ops.decode_state import DecodeState
from ostinato.ops.sampling.drafts import LookUp, look_up_drafts
from ostinato.speculative.proposer import Proposer, ProposerContext

_SEPARATOR = -1


class LookUpProposer(Proposer):
    """Searches on the device, by ``look_up_drafts``. The history is a ring of ``history_len``."""

    def __init__(
        self, context: ProposerContext, *, min_match: int, max_match: int, history_len: int
    ) -> None:
        history = torch.full((history_len,), _SEPARATOR, dtype=torch.int32, device=context.device)
        self._where = LookUp(history, min_match, max_match)
        self._next = 0  # where the next output goes in the history

    @property
    def drafts_are_valid(self) -> bool:
        return True

    def propose(self, state: DecodeState) -> None:
        look_up_drafts(state, self._where)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Write the output over the oldest tokens of the history, if there is one."""
        history = self._where.history
        tokens = [*token_ids[-(len(history) - 1) :], _SEPARATOR] if len(history) > 1 else []
        if self._next + len(tokens) > len(history):
            history[self._next :].fill_(_SEPARATOR)
            self._next = 0
        if tokens:
            end = self._next + len(tokens)
            source = torch.tensor(tokens, dtype=torch.int32)
            history[self._next : end].copy_(source, non_blocking=True)
            self._next = end

    def tensors(self) -> Sequence[torch.Tensor]:
        return (self._where.history,)
