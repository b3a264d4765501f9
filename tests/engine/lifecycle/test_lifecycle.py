"""Everything that changes an engine between requests, in random order: tokens stay right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import changes_of, save_adapter
from tiny_models import TINY_NATIVE
from weight_sets import GREEDY, PROMPTS, WeightSets, join, open_llm, tokens_of

from ostinato import (
    LLM,
    AsleepError,
    GraphConfig,
    ModelLoadError,
    RequestError,
    StaleGraphError,
    WeightGroup,
)

Tensors = dict[str, torch.Tensor]

NUM_STEPS = 200


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "ab")


class RandomLife:
    """Does any of ``steps`` to an ``llm``, and knows what it should generate.

    Tokens are compared with transformers' after every step that leaves the engine able to run.
    """

    def __init__(self, llm: LLM, sets: WeightSets, adapters: dict[str, Path], seed: int) -> None:
        self.llm, self._sets, self._random = llm, sets, random.Random(seed)
        self._tensors = {name: sets.of(name) for name in "ab"}
        self._changes = {name: changes_of(path) for name, path in adapters.items()}
        self._adapters = adapters
        self._device = llm.engine.model.device
        self._groups: tuple[WeightGroup, WeightGroup] = join()
        names = sorted(self._tensors["a"])
        self._parts = (names[::2], names[1::2])
        self.weights: list[str | None] = ["a", "a"]  # of each part; None: discarded
        self.loaded: dict[str, str] = {}  # which adapter has each name
        self._expected: dict[object, list[list[int]]] = {}
        self.done: dict[str, int] = {}
        self.num_compared = 0
        self.steps: dict[str, Callable[[], None]] = {
            "generate": lambda: None,
            "update all": lambda: self.update(self.on_device),
            "update from an iterator": lambda: self.update(lambda given: one_buffer(given)),
            "update from a file": lambda: self.update(None),
            "update from a group": self.update_from_group,
            "update a part": lambda: self.update(self.on_device, of_part=True),
            "update keeping prefixes": self.update_and_keep,
            "fail to update": self.fail_to_update,
            "sleep": lambda: self.sleep(1),
            "deep sleep": lambda: self.sleep(2),
            "wake": self.llm.wake,
            "clear": self.llm.clear_graphs,
            "capture": lambda: self.capture(self.llm.capture_graphs),
            "capture one": lambda: self.capture(self.llm.capture_next),
            "reset": self.llm.reset_prefix_cache,
            "load an adapter": self.load_adapter,
            "unload an adapter": self.unload_adapter,
            "clear in a stream": self.clear_in_a_stream,
        }

    def step(self) -> None:
        name = self._random.choice(list(self.steps))
        if self._random.random() < 0.5:  # it would not run most of the time
            if self.llm.sleep_level is not None:
                name = "wake"
            elif None in self.weights:
                name = "update all"
        self.done[name] = self.done.get(name, 0) + 1
        self.steps[name]()
        self.check()

    def check(self) -> None:
        number = self._random.randrange(len(PROMPTS))
        adapter = self._random.choice([None, *self.loaded])
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError, match=f"asleep \\(level {self.llm.sleep_level}\\)"):
                self.llm.generate([PROMPTS[number]], GREEDY, adapter=adapter)
        elif None in self.weights:
            with pytest.raises(ModelLoadError, match="discarded the weights"):
                self.llm.generate([PROMPTS[number]], GREEDY, adapter=adapter)
        else:
            (output,) = self.llm.generate([PROMPTS[number]], GREEDY, adapter=adapter)
            self.num_compared += 1
            assert output.outputs[0].token_ids == self.expected(adapter)[number]

    def expected(self, adapter: str | None) -> list[list[int]]:
        """transformers' tokens for all prompts, with the weights and an adapter merged in."""
        changes = {} if adapter is None else self._changes[self.loaded[adapter]]
        key = (*self.weights, None if adapter is None else self.loaded[adapter])
        if key not in self._expected:
            tensors = {
                name: self._tensors[source or ""][name]
                for part, source in zip(self._parts, self.weights, strict=True)
                for name in part
            }
            merged = {name: each + changes.get(name, 0.0) for name, each in tensors.items()}
            self._expected[key] = self._sets.mixed_tokens(merged)
        return self._expected[key]

    # --- weights -------------------------------------------------------------------------------

    def on_device(self, given: Tensors) -> Tensors:
        return {name: each.to(self._device) for name, each in given.items()}

    def update(self, form: Callable[[Tensors], Any] | None, *, of_part: bool = False) -> None:
        """Write all weights or a part; ``form``: how they are passed, None for a path."""
        source, parts = self._random.choice("ab"), [self._random.choice((0, 1))]
        if not of_part:
            parts = [0, 1]
        given = {name: self._tensors[source][name] for part in parts for name in self._parts[part]}
        weights = self._sets.paths[source] if form is None else form(given)
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError):
                self.llm.update_weights(weights)
            return
        self.llm.update_weights(weights)
        for part in parts:
            self.weights[part] = source

    def update_from_group(self) -> None:
        if self.llm.sleep_level is not None:
            return  # the trainer would wait until it wakes
        trainer, engine = self._groups
        with ThreadPoolExecutor(1) as thread:
            source = self._random.choice("ab")
            sending = thread.submit(trainer.send, self._tensors[source])
            self.llm.update_weights(engine)
            sending.result()
        self.weights = [source, source]

    def update_and_keep(self) -> None:
        if self.llm.sleep_level is None and None not in self.weights:
            tensors = {
                name: self._tensors[source or ""][name]
                for part, source in zip(self._parts, self.weights, strict=True)
                for name in part
            }
            self.llm.update_weights(tensors, keep_prefix_cache=True)

    def fail_to_update(self) -> None:
        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(self._tensors["b"].items())[:5]
            raise ConnectionError("the trainer is gone")

        asleep = self.llm.sleep_level is not None
        with pytest.raises(AsleepError if asleep else ConnectionError):
            self.llm.update_weights(broken())

    # --- memory and graphs ---------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        if self.llm.sleep_level not in (None, level):
            with pytest.raises(AsleepError, match="call wake\\(\\) before"):
                self.llm.sleep(level)  # type: ignore[arg-type]
            return
        self.llm.sleep(level)  # type: ignore[arg-type]
        if level == 2:
            self.weights = [None, None]

    def capture(self, capture: Callable[[], object]) -> None:
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError):
                capture()
            return
        capture()

    def clear_in_a_stream(self) -> None:
        if self.llm.sleep_level is not None or None in self.weights:
            return
        adapter, tokens = self._random.choice([None, *self.loaded]), list[int]()
        expected = self.expected(adapter)[0]
        stop = self._random.randrange(len(expected))
        for number, delta in enumerate(self.llm.stream([PROMPTS[0]], GREEDY, adapter=adapter)):
            tokens += delta.token_ids
            if number == stop:
                self.llm.clear_graphs()
        assert tokens == expected

    # --- adapters ------------------------------------------------------------------------------

    def load_adapter(self) -> None:
        """Or replace the one that is there."""
        name, adapter = "one", self._random.choice("xy")
        self.llm.load_adapter(name, self._adapters[adapter])
        self.loaded[name] = adapter

    def unload_adapter(self) -> None:
        if self.loaded:
            name = self._random.choice(sorted(self.loaded))
            self.llm.unload_adapter(name)
            del self.loaded[name]


def one_buffer(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, one after another in the same memory, as some trainers pass them."""
    buffer = torch.empty(max(each.numel() for each in tensors.values()))
    for name, each in tensors.items():
        yield name, buffer[: each.numel()].view(each.shape).copy_(each)


@pytest.mark.slow
def test_anything_in_any_order(sets: WeightSets, device: torch.device, tmp_path: Path) -> None:
    adapters = {
        name: save_adapter(tmp_path / name, sets.paths["a"], seed=seed)
        for seed, name in enumerate("xy")
    }
    options = {
        "enable_sleep_mode": True,
        "enable_lora": True,
        "max_loras": 1,
        "graphs": GraphConfig(capture_sizes=[1]),
    }
    with open_llm(sets.paths["a"], device, **options) as llm:
        addresses = [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
        life = RandomLife(llm, sets, adapters, seed=1)
        for _ in range(NUM_STEPS):
            life.step()
        llm.wake()
        llm.update_weights(sets.paths["b"])
        llm.capture_graphs()
        assert num_graphs(llm)
        assert tokens_of(llm) == sets.tokens("b")
        assert addresses == [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
    assert set(life.done) == set(life.steps)
    assert min(life.done.values()) >= 3
    assert life.num_compared > NUM_STEPS // 2


# --- graphs --------------------------------------------------------------------------------------


@pytest.fixture
def llm(sets: WeightSets, device: torch.device) -> Iterator[LLM]:
    with open_llm(sets.paths["a"], device) as llm:
        yield llm


def num_graphs(llm: LLM) -> int:
    return len(llm.ledger().graphs())


def test_graphs_are_dropped_and_captured_again(llm: LLM, sets: WeightSets) -> None:
    before = num_graphs(llm)
    assert before
    llm.clear_graphs()
    assert num_graphs(llm) == 0
    assert tokens_of(llm) == sets.tokens("a")
    llm.capture_graphs()
    assert num_graphs(llm) == before
    assert tokens_of(llm) == sets.tokens("a")


def test_requests_go_on_without_their_graphs(llm: LLM, sets: WeightSets) -> None:
    tokens: list[int] = []
    for number, delta in enumerate(llm.stream([PROMPTS[0]], GREEDY)):
        tokens += delta.token_ids
        if number == 2:
            llm.clear_graphs()
            with pytest.raises(RequestError, match="cannot be captured while requests are unfin"):
                llm.capture_graphs()
    assert tokens == sets.tokens("a")[0]
    llm.capture_graphs()
    assert tokens_of(llm) == sets.tokens("a")


def test_weights_that_moved_are_found_when_graphs_are_captured(llm: LLM, sets: WeightSets) -> None:
    parameter = llm.engine.model.norm.weight  # type: ignore[attr-defined]
    old = parameter.data
    parameter.data = old.clone()
    with pytest.raises(StaleGraphError, match=r"norm\.weight"):
        llm.capture_graphs()
    llm.clear_graphs()
    llm.capture_graphs()
    assert tokens_of(llm) == sets.tokens("a")
