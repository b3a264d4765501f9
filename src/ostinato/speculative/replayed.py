"""Proposes what is known to come next, right at a set rate: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.errors import ConfigError
from ostinato.ops.decode_state import DecodeState
from ostinato.ops.sampling.counter_random import WORD_BITS, random_words, spread_seed
from ostinato.scheduling.request import Request
from ostinato.speculative.proposer import Proposer, ProposerContext


class ReplayProposer(Proposer):
    """Replays ``texts``, each a prompt with its output, for requests that start from then on."""

    def __init__(
        self,
        context: ProposerContext,
        *,
        texts: Sequence[Sequence[int]],
        acceptance: float,
        seed: int,
    ) -> None:
        self.texts = [list(text) for text in texts]
        largest = max((max(text, default=0) for text in self.texts), default=0)
        if largest >= context.vocab_size:
            raise ConfigError(
                f"texts of ReplayedDrafts have the token {largest}, but token ids of this model go "
                f"from 0 to {context.vocab_size - 1}"
            )
        self._vocab_size = context.vocab_size
        self._key = spread_seed(seed)
        self._threshold = torch.zeros((), dtype=torch.int64, device=context.device)
        self.set_acceptance(acceptance)
        width = context.max_model_len + 1 + context.max_num_drafts
        self._rows = torch.zeros(
            (context.num_rows, width), dtype=torch.int32, device=context.device
        )
        self._is_known = torch.zeros_like(self._rows, dtype=torch.bool)

    def set_acceptance(self, acceptance: float) -> None:
        """Change the rate of right drafts from the next step on."""
        self._threshold.fill_(int(acceptance * (1 << WORD_BITS)))

    @property
    def drafts_are_valid(self) -> bool:
        return True

    def propose(self, state: DecodeState) -> None:
        req_indices, num_drafts = state.req_indices, state.query_len - 1
        last = state.num_computed[req_indices].long()
        columns = last.unsqueeze(1) + 1 + torch.arange(num_drafts, device=last.device)
        rows = req_indices.unsqueeze(1)
        words = random_words(req_indices + self._key, last, 0, num_drafts)
        is_right = (words < self._threshold) & self._is_known[rows, columns]
        token = self._rows[rows, columns]
        wrong = torch.remainder(token + 1, self._vocab_size)
        state.token_ids[rows, columns] = torch.where(is_right, token, wrong)

    def admit(self, req_index: int, request: Request) -> None:
        prompt = request.prompt_token_ids
        text = next((text for text in self.texts if text[: len(prompt)] == prompt), [])
        self._is_known[req_index].zero_()
        self._is_known[req_index, : len(text)] = True
        source = torch.tensor(text[: self._rows.shape[1]], dtype=torch.int32)
        self._rows[req_index, : len(source)].copy_(source, non_blocking=True)

    def tensors(self) -> Sequence[torch.Tensor]:
        return self._rows, self._is_known, self._threshold
