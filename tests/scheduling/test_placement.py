"""Which replica a request goes to: where its prefix is cached, unless too much waits there."""

from __future__ import annotations

import random

from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.block_allocator import BlockAllocator
from ostinato.scheduling.placement import Placement
from ostinato.scheduling.request import Request
from ostinato.scheduling.scheduler import Scheduler

BLOCK = 4


class Replicas:
    """Schedulers whose model always samples token 1."""

    def __init__(self, count: int, *, caching: bool = True) -> None:
        self.schedulers = [
            Scheduler(
                BlockAllocator(200, BLOCK, enable_prefix_caching=caching),
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=128,
            )
            for _ in range(count)
        ]
        self.placement = Placement(self.schedulers)
        self._num_added = 0

    def add(self, prompt: list[int], *, salt: bytes = b"") -> int:
        request = Request(
            f"request {self._num_added}",
            prompt,
            SamplingParams(),
            max_total_tokens=len(prompt) + 3,
            cache_salt=salt,
        )
        self._num_added += 1
        replica = self.placement.choose(request)
        self.schedulers[replica].add(request)
        return replica

    def step(self) -> None:
        for scheduler in self.schedulers:
            plan = scheduler.schedule()
            scheduler.commit(plan, [1] * plan.num_samples)
        self.placement.loads = None

    def finish(self) -> None:
        while any(scheduler.has_unfinished for scheduler in self.schedulers):
            self.step()


def prompt_of(first: int, length: int) -> list[int]:
    return [first * 1000 + i for i in range(length)]


def test_the_least_loaded_replica_gets_a_request() -> None:
    replicas = Replicas(3)
    lengths = [10, 3, 5, 4, 1, 20, 1]
    # Loads: 10 0 0; 10 3 0; 10 3 5; 10 7 5; 10 7 6; 10 7 26; the last goes to 7.
    assert [replicas.add(prompt_of(n, n)) for n in lengths] == [0, 1, 2, 1, 2, 2, 1]


def test_loads_are_of_unfinished_requests_and_their_outputs() -> None:
    replicas = Replicas(2)
    assert replicas.add(prompt_of(1, 6)) == 0
    assert replicas.add(prompt_of(2, 5)) == 1
    replicas.step()
    replicas.step()
    assert replicas.add(prompt_of(3, 2)) == 1  # 8 tokens against 7
    assert replicas.add(prompt_of(4, 2)) == 0  # 8 against 9
    replicas.finish()
    assert replicas.add(prompt_of(5, 2)) == 0  # both are idle


def test_a_prefix_goes_where_it_is_cached() -> None:
    replicas = Replicas(2)
    first, second = prompt_of(1, 20), prompt_of(2, 20)
    assert [replicas.add(first), replicas.add(second)] == [0, 1]
    replicas.finish()
    assert replicas.add([*second, 7]) == 1  # the first one without caches
    replicas.finish()
    assert replicas.add(prompt_of(4, 3)) == 0
    assert replicas.add([*second, 8]) == 1
    assert replicas.add([*first, 7]) == 0  # though less waits in the other


def test_unless_more_waits_there_than_the_prefix_saves() -> None:
    replicas = Replicas(2)
    shared = prompt_of(1, 20)
    assert replicas.add(shared) == 0
    replicas.finish()
    # 20 cached tokens save less than the 21 + 21 that wait from the third on.
    assert [replicas.add([*shared, n]) for n in range(3)] == [0, 1, 0]
    assert replicas.schedulers[1].num_unfinished_tokens == 21


def test_adapters_share_no_prefix() -> None:
    replicas = Replicas(2)
    shared = prompt_of(1, 20)
    assert [replicas.add(prompt_of(2, 3)), replicas.add(shared, salt=b"adapter")] == [0, 1]
    replicas.finish()
    assert replicas.add([*shared, 5]) == 0
    replicas.finish()
    assert replicas.add([*shared, 5], salt=b"adapter") == 1


def test_without_prefix_caching_only_the_load_counts() -> None:
    replicas = Replicas(2, caching=False)
    assert [replicas.add(prompt_of(1, 20)), replicas.add(prompt_of(2, 20))] == [0, 1]
    replicas.finish()
    assert replicas.add(prompt_of(2, 20)) == 0


def test_the_same_arrivals_give_the_same_places() -> None:
    def places(seed: int) -> list[int]:
        rng, replicas, found = random.Random(seed), Replicas(4), []
        for _ in range(60):
            prompt = [*prompt_of(rng.randrange(3), rng.randint(1, 30)), rng.randrange(9)]
            found.append(replicas.add(prompt))
            if rng.random() < 0.5:
                replicas.step()
        return found

    assert places(0) == places(0)
    assert set(places(0)) == {0, 1, 2, 3}
