"""Turns what each data-parallel rank would run into what all of them run, as this rank's graph.

``agreement.py`` decides the mode and the number of tokens; this module finds the plan's size for
them and the key of this rank's graph. All ranks have the same plan, fully captured, so they arrive
at the same mode and size without further communication.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ostinato.errors import BatchError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.parallel.agreement import Agreement, Reducer, StepAgreement, StepWish


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """What this rank runs, and [ranks] int32, on the CPU: how many tokens each rank runs."""

    choice: Choice
    num_tokens_across_dp: torch.Tensor


class _Common(NamedTuple):
    """A kind and size of graph, one of which each rank runs."""

    mode: CUDAGraphMode
    size: int
    uniform: bool  # a decode graph

    @classmethod
    def of(cls, choice: Choice) -> _Common:
        return cls(choice.mode, choice.padded_num_tokens, choice.descriptor.uniform)


class AgreedDispatch:
    """Agrees on each step with the ranks of ``comm``, which reduces CPU tensors.

    ``dispatch`` belongs to ``plan``. All ranks must call ``step`` equally often.
    """

    def __init__(
        self, comm: Reducer, plan: CapturePlan, dispatch: Callable[[BatchShape], Choice]
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._dispatch = dispatch
        self._decode_sizes: dict[frozenset[int], tuple[int, ...]] = {}  # by a step's query lengths

    def step(self, shape: BatchShape | None) -> AgreedStep | None:
        """What to run for this rank's batch ``shape`` (None: no work); returns None for no step.

        One all-reduce. A rank without work also gets a choice, if another rank has work.
        """
        own = None if shape is None else self._dispatch(shape)
        wish = StepWish.idle() if shape is None or own is None else StepWish.of(own, shape)
        agreed = Agreement().step(self._comm, wish)
        if not agreed.has_work:
            return None
        graph = self._graph_in_common(agreed)
        if graph is None:
            # A rank without work needs at least one token to join every collective.
            across = [self._plan.padded_tokens(max(n, 1)) for n in agreed.tokens_by_rank]
            choice = self._eager(shape, own, agreed, across[self._comm.index])
        else:
            across = [graph.size] * self._comm.size
            choice = self._own_graph(shape, own, agreed, graph)
        return AgreedStep(
            choice=choice, num_tokens_across_dp=torch.tensor(across, dtype=torch.int32)
        )

    def _graph_in_common(self, agreed: StepAgreement) -> _Common | None:
        """The best graph that the plan has for all ranks; None if there is none.

        Decode and mixed graphs of one size contain different collectives, so all run one kind.
        """
        mode, mixed = agreed.mode, self._plan.mode.mixed_mode()
        candidates: list[tuple[CUDAGraphMode, bool, tuple[int, ...]]] = []
        if mode is CUDAGraphMode.FULL and agreed.is_decode:
            candidates.append((mode, True, self._common_decode_sizes(agreed.query_lens)))
        if CUDAGraphMode.NONE.rank < mixed.rank <= mode.rank:
            candidates.append((mixed, False, self._plan.mixed_sizes))
        for candidate, uniform, sizes in candidates:
            index = bisect_left(sizes, agreed.num_tokens)
            if index < len(sizes):
                return _Common(candidate, sizes[index], uniform)
        return None

    def _common_decode_sizes(self, query_lens: frozenset[int]) -> tuple[int, ...]:
        """Sizes that have a decode graph for each of these query lengths."""
        if query_lens not in self._decode_sizes:
            by_length = [set(self._plan.decode_sizes_for(length)) for length in query_lens]
            common = set.intersection(*by_length) if by_length else set()
            self._decode_sizes[query_lens] = tuple(sorted(common))
        return self._decode_sizes[query_lens]

    def _eager(
        self,
        shape: BatchShape | None,
        own: Choice | None,
        agreed: StepAgreement,
        num_tokens: int,
    ) -> Choice:
        if own is not None and own.mode is CUDAGraphMode.NONE:
            return own
        wished = agreed.mode is CUDAGraphMode.NONE
        choice = Choice(
            mode=CUDAGraphMode.NONE,
            descriptor=BatchDescriptor.eager(
                num_tokens, 0 if shape is None else shape.num_active_loras
            ),
            reason=Reason.EAGER_ON_ANOTHER_RANK if wished else Reason.NO_COMMON_SIZE,
        )
        return self._as_decode_step(choice, shape)

    def _own_graph(
        self,
        shape: BatchShape | None,
        own: Choice | None,
        agreed: StepAgreement,
        graph: _Common,
    ) -> Choice:
        """This rank's graph of that kind and size, for the number of adapters in its batch."""
        mode, size, uniform = graph
        if own is not None and _Common.of(own) == graph:
            return own
        num_loras = 0 if shape is None else shape.num_active_loras
        if uniform:
            # A rank without work takes the smallest query length of the step.
            query_len = min(agreed.query_lens) if shape is None else shape.max_query_len
            padded = BatchShape(size, size // query_len, query_len, num_loras)
        else:
            padded = BatchShape(size, 1, size, num_loras, has_prompts=True)
        choice = self._dispatch(padded)
        if _Common.of(choice) != graph:
            raise BatchError(
                f"the ranks agreed on a {mode.name} graph of {size} tokens, but rank "
                f"{self._comm.index} of {self._comm.size} has {choice} for it; all ranks need the "
                "same plan, fully captured"
            )
        if own is None:
            return choice
        reason = own.reason
        if own.mode is not mode:
            reason = Reason.PIECES_ON_ANOTHER_RANK
        elif own.descriptor.uniform and not uniform:
            reason = Reason.MIXED_ON_ANOTHER_RANK
        choice = replace(choice, reason=reason)
        return choice if mode is CUDAGraphMode.FULL else self._as_decode_step(choice, shape)

    def _as_decode_step(self, choice: Choice, shape: BatchShape | None) -> Choice:
        """The same, run as a decode step if ``shape`` is one and its rows can be padded so far."""
        if shape is None or shape.num_tokens != shape.num_reqs * shape.max_query_len:
            return choice
        query_len, padded = shape.max_query_len, choice.padded_num_tokens
        if (
            shape.has_prompts
            or query_len not in self._plan.decode_query_lens
            or not self._plan.is_uniform(padded, query_len)
        ):
            return choice
        return replace(choice, uniform_decode=True, padded_num_reqs=padded // query_len)
