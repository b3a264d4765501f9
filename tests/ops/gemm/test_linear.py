"""GEMMs with their norm, gate and residual, compared with float64; and the choice of tiles.

Without a GPU the kernels run in Triton's interpreter, as in ``test_triton_paged``. GPU-only tests
are in ``tests/gpu/test_linear_gpu.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import compat
from ostinato.errors import BatchError
from ostinato.ops.activation import Activation, activate
from ostinato.ops.gemm import tuning
from ostinato.ops.gemm.linear import Gemm, Norm, linear, run_kernel
from ostinato.ops.gemm.measuring import StepGemm
from ostinato.ops.gemm.tile_config import (
    GemmChoice,
    Gpu,
    LinearShape,
    TileConfig,
    candidates,
)
from ostinato.ops.gemm.tune_linears import tune_linears
from ostinato.ops.gemm.tuning import Tuning

pytest.importorskip("triton")

EXAMPLES = 8 if torch.cuda.is_available() else 40  # CUDA takes a second for every new kernel


@pytest.fixture
def device() -> torch.device:
    """One or the other: where there is a GPU, the kernels are not interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Case:
    """The arguments of a GEMM, and its result in float64."""

    def __init__(
        self,
        num_rows: int,
        outputs: int,
        k: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        bias: bool = False,
        norm: bool = False,
        gated: bool = False,
        residual: bool = False,
        size: float = 1.0,
        activation: Activation = "silu",
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows + outputs + k)

        def draw(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(device, dtype)

        n = 2 * outputs if gated else outputs
        # Rows of a wider matrix, whose remaining columns must not be read.
        self.x = torch.full((num_rows, k + 3), torch.nan, device=device, dtype=dtype)[:, :k]
        self.x.copy_(draw(num_rows, k, size=size))
        self.weight = draw(n, k, size=k**-0.5)
        self.bias = draw(n) if bias else None
        self.norm = Norm(draw(k), 1e-5) if norm else None
        self.residual = draw(num_rows, outputs) if residual else None
        self.gated = gated
        self.activation: Activation = activation

    def expected(self) -> Tensor:
        x = self.x.double()
        if self.norm is not None:
            x = x * (x.square().mean(1, keepdim=True) + self.norm.eps).rsqrt()
            x = x * self.norm.weight.double()
        y = x @ self.weight.double().mT
        if self.bias is not None:
            y = y + self.bias.double()
        if self.gated:
            gate, up = y.chunk(2, dim=1)
            y = activate(gate, self.activation) * up
        return y if self.residual is None else y + self.residual.double()

    def check(self, y: Tensor) -> None:
        expected = self.expected()
        assert y.shape == expected.shape
        assert y.dtype == self.x.dtype
        assert y.is_contiguous()
        # In half precision, inputs of a GEMM with a norm are rounded once more than its result.
        tolerance = 2e-5 if y.dtype == torch.float32 else 4 * torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=4 * tolerance)

    def launch(self, config: TileConfig) -> Tensor:
        x = self.x if self.x.shape[0] > 1 else self.x.contiguous()
        before = [None if t is None else t.clone() for t in (x, self.residual)]
        gemm = Gemm(x, self.weight, self.bias, self.norm, self.gated, self.residual)
        y = run_kernel(config, gemm._replace(activation=self.activation))
        for tensor, copy in zip((x, self.residual), before, strict=True):
            assert tensor is None or torch.equal(tensor, copy)
        return y


EXTRAS = [
    dict(zip(("bias", "norm", "gated", "residual"), flags, strict=True))
    for flags in product((False, True), repeat=4)
]


def name(extras: dict[str, bool]) -> str:
    return "+".join(key for key, on in extras.items() if on) or "plain"


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("extras", EXTRAS, ids=name)
@pytest.mark.parametrize("k", [64, 100], ids=["even", "odd"])
def test_kernel_of_one_row(device: torch.device, extras: dict[str, bool], k: int) -> None:
    case = Case(1, 21, k, device=device, **extras)
    case.check(case.launch(TileConfig(8, 32, 4, prefetch=2)))


@pytest.mark.sweep
@pytest.mark.parametrize("extras", EXTRAS, ids=name)
@pytest.mark.parametrize("split", [1, 3], ids=["whole", "split"])
def test_kernel_of_several_rows(device: torch.device, extras: dict[str, bool], split: int) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    case = Case(5, 40, 100, device=device, dtype=dtype, **extras)
    config = TileConfig(32, 32, 4, num_stages=2, split_k=split, prefetch=1)
    case.check(case.launch(config))
    case.check(case.launch(config))  # counters are zero whatever ran before


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_kernel_of_other_gates(device: torch.device, num_rows: int, activation: Any) -> None:
    """With a norm whose weight is in float32, as Gemma has it."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    case = Case(
        num_rows, 21, 64, device=device, dtype=dtype, norm=True, gated=True, activation=activation
    )
    assert case.norm is not None
    case.norm = case.norm._replace(weight=torch.randn(64, device=device))
    case.check(case.launch(TileConfig(16, 32, 4, num_stages=2)))
    gemm = linear(case.x, case.weight, norm=case.norm, gated=True, activation=activation)
    case.check(gemm)


@pytest.mark.slow
@given(
    num_rows=st.integers(1, 64),
    outputs=st.integers(1, 70),
    k=st.sampled_from([16, 48, 64, 100, 129, 256]),
    extras=st.sampled_from(EXTRAS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    block_n=st.sampled_from([16, 32, 64]),
    block_k=st.sampled_from([16, 64, 128]),
    split_k=st.sampled_from([1, 2, 5]),
)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kernel_of_any_shape(
    device: torch.device,
    num_rows: int,
    outputs: int,
    k: int,
    extras: dict[str, bool],
    dtype: torch.dtype,
    block_n: int,
    block_k: int,
    split_k: int,
) -> None:
    if device.type == "cuda":
        dtype = torch.float16
    case = Case(num_rows, outputs, k, dtype=dtype, device=device, **extras)
    case.check(case.launch(TileConfig(block_n, block_k, 4, 3, split_k, 1)))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_kernel_has_room_for_large_inputs_of_a_norm(device: torch.device, num_rows: int) -> None:
    """60,000 times a norm's weight overflows float16, though the normed input does not."""
    case = Case(num_rows, 20, 64, dtype=torch.float16, device=device, norm=True, size=15_000.0)
    case.check(case.launch(TileConfig(16, 32, 4, num_stages=1 if num_rows == 1 else 2)))
    if device.type == "cuda" and compat.runs_gluon(device):  # in registers
        case.check(case.launch(TileConfig(16, 32, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3])
def test_kernel_takes_the_model_of_the_smallest_shapes(device: torch.device, num_rows: int) -> None:
    case = Case(num_rows, 48, 576, device=device, dtype=torch.float16, norm=True, gated=True)
    shape = LinearShape(num_rows, 96, 576, torch.float16, norm=True, gated=True)
    for config in candidates(shape, GPU._replace(gluon=device.type == "cuda")):
        case.check(case.launch(config))


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_kernel_takes_an_odd_split(device: torch.device, gated: bool) -> None:
    """A GPU of a few SMs splits a small GEMM as a large one splits a large GEMM."""
    case = Case(12, 180, 2601, device=device, dtype=torch.float16, gated=gated)
    shape = LinearShape(12, 360 if gated else 180, 2601, torch.float16, gated=gated)
    config = candidates(shape, Gpu("small", num_sms=9))[0]
    assert config.split_k == 3
    case.check(case.launch(config))


# --- torch's way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("extras", EXTRAS, ids=name)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 90])
def test_torch_computes_the_same(num_rows: int, extras: dict[str, bool]) -> None:
    case = Case(num_rows, 24, 32, **extras)
    before = None if case.residual is None else case.residual.clone()
    case.check(
        linear(
            case.x,
            case.weight,
            case.bias,
            norm=case.norm,
            gated=case.gated,
            residual=case.residual,
        )
    )
    assert before is None or torch.equal(case.residual, before)


def test_torch_takes_a_transposed_weight() -> None:
    case = Case(3, 24, 32, residual=True)
    case.weight = case.weight.mT.contiguous().mT
    case.check(linear(case.x, case.weight, residual=case.residual))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 31)}, r"\[3, 31\] do not fit a weight of shape \[24, 32\]"),
        ({"x": torch.zeros(32)}, r"\[M, K\] and \[N, K\]"),
        ({"bias": torch.zeros(12)}, r"the bias must have shape \[24\], got \[12\]"),
        ({"norm": Norm(torch.zeros(24), 1e-5)}, "the norm's weight"),
        ({"residual": torch.zeros(3, 12)}, r"must have shape \[3, 24\], got \[3, 12\]"),
        (
            {"residual": torch.zeros(3, 24), "gated": True},
            r"have shape \[3, 12\], got \[3, 24\]",
        ),
        ({"weight": torch.zeros(23, 32), "gated": True}, "needs an even number of rows, got 23"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(3, 32), "weight": torch.zeros(24, 32), **change}
    with pytest.raises(BatchError, match=message):
        linear(**arguments)


# --- choosing tile configs ------------------------------------------------------------------------

SHAPE = LinearShape(16, 3072, 2048, torch.bfloat16, norm=True)
KEY = "GPU/bfloat16/16/3072x2048/norm"
FAST = TileConfig(32, 128, 4, 4)
GPU = Gpu("GPU")


class Stopwatch:
    """Returns given times of a step's last GEMM, and records what was compiled and measured."""

    def __init__(self, times: dict[GemmChoice, float | Exception]) -> None:
        self._times = times
        self.compiled: list[GemmChoice] = []
        self.calls: list[list[StepGemm]] = []

    def compile_all(self, gemms: Sequence[StepGemm]) -> Iterator[None]:
        for gemm in gemms:
            self.compiled.append(gemm.choice)
            yield

    def __call__(self, step: Sequence[StepGemm]) -> float:
        self.calls.append(list(step))
        time = self._times.get(step[-1].choice, 9.0)
        if isinstance(time, Exception):
            raise time
        return time


def tune(file: Path, stopwatch: Stopwatch, *shapes: LinearShape, **shipped: GemmChoice) -> Tuning:
    known = Tuning(file, dict(shipped))
    run_tuning(known, stopwatch, {shape: [] for shape in shapes})
    return known


def run_tuning(
    known: Tuning, stopwatch: Stopwatch, weights: dict[LinearShape, list[Tensor]], **options: Any
) -> None:
    compile_all = stopwatch.compile_all
    tune_linears(
        weights, gpu=GPU, known=known, measure=stopwatch, compile_all=compile_all, **options
    )


def test_a_shape_is_named_by_what_it_depends_on() -> None:
    assert SHAPE.key("GPU") == KEY
    assert SHAPE._replace(num_rows=9).key("GPU") == KEY
    different = [
        SHAPE.key("another"),
        *(SHAPE._replace(num_rows=rows).key("GPU") for rows in (1, 8, 17, 33)),
        SHAPE._replace(n=2048).key("GPU"),
        SHAPE._replace(k=3072).key("GPU"),
        SHAPE._replace(dtype=torch.float16).key("GPU"),
        SHAPE._replace(norm=False).key("GPU"),
        SHAPE._replace(gated=True).key("GPU"),
        SHAPE._replace(residual=True).key("GPU"),
    ]
    assert len({KEY, *different}) == 1 + len(different)


def test_the_fastest_is_remembered_across_processes(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "linear.json"
    fastest = candidates(SHAPE, GPU)[1]
    stopwatch = Stopwatch({"torch": 8.0, fastest: 4.0})
    known = tune(file, stopwatch, SHAPE, SHAPE._replace(num_rows=12))
    assert known.get(KEY) == fastest
    assert len(stopwatch.calls) == 1 + len(candidates(SHAPE, GPU))  # one class, measured once
    again = Stopwatch({})
    assert tune(file, again, SHAPE).get(KEY) == fastest
    assert not again.calls
    assert [path.name for path in file.parent.iterdir()] == ["linear.json"]


def test_a_shape_is_measured_after_the_other_gemms_of_a_step(tmp_path: Path) -> None:
    """With the choices that are known or were found for them; a head after all of a layer."""
    known = Tuning(tmp_path / "linear.json", {})
    qkv, up, head = SHAPE, SHAPE._replace(n=8192, gated=True), SHAPE._replace(n=50_000)
    other_rows = qkv._replace(num_rows=64)
    down = LinearShape(16, 2048, 4096, torch.bfloat16, residual=True)
    known.remember({up.key("GPU"): FAST, other_rows.key("GPU"): FAST})
    best = candidates(qkv, GPU)[1]
    stopwatch = Stopwatch({best: 4.0})
    layers: list[Tensor] = [torch.zeros(1)] * 6
    weights = {qkv: layers, other_rows: layers, up: layers, down: layers, head: layers[:1]}
    run_tuning(known, stopwatch, weights)
    steps = {
        measured: [(gemm.shape, gemm.choice) for gemm in step[:-1]]
        for step in stopwatch.calls
        if (measured := step[-1].shape)
    }
    assert steps[qkv] == [(up, FAST), (down, candidates(down, GPU)[0])]
    assert steps[down] == [(qkv, best), (up, FAST)]
    assert [shape for shape, _ in steps[head]] == [qkv, up, down]
    assert set(steps) == {qkv, down, head}


def test_a_quick_look_takes_the_most_promising(tmp_path: Path) -> None:
    stopwatch = Stopwatch({})
    run_tuning(Tuning(tmp_path / "linear.json", {}), stopwatch, {SHAPE: []}, num_candidates=2)
    tried = [step[-1].choice for step in stopwatch.calls]
    assert tried == [*candidates(SHAPE, GPU)[:2], "torch"]
    assert stopwatch.compiled == tried


def test_a_quick_look_does_not_stand_in_for_a_thorough_one(tmp_path: Path) -> None:
    """``ostinato tune`` after a start; what is shipped was measured thoroughly."""
    file, shipped = tmp_path / "linear.json", SHAPE._replace(num_rows=1)
    last = candidates(SHAPE, GPU)[-1]
    known = Tuning(file, {shipped.key("GPU"): FAST})
    run_tuning(known, Stopwatch({last: 1.0}), {SHAPE: []}, num_candidates=2)
    assert known.get(KEY) != last
    run_tuning(known, Stopwatch({last: 1.0}), {SHAPE: [], shipped: []}, again=True)
    assert known.get(KEY) == Tuning(file, {}).get(KEY) == last
    assert known.get(shipped.key("GPU")) == FAST


def test_torch_may_win(tmp_path: Path) -> None:
    assert tune(tmp_path / "linear.json", Stopwatch({"torch": 1.0}), SHAPE).get(KEY) == "torch"
    assert Tuning(tmp_path / "linear.json", {}).get(KEY) == "torch"


def test_configs_that_do_not_run_are_out_of_the_race(tmp_path: Path) -> None:
    first, second, *_ = candidates(SHAPE, GPU)
    times: dict[GemmChoice, float | Exception] = {
        first: RuntimeError("out of resource"),
        second: 8.5,
    }
    assert tune(tmp_path / "linear.json", Stopwatch(times), SHAPE).get(KEY) == second


def test_torch_is_not_saved_where_nothing_else_ran(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For lack of a C compiler, say, which may be installed before the next start."""
    file = tmp_path / "linear.json"
    other = SHAPE._replace(num_rows=1)
    broken = RuntimeError("Failed to find C compiler")
    known = tune(file, Stopwatch(dict.fromkeys(candidates(SHAPE, GPU), broken)), SHAPE, other)
    assert known.get(KEY) == known.choice(SHAPE, GPU) == "torch"
    assert "none of our kernels does (RuntimeError: Failed to find C compiler)" in caplog.text
    known.remember({"later": FAST})
    fresh = Tuning(file, {})
    assert fresh.get(KEY) is None
    assert fresh.get(other.key("GPU")) is not None
    assert fresh.get("later") == FAST


def test_torch_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no GPU"):
        tune(tmp_path / "linear.json", Stopwatch({"torch": RuntimeError("no GPU")}), SHAPE)


def test_the_shipped_table_is_not_measured_again(tmp_path: Path) -> None:
    stopwatch = Stopwatch({})
    known = tune(tmp_path / "linear.json", stopwatch, SHAPE, **{KEY: FAST})
    assert known.get(KEY) == FAST
    assert not stopwatch.calls
    assert not (tmp_path / "linear.json").exists()


def test_what_was_measured_here_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    Tuning(file, {}).remember({KEY: FAST})
    assert Tuning(file, {KEY: "torch"}).get(KEY) == FAST


def test_many_rows_are_not_measured(tmp_path: Path) -> None:
    stopwatch = Stopwatch({})
    tune(tmp_path / "linear.json", stopwatch, SHAPE._replace(num_rows=65))
    assert not stopwatch.calls


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 2}', b'{"version": 2, "entries": []}'],
)
def test_a_damaged_file_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = tmp_path / "linear.json"
    file.write_bytes(content)
    fastest = candidates(SHAPE, GPU)[0]
    with caplog.at_level(logging.WARNING):
        assert tune(file, Stopwatch({fastest: 1.0}), SHAPE).get(KEY) == fastest
    assert "is ignored and will be recreated" in caplog.text
    assert Tuning(file, {}).get(KEY) == fastest


@pytest.mark.parametrize(
    "entry",
    [
        "cublas",
        None,
        7,
        [32, 128, 4],
        {},
        {**FAST.as_json(), "cluster": 2},
        {**FAST.as_json(), "block_n": 24},
        {**FAST.as_json(), "block_k": "128"},
        {**FAST.as_json(), "num_warps": 0},
        {**FAST.as_json(), "num_warps": True},
        {**FAST.as_json(), "split_k": 0},
        {**FAST.as_json(), "prefetch": -1},
    ],
)
def test_entries_that_cannot_be_used_are_measured_again(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "linear.json"
    file.write_text(json.dumps({"version": 2, "entries": {KEY: entry, "other": "torch"}}))
    known = Tuning(file, {})
    assert known.get(KEY) is None
    assert known.get("other") == "torch"
    fastest = candidates(SHAPE, GPU)[0]
    assert tune(file, Stopwatch({fastest: 1.0}), SHAPE).get(KEY) == fastest
    assert Tuning(file, {}).get("other") == "torch"


def test_another_version_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    file.write_text(json.dumps({"version": 0, "entries": {KEY: "torch"}}))
    assert Tuning(file, {}).get(KEY) is None


def test_a_directory_that_cannot_be_written_costs_the_next_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuning").write_text("a file where the directory should be")
    fastest = candidates(SHAPE, GPU)[0]
    with caplog.at_level(logging.WARNING):
        known = tune(tmp_path / "tuning" / "linear.json", Stopwatch({fastest: 1.0}), SHAPE)
    assert known.get(KEY) == fastest
    assert "OSTINATO_CACHE" in caplog.text


def test_what_another_process_found_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    early = Tuning(file, {})
    Tuning(file, {}).remember({"theirs": FAST})
    early.remember({"ours": "torch"})
    late = Tuning(file, {})
    assert late.get("theirs") == FAST
    assert late.get("ours") == "torch"


def test_a_lookup_during_a_measurement_does_not_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looks up a shape, for a running engine, while another starts one."""
    known = Tuning(tmp_path / "linear.json", {})

    def default_choice(_shape: LinearShape, _gpu: Gpu) -> GemmChoice:
        known.remember({KEY: FAST})
        return "torch"

    monkeypatch.setattr(tuning, "default_choice", default_choice)
    assert known.choice(SHAPE, GPU) == "torch"
    assert known.choice(SHAPE, GPU) == FAST


def test_a_process_does_not_undo_what_another_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    Tuning(file, {}).remember({KEY: "torch"})
    early = Tuning(file, {})
    Tuning(file, {}).remember({KEY: FAST})
    early.remember({"ours": "torch"})
    assert early.get(KEY) == "torch", "what it began with"
    assert Tuning(file, {}).get(KEY) == FAST


def test_the_shipped_table_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every entry is usable: none was skipped when reading it."""
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    text = Path(tuning.__file__).with_name("tuned_h200.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert content["version"] == 2
    table = tuning.read_table(text)
    assert table.keys() == content["entries"].keys()
    assert tuning.write_table(table) == text
    tuning.tuning.cache_clear()
    for key, choice in table.items():
        assert tuning.tuning().get(key) == choice
    tuning.tuning.cache_clear()
