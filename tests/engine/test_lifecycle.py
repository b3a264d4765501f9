"""Everything that changes an engine between requests, in random order: tokens stay right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import TINY_NATIVE
from weight_sets import GREEDY, PROMPTS, WeightSets, open_llm, tokens_of

from ostinato import LLM, AsleepError, GraphConfig, ModelLoadError, RequestError, StaleGraphError

NUM_STEPS = 200


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "ab")


class RandomLife:
    """Does any of ``steps`` to an ``llm``, and knows which weights it should have.

    Tokens are compared with transformers' after every step that leaves the engine able to run.
    """

    def __init__(self, llm: LLM, sets: WeightSets, seed: int) -> None:
        self.llm, self._sets, self._random = llm, sets, random.Random(seed)
        self._tensors = {name: sets.of(name) for name in "ab"}
        self._device = llm.engine.model.device
        self.weights: str | None = "a"  # None: discarded
        self.done: dict[str, int] = {}
        self.steps: dict[str, Callable[[], None]] = {
            "generate": lambda: None,
            "update": self.update,
            "update keeping prefixes": self.update_and_keep,
            "sleep": lambda: self.sleep(1),
            "deep sleep": lambda: self.sleep(2),
            "wake": self.llm.wake,
            "clear": self.llm.clear_graphs,
            "capture": self.capture,
            "reset": self.llm.reset_prefix_cache,
        }

    def step(self) -> None:
        name = self._random.choice(list(self.steps))
        self.done[name] = self.done.get(name, 0) + 1
        self.steps[name]()
        self.check()

    def check(self) -> None:
        number = self._random.randrange(len(PROMPTS))
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError, match=f"asleep \\(level {self.llm.sleep_level}\\)"):
                self.llm.generate([PROMPTS[number]], GREEDY)
        elif self.weights is None:
            with pytest.raises(ModelLoadError, match="discarded the weights"):
                self.llm.generate([PROMPTS[number]], GREEDY)
        else:
            (output,) = self.llm.generate([PROMPTS[number]], GREEDY)
            assert output.outputs[0].token_ids == self._sets.tokens(self.weights)[number]

    def update(self) -> None:
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError):
                self.llm.update_weights(self._tensors["b"])
            return
        self.weights = self._random.choice("ab")
        tensors = self._tensors[self.weights]
        self.llm.update_weights({name: each.to(self._device) for name, each in tensors.items()})

    def update_and_keep(self) -> None:
        if self.llm.sleep_level is None and self.weights is not None:
            self.llm.update_weights(self._tensors[self.weights], keep_prefix_cache=True)

    def sleep(self, level: int) -> None:
        if self.llm.sleep_level not in (None, level):
            with pytest.raises(AsleepError, match="call wake\\(\\) before"):
                self.llm.sleep(level)  # type: ignore[arg-type]
            return
        self.llm.sleep(level)  # type: ignore[arg-type]
        if level == 2:
            self.weights = None

    def capture(self) -> None:
        if self.llm.sleep_level is not None:
            with pytest.raises(AsleepError):
                self.llm.capture_graphs()
            return
        self.llm.capture_graphs()


@pytest.mark.slow
def test_anything_in_any_order(sets: WeightSets, device: torch.device) -> None:
    options = {"enable_sleep_mode": True, "graphs": GraphConfig(capture_sizes=[1])}
    with open_llm(sets.paths["a"], device, **options) as llm:
        addresses = [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
        life = RandomLife(llm, sets, seed=1)
        for _ in range(NUM_STEPS):
            life.step()
        llm.wake()
        llm.update_weights(sets.paths["b"])
        llm.capture_graphs()
        assert num_graphs(llm)
        assert tokens_of(llm) == sets.tokens("b")
        assert addresses == [each.data_ptr() for each in llm.engine.model.parameters()]  # type: ignore[attr-defined]
    assert len(life.done) == len(life.steps)
    assert min(life.done.values()) >= NUM_STEPS // 20


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
