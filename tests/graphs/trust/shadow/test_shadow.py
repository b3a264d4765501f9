"""``Shadow``: a step of a graph and of eager code, compared, told apart, and put right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import pytest
import torch

from ostinato import GraphPool, eager_break
from ostinato.graphs.backends.cpu.backend import CpuGraph
from ostinato.graphs.trust.ledger.owners import memory_of
from ostinato.graphs.trust.shadow.call_log import CallLogging
from ostinato.graphs.trust.shadow.memory_names import name_among
from ostinato.graphs.trust.shadow.memory_part import MemoryPart
from ostinato.graphs.trust.shadow.report import Cause
from ostinato.graphs.trust.shadow.shadow import Shadow, ShadowedStep

Forward = Callable[[torch.Tensor], torch.Tensor]
ROWS, REAL, WIDTH = 4, 3, 8


class Counter:
    """Adds up what it sees: state that a step changes in place."""

    def __init__(self, device: torch.device, forward: Forward | None = None) -> None:
        self.weight = torch.randn(WIDTH, WIDTH, device=device)
        self.total = torch.zeros(ROWS, WIDTH, device=device)
        self.forward = forward or (lambda hidden: hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.forward(torch.relu(x @ self.weight))
        self.total += hidden
        return hidden * 2


class Stepper:
    """One captured step of a ``Counter``, and its shadow."""

    def __init__(self, pool: GraphPool, counter: Counter, *, split: bool = False) -> None:
        self.counter, self.pool = counter, pool
        self.x = torch.randn(ROWS, WIDTH, device=pool.device)
        self.shadow = Shadow(pool, name_of=self._name_of)
        total = counter.total.clone()
        captured = pool.capture(lambda: counter(self.x), split_at_breaks=split)
        counter.total.copy_(total)
        self.output = captured.output
        self.step = ShadowedStep(
            graph="the graph",
            tape=captured.tape,
            eager=self._eager,
            replay=self._replay,
            parts=[
                MemoryPart(name="total", tensor=counter.total, index=(slice(REAL),)),
                MemoryPart(name="x", tensor=self.x, compared=False),
            ],
            rows={ROWS: slice(REAL)},
        )

    def _name_of(self, address: int) -> str | None:
        return name_among(memory_of({"weight": self.counter.weight}), address)

    def _eager(
        self, *, other_padding: bool = False, logging: CallLogging | None = None
    ) -> Mapping[str, torch.Tensor]:
        if other_padding:
            self.x[REAL:] += 1
        with logging or nullcontext():
            output = self.counter(self.x)
        return {"output": output[:REAL]}

    def _replay(self) -> Mapping[str, torch.Tensor]:
        self.pool.replay(self.step.tape)
        return {"output": self.output[:REAL]}

    def run(self) -> object:
        return self.shadow.run(self.step, "now")


def test_a_step_that_agrees_takes_effect_once(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    expected = torch.relu(stepper.x @ stepper.counter.weight)
    assert stepper.run() is None
    assert torch.equal(stepper.counter.total[:REAL], expected[:REAL])
    assert torch.equal(stepper.output[:REAL], 2 * expected[:REAL])
    assert stepper.shadow.report.num_compared == 1
    assert not stepper.shadow.report.mismatches


def test_a_step_that_differs_takes_effect_as_in_eager_code(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    stepper.counter.weight = stepper.counter.weight + 1
    expected = torch.relu(stepper.x @ stepper.counter.weight)
    assert stepper.run() is not None
    assert torch.equal(stepper.counter.total[:REAL], expected[:REAL])
    assert torch.equal(stepper.output[:REAL], 2 * expected[:REAL])


def test_moved_memory_is_named(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    stepper.counter.weight = stepper.counter.weight + 1
    stepper.run()
    (found,) = stepper.shadow.report.mismatches
    assert found.finding.cause is Cause.MOVED_MEMORY
    assert found.finding.operator == "aten.mm.default"
    assert "is tensor 'weight', at 0x" in found.finding.detail
    assert found.tensor == "total"
    assert "the graph differs from eager (now): total by up to" in str(found)
    assert stepper.shadow.report.quarantined == ["the graph"]


def test_a_host_value_is_named(pool: GraphPool) -> None:
    scale = [2.0]
    stepper = Stepper(pool, Counter(pool.device, lambda hidden: hidden * scale[0]))
    scale[0] = 3.0
    stepper.run()
    (found,) = stepper.shadow.report.mismatches
    assert found.finding.cause is Cause.HOST_VALUE
    assert "other is 3.0 now and 2.0 in the graph" in str(found)


def test_other_operators_are_named(pool: GraphPool) -> None:
    negate = [False]
    stepper = Stepper(pool, Counter(pool.device, lambda h: -h if negate[0] else h.abs()))
    negate[0] = True
    stepper.run()
    (found,) = stepper.shadow.report.mismatches
    assert found.finding.cause is Cause.OTHER_OPERATORS
    assert found.finding.operator == "aten.abs.default"
    assert "eager code runs aten.neg.default there" in str(found)


def test_a_padding_leak_is_named(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device, lambda hidden: hidden + hidden.mean(0)))
    stepper.run()
    (found,) = stepper.shadow.report.mismatches
    assert found.finding.cause is Cause.PADDING
    assert found.finding.operator == "aten.mean.dim"


def corrupt(graph: object, number: int) -> None:
    """Make a step of a graph write something else than it did at the capture."""
    assert isinstance(graph, CpuGraph)
    step = graph._steps[number]

    def wrong() -> None:
        step()
        step.keywords["out"].add_(1)  # type: ignore[attr-defined]

    graph._steps[number] = wrong


def test_the_operator_with_another_result_is_named() -> None:
    with GraphPool("cpu", lazy_capture=True) as pool:
        stepper = Stepper(pool, Counter(pool.device))
        corrupt(stepper.step.tape.graphs[0], 1)
        stepper.run()
        (found,) = stepper.shadow.report.mismatches
        assert found.finding.cause is Cause.OTHER_RESULT
        assert found.finding.operator == "aten.relu.default"
        assert "its result differs by up to 1" in str(found)


@eager_break
def halve(hidden: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(hidden, 0.5, out=out)


def through_a_break(hidden: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden)
    halve(hidden, out)
    return torch.sin(out)


def test_the_segment_is_named() -> None:
    with GraphPool("cpu", lazy_capture=True) as pool:
        stepper = Stepper(pool, Counter(pool.device, through_a_break), split=True)
        assert stepper.run() is None
        corrupt(stepper.step.tape.graphs[1], 0)
        stepper.run()
        (found,) = stepper.shadow.report.mismatches
        assert (found.finding.segment, found.finding.operator) == (1, "aten.sin.default")
        assert "first at aten.sin.default in segment 1" in str(found)


def test_segments_are_compared_where_graphs_run_whole(pool: GraphPool) -> None:
    """On CUDA only the arguments of breaks can be compared; here the weight moves before one."""
    stepper = Stepper(pool, Counter(pool.device, through_a_break), split=True)
    stepper.counter.weight = stepper.counter.weight + 1
    stepper.run()
    (found,) = stepper.shadow.report.mismatches
    assert found.finding.cause is Cause.MOVED_MEMORY
    assert found.finding.segment == 0


def test_eager_code_that_never_repeats_itself_sets_the_tolerance(pool: GraphPool) -> None:
    """As a kernel that adds in the order of arrival does."""
    noise = torch.zeros(ROWS, WIDTH, device=pool.device)

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        noise.add_(1e-6)
        return hidden + noise

    stepper = Stepper(pool, Counter(pool.device, noisy))
    assert stepper.run() is None
    assert stepper.shadow.report.num_inexact == 1
    assert stepper.shadow.report.inexact["the graph"] == "aten.add.Tensor"
    stepper.counter.weight = stepper.counter.weight + 1  # far beyond it
    assert stepper.run() is not None


def test_a_step_without_memory_for_its_shadow_runs_alone(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    expected = torch.relu(stepper.x @ stepper.counter.weight)

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    stepper.counter.forward = fail
    assert stepper.run() is None
    assert stepper.shadow.report.num_skipped == 1
    assert torch.equal(stepper.counter.total[:REAL], expected[:REAL])


def test_on_ranks_it_raises_instead(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    stepper.shadow = Shadow(pool, name_of=lambda address: None, agree=bool)

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    stepper.counter.forward = fail
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        stepper.run()


def test_a_rank_follows_what_another_found(pool: GraphPool) -> None:
    stepper = Stepper(pool, Counter(pool.device))
    stepper.shadow = Shadow(pool, name_of=lambda address: None, agree=lambda found: True)
    assert stepper.run() is not None
    (found,) = stepper.shadow.report.mismatches
    assert "on another rank): nothing here by up to 0" in str(found)
