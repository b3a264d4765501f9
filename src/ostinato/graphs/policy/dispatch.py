"""Finds the graph for the shape of a batch in constant time, and counts what ran.

All answers are precomputed, in one table per kind of batch, so a dispatch is a few comparisons and
an index for any number of graphs. The tables follow the plan and the state of its entries
(captured, failed, disabled). After a change of that state, call ``build``; otherwise the next
dispatch does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.policy.sizes import padding_table

# By number of tokens: a graph, or why there is none.
_Answers = list[Choice | Reason]

_MOST_EAGER = 1 << 13  # eager choices that are kept: callables may get any number of rows


class Dispatcher:
    """Answers ``dispatch(shape)`` for one plan.

    An entry that is not captured yet runs eagerly, with that reason; ``mark_captured`` opens it.
    Preference is always FULL, then PIECEWISE, then eager with the reason why the first choice was
    not possible.

    ``model`` is the index of the model in its choices. ``fixed_reqs``: PIECEWISE graphs too have a
    fixed number of rows, as captured.
    """

    def __init__(self, plan: CapturePlan, *, model: int = 0, fixed_reqs: bool = False) -> None:
        self.plan = plan
        self._model = model
        self._fixed_reqs = fixed_reqs
        self._planned = frozenset(plan.entries)
        self._captured: set[PlanEntry] = set()
        self._refused: dict[PlanEntry, Reason] = {}
        self._eager: dict[tuple[int, Reason, int, int], Choice] = {}
        self._lora_case_index = padding_table(plan.lora_cases)
        self._query_lens = frozenset(plan.decode_query_lens)
        # By query length of uniform decode batches (0: mixed), by whether attention blocks FULL;
        # then by LoRA case.
        self._tables: dict[tuple[int, bool], list[_Answers]] = {}
        self._stale = True

    def dispatch(self, shape: BatchShape) -> Choice:
        """The graph that runs ``shape``, or eager, with the reason."""
        num_tokens, num_reqs, max_query_len, num_loras, blocked, has_prompts = shape
        if not 1 <= num_reqs <= num_tokens or num_loras < 0:
            raise BatchError(
                f"cannot dispatch {shape}: a batch needs at least one request, at least one token "
                "for each, and num_active_loras >= 0; skip the step if there is nothing to run"
            )
        if self._stale:
            self.build()
        is_decode = (
            max_query_len in self._query_lens
            and num_tokens == max_query_len * num_reqs
            and not has_prompts
        )
        query_len = max_query_len if is_decode else 0
        if num_loras >= len(self._lora_case_index):
            why = Reason.TOO_MANY_LORAS if self.plan.entries else Reason.MODE_NONE
            return self._eager_choice(num_tokens, why, query_len, num_loras)
        answers = self._tables[query_len, blocked][self._lora_case_index[num_loras]]
        if num_tokens >= len(answers):
            why = self._beyond_tables(query_len, blocked)
            return self._eager_choice(num_tokens, why, query_len, num_loras)
        answer = answers[num_tokens]
        if isinstance(answer, Reason):
            return self._eager_choice(num_tokens, answer, query_len, num_loras)
        limit = answer.padded_num_reqs
        if limit is not None and num_reqs > limit:
            raise BatchError(
                f"cannot dispatch {shape}: the plan is for at most {self.plan.max_num_seqs} "
                "requests"
            )
        return answer

    def mark_captured(self, entry: PlanEntry) -> None:
        """From now on ``entry`` may be chosen."""
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
        """Forget all captures; every batch runs eagerly until graphs are captured again."""
        self._captured.clear()
        self._refused.clear()
        self._stale = True

    def is_open(self, entry: PlanEntry) -> bool:
        """Whether the entry is neither captured nor failed."""
        return entry not in self._captured and entry not in self._refused

    @property
    def captured(self) -> frozenset[PlanEntry]:
        """The entries that may be chosen."""
        return frozenset(self._captured)

    def check_has(self, plan: CapturePlan) -> None:
        """Raise unless every entry of ``plan`` is one of the dispatcher's."""
        for entry in plan.entries:
            self._check_planned(entry)

    def _check_planned(self, entry: PlanEntry) -> None:
        if entry not in self._planned:
            raise ConfigError(
                f"{entry} is not in the plan of the dispatcher, so it can never be chosen; build "
                "the dispatcher from the same plan"
            )

    # --- building the tables -------------------------------------------------------------------

    def build(self) -> None:
        """Compute all answers, if the state of the plan has changed since the last build."""
        if not self._stale:
            return
        for query_len in (0, *self.plan.decode_query_lens):
            for blocked in (False, True):
                self._tables[query_len, blocked] = [
                    self._answers(query_len, blocked, case) for case in self.plan.lora_cases
                ]
        self._stale = False

    def _answers(self, query_len: int, blocked: bool, num_loras: int) -> _Answers:
        """The answer for every number of tokens up to the largest size."""
        plan = self.plan
        # Without decode graphs, decode batches are answered like any other.
        separate = query_len > 0 and plan.mode.separate_routine() and not blocked
        own_sizes = plan.decode_sizes_for(query_len) if separate else ()
        fallback = Reason.TOO_LARGE if separate else self._no_graph_reason(blocked=blocked)
        answers: _Answers = []
        for size in sorted({*own_sizes, *plan.mixed_sizes}):  # answers are constant up to each size
            chain = self._chain(size, own_sizes, query_len, blocked, num_loras)
            answer = self._first_captured(chain, query_len, fallback)
            answers += [answer] * (size + 1 - len(answers))
        return answers

    def _chain(
        self, num_tokens: int, own_sizes: tuple[int, ...], query_len: int, blocked: bool, loras: int
    ) -> Iterator[tuple[PlanEntry, Reason]]:
        """The entries that hold ``num_tokens``, best first."""
        plan, mixed = self.plan, self.plan.mode.mixed_mode()
        if own_sizes and num_tokens <= own_sizes[-1]:
            own = own_sizes[bisect_left(own_sizes, num_tokens)]
            descriptor = plan.decode_descriptor(own, query_len, loras)
            entry = PlanEntry(mode=CUDAGraphMode.FULL, descriptor=descriptor)
            yield entry, Reason.UNIFORM_DECODE
        is_possible = (
            mixed is CUDAGraphMode.PIECEWISE if blocked else mixed is not CUDAGraphMode.NONE
        )
        sizes = plan.mixed_sizes
        if is_possible and sizes and num_tokens <= sizes[-1]:
            shared = sizes[bisect_left(sizes, num_tokens)]
            descriptor = plan.mixed_descriptor(shared, loras)
            reason = Reason.FULL_BLOCKED if blocked else Reason.MIXED
            yield PlanEntry(mode=mixed, descriptor=descriptor), reason

    def _first_captured(
        self, chain: Iterator[tuple[PlanEntry, Reason]], query_len: int, fallback: Reason
    ) -> Choice | Reason:
        first_refusal: Reason | None = None
        for entry, reason in chain:
            if entry in self._captured:
                return self._graph_choice(entry, reason, query_len)
            if self._refused.get(entry) is Reason.QUARANTINED:
                return Reason.QUARANTINED  # what is wrong with it may be wrong with the next too
            first_refusal = first_refusal or self._refused.get(entry, Reason.NOT_CAPTURED)
        return first_refusal or fallback

    def _graph_choice(self, entry: PlanEntry, reason: Reason, query_len: int) -> Choice:
        key, num_reqs = entry.descriptor, entry.descriptor.num_reqs
        uniform = key.uniform
        if entry.mode is CUDAGraphMode.PIECEWISE:
            uniform = self.plan.is_uniform(key.num_tokens, query_len)
            if uniform:
                num_reqs = key.num_tokens // query_len
            elif self._fixed_reqs:
                num_reqs = min(key.num_tokens, self.plan.max_num_seqs)
        return Choice(
            mode=entry.mode,
            descriptor=key,
            reason=reason,
            uniform_decode=uniform,
            padded_num_reqs=num_reqs,
            model=self._model,
        )

    # --- eager answers -------------------------------------------------------------------------

    def _no_graph_reason(self, *, blocked: bool) -> Reason:
        if self.plan.mode is CUDAGraphMode.NONE:
            return Reason.MODE_NONE
        return Reason.ATTENTION if blocked else Reason.MIXED_NOT_PLANNED

    def _beyond_tables(self, query_len: int, blocked: bool) -> Reason:
        """Why a batch larger than every table runs eagerly."""
        if self.plan.mode is CUDAGraphMode.NONE:
            return Reason.MODE_NONE
        mixed_has_graphs = self.plan.mode.mixed_mode() is not CUDAGraphMode.NONE
        if mixed_has_graphs or (query_len and not blocked):
            return Reason.TOO_LARGE
        return self._no_graph_reason(blocked=blocked)

    def _eager_choice(
        self, num_tokens: int, reason: Reason, query_len: int, num_loras: int
    ) -> Choice:
        key = (num_tokens, reason, query_len, num_loras)
        if key not in self._eager:
            if len(self._eager) >= _MOST_EAGER:
                self._eager.clear()
            padded = self.plan.padded_tokens(num_tokens)
            uniform = self.plan.is_uniform(padded, query_len)
            self._eager[key] = Choice(
                mode=CUDAGraphMode.NONE,
                descriptor=BatchDescriptor.eager(padded, num_loras),
                reason=reason,
                uniform_decode=uniform,
                padded_num_reqs=padded // query_len if uniform else None,
                model=self._model,
            )
        return self._eager[key]


@dataclass(slots=True)
class RunTime:
    """How long batches took together: ``num_runs`` that were timed, and their ``seconds``."""

    num_runs: int = 0
    seconds: float = 0.0


class DispatchStats:
    """Counts replays and padding tokens by key, and eager batches by reason.

    ``times``: by the same, of batches that were timed. What waits for a batch adds its time to the
    ``run_time`` of the moment when it was recorded. ``last_used``: when a key was last replayed, as
    ``time.monotonic()``. A repeated choice, as in decoding, costs two additions and a look at the
    clock.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._replays: Counter[BatchDescriptor] = Counter()
        self._padding: Counter[BatchDescriptor] = Counter()
        self._last_used: dict[BatchDescriptor, float] = {}
        self._eager: Counter[Reason] = Counter()
        self._replayed_tokens = 0
        self._last: Choice | None = None
        self._shapes: Counter[tuple[bool, int]] = Counter()
        self._num_runs = self._num_tokens = 0  # of the last batch, not yet counted above
        self._last_run = 0.0
        self.times: dict[BatchDescriptor | Reason, RunTime] = {}
        self.run_time = RunTime()

    def record(self, choice: Choice, num_tokens: int) -> None:
        if choice is not self._last or num_tokens != self._num_tokens:
            self._count_last()
            self._last, self._num_tokens = choice, num_tokens
            key = choice.reason if choice.mode is CUDAGraphMode.NONE else choice.descriptor
            self.run_time = self.times.setdefault(key, RunTime())
        self._num_runs += 1
        self._last_run = monotonic()

    def _count_last(self) -> None:
        choice, num_runs = self._last, self._num_runs
        num_tokens, self._num_runs = self._num_tokens * num_runs, 0
        if choice is None or num_runs == 0:
            return
        self._shapes[choice.uniform_decode, self._num_tokens] += num_runs
        if choice.mode is CUDAGraphMode.NONE:
            self._eager[choice.reason] += num_runs
            return
        self._replays[choice.descriptor] += num_runs
        self._replayed_tokens += num_tokens
        self._padding[choice.descriptor] += choice.padded_num_tokens * num_runs - num_tokens
        self._last_used[choice.descriptor] = self._last_run

    @property
    def replays(self) -> Counter[BatchDescriptor]:
        self._count_last()
        return self._replays

    @property
    def shapes(self) -> Counter[tuple[bool, int]]:
        """Batches by their number of tokens before padding, and by whether they decode."""
        self._count_last()
        return self._shapes

    @property
    def eager(self) -> Counter[Reason]:
        self._count_last()
        return self._eager

    @property
    def replayed_tokens(self) -> int:
        self._count_last()
        return self._replayed_tokens

    @property
    def padding_tokens(self) -> int:
        return self.padding.total()

    @property
    def padding(self) -> Counter[BatchDescriptor]:
        self._count_last()
        return self._padding

    @property
    def last_used(self) -> dict[BatchDescriptor, float]:
        self._count_last()
        return self._last_used

    @property
    def hits(self) -> int:
        """Batches that ran through a graph."""
        return self.replays.total()

    @property
    def misses(self) -> int:
        """Batches that ran eagerly."""
        return self.eager.total()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Replayed batches, eager batches, replayed tokens, padding tokens."""
        return self.hits, self.misses, self.replayed_tokens, self.padding_tokens

    @property
    def padding_fraction(self) -> float:
        """The fraction of replayed rows that was padding."""
        total = self.replayed_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0
