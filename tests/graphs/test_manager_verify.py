"""``CudaGraphManager(verify=...)``: graphs of a runner of one's own, compared with eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    BatchShape,
    CapturePlan,
    Choice,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    MemoryPart,
    PlanEntry,
    PreparedBatch,
    Reason,
    VerifyOptions,
    eager_break,
)
from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.shadow.report import Cause

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
WIDTH, MOST = 4, 8
PADDING_ROW = MOST  # of the cache

Inputs = tuple[torch.Tensor, torch.Tensor]
Mix = Callable[[torch.Tensor], torch.Tensor]


@eager_break
def attention(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


class Runner:
    """Buffers, a cache that every step adds to, and a manager that compares steps."""

    def __init__(
        self,
        pool: GraphPool,
        mode: CUDAGraphMode,
        verify: str | VerifyOptions,
        *,
        hooks: bool = False,
        mix: Mix | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = pool
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to(pool.device)
        self.mix = mix or (lambda hidden: hidden)
        self.scale = 1.0
        self.x = torch.zeros(MOST, WIDTH, device=pool.device)
        self.rows = torch.full((MOST,), PADDING_ROW, device=pool.device)
        self.cache = torch.zeros(MOST + 1, WIDTH, device=pool.device)
        self.piecewise = CUDAGraphWrapper(self.model, PIECEWISE, pool=pool, split_at_breaks=True)
        plan = CapturePlan.build(mode, [2, 4, 8], max_num_seqs=MOST, max_num_batched_tokens=MOST)
        self.manager: CudaGraphManager[Inputs, torch.Tensor] = CudaGraphManager(
            plan,
            pool,
            show_progress=False,
            verify=all_hooks(self, str(verify)) if hooks else verify,
        )

    def model(self, inputs: Inputs) -> torch.Tensor:
        x, rows = inputs
        hidden = self.mix(x @ self.weight) * self.scale
        out = torch.empty_like(hidden)
        attention(hidden, out)
        self.cache.index_add_(0, rows, out)
        return out + 1

    def batch(self, size: int) -> PreparedBatch[Inputs]:
        return PreparedBatch(inputs=(self.x[:size], self.rows[:size]))

    def fill(self, values: torch.Tensor, size: int) -> None:
        self.x[:size].zero_()
        self.rows[:size].fill_(PADDING_ROW)
        self.x[: len(values)].copy_(values)
        self.rows[: len(values)].copy_(torch.arange(len(values)))

    def prepare(self, entry: PlanEntry) -> PreparedBatch[Inputs]:
        return self.trial(entry, entry.descriptor.num_tokens)

    def trial(self, entry: PlanEntry, num_tokens: int) -> PreparedBatch[Inputs]:
        self.fill(batch_of(num_tokens), entry.descriptor.num_tokens)
        return self.batch(entry.descriptor.num_tokens)

    def poison(self, batch: PreparedBatch[Inputs], num_tokens: int) -> None:
        batch.inputs[0][num_tokens:] = float("nan")

    def writes(self, batch: PreparedBatch[Inputs], num_tokens: int) -> Iterator[MemoryPart]:
        rows = batch.inputs[1][:num_tokens]
        yield MemoryPart(name="the cache", tensor=self.cache, index=(rows,))

    def capture(self) -> None:
        self.manager.capture(self.piecewise, self.prepare)

    def step(self, values: torch.Tensor, *, prompts: bool = False) -> tuple[torch.Tensor, Choice]:
        count = len(values)
        choice = self.manager.dispatch(BatchShape(count, count, 1, has_prompts=prompts))
        self.fill(values, choice.padded_num_tokens)
        batch = self.batch(choice.padded_num_tokens)
        return self.manager.run(self.piecewise, batch, choice, count), choice

    def expected(self, values: torch.Tensor) -> torch.Tensor:
        """What the model leaves in the cache; without padding, where a GEMM may round otherwise."""
        values = values.to(self.weight)
        return self.mix(values @ self.weight) * self.scale * 2


def batch_of(count: int) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) / 8


def all_hooks(runner: Runner, policy: str) -> VerifyOptions:
    """What a runner says of its batches: what they write, and what padding may be."""
    return VerifyOptions(
        policy=policy, poison=runner.poison, trial=runner.trial, writes=runner.writes
    )


@pytest.mark.parametrize("mode", [FULL, BOTH, PIECEWISE, DECODE_ONLY])
@pytest.mark.parametrize("hooks", [False, True])
def test_right_graphs_agree_at_capture_and_in_service(
    pool: GraphPool, mode: CUDAGraphMode, hooks: bool
) -> None:
    runner = Runner(pool, mode, "capture,sample:1", hooks=hooks)
    runner.capture()
    report = runner.manager.verification
    assert not report.mismatches
    # Each graph also with the most padding, if the runner prepares such a batch.
    at_capture = len(runner.manager.plan.entries) * (2 if hooks else 1)
    assert report.num_compared == at_capture
    runner.cache.zero_()
    num_graphs, expected = 0, torch.zeros_like(runner.cache)
    for count, prompts in ((3, False), (3, True), (1, False), (8, True)):
        values = batch_of(count)
        result, choice = runner.step(values, prompts=prompts)
        num_graphs += choice.mode is not CUDAGraphMode.NONE
        added = runner.expected(values)
        expected[:count] += added
        assert torch.allclose(result, added + 1)
    assert torch.allclose(runner.cache[:MOST], expected[:MOST])  # each step took effect once
    assert report is runner.manager.verification
    assert (
        report.num_compared == len(runner.manager.plan.entries) * (2 if hooks else 1) + num_graphs
    )
    assert not report.mismatches


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE])
def test_capture_leaves_memory_as_without_verify(pool: GraphPool, mode: CUDAGraphMode) -> None:
    left = []
    for verify in ("off", "capture"):
        runner = Runner(pool, mode, verify)
        runner.capture()
        left.append(runner.cache.clone())
    assert torch.equal(*left)


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE])
def test_a_graph_that_differs_in_service_is_quarantined(
    pool: GraphPool, mode: CUDAGraphMode
) -> None:
    runner = Runner(pool, mode, "sample:1")
    runner.capture()
    runner.cache.zero_()
    runner.scale = 3.0  # the graphs keep 1.0
    values = batch_of(3)
    added = runner.expected(values)
    result, choice = runner.step(values)
    assert choice.mode is not CUDAGraphMode.NONE
    assert torch.allclose(result, added + 1)  # as eager code has it
    assert torch.allclose(runner.cache[:3], added)
    (found,) = runner.manager.verification.mismatches
    assert found.finding.cause is Cause.HOST_VALUE
    assert "3.0 now and 1.0 in the graph" in str(found)
    assert f"{choice.mode.name} graph of 4 tokens" in str(found)
    assert "(step 1)" in str(found)
    result, choice = runner.step(values)
    assert choice.reason is Reason.QUARANTINED
    assert torch.allclose(result, added + 1)
    assert torch.allclose(runner.cache[:3], 2 * added)
    assert not runner.manager.needs_capture()


def test_after_a_mismatch_other_graphs_are_compared_in_their_next_step(pool: GraphPool) -> None:
    rate = "sample:0.3"
    samples = VerifyPolicy.parse(rate).samples
    number = next(each for each in range(100) if samples(each) and not samples(each + 1))
    runner = Runner(pool, DECODE_ONLY, rate)
    runner.capture()
    for _ in range(number):
        runner.step(batch_of(3))
    assert not runner.manager.verification.mismatches
    runner.scale = 3.0
    for count in (3, 1):  # the second is not sampled
        result, choice = runner.step(batch_of(count))
        assert choice.mode is FULL
        assert torch.allclose(result, runner.expected(batch_of(count)) + 1)
    assert len(runner.manager.verification.mismatches) == 2


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE])
def test_a_padding_leak_is_found_at_capture(pool: GraphPool, mode: CUDAGraphMode) -> None:
    runner = Runner(pool, mode, "capture", hooks=True, mix=lambda hidden: hidden + hidden.mean(0))
    runner.capture()
    found = runner.manager.verification.mismatches
    assert {each.finding.cause for each in found} == {Cause.PADDING}
    assert len(found) == 3
    assert {each.finding.operator for each in found} == {"aten.mean.dim"}
    assert all("(at capture)" in str(each) for each in found)
    _, choice = runner.step(batch_of(3))
    assert choice.reason is Reason.QUARANTINED


def test_moved_memory_is_named_as_its_owner(pool: GraphPool) -> None:
    runner = Runner(pool, DECODE_ONLY, "off")
    owners = {"the weight": runner.weight + 1}
    runner = Runner(pool, DECODE_ONLY, VerifyOptions(policy="sample:1", owners=owners))
    runner.capture()
    runner.weight = owners["the weight"]
    result, _ = runner.step(batch_of(2))
    assert torch.allclose(result, runner.expected(batch_of(2)) + 1)
    (found,) = runner.manager.verification.mismatches
    assert found.finding.cause is Cause.MOVED_MEMORY
    assert "mat2 is tensor 'the weight', at 0x" in found.finding.detail


def test_several_wrappers_are_compared_as_a_whole(pool: GraphPool) -> None:
    runner = Runner(pool, PIECEWISE, "capture,sample:1")
    first = CUDAGraphWrapper(lambda x: x * runner.scale, PIECEWISE, pool=pool)
    second = CUDAGraphWrapper(lambda x: x + runner.scale, PIECEWISE, pool=pool)

    def forward(inputs: Inputs) -> torch.Tensor:
        return second(first(inputs[0])) * 2

    runner.piecewise = forward  # type: ignore[assignment]
    runner.capture()
    assert runner.manager.verification.num_compared == 3
    result, _ = runner.step(batch_of(3))
    assert torch.equal(result.cpu(), (batch_of(3) + 1) * 2)
    runner.scale = 3.0
    result, _ = runner.step(batch_of(3))
    assert torch.equal(result.cpu(), (batch_of(3) * 3 + 3) * 2)
    (found,) = runner.manager.verification.mismatches
    assert found.finding.cause is Cause.OTHER_RESULT


def test_runs_of_a_step_draw_the_same_numbers(pool: GraphPool) -> None:
    runner = Runner(pool, DECODE_ONLY, "sample:1", mix=lambda x: x + torch.rand_like(x))
    runner.capture()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(runner.step(batch_of(3))[0].clone())
    assert torch.equal(*results)
    report = runner.manager.verification
    assert (report.num_compared, report.num_inexact, report.mismatches) == (2, 0, [])


def test_a_graph_is_compared_when_it_is_captured_alone(pool: GraphPool) -> None:
    runner = Runner(pool, DECODE_ONLY, "capture")
    entry = runner.manager.plan.entries[0]
    runner.manager.capture_graph(entry, runner.model, runner.prepare)
    assert runner.manager.verification.num_compared == 1
    runner.manager.clear_graphs()
    runner.capture()
    assert runner.manager.verification.num_compared == 4


def test_run_needs_no_verify(pool: GraphPool) -> None:
    runner = Runner(pool, BOTH, "off")
    runner.capture()
    for count, prompts in ((3, False), (3, True)):
        result, choice = runner.step(batch_of(count), prompts=prompts)
        assert choice.mode is (PIECEWISE if prompts else FULL)
        assert torch.allclose(result, runner.expected(batch_of(count)) + 1)
    assert runner.manager.verification.num_compared == 0


def test_unknown_policies_are_refused(pool: GraphPool) -> None:
    with pytest.raises(ConfigError, match="unknown verify 'always'; choose 'off'"):
        Runner(pool, DECODE_ONLY, "always")
    with pytest.raises(ConfigError, match="unknown verify 'always'"):
        Runner(pool, DECODE_ONLY, VerifyOptions(policy="always"))


def test_parts_with_one_name_are_refused(pool: GraphPool) -> None:
    def writes(batch: PreparedBatch[Inputs], num_tokens: int) -> list[MemoryPart]:
        return [MemoryPart(name="it", tensor=torch.ones(1)) for _ in range(2)]

    runner = Runner(pool, DECODE_ONLY, VerifyOptions(policy="sample:1", writes=writes))
    runner.capture()
    with pytest.raises(ConfigError, match="lists 2 parts, of which several are named 'it'"):
        runner.step(batch_of(2))


def nothing(*given: object) -> list[object]:
    return [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poison": 3}, "VerifyOptions.poison must be a function, got 3"),
        ({"agree": True}, "VerifyOptions.agree must be a function, got True"),
        ({"owners": 3}, "owners is a int; pass a dict that names modules, tensors"),
        ({"writes": nothing}, r"writes\(\) must list ostinato.MemoryPart, got 3"),
    ],
)
def test_wrong_options_are_refused(pool: GraphPool, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(pool, DECODE_ONLY, VerifyOptions(policy="capture", **options)).capture()


def test_complex_results_are_compared(pool: GraphPool) -> None:
    runner = Runner(pool, DECODE_ONLY, "sample:1")

    def forward(inputs: Inputs) -> torch.Tensor:
        return torch.complex(inputs[0], inputs[0] * runner.scale)

    runner.piecewise = forward  # type: ignore[assignment]
    runner.capture()
    runner.step(batch_of(3))
    assert not runner.manager.verification.mismatches
    runner.scale = 3.0
    result, _ = runner.step(batch_of(3))
    assert torch.equal(result.imag.cpu(), batch_of(3) * 3)
    (found,) = runner.manager.verification.mismatches
    assert found.max_difference == pytest.approx(2 * float(batch_of(3).max()))


def test_a_key_without_a_graph_is_refused(pool: GraphPool) -> None:
    runner = Runner(pool, DECODE_ONLY, "sample:1")
    key = BatchDescriptor(4, num_reqs=4, uniform=True)
    choice = Choice(mode=FULL, descriptor=key, reason=Reason.UNIFORM_DECODE)
    with pytest.raises(BatchError, match="no FULL graph was captured for"):
        runner.manager.run(runner.piecewise, runner.batch(4), choice, 4)


@pytest.mark.parametrize("mode", [DECODE_ONLY, PIECEWISE])
@pytest.mark.parametrize("verify", ["off", "sample:1"])
def test_a_wrong_batch_is_refused(pool: GraphPool, mode: CUDAGraphMode, verify: str) -> None:
    runner = Runner(pool, mode, verify)
    runner.capture()
    choice = runner.manager.dispatch(BatchShape(3, 3, 1))
    for count in (0, 5):
        with pytest.raises(BatchError, match=f"{count} rows were requested from a graph of 4"):
            runner.manager.run(runner.piecewise, runner.batch(4), choice, count)
    with pytest.raises(BatchError, match=r"the batch is a tuple; pass an ostinato.PreparedBatch"):
        runner.manager.run(runner.piecewise, (runner.x, runner.rows), choice, 3)  # type: ignore
