"""``bench parallel`` and ``plan parallel``: what they measure, predict, print, plot and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, command_line
from rich.console import Console
from tiny_models import TINY_MIXTURES
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato import set_forward_context
from ostinato.attention import create_attention
from ostinato.bench.layouts import plot as plot_parallel
from ostinato.bench.layouts import run as parallel
from ostinato.bench.layouts.rank_step import (
    BLOCK_SIZE,
    DrawnComm,
    SilentComm,
    make_batch,
    make_cache,
)
from ostinato.cli.tables.parallel_tables import bench_tables, plan_tables
from ostinato.errors import ConfigError
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native import shapes
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.parallel.comm import Comm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import build_base
from ostinato.planner import forecast as plan
from ostinato.testing.loopback import LoopbackWorld

CPU = torch.device("cpu")
BENCH = ["bench", "parallel", "--model", "tiny", "--device", "cpu", "--tokens", "1,3,8"]
SHORT = ["--context", "20", "--repeats", "1"]


@pytest.fixture
def ostinato(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return command_line(capfd, monkeypatch)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    layouts = [ParallelLayout(2, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)]
    return parallel.run(
        "tiny", layouts=layouts, tokens=[8, 3, 1, 3], context=20, repeats=2, device="cpu"
    )


@pytest.fixture
def file(measured: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measured))
    return str(path)


# --- one rank without the others ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_silent_results_have_the_shapes_of_real_ones(size: int) -> None:
    world = LoopbackWorld(size)
    tensor = torch.randn(4, 8, 3)

    def shapes(comm: Comm) -> list[torch.Size]:
        return [
            comm.all_reduce(tensor.clone()).shape,
            comm.all_gather(tensor).shape,
            comm.all_gather(tensor, dim=1).shape,
            comm.all_to_all(tensor, split_dim=1, concat_dim=0).shape,
            comm.all_to_all(tensor, split_dim=0, concat_dim=1).shape,
        ]

    ranks = range(size)
    for rank, real in enumerate(world.run(lambda rank: shapes(world.comm(ranks, rank)))):
        silent = SilentComm(ranks, rank)
        assert (silent.size, silent.index) == (size, rank)
        assert shapes(silent) == real


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("padded", [21, 24])
def test_batches_are_real_batches(checkpoint: tuple[Any, Path], padded: int) -> None:
    """A prompt, and then a decode of many requests that all have it, give transformers' logits."""
    theirs, path = checkpoint
    config = DecoderConfig.from_hf(theirs.config)
    alone = ParallelLayout()
    model = build_base(
        config, alone, 0, lambda ranks: SilentComm(ranks, 0), device=CPU, dtype=torch.float32
    )
    Checkpoint(path).copy_into(list(model.weight_slots()), CPU, show_progress=False)
    cache = make_cache(
        model.attention_specs, max_tokens=21, context=21, device=CPU, dtype=torch.float32
    )
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))

    def hidden_of(kind: Any, size: int, padded: int) -> torch.Tensor:
        batch = make_batch(
            kind,
            size,
            padded,
            context=21,
            vocab_size=96,
            cache=cache,
            attention=create_attention("torch", CPU),
        )
        with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
            hidden: torch.Tensor = model.compute_logits(model(batch.input_ids, batch.positions))
        return hidden[:size]

    with torch.inference_mode():
        expected = theirs(torch.arange(21)[None]).logits[0]
    torch.testing.assert_close(hidden_of("prefill", 21, padded), expected, atol=1e-4, rtol=1e-4)
    # All requests now have that prompt, except for its last token, which is their number.
    blocks = -(-21 // BLOCK_SIZE)
    for layer in cache.layers:
        for tensor in layer:
            tensor[1 + blocks : 1 + 3 * blocks] = tensor[1 : 1 + blocks].repeat(2, 1, 1, 1)
    decoded = hidden_of("decode", 3, 3 + padded - 21)
    for last in range(3):
        ids = torch.tensor([[*range(20), last]])
        with torch.inference_mode():
            expected = theirs(ids).logits[0, -1]
        torch.testing.assert_close(decoded[last], expected, atol=1e-4, rtol=1e-4)


def test_requests_share_blocks_of_a_small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig.from_hf(parallel.shape_config("tiny"))
    model = build_base(
        config,
        ParallelLayout(),
        0,
        lambda ranks: SilentComm(ranks, 0),
        device=CPU,
        dtype=torch.float32,
        max_position=64,
    )
    cache_bytes = 5 * 2 * 2 * 2 * 16 * 16 * 4
    monkeypatch.setattr("ostinato.bench.layouts.rank_step._CPU_CACHE_BYTES", cache_bytes)
    cache = make_cache(
        model.attention_specs, max_tokens=9, context=40, device=CPU, dtype=torch.float32
    )
    assert cache.layers[0][0].shape[0] == 1 + 5
    batch = make_batch(
        "decode",
        9,
        9,
        context=40,
        vocab_size=512,
        cache=cache,
        attention=create_attention("torch", CPU),
    )
    used = batch.metadata.block_table.unique().tolist()
    assert used == [1, 2, 3, 4, 5]
    with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
        assert model(batch.input_ids, batch.positions).shape == (9, 64)


# --- bench parallel -------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows(measured: dict[str, Any]) -> None:
    assert measured["communication"].startswith("excluded")
    assert (measured["model"], measured["dtype"], measured["context"]) == ("tiny", "float32", 20)
    keys = [(row["sp"], row["tp"], row["kind"], row["num_tokens"]) for row in measured["rows"]]
    assert keys == [
        (sp, tp, kind, size)
        for sp, tp in ((2, 1), (1, 2), (2, 2))
        for kind in ("decode", "prefill")
        for size in (1, 3, 8)
    ]
    for row in measured["rows"]:
        assert 0 < row["head_ms"] < min(row["base_ms"], row["shift_ms"])
        if row["sp"] == 1:
            assert row["base_ms"] == row["shift_ms"]


def test_experts_over_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mixture is measured split and spread, and both are predicted from that."""
    shape = TINY_MIXTURES["mixtral"]().to_dict() | {"eos_token_id": None}  # four experts
    monkeypatch.setitem(shapes.SHAPES, "mixture", shape)
    layouts = [ParallelLayout(1, 2), ParallelLayout(1, 4)]
    results = parallel.run(
        "mixture", layouts=layouts, tokens=[1, 5], context=8, repeats=1, device="cpu"
    )
    spread = results["expert_parallel"]
    assert [(row["gpus"], row["kind"], row["num_tokens"]) for row in spread] == [
        (gpus, kind, size) for gpus in (2, 4) for kind in ("decode", "prefill") for size in (1, 5)
    ]
    assert all(row["ms"] > 0 for row in spread)
    assert any("(EP)" in str(getattr(part, "title", "")) for part in bench_tables(results))
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(results))
    predicted = plan.run(plan.Question(source=file))
    steps = {
        (row["gpus"], row["kind"], row["num_tokens"]): row["ms"] - row["communication_ms"]
        for row in predicted["steps"]
        if row["way"] == "EP"
    }
    for row in spread:
        key = row["gpus"], row["kind"], row["num_tokens"]
        assert steps[key] == pytest.approx(row["ms"])


def test_drawn_rows_stay_where_they_are() -> None:
    """Graphs read them; smaller batches have some of them, and real tokens' slots."""
    comm = DrawnComm(range(3), 0)
    rows = comm.all_gather(torch.zeros(4, 8))
    assert rows.shape == (12, 8)
    assert rows.std() > 0.5
    assert comm.all_gather(torch.zeros(2, 8)).data_ptr() == rows.data_ptr()
    assert comm.all_gather(torch.full((4,), -1)).tolist() == [0] * 12


@pytest.mark.slow
def test_models_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    for name in ("build_base", "build_shift"):
        real = getattr(parallel, name)

        def build(config: Any, layout: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            built.append((real.__name__, layout.sp, layout.tp))
            return real(config, layout, *args, **options)

        monkeypatch.setattr(parallel, name, build)
    options: dict[str, Any] = {"tokens": [1], "context": 4, "repeats": 1, "device": "cpu"}
    rows = parallel.run("tiny", **options)["rows"]
    assert built == [
        ("build_base", 2, 1),
        ("build_shift", 2, 1),
        ("build_base", 1, 2),
        ("build_base", 4, 1),
        ("build_shift", 4, 1),
        ("build_base", 2, 2),
        ("build_base", 1, 4),
    ]
    shifts = {
        (row["sp"], row["kind"]): row["shift_ms"] - row["head_ms"]
        for row in rows
        if row["sp"] * row["tp"] == 4 and row["sp"] > 1
    }
    for kind in ("decode", "prefill"):
        assert shifts[4, kind] == pytest.approx(shifts[2, kind])


@pytest.mark.slow
def test_bench_command(ostinato: Run, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [*BENCH, *SHORT, "--layouts", "2x1,2x2"]
    answer = ostinato(*command, "--json", "--output", str(out)).json
    assert answer == json.loads(out.read_text())
    assert len(answer["rows"]) == 2 * 2 * 3
    shown = ostinato(*command)
    assert "communication is excluded" in shown.out
    for title in ("SP 2 x TP 1: ms of one rank", "SP 2 x TP 2: ms of one rank"):
        assert title in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "2"], "--layouts takes layouts SPxTP separated by commas, got '2'"),
        (["--layouts", "0x2"], "sequence parallel size (sp) must be an int of at least 1, got 0"),
        (
            ["--layouts", "3x1"],
            "4 query heads cannot be divided evenly among sp=3 x tp=1 = 3 ranks",
        ),
        (["--model", "giant"], "unknown model shape 'giant'"),
        (["--tokens", "1,many"], "--tokens takes integers separated by commas, got '1,many'"),
        (["--tokens", "0"], "number of tokens must be a positive integer, got 0"),
        (["--context", "0"], "context must be a positive integer, got 0"),
        (["--repeats", "-1"], "repeats must be a positive integer, got -1"),
        (["--context", "4096"], "the longest sequence was set to 4096 tokens"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "abacus"], "unknown device 'abacus'"),
    ],
)
def test_bench_refuses(ostinato: Run, options: list[str], message: str) -> None:
    answer = ostinato(*BENCH, *SHORT, *options)
    assert answer.exit_code == 1
    assert message in answer.err


# --- plan parallel --------------------------------------------------------------------------------


def test_plan_from_a_measurement(ostinato: Run, file: str, measured: dict[str, Any]) -> None:
    answer = ostinato("plan", "parallel", "--from", file, "--json").json
    assert (answer["model"], answer["dtype"], answer["compute"]) == ("tiny", "float32", "measured")
    assert [(row["sp"], row["tp"]) for row in answer["layouts"]] == [(2, 1), (1, 2), (2, 2)]
    steps = {
        (row["way"], row["sp"], row["tp"], row["kind"], row["num_tokens"]): row
        for row in answer["steps"]
    }
    for row in measured["rows"]:
        way = {(2, 1): "SP", (1, 2): "TP", (2, 2): "SP+TP"}[row["sp"], row["tp"]]
        step = steps[way, row["sp"], row["tp"], row["kind"], row["num_tokens"]]
        assert step["ms"] - step["communication_ms"] == pytest.approx(row["base_ms"])
    assert {load["num_reqs"] for load in answer["loads"]} == {8}  # no more were measured


@pytest.mark.slow
def test_plan_by_roofline(ostinato: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    answer = ostinato("plan", "parallel", "--gpus", "8", "--json", "--output", str(out)).json
    assert answer == json.loads(out.read_text())
    assert answer["compute"] == "roofline"
    layouts = {(row["sp"], row["tp"]): row for row in answer["layouts"]}
    assert list(layouts) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert all(0 < row["threshold"] < 2048 for shape, row in layouts.items() if shape[0] > 1)
    best = {load["load"]: load["best"] for load in answer["loads"]}
    assert best["decode-heavy"]["way"] == "TP"
    assert (best["prefill-heavy"]["way"], best["prefill-heavy"]["sp"]) == ("shift", 8)


def test_assumptions_are_printed(ostinato: Run) -> None:
    small = ["plan", "parallel", "--model", "tiny", "--max-tokens", "64"]
    shown = " ".join(ostinato(*small).out.split())
    for words in (
        "450 GB/s per GPU and direction (NVLink 4 of an H200",
        "10 µs and its bytes / bandwidth (typical of NCCL",
        "4390 GB/s (a plain read of an H200",
        "989 TFLOP/s (an H200's data sheet",
        "moves 2(n-1)/n of its tensor, twice per layer",
        "attends to 512 keys",
        "batches of 1 to 64 tokens",
        "decode-heavy is 32 requests of 128 tokens that generate 512",
    ):
        assert words in shown
    changed = ["--bandwidth", "300", "--latency", "5", "--memory-bandwidth", "3000", "--peak", "9"]
    shown = " ".join(ostinato(*small, *changed, "--context", "7").out.split())
    for words in (
        "300 GB/s per GPU and direction (given)",
        "5 µs and its bytes / bandwidth (given)",
        "3000 GB/s (given)",
        "9 TFLOP/s (given)",
        "attends to 7 keys",
    ):
        assert words in shown


def test_plan_tables_fit(capsys: pytest.CaptureFixture[str]) -> None:
    results = plan.run(plan.Question(max_tokens=64))
    console = Console(width=80)
    for part in plan_tables(results):
        console.print(part)
    shown = capsys.readouterr().out
    assert "…" not in shown  # nothing is cut off
    for title in ("2 GPUs: ms per step", "8 GPUs: ms per step", "Layouts:", "prefill-heavy: 32"):
        assert title in shown


def test_plan_tables_of_one_layout() -> None:
    """A mixed layout alone has no column in the tables of steps."""
    results = plan.run(plan.Question(layouts=[ParallelLayout(4, 2)], max_tokens=64))
    assert len(plan_tables(results)) == 1 + len(results["assumptions"]) + 1 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "2by1"], "--layouts takes layouts SPxTP separated by commas, got '2by1'"),
        (["--layouts", "3x1"], "32 query heads cannot be divided evenly among sp=3 x tp=1 = 3"),
        (["--gpus", "3"], "32 query heads cannot be divided evenly among sp=3 x tp=1 = 3 ranks"),
        (["--gpus", "0"], "number of GPUs must be a positive integer, got 0"),
        (["--gpus", "some"], "--gpus takes integers separated by commas"),
        (["--gpus", "2", "--layouts", "2x1"], "both --gpus and --layouts were given"),
        (["--from", "nowhere.json"], "cannot read a result from 'nowhere.json'"),
        (["--bandwidth", "0"], "the bandwidth between GPUs must be a number above 0, got 0.0"),
        (["--bandwidth", "nan"], "the bandwidth between GPUs must be a number above 0, got nan"),
        (["--latency", "-1"], "the latency of a collective must be a number of at least 0"),
        (["--memory-bandwidth", "-3"], "the memory bandwidth must be a number above 0"),
        (["--peak", "0"], "the peak FLOP rate must be a number above 0, got 0.0"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be a positive integer, got 0"),
        (["--dtype", "int4"], "unknown dtype 'int4'; choose bfloat16"),
        (["--model", "giant"], "unknown model shape 'giant'"),
        (["--plot", "picture.gif"], "a plot must be one of .png, .svg, .pdf, got 'picture.gif'"),
        (["--plot", "nowhere/p.png"], "nowhere/p.png cannot be written: there is no directory"),
        (["--plot-layout", "2x1"], "--plot-layout needs --plot"),
    ],
)
def test_plan_refuses(ostinato: Run, options: list[str], message: str) -> None:
    answer = ostinato("plan", "parallel", *options)
    assert (answer.exit_code, answer.out) == (1, "")
    assert message in answer.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-3.1-8b"], "--model is llama-3.1-8b, but tiny was measured"),
        (["--dtype", "bfloat16"], "--dtype is bfloat16, but float32 was measured"),
        (["--peak", "989"], "--peak has no effect with --from"),
        (["--memory-bandwidth", "1"], "--memory-bandwidth has no effect with --from"),
        (["--context", "9"], "--context has no effect with --from"),
        (["--gpus", "8"], "no layout of 8 GPUs was measured, only of 2, 4"),
        (["--layouts", "4x1"], "layout 4x1; it has the layouts 2x1, 1x2, 2x2"),
        (["--max-tokens", "9"], "ends at 8 tokens"),
    ],
)
def test_plan_refuses_beside_a_measurement(
    ostinato: Run, file: str, options: list[str], message: str
) -> None:
    answer = ostinato("plan", "parallel", "--from", file, *options)
    assert answer.exit_code == 1
    assert message in answer.err


def test_plan_reads_only_results_of_bench_parallel(
    ostinato: Run, file: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": [{"tpot_ms": {}}]}')
    answer = ostinato("plan", "parallel", "--from", str(path))
    assert answer.exit_code == 1
    assert "is not a result of `ostinato bench parallel`" in answer.err
    damaged = {**json.loads(Path(file).read_text()), "dtype": "int3"}
    path.write_text(json.dumps(damaged))
    assert "unknown dtype 'int3'" in ostinato("plan", "parallel", "--from", str(path)).err
    path.write_text("not JSON")
    assert "cannot read a result" in ostinato("plan", "parallel", "--from", str(path)).err


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_draw() -> None:
    pytest.importorskip("matplotlib")
    results = plan.run(plan.Question(gpus=[2, 4], max_tokens=2048))
    figure = plot_parallel.draw(results)
    decode, prefill = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in decode.lines}
    threshold = next(row["threshold"] for row in results["layouts"] if row["sp"] == 4)
    assert {"TP 4", "SP 4", "SP 4 with shift", "TP 4, communication"} < set(lines)
    expected = [
        [row["num_tokens"], row["ms"]]
        for row in results["steps"]
        if (row["way"], row["tp"], row["kind"]) == ("TP", 4, "decode")
    ]
    assert lines["TP 4"] == expected
    assert threshold in [point[0] for point in lines["SP 4 with shift"]]
    assert [text.get_text() for text in prefill.texts] == [f"threshold {threshold}"]
    mixed = plot_parallel.draw(results, ParallelLayout(2, 2)).axes[0]
    assert "SP 2 x TP 2 with shift" in [line.get_label() for line in mixed.lines]
    alone = plot_parallel.draw(results, ParallelLayout(1, 4)).axes[0]
    labels = [line.get_label() for line in alone.lines]
    assert labels == ["TP 4", "TP 4, communication"]
    with pytest.raises(
        ConfigError, match="layout 8x1 was not predicted; predicted layouts: 2x1, 1x2, 4x1"
    ):
        plot_parallel.draw(results, ParallelLayout(8, 1))


def test_plot_command(ostinato: Run, file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    command = ["plan", "parallel", "--from", file, "--plot", str(picture), "--plot-layout", "2x1"]
    assert ostinato(*command).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_draw_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    results = plan.run(plan.Question(gpus=[2], max_tokens=8))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r"plotting needs matplotlib.*pip install"):
        plot_parallel.draw(results)
