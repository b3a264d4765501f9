"""Runs one model on several ranks, step by step: rank 0 leads, the others follow.

The scheduler is on rank 0. It sends each step's plan to the others before it runs the step itself;
every rank updates its request state from the plan, chooses the same graph, and runs it. No token is
sent: all ranks have the same logits, and sampling noise is a function of seed and position. So all
ranks sample the same tokens and write them to their own state, where the next step finds them. A
sharded LM head is gathered, which makes logits bitwise equal; with tensor parallelism of 1 each
rank computes them in full, which gives equal results on GPUs of the same model. Drafts are not sent
either: each rank looks them up in its own state, and rank 0 sends the outputs to learn from.

With several replicas, rank 0 has a scheduler for each. One message carries the plans of all, every
rank runs that of its replica, and the results of other replicas are sent back
(``replica_results.py``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from ostinato.errors import SchedulingError
from ostinato.graphs.capture.pool import GraphPool
from ostinato.loading.update import WeightUpdate
from ostinato.lora.adapter_weights import Matrices
from ostinato.ranks.plan_message import (
    Kind,
    PlanDecoder,
    PlanEncoder,
    ReplicaEncoder,
    decode_outputs,
    encode_outputs,
    message_of_replica,
    to_bytes,
    to_words,
)
from ostinato.ranks.replica_results import RemoteResult, ResultReceiver, ResultSender
from ostinato.ranks.watch.interrupts import uninterrupted
from ostinato.ranks.world import World
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.step_result import ResultRing, StepResult
from ostinato.scheduling.step_plan import IntArray, StepPlan

_NOTHING = np.empty(0, dtype=np.int64)


class RankRunner(ModelRunner):
    """One rank's runner in ``world``. After ``begin``, closing it leaves the world.

    ``num_ahead``: how many steps are started before the results of a step are read.
    """

    has_other_ranks = True

    def __init__(self, *args: Any, world: World, num_ahead: int = 0, **options: Any) -> None:
        super().__init__(*args, agreement=world.replica_agreement, **options)
        self._world = world
        self._num_ahead = num_ahead
        self._leave: Callable[[], object] = lambda: None
        self._has_begun = False

    def begin(self) -> None:
        """All ranks are ready. From now on a runner that is garbage-collected leaves the world."""
        self._has_begun = True
        self._leave = weakref.finalize(self, _leave, self._world, self.pool)

    def _run_no_plan(self) -> None:
        """Take part in a step of other replicas, if all step together."""
        if self._world.replica_agreement is not None:
            self.run_idle()

    def _load_of_all(self, *, reset: bool) -> dict[int, list[int]]:
        """The sum of what all ranks counted; a token counts on one of them."""
        own = super().expert_load(reset=reset)
        if not own:
            return own
        summed = self._world.control.all_reduce(torch.tensor(list(own.values())))
        return dict(zip(own, summed.tolist(), strict=True))

    def _on_all_ranks(self, succeeded: bool) -> bool:
        failed = torch.tensor([not succeeded], dtype=torch.int64)
        return not self._world.control.all_reduce(failed).item()

    def check(self) -> None:
        self._world.check()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._leave()


class LeadingRunner(RankRunner):
    """Rank 0's runner: the other ranks repeat what it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._encoder = PlanEncoder()
        world = self._world
        self._replicas = ReplicaEncoder(world.num_replicas)
        self._receivers = [
            ResultReceiver(world.control, replica * world.layout.world_size)
            for replica in range(1, world.num_replicas)
        ]
        self._num_steps = self._num_flushed = 0  # of all replicas
        self._ended: list[list[int]] = []  # outputs to learn before the next step

    def run(self, plan: StepPlan) -> StepResult:
        assert not self._receivers, "replicas run together, by run_replicas"
        # A step started on one rank must finish on all, or the ranks are out of step for good.
        with uninterrupted(), self._world.together():
            self._learn_ended()
            self._world.progress.announce()
            self._world.channel.send(*self._encoder.encode(plan))
            return _AwaitedResult(super().run(plan), self._world)

    def run_replicas(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Run a step of all replicas: one plan for each, which may be empty for some."""
        with uninterrupted(), self._world.together():
            step = self._num_steps = self._num_steps + 1
            for receiver in self._receivers:  # unread results of steps that were rolled back
                receiver.receive_up_to(step - self._num_ahead - 1)
            self._learn_ended()
            self._world.progress.announce()
            self._world.channel.send(*self._replicas.encode(plans))
            others: list[StepResult] = []
            for receiver, plan in zip(self._receivers, plans[1:], strict=True):
                result = RemoteResult(step, plan.num_samples, partial(self._receive, receiver))
                receiver.expect(result)
                others.append(result)
            if plans[0].num_tokens:
                return [_AwaitedResult(super().run(plans[0]), self._world), *others]
            self._run_no_plan()
            return [StepResult(), *others]

    def learn(self, token_ids: Sequence[int]) -> None:
        """All ranks, of all replicas, learn it before their next step."""
        if self.memory.proposer is not None:
            self._ended.append(list(token_ids))

    def _learn_ended(self) -> None:
        if self._ended:
            self._world.progress.announce()
            self._world.channel.send(*encode_outputs(self._ended))
            for token_ids in self._ended:
                super().learn(token_ids)
            self._ended.clear()

    def _receive(self, receiver: ResultReceiver, step: int) -> None:
        with uninterrupted(), self._world.together(processes=False):
            if self._num_flushed < step and self._num_steps < step + self._num_ahead:
                self._world.progress.announce()
                self._world.channel.send(Kind.SEND_RESULTS, _NOTHING)
                self._num_flushed = self._num_steps
            receiver.receive_up_to(step)
            self._world.check(processes=False)

    def replica_counts(self) -> list[Sequence[int]]:
        """``DispatchStats.counts`` of every replica."""
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(Kind.SEND_COUNTS, _NOTHING)
            self._num_flushed = self._num_steps
            others = [receiver.receive_counts() for receiver in self._receivers]
            return [self.stats.counts, *others]

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(Kind.EXPERT_LOAD, np.array([reset], dtype=np.int64))
            return self._load_of_all(reset=reset)

    def load_adapter(self, slot: int, matrices: Matrices) -> None:
        tensors = {}
        for name, pair in matrices.items():
            for part, tensor in zip("ab", pair, strict=True):
                tensors[f"{part} {name}"] = tensor.contiguous()
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            words = np.concatenate(([slot], to_words(save(tensors))))
            self._world.channel.send(Kind.ADAPTER, words)
            super().load_adapter(slot, matrices)

    def write_weights(self, update: WeightUpdate) -> None:
        with uninterrupted(), self._world.together():
            for name, tensor in update.tensors():
                tensor = tensor.cpu().contiguous()
                self._world.progress.announce()
                self._world.channel.send(Kind.WEIGHTS, to_words(save({name: tensor})))
                self.write_tensors({name: tensor})

    def clear_graphs(self) -> None:
        with self._told(Kind.CLEAR_GRAPHS):
            super().clear_graphs()

    def capture_model(self) -> int:
        if not self._has_begun:  # at start-up all ranks capture by themselves
            return super().capture_model()
        with self._told(Kind.CAPTURE_GRAPHS):
            return super().capture_model()

    def capture_entry(self, model: int, index: int) -> None:
        with self._told(Kind.CAPTURE_ENTRY, model, index):
            super().capture_entry(model, index)

    def sleep(self, *, keep_weights: bool) -> MemoryError | None:
        with self._told(Kind.SLEEP, keep_weights):
            return super().sleep(keep_weights=keep_weights)

    def wake(self) -> MemoryError | None:
        with self._told(Kind.WAKE):
            return super().wake()

    @contextlib.contextmanager
    def _told(self, kind: Kind, *words: int) -> Iterator[None]:
        """The other ranks do what this one does inside."""
        with uninterrupted(), self._world.together():
            self._world.progress.announce()
            self._world.channel.send(kind, np.array(words, dtype=np.int64))
            yield


class _AwaitedResult(StepResult):
    """The results of a step that all ranks run; waiting for them may mean waiting for any rank."""

    def __init__(self, own: StepResult, world: World) -> None:
        self._own = own
        self._world = world

    def token_ids(self) -> IntArray:
        # The processes were checked when the step started.
        with uninterrupted(), self._world.together(processes=False):
            tokens = self._own.token_ids()
            # A step aborted because of a failed rank has no results.
            self._world.check(processes=False)
            return tokens

    def logprobs(self, row: int, num_top: int) -> list[tuple[int, float]]:
        return self._own.logprobs(row, num_top)


class _NoResults(ResultRing):
    """For ranks whose tokens nothing reads: nothing is sent."""

    def send(self, *results: Any) -> StepResult:
        return StepResult()


class FollowingRunner(RankRunner):
    """Any other rank's runner: runs the plans that rank 0 sends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._decoder = PlanDecoder()
        world = self._world
        self._sender: ResultSender | None = None
        if world.replica and not world.rank_in_replica:
            self._sender = ResultSender(world.control, self._num_ahead)
        else:
            self.results = _NoResults(self.plan.max_num_seqs, self.model.device)

    def run(self, plan: StepPlan) -> StepResult:
        raise SchedulingError(
            f"this is rank {self._world.rank}, but only rank 0 takes requests; call generate or "
            "stream, on all ranks"
        )

    @torch.inference_mode()
    def follow(self) -> bytes | None:
        """Run what rank 0 sends until it shares a result, which is returned, or leaves (None)."""
        with self._world.together():
            while True:
                kind, words = self._world.channel.receive()
                if kind is Kind.CLOSE:
                    return None
                if kind is Kind.RESULT:
                    return to_bytes(words)
                self._follow(kind, words)

    def _follow(self, kind: Kind, words: IntArray) -> None:
        sender = self._sender
        if kind is Kind.ADAPTER:
            self._write_adapter(words)
            self.ledger.check()
        elif kind is Kind.WEIGHTS:
            self.write_tensors(load(to_bytes(words)))
            self.ledger.check()
        elif kind is Kind.SEND_RESULTS:
            if sender is not None:
                sender.flush()
        elif kind is Kind.SEND_COUNTS:
            if sender is not None:
                sender.send_counts(self.stats.counts)
        elif kind is Kind.EXPERT_LOAD:
            self._load_of_all(reset=bool(words[0]))
        elif kind is Kind.CLEAR_GRAPHS:
            self.clear_graphs()
        elif kind is Kind.CAPTURE_GRAPHS:
            self.capture_model()
        elif kind is Kind.CAPTURE_ENTRY:
            self.capture_entry(*words.tolist())
        elif kind is Kind.SLEEP:
            self.sleep(keep_weights=bool(words[0]))  # rank 0 gets the same error
        elif kind is Kind.WAKE:
            if self.wake() is None:
                self.ledger.check()
        elif kind is Kind.LEARN:
            for token_ids in decode_outputs(words):
                self.learn(token_ids)
        else:
            if kind is Kind.REPLICAS:
                kind, words = message_of_replica(words, self._world.replica)
            result = self._run_message(kind, words)
            if sender is not None:
                sender.add(result)

    def _run_message(self, kind: Kind, words: IntArray) -> StepResult | None:
        """Run this replica's part of a step; returns None if it samples nothing."""
        if kind is Kind.IDLE:
            self._run_no_plan()
            return None
        plan = self._decoder.decode(kind, words)
        result = super().run(plan)
        return result if plan.num_samples else None

    def _write_adapter(self, words: IntArray) -> None:
        tensors = load(to_bytes(words[1:]))
        names = [name[2:] for name in tensors if name.startswith("a ")]
        matrices = {name: (tensors[f"a {name}"], tensors[f"b {name}"]) for name in names}
        self.load_adapter(int(words[0]), matrices)


def _leave(world: World, pool: GraphPool) -> None:
    try:
        with contextlib.suppress(Exception):
            pool.close()  # first, because graphs hold the communicators that they captured
        if world.is_first and not world.symmetric:
            # Ranks that only serve must be told to leave; ranks that run the script know.
            with contextlib.suppress(Exception), world.together():
                world.progress.announce()
                world.channel.send(Kind.CLOSE, _NOTHING)
    finally:
        world.close()
