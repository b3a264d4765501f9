"""CudaGraphManager and its caller: when ``prepare`` runs, and what a wrong result is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import (
    BatchDescriptor,
    BatchShape,
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    eager_break,
    get_forward_context,
    set_forward_context,
)
from ostinato.errors import (
    CaptureError,
    CaptureOutOfMemoryError,
    ClosedError,
    ConfigError,
    ReplayMismatchError,
)
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.prepared_batch import PreparedBatch

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
WIDTH = 3

Forward = Callable[[torch.Tensor], Any]
Prepare = Callable[[PlanEntry], Any]


@eager_break
def attention(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


class Metadata:
    """Attention metadata with a part that is worked out when it is first asked for."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths
        self._starts: torch.Tensor | None = None

    def starts(self) -> torch.Tensor:
        if self._starts is None:
            self._starts = self._lengths.cumsum(0)
        return self._starts


class Engine:
    """Buffers, a plan and a manager; the forward is each test's."""

    def __init__(
        self, pool: GraphPool, mode: CUDAGraphMode, sizes: list[int], **options: Any
    ) -> None:
        self.x = torch.ones(16, WIDTH, device=pool.device)
        self.lengths = torch.ones(16, device=pool.device)
        self.plan = CapturePlan.build(mode, sizes, max_num_seqs=16, max_num_batched_tokens=16)
        self.manager: CudaGraphManager[torch.Tensor, Any] = CudaGraphManager(
            self.plan, pool, show_progress=False, **options
        )
        self.prepared: list[int] = []

    def prepare(self, entry: PlanEntry) -> PreparedBatch[torch.Tensor]:
        rows = entry.descriptor.num_tokens
        self.prepared.append(rows)
        return PreparedBatch(inputs=self.x[:rows], attn_metadata=Metadata(self.lengths[:rows]))

    def capture(self, forward: Forward, prepare: Prepare | None = None) -> CaptureReport:
        return self.manager.capture(forward, prepare or self.prepare)


def reads_metadata(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    out = torch.empty_like(y)
    attention(y, out)
    return out + get_forward_context().attn_metadata.starts()[:, None]


# --- prepare ------------------------------------------------------------------------------------


def kernels(entry: PlanEntry) -> int:
    return 0


@pytest.mark.parametrize("mode", [DECODE_ONLY, FULL])
@pytest.mark.parametrize("num_warmups", [0, 1, 3])
@pytest.mark.parametrize("kernel_class", [None, kernels])
def test_what_metadata_computes_on_first_use_is_inside_the_graph(
    pool: GraphPool, mode: CUDAGraphMode, num_warmups: int, kernel_class: Any
) -> None:
    engine = Engine(pool, mode, [2, 4], num_warmups=num_warmups, kernel_class=kernel_class)
    engine.capture(reads_metadata)
    engine.lengths.copy_(torch.arange(1, 17))
    for size in (2, 4):
        key = BatchDescriptor(size, num_reqs=size, uniform=mode is DECODE_ONLY)
        result = engine.manager.run_fullgraph(key)
        assert isinstance(result, torch.Tensor)
        assert result[:, 0].tolist() == (engine.lengths[:size].cumsum(0) + 1).tolist()


def test_pieces_compute_metadata_inside_their_graphs(pool: GraphPool) -> None:
    engine = Engine(pool, PIECEWISE, [4])
    pieces = CUDAGraphWrapper(reads_metadata, PIECEWISE, pool=pool, split_at_breaks=True)
    engine.capture(pieces)
    engine.lengths.copy_(torch.arange(1, 17))
    with set_forward_context(PIECEWISE, BatchDescriptor(4)):
        assert pieces(engine.x[:4])[:, 0].tolist() == [2, 4, 7, 11]


def test_a_size_that_is_captured_again_with_care_is_prepared_anew(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4], kernel_class=kernels)
    failures = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = reads_metadata(x)
        if len(x) == 2 and get_forward_context().cudagraph_runtime_mode is FULL and not failures:
            failures.append(True)
            raise CaptureError("needs a warm-up")
        return result

    engine.capture(forward)
    assert failures
    engine.lengths.fill_(5)
    result = engine.manager.run_fullgraph(BatchDescriptor(2, num_reqs=2, uniform=True))
    assert isinstance(result, torch.Tensor)
    assert result[:, 0].tolist() == [6, 11]


def test_without_a_warm_up_an_entry_is_prepared_once(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4, 8], num_warmups=2, kernel_class=kernels)
    engine.capture(reads_metadata)
    assert engine.prepared == [8, 8, 4, 2]


def test_without_warm_ups_the_first_output_is_made_by_one_run(pool: GraphPool) -> None:
    engine = Engine(pool, BOTH, [2, 4], num_warmups=0)
    pieces = CUDAGraphWrapper(reads_metadata, PIECEWISE, pool=pool, split_at_breaks=True)
    modes = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        modes.append((get_forward_context().cudagraph_runtime_mode, len(x)))
        return pieces(x)

    engine.capture(forward)
    assert modes == [(PIECEWISE, 4), (PIECEWISE, 2), (NONE, 4), (FULL, 4), (FULL, 2)]
    assert engine.prepared == [4, 2, 4, 4, 2]


@pytest.mark.parametrize("value", [None, {"inputs": 1}, torch.ones(4)], ids=type)
@pytest.mark.parametrize("mode", [PIECEWISE, DECODE_ONLY])
def test_prepare_must_return_a_prepared_batch(
    pool: GraphPool, mode: CUDAGraphMode, value: object
) -> None:
    engine = Engine(pool, mode, [4])
    returned = f"prepare returned a {type(value).__name__}; return an ostinato.PreparedBatch"
    message = rf"num_tokens=4.*{returned}"
    with pytest.raises(CaptureError, match=message):
        engine.capture(reads_metadata, lambda entry: value)


def test_out_of_memory_is_not_tried_again(pool: GraphPool) -> None:
    """With all care it would need more, not less."""
    engine = Engine(pool, DECODE_ONLY, [2, 4], kernel_class=kernels)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 2:
            raise CaptureOutOfMemoryError("no room")
        return x + 1

    with pytest.raises(CaptureOutOfMemoryError, match=r"num_tokens=2.*no room"):
        engine.capture(forward)
    assert engine.prepared == [4, 4, 2]


def test_a_closed_pool_replays_nothing(device: torch.device) -> None:
    with GraphPool(device) as pool:
        engine = Engine(pool, DECODE_ONLY, [2])
        engine.capture(reads_metadata)
    key = BatchDescriptor(2, num_reqs=2, uniform=True)
    with pytest.raises(ClosedError, match=r"cannot replay .*num_tokens=2.*is closed"):
        engine.manager.run_fullgraph(key)


# --- what a forward returns ---------------------------------------------------------------------

ELSEWHERE = torch.empty(4, WIDTH, device="meta")
WRONG: list[tuple[str, Forward, str]] = [
    ("none", lambda x: None, r"None for a batch padded to 4 tokens; return a tensor \[4,"),
    ("list", lambda x: [x], r"a list of 1 \(Tensor\) for a batch padded to 4"),
    ("dict", lambda x: {"hidden": x}, r"a dict with the keys \['hidden'\]"),
    ("number", lambda x: 1.5, "a float for"),
    ("three", lambda x: (x, [x], [x]), r"a tuple of 3 \(Tensor, list, list\)"),
    ("pair", lambda x: (x, x), r"a tuple of 2 \(Tensor, Tensor\) .*list of auxiliary"),
    ("too few rows", lambda x: x[:3], r"\(3, 3\) torch\.float32 as its output .*a row for every"),
    ("too many rows", lambda x: torch.cat([x, x]), r"\(8, 3\) .*padded to 4 tokens"),
    ("no rows", lambda x: x.sum(), r"\(\) torch\.float32 as its output"),
    ("meta", lambda x: ELSEWHERE, r"a tensor on meta as its output, but the graphs are on"),
    ("no hidden", lambda x: (None, [x]), "None as its hidden states"),
    ("aux", lambda x: (x, [x, None]), "None as auxiliary hidden state 1"),
    ("aux rows", lambda x: (x, [x[:1]]), r"\(1, 3\) .* as auxiliary hidden state 0"),
    ("aux list", lambda x: (x, [[x]]), r"a list of 1 \(Tensor\) as auxiliary hidden state 0"),
]


@pytest.mark.parametrize(
    ("returned", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
@pytest.mark.parametrize("num_warmups", [0, 1])
@pytest.mark.parametrize("first", [True, False], ids=["first size", "second size"])
def test_a_wrong_result_is_named(
    pool: GraphPool, returned: Forward, message: str, num_warmups: int, first: bool
) -> None:
    engine = Engine(pool, DECODE_ONLY, [4] if first else [4, 8], num_warmups=num_warmups)

    def forward(x: torch.Tensor) -> Any:
        return returned(x) if len(x) == 4 else x + 1

    with pytest.raises(CaptureError, match=rf"num_tokens=4, .*the forward returned {message}"):
        engine.capture(forward)
    captured = {entry.descriptor.num_tokens for entry in engine.manager.dispatcher.captured}
    assert captured == (set() if first else {8})


OTHER: list[tuple[str, Forward, Forward, str]] = [
    (
        "dtype",
        lambda x: x + 1,
        lambda x: x.double(),
        r"\(2, 3\) torch\.float64 as its output .* \(2, 3\) torch\.float32 was expected",
    ),
    (
        "width",
        lambda x: x + 1,
        lambda x: x[:, :2],
        r"\(2, 2\) torch\.float32 as its output .* where \(2, 3\) torch\.float32 was expected",
    ),
    (
        "fewer",
        lambda x: (x + 1, [x, x]),
        lambda x: (x + 1, [x]),
        "hidden states and 1 auxiliary ones .*but hidden states and 2 auxiliary ones for the first",
    ),
    (
        "more",
        lambda x: (x + 1, [x]),
        lambda x: (x + 1, [x, x]),
        "hidden states and 2 auxiliary ones .*but hidden states and 1 auxiliary ones for the first",
    ),
    (
        "auxiliary",
        lambda x: x + 1,
        lambda x: (x + 1, [x]),
        "hidden states and 1 auxiliary ones .*but hidden states alone for the first size",
    ),
    (
        "an empty list",
        lambda x: x + 1,
        lambda x: (x + 1, []),
        "hidden states and 0 auxiliary ones .*but hidden states alone for the first size",
    ),
    (
        "alone",
        lambda x: (x + 1, []),
        lambda x: x + 1,
        "hidden states alone .*but hidden states and 0 auxiliary ones for the first size",
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "message"), [row[1:] for row in OTHER], ids=[row[0] for row in OTHER]
)
def test_another_result_than_the_first_sizes_is_refused(
    pool: GraphPool, first: Forward, second: Forward, message: str
) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4])
    with pytest.raises(CaptureError, match=rf"num_tokens=2, .*the forward returned {message}"):
        engine.capture(lambda x: (first if len(x) == 4 else second)(x))
    key = BatchDescriptor(4, num_reqs=4, uniform=True)
    engine.manager.run_fullgraph(key)  # the first size is usable


def test_auxiliary_states_may_come_as_a_tuple(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2])
    engine.capture(lambda x: (x + 1, (x * 2,)))
    output = engine.manager.run_fullgraph(BatchDescriptor(2, num_reqs=2, uniform=True))
    assert isinstance(output, tuple)
    hidden, aux = output
    assert hidden.tolist() == [[2.0] * WIDTH] * 2
    assert [state.tolist() for state in aux] == [[[2.0] * WIDTH] * 2]


# --- outputs that stay in place ------------------------------------------------------------------


def in_place(engine: Engine) -> Prepare:
    def prepare(entry: PlanEntry) -> PreparedBatch[torch.Tensor]:
        rows = entry.descriptor.num_tokens
        return PreparedBatch(inputs=engine.x[:rows], output_in_place=True)

    return prepare


@pytest.mark.parametrize("by_run", [False, True])
def test_only_tensors_with_a_row_for_every_token_lose_their_padding(
    pool: GraphPool, by_run: bool
) -> None:
    """Sums over the batch and tables of other sizes are part of the result as they are."""
    engine = Engine(pool, DECODE_ONLY, [4])

    def forward(x: torch.Tensor) -> dict[str, Any]:
        return {"rows": x + 1, "sum": x.sum(), "load": x.new_ones(8), "name": "it"}

    engine.capture(forward, in_place(engine))
    choice = engine.manager.dispatch(BatchShape(3, 3, 1))
    assert choice.mode is FULL
    if by_run:
        output = engine.manager.run(forward, PreparedBatch(inputs=engine.x[:4]), choice, 3)
    else:
        output = engine.manager.run_fullgraph(choice.descriptor, 3)
    assert isinstance(output, dict)
    assert output["rows"].tolist() == [[2.0] * WIDTH] * 3
    assert output["sum"].item() == 4 * WIDTH
    assert output["load"].tolist() == [1.0] * 8
    assert output["name"] == "it"


# --- torch's settings, other managers ------------------------------------------------------------


def test_a_full_graph_is_not_replayed_under_another_autocast(
    pool: GraphPool, device: torch.device
) -> None:
    """Eager batches beside it would have another dtype."""
    engine = Engine(pool, DECODE_ONLY, [4])
    weight = torch.ones(WIDTH, WIDTH, device=device)
    engine.capture(lambda x: x @ weight)
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        pytest.raises(ReplayMismatchError, match=r"autocast was None .* and is torch.bfloat16 now"),
    ):
        engine.manager.run_fullgraph(4)
    engine.manager.clear_graphs()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        engine.capture(lambda x: x @ weight)
        result = engine.manager.run_fullgraph(4)
        assert isinstance(result, torch.Tensor)
        assert result.dtype is torch.bfloat16
    with pytest.raises(ReplayMismatchError, match=r"autocast was torch.bfloat16 .* and is None"):
        engine.manager.run_fullgraph(4)


def test_a_dispatcher_of_another_plan_is_refused(pool: GraphPool) -> None:
    engine = Engine(pool, DECODE_ONLY, [2, 4])
    with pytest.raises(ConfigError, match=r"num_tokens=8, .* is not in the plan of the disp"):
        Engine(pool, DECODE_ONLY, [4, 8], dispatcher=engine.manager.dispatcher)


def test_a_size_that_another_manager_captured_with_the_same_wrapper_is_explained(
    pool: GraphPool,
) -> None:
    engine = Engine(pool, PIECEWISE, [2, 4])
    pieces = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE, pool=pool)
    engine.capture(pieces)
    other = Engine(pool, PIECEWISE, [4, 8])
    other.x = engine.x
    with pytest.raises(CaptureError, match="captured this key before, for another manager"):
        other.capture(pieces)
    engine.manager.clear_graphs()
    assert other.capture(pieces).num_graphs == 1  # 8 is captured already
