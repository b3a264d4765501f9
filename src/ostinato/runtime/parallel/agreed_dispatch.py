"""From what each data-parallel rank would run to what all of them run, as graphs of this rank.

``agreement.py`` says which mode and size; here is the key that a rank's plan has for them. All
ranks have the same plan, and have captured all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.plan import CapturePlan
from ostinato.runtime.parallel.agreement import Agreement, Reducer, StepAgreement, StepWish


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """What this rank runs, and [ranks] int32, on the CPU, how many tokens each rank runs."""

    choice: Choice
    num_tokens_across_dp: torch.Tensor


class AgreedDispatch:
    """Agrees on each step with the ranks of ``comm``, which reduces CPU tensors.

    ``dispatch`` is that of ``plan``. Every rank must call ``step`` as often as every other.
    """

    def __init__(
        self, comm: Reducer, plan: CapturePlan, dispatch: Callable[[BatchShape], Choice]
    ) -> None:
        if len(plan.decode_query_lens) > 1:
            raise ConfigError(
                f"ranks that step together decode one number of tokens a request, not one of "
                f"{list(plan.decode_query_lens)}"
            )
        self._comm = comm
        self._plan = plan
        self._dispatch = dispatch

    def step(self, own: Choice | None) -> AgreedStep | None:
        """What to run where ``own`` would be run alone; None: no work, on this rank or on any.

        One all-reduce. A rank without work gets a choice too, if another has any.
        """
        wish = StepWish.idle() if own is None else StepWish.of(own)
        agreed = Agreement().step(self._comm, wish)
        if not agreed.has_work:
            return None
        # What ranks with work wished for is padded already.
        across = [self._plan.padded_tokens(count) for count in agreed.num_tokens_across_dp]
        return AgreedStep(
            choice=self._choice(own, agreed, across[self._comm.index]),
            num_tokens_across_dp=torch.tensor(across, dtype=torch.int32),
        )

    def _choice(self, own: Choice | None, agreed: StepAgreement, num_tokens: int) -> Choice:
        if own is not None and own.mode is agreed.mode and own.padded_num_tokens == num_tokens:
            return own
        if agreed.mode is CUDAGraphMode.NONE:
            descriptor = BatchDescriptor(num_tokens)
            return Choice(
                mode=agreed.mode, descriptor=descriptor, reason=Reason.EAGER_ON_ANOTHER_RANK
            )
        choice = self._dispatch(self._shape(agreed.mode, num_tokens))
        if choice.mode is not agreed.mode or choice.padded_num_tokens != num_tokens:
            raise BatchError(
                f"the ranks agreed on a {agreed.mode.name} graph of {num_tokens} tokens, for which "
                f"rank {self._comm.index} of {self._comm.size} has {choice}; all ranks need the "
                "same plan, and all of it captured"
            )
        if own is not None and own.mode is not agreed.mode:
            return replace(choice, reason=Reason.PIECES_ON_ANOTHER_RANK)
        return choice

    def _shape(self, mode: CUDAGraphMode, num_tokens: int) -> BatchShape:
        """A batch that has the graph of ``mode`` and ``num_tokens``."""
        (query_len,) = self._plan.decode_query_lens
        if mode is CUDAGraphMode.FULL and self._plan.mode.separate_routine():
            return BatchShape(num_tokens, num_tokens // query_len, query_len)
        # A query length that no decode batch has.
        return BatchShape(num_tokens, 1, max(query_len, num_tokens) + 1)
