"""One sequence of a request and its output so far; created when the engine can run it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ostinato.lora.adapter_slots import LoadedAdapter
from ostinato.outputs import CompletionOutput
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import NO_LORA, Request
from ostinato.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from ostinato.vision.prompt_images import PromptImages

NUM_SEEDS = 2**63


@dataclass(eq=False)
class Completion:
    """One sequence in the engine, and its output so far.

    ``output.token_ids`` grows with every step. ``output.text`` is complete once the sequence ends;
    until then ``read_text`` updates it. The engine reads sequences with stop strings every step.

    The engine appends the completion to ``news``, if set, when it ends, and on every token if its
    request is watched.
    """

    request: Request
    output: CompletionOutput
    detokenizer: Detokenizer | None
    news: deque[Completion] | None = None

    @property
    def finished(self) -> bool:
        return self.output.finished

    def tell(self) -> None:
        """Append this completion to ``news``."""
        if self.news is not None:
            self.news.append(self)

    def read_text(self, *, final: bool = False) -> str | None:
        """Decode the tokens added since the last call; return the stop string found, if any.

        Tokens after the one that completes a stop string are dropped: a step may add several.
        """
        detokenizer = self.detokenizer
        if detokenizer is None:
            return None
        found = detokenizer.read(self.output.token_ids, self.request.params.min_tokens)
        if found is not None:
            del self.output.token_ids[detokenizer.num_read :]
        if final and found is None:
            detokenizer.finish()
        self.output.text = detokenizer.text
        return found

    def forget_text(self) -> None:
        """Decode all tokens anew at the next ``read_text``: the last one was interrupted."""
        if self.detokenizer is not None:
            self.detokenizer = self.detokenizer.anew()


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A validated request, from which ``params.n`` sequences can be created."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    seed: int
    stop_token_ids: frozenset[int]
    tokenizer: Any
    adapter: LoadedAdapter | None = None
    images: PromptImages | None = None

    def completion(self, index: int) -> Completion:
        """Create the sequence with this index."""
        params = self.params
        request = Request(
            request_id=f"{self.request_id}.{index}",
            prompt_token_ids=self.prompt_token_ids,
            params=params,
            max_total_tokens=self.max_total_tokens,
            seed=_nth_seed(self.seed, index),
            stop_token_ids=self.stop_token_ids,
            lora_slot=NO_LORA if self.adapter is None else self.adapter.slot,
            cache_salt=b"" if self.adapter is None else self.adapter.cache_salt,
            contents=() if self.images is None else self.images.contents,
            images=self.images,
            watched=bool(params.stop) or params.logprobs is not None,
        )
        return Completion(
            request=request,
            output=CompletionOutput(
                index=index,
                token_ids=request.output_token_ids,  # shared, so each token is written once
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            ),
            detokenizer=None if self.tokenizer is None else Detokenizer(self.tokenizer, params),
        )


def _nth_seed(seed: int, index: int) -> int:
    """The seed of one sequence of a request; practically never equal to another request's."""
    if index == 0:
        return seed
    digest = blake2b(b"%d %d" % (seed, index), digest_size=8, person=b"sequence").digest()
    return int.from_bytes(digest, "little") % NUM_SEEDS
