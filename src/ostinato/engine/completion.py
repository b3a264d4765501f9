"""One sequence of a request: made when the engine can use it, and what has come out of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ostinato.outputs import CompletionOutput
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import Request
from ostinato.text.detokenizer import Detokenizer

NUM_SEEDS = 2**63


@dataclass(eq=False)
class Completion:
    """One sequence on its way through the engine, and what has come out of it so far.

    ``output.token_ids`` grows with every step. ``output.text`` is complete when it has ended; until
    then ``read_text`` brings it up to date. Sequences with stop strings are read at every step.

    ``news``, if set, is told by the engine when it has ended, and with a watched request of every
    token.
    """

    request: Request
    output: CompletionOutput
    detokenizer: Detokenizer | None
    news: deque[Completion] | None = None

    @property
    def finished(self) -> bool:
        return self.output.finished

    def tell(self) -> None:
        """Something happened to it."""
        if self.news is not None:
            self.news.append(self)

    def read_text(self, *, final: bool = False) -> str | None:
        """Turn the tokens that came since it was last read into text; the stop string found."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            return None
        found = detokenizer.read(self.output.token_ids, self.request.params.min_tokens)
        if final and found is None:
            detokenizer.finish()
        self.output.text = detokenizer.text
        return found


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request that the engine will take, of which ``params.n`` sequences can be made."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    seed: int
    stop_token_ids: frozenset[int]
    tokenizer: Any

    def completion(self, index: int) -> Completion:
        """Make one of its sequences."""
        params = self.params
        request = Request(
            request_id=f"{self.request_id}.{index}",
            prompt_token_ids=self.prompt_token_ids,
            params=params,
            max_total_tokens=self.max_total_tokens,
            seed=_nth_seed(self.seed, index),
            stop_token_ids=self.stop_token_ids,
            watched=bool(params.stop) or params.logprobs is not None,
        )
        return Completion(
            request=request,
            output=CompletionOutput(
                index=index,
                token_ids=request.output_token_ids,  # one list: a token is written once
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            ),
            detokenizer=None if self.tokenizer is None else Detokenizer(self.tokenizer, params),
        )


def _nth_seed(seed: int, index: int) -> int:
    """The seed of one of several sequences of a request: no other request's, as good as surely."""
    if index == 0:
        return seed
    digest = blake2b(b"%d %d" % (seed, index), digest_size=8, person=b"sequence").digest()
    return int.from_bytes(digest, "little") % NUM_SEEDS
