"""What a step gives the host: tokens, and log-probabilities where somebody asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ostinato.runtime.host_copy import HostCopy
from ostinato.runtime.sampler import SamplerOutput
from ostinato.runtime.schedule_plan import IntArray


class StepResult:
    """The results of one step on their way to the host; reading them waits for that step alone.

    ``token_ids`` [num_samples] on the device, in plan order, or None where no request gets one.
    ``filtered`` is what the full sampler made for the rows at ``filtered_rows``.
    """

    def __init__(
        self,
        token_ids: torch.Tensor | None,
        filtered: SamplerOutput | None = None,
        filtered_rows: Sequence[int] = (),
    ) -> None:
        tensors = [] if token_ids is None else [token_ids]
        if filtered is not None and filtered.logprobs is not None:
            assert filtered.logprob_token_ids is not None
            tensors += [filtered.logprob_token_ids, filtered.logprobs]
        self._copy = HostCopy(*tensors)
        self._place = {row: place for place, row in enumerate(filtered_rows)}
        self._logprobs: tuple[list[list[int]], list[list[float]]] | None = None

    def token_ids(self) -> IntArray:
        """The tokens, once the step is done."""
        copies = self._copy.wait()
        return copies[0].numpy() if copies else np.empty(0, dtype=np.int64)

    def logprobs(self, row: int, num_top: int) -> list[tuple[int, float]]:
        """The sampled token and the ``num_top`` most likely ones of one row, which asked."""
        if self._logprobs is None:
            _, tokens, values = self._copy.wait()
            self._logprobs = tokens.tolist(), values.tolist()
        place, kept = self._place[row], slice(1 + num_top)
        tokens_of, values_of = self._logprobs
        return list(zip(tokens_of[place][kept], values_of[place][kept], strict=True))
