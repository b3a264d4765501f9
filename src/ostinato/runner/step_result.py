"""What a step gives the host: tokens, log-probabilities where a request asked for them, and to an
observer the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from ostinato.runner.host_copy import Awaited, HostCopy
from ostinato.sampling.sampler import SamplerOutput
from ostinato.scheduling.schedule_plan import IntArray


@dataclass(frozen=True, kw_only=True)
class SampledLogits:
    """What one step samples from: ``logits`` [N, V] as the model made them, no padding among them.

    Row i is of request ``request_ids[i]``. They are not yet biased, penalised or divided by a
    temperature. The next step may overwrite them, so work on the current stream or clone them.
    """

    request_ids: Sequence[str]
    logits: torch.Tensor


LogitsObserver: TypeAlias = Callable[[SampledLogits], None]


class StepResult:
    """The results of one step on their way to the host; reading them waits for that step alone.

    ``copies``: of the tokens [num_samples], in plan order, where any request gets one; then, of the
    rows at ``filtered_rows``, the tokens and values of their logprobs, where anybody asked.
    """

    def __init__(self, copies: Awaited, filtered_rows: Sequence[int] = ()) -> None:
        self._copies = copies
        self._filtered_rows = filtered_rows
        self._logprobs: dict[int, tuple[list[int], list[float]]] | None = None  # by row

    @classmethod
    def sampled(
        cls, token_ids: torch.Tensor, filtered: SamplerOutput, filtered_rows: Sequence[int]
    ) -> StepResult:
        """Of a step with rows that went through the full sampler."""
        tensors = [token_ids]
        if filtered.logprobs is not None:
            assert filtered.logprob_token_ids is not None
            tensors += [filtered.logprob_token_ids, filtered.logprobs]
        return cls(HostCopy(*tensors), filtered_rows)

    def token_ids(self) -> IntArray:
        """The tokens, once the step is done."""
        copies = self._copies.wait()
        return copies[0].numpy() if copies else np.empty(0, dtype=np.int64)

    def logprobs(self, row: int, num_top: int) -> list[tuple[int, float]]:
        """The sampled token and the ``num_top`` most likely ones of one row, which asked."""
        if self._logprobs is None:
            _, tokens, values = self._copies.wait()
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            self._logprobs = dict(zip(self._filtered_rows, pairs, strict=True))
        tokens_of, values_of = self._logprobs[row]
        return list(zip(tokens_of[: 1 + num_top], values_of[: 1 + num_top], strict=True))
