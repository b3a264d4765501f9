"""From the shape of a batch to the graph that runs it, in constant time.

All answers are worked out beforehand, one table per kind of batch, so a dispatch is a few
comparisons and an index whatever the number of graphs. The tables follow the plan and the state of
its entries (captured, failed, disabled) and are rebuilt when that state changes, which after
start-up is never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.policy.sizes import padding_table

_Table = list[list[Choice]]  # [LoRA case][num_tokens]
_Chain = Callable[[int, int], Iterator[tuple[PlanEntry, Reason]]]  # (size, adapters) -> preferences


class Dispatcher:
    """Answers ``dispatch(shape)`` for one plan.

    Not captured yet means eager, with that reason; ``mark_captured`` opens an entry. Preference is
    always FULL, then PIECEWISE, then eager with the reason why the first choice was not possible.
    """

    def __init__(self, plan: CapturePlan) -> None:
        self.plan = plan
        self._planned = frozenset(plan.entries)
        self._captured: set[PlanEntry] = set()
        self._refused: dict[PlanEntry, Reason] = {}
        self._eager: dict[tuple[int, Reason], Choice] = {}
        self._lora_case_index = padding_table(plan.lora_cases)
        self._stale = True

    def dispatch(self, shape: BatchShape) -> Choice:
        """The graph that runs ``shape``, or eager, with the reason."""
        num_tokens, num_reqs, max_query_len, num_loras, blocked, has_prompts = shape
        if not 1 <= num_reqs <= num_tokens or num_loras < 0:
            raise BatchError(
                f"cannot dispatch {shape}: a batch has at least one request, a token or more for "
                "each, and no negative number of adapters; skip the step if there is nothing to run"
            )
        if self._stale:
            self._rebuild()
        if blocked:
            table = self._blocked
        elif (
            max_query_len in self._decode
            and num_tokens == max_query_len * num_reqs
            and not has_prompts
        ):
            table = self._decode[max_query_len]
        else:
            table = self._mixed
        if num_loras >= len(self._lora_case_index):
            why = Reason.TOO_MANY_LORAS if self.plan.entries else Reason.MODE_NONE
            return self._eager_choice(num_tokens, why)
        answers = table[self._lora_case_index[num_loras]]
        if num_tokens < len(answers):
            choice = answers[num_tokens]
            limit = choice.descriptor.num_reqs
            if limit is not None and num_reqs > limit:
                raise BatchError(
                    f"cannot dispatch {shape}: the plan is for at most {self.plan.max_num_seqs} "
                    "requests"
                )
            return choice
        return self._eager_choice(num_tokens, self._beyond_tables(shape))

    def mark_captured(self, entry: PlanEntry) -> None:
        self._check_planned(entry)
        self._captured.add(entry)
        self._refused.pop(entry, None)
        self._stale = True

    def mark_refused(self, entry: PlanEntry, reason: Reason) -> None:
        """Never choose ``entry`` again: its capture failed, or it was disabled."""
        self._check_planned(entry)
        if not reason.is_eager:
            raise ConfigError(f"{reason.name} is not a reason to run eagerly")
        self._captured.discard(entry)
        self._refused[entry] = reason
        self._stale = True

    def reset(self) -> None:
        """Forget what was captured; everything is eager until it is captured again."""
        self._captured.clear()
        self._refused.clear()
        self._stale = True

    def is_open(self, entry: PlanEntry) -> bool:
        """Whether the entry still waits for its capture."""
        return entry not in self._captured and entry not in self._refused

    @property
    def captured(self) -> frozenset[PlanEntry]:
        return frozenset(self._captured)

    def _check_planned(self, entry: PlanEntry) -> None:
        if entry not in self._planned:
            raise ConfigError(f"{entry} is not in the plan, so no batch could ever choose it")

    # --- building the tables -------------------------------------------------------------------

    def _rebuild(self) -> None:
        plan, cases = self.plan, self.plan.lora_cases
        self._mixed = [self._answers(self._mixed_chain, case) for case in cases]
        self._blocked = [self._answers(self._blocked_chain, case) for case in cases]
        # Without graphs of their own, decode batches are answered like any other.
        self._decode: dict[int, _Table] = {}
        if plan.mode.separate_routine():
            for query_len in plan.decode_query_lens:
                self._decode[query_len] = [self._decode_answers(query_len, case) for case in cases]
        self._stale = False

    def _decode_answers(self, query_len: int, num_loras: int) -> list[Choice]:
        own_sizes = self.plan.decode_sizes_for(query_len)
        own = padding_table(own_sizes)
        shared = padding_table(self.plan.sizes)

        def chain(num_tokens: int) -> Iterator[tuple[PlanEntry, Reason]]:
            if num_tokens < len(own):
                size = own_sizes[own[num_tokens]]
                descriptor = self.plan.decode_descriptor(size, query_len, num_loras)
                yield (
                    PlanEntry(mode=CUDAGraphMode.FULL, descriptor=descriptor),
                    Reason.UNIFORM_DECODE,
                )
            if num_tokens < len(shared):
                yield from self._mixed_chain(self.plan.sizes[shared[num_tokens]], num_loras)

        return [
            self._first_captured(count, chain(count), Reason.TOO_LARGE)
            for count in range(max(len(own), len(shared)))
        ]

    def _answers(self, chain: _Chain, num_loras: int) -> list[Choice]:
        fallback = self._no_graph_reason(blocked=chain == self._blocked_chain)
        sizes = self.plan.sizes
        return [
            self._first_captured(count, chain(sizes[index], num_loras), fallback)
            for count, index in enumerate(padding_table(sizes))
        ]

    def _mixed_chain(self, size: int, num_loras: int) -> Iterator[tuple[PlanEntry, Reason]]:
        mode = self.plan.mode.mixed_mode()
        if mode is not CUDAGraphMode.NONE:
            descriptor = self.plan.mixed_descriptor(size, num_loras)
            yield PlanEntry(mode=mode, descriptor=descriptor), Reason.MIXED

    def _blocked_chain(self, size: int, num_loras: int) -> Iterator[tuple[PlanEntry, Reason]]:
        for entry, _ in self._mixed_chain(size, num_loras):
            if entry.mode is CUDAGraphMode.PIECEWISE:
                yield entry, Reason.FULL_BLOCKED

    def _first_captured(
        self, num_tokens: int, chain: Iterator[tuple[PlanEntry, Reason]], fallback: Reason
    ) -> Choice:
        first_refusal: Reason | None = None
        for entry, reason in chain:
            if entry in self._captured:
                return Choice(mode=entry.mode, descriptor=entry.descriptor, reason=reason)
            first_refusal = first_refusal or self._refused.get(entry, Reason.NOT_CAPTURED)
        return self._eager_choice(max(num_tokens, 1), first_refusal or fallback)

    # --- eager answers -------------------------------------------------------------------------

    def _no_graph_reason(self, *, blocked: bool) -> Reason:
        if self.plan.mode is CUDAGraphMode.NONE:
            return Reason.MODE_NONE
        return Reason.ATTENTION if blocked else Reason.MIXED_NOT_PLANNED

    def _beyond_tables(self, shape: BatchShape) -> Reason:
        """Why a batch larger than every table runs eagerly."""
        if self.plan.mode is CUDAGraphMode.NONE:
            return Reason.MODE_NONE
        mixed_has_graphs = self.plan.mode.mixed_mode() is not CUDAGraphMode.NONE
        uniform = (
            shape.max_query_len in self.plan.decode_query_lens
            and shape.num_tokens == shape.max_query_len * shape.num_reqs
            and not shape.has_prompts
        )
        if mixed_has_graphs or (uniform and not shape.attention_blocks_full):
            return Reason.TOO_LARGE
        return self._no_graph_reason(blocked=shape.attention_blocks_full)

    def _eager_choice(self, num_tokens: int, reason: Reason) -> Choice:
        key = (num_tokens, reason)
        if key not in self._eager:
            descriptor = BatchDescriptor(self.plan.padded_tokens(num_tokens))
            self._eager[key] = Choice(mode=CUDAGraphMode.NONE, descriptor=descriptor, reason=reason)
        return self._eager[key]
