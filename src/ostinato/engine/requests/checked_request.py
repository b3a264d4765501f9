"""Requests that fit the model: checked before any of a call runs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ostinato.engine.requests.completion import Completion
from ostinato.errors import RequestError
from ostinato.lora.adapter_slots import LoadedAdapter
from ostinato.outputs import CompletionOutput
from ostinato.quoting import shown
from ostinato.sampling.sampling_state import STOP_IDS_WIDTH
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.request import NO_LORA, Request
from ostinato.structured.constraint import Constraint
from ostinato.structured.grammars import Grammars
from ostinato.text.detokenizer import Detokenizer
from ostinato.text.prompts import check_num_tokens, check_token_ids

if TYPE_CHECKING:
    from ostinato.vision.prompt_images import PromptImages

_NUM_SEEDS = 2**63


class RequestChecks:
    """Checks requests against a model; gives each an id, and a seed if it has none."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Any,
        seed: int,
        grammars: Grammars,
    ) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()

    def check(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        name: str,
        eos_token_ids: frozenset[int],
        adapter: LoadedAdapter | None,
        images: PromptImages | None,
    ) -> CheckedRequest:
        """The request of ``prompt``, which errors call ``name``. Raises RequestError.

        ``eos_token_ids`` end it, unless its parameters ignore them.
        """
        check_token_ids(name, prompt, self._vocab_size, self._tokenizer)
        check_num_tokens(name, len(prompt), self._max_model_len)
        self._check_params(params)
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        stops = frozenset(params.stop_token_ids) | eos
        if params.min_tokens and len(stops) > STOP_IDS_WIDTH:
            raise RequestError(
                f"{name} has min_tokens with {len(stops)} stop_token_ids and end-of-sequence "
                f"tokens, but at most {STOP_IDS_WIDTH} can be suppressed; give fewer "
                "stop_token_ids, or leave min_tokens out"
            )
        return CheckedRequest(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=prompt,
            params=params,
            max_total_tokens=limit,
            seed=self._seeds.randrange(_NUM_SEEDS) if params.seed is None else params.seed,
            stop_token_ids=stops,
            tokenizer=self._tokenizer,
            adapter=adapter,
            images=images,
            grammars=self._grammars,
        )

    def _check_params(self, params: SamplingParams) -> None:
        named = {"logit_bias": params.logit_bias or {}, "stop_token_ids": params.stop_token_ids}
        for name, tokens in named.items():
            for token in tokens:
                if token >= self._vocab_size:
                    raise RequestError(
                        f"{name} names token {shown(token)}; token ids go from 0 to "
                        f"{self._vocab_size - 1}"
                    )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"stop strings {shown(params.stop)} need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        if params.structure is not None:
            self._grammars.compile(params.structure)


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
    grammars: Grammars
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
            constraint=self._constraint(),
            watched=bool(params.stop)
            or params.logprobs is not None
            or params.structure is not None,
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

    def _constraint(self) -> Constraint | None:
        wanted = self.params.structure
        if wanted is None:
            return None
        return self.grammars.constraint(wanted, ignore_eos=self.params.ignore_eos)


def _nth_seed(seed: int, index: int) -> int:
    """The seed of one sequence of a request; practically never equal to another request's."""
    if index == 0:
        return seed
    digest = blake2b(b"%d %d" % (seed, index), digest_size=8, person=b"sequence").digest()
    return int.from_bytes(digest, "little") % _NUM_SEEDS
