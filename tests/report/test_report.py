"""``LLM.report``: what it says is what ran."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ostinato import (
    LLM,
    ConfigError,
    GraphConfig,
    Reason,
    SamplingParams,
    graphed,
    read_report,
    write_report,
)
from ostinato.engine.memory_samples import MemorySamples
from ostinato.report.pictures import draw_graphs, label_of, role_of
from ostinato.report.records import RunReport


def small_llm(graphs: GraphConfig) -> LLM:
    return LLM(
        "tiny",
        random_weights=True,
        device="cpu",
        dtype="float32",
        max_model_len=32,
        kv_cache_memory_bytes="1M",
        graphs=graphs,
        show_progress=False,
    )


def test_rows_add_up_to_the_counts_of_the_engine(llm: LLM, report: RunReport) -> None:
    stats = llm.engine.runner.stats
    assert sum(row.replays for row in report.graphs) == stats.hits
    assert sum(row.padding_tokens for row in report.graphs) == stats.padding_tokens
    assert {row.reason: row.steps for row in report.eager} == {Reason.TOO_LARGE.name: 1}
    # Three requests, padded to four; nineteen tokens each after those of their prompts.
    (of_four,) = (
        row for row in report.graphs if row.name == "FULL, 4 tokens of 4 requests, decode"
    )
    assert (of_four.replays, of_four.padding_tokens) == (19, 19)


def test_every_step_is_timed_once(report: RunReport) -> None:
    for row in [*report.graphs, *report.eager]:
        steps = row.replays if hasattr(row, "replays") else row.steps
        assert row.timed_runs == steps
        assert (row.run_s > 0) == (steps > 0)


def test_the_plan_and_the_cost_of_capture_are_the_engines(llm: LLM, report: RunReport) -> None:
    captured = llm.engine.runner.capture_report
    assert report.plan.mode == "FULL_AND_PIECEWISE"
    assert report.plan.decode_sizes == report.plan.mixed_sizes == [1, 2, 4, 8]
    assert [row.capture_s for row in report.graphs] == [each.seconds for each in captured.entries]
    assert sum(row.num_bytes for row in report.graphs) == captured.num_bytes
    assert report.environment["torch"]


def test_a_full_graph_is_drawn_by_layer_with_all_its_nodes(llm: LLM, report: RunReport) -> None:
    (picture,) = (
        each
        for each in report.pictures.graphs
        if each.name == "FULL, 8 tokens of 8 requests, decode"
    )
    entry = next(
        each.entry
        for each in llm.engine.runner.capture_report.entries
        if each.entry.descriptor.uniform and each.entry.descriptor.num_tokens == 8
    )
    assert picture.num_nodes == llm.engine.runner.num_nodes(entry)
    assert not picture.is_split
    titles = [group.title for group in picture.groups]
    assert titles == ["outside the layers", "layer 0", "layer 1", "outside the layers"]
    nodes = [report.pictures.nodes[number] for number in picture.groups[1].nodes]
    assert "attention" in {node.role for node in nodes}
    held = {owner for node in nodes for owner in node.owners}
    assert "parameter 'layers.0.qkv_proj.weight'" in held
    assert "KV cache 'layer 0, keys'" in held
    assert not any("layers.1." in owner for owner in held)


def test_a_graph_in_pieces_is_drawn_by_piece(report: RunReport) -> None:
    (picture,) = (each for each in report.pictures.graphs if each.name == "PIECEWISE, 8 tokens")
    assert picture.is_split
    assert [group.title for group in picture.groups] == ["piece 0", "piece 1", "piece 2"]


class Deep(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_equal_layers_are_drawn_once(device: torch.device) -> None:
    with graphed(Deep(5).to(device).eval(), sizes=[2]) as model:
        model(torch.ones(2, 3, device=device))
        (picture,) = draw_graphs(model.ledger()).graphs
    assert any(
        group.title == "layers 0\N{EN DASH}4" and group.repeat == 5 for group in picture.groups
    )
    assert sum(group.repeat * len(group.nodes) for group in picture.groups) == picture.num_nodes


def test_kernel_names_are_shortened() -> None:
    names = {
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)": (
            "vectorized_elementwise_kernel"
        ),
        "aten.addmm.default": "addmm",
        "nvjet_tst_64x8_64x16": "nvjet_tst_64x8_64x16",
        "memset": "memset",
    }
    assert {name: label_of(name) for name in names} == names


def test_kernels_without_a_telling_name_are_known_by_their_memory() -> None:
    def role(name: str, *owners: str) -> str:
        return role_of(("kernel", name, None, owners))

    assert role("tile_kernel", "parameter 'layers.0.o_proj.weight'") == "gemm"
    assert role("decode_kernel", "KV cache 'layer 0, keys'") == "attention"
    assert role("rms_norm_kernel", "parameter 'layers.0.attention_norm.weight'") == "norm"
    assert role("combine_kernel") == "other"


# --- the file -----------------------------------------------------------------------------------


def test_a_file_has_the_whole_report(report: RunReport, tmp_path: Path) -> None:
    write_report(report, tmp_path / "run.json")
    assert read_report(tmp_path / "run.json") == report


def test_a_report_of_nothing_has_no_graph_and_is_read_back(tmp_path: Path) -> None:
    with small_llm(GraphConfig(mode="NONE")) as llm:
        llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))
        report = llm.report()
    assert report.graphs == report.pictures.graphs == []
    assert [row.reason for row in report.eager] == ["MODE_NONE"]
    write_report(report, tmp_path / "run.json")
    assert read_report(tmp_path / "run.json") == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "is not a run report; LLM.report"),
        ({"format_version": 2}, "of format version 2, and this Ostinato reads version 1"),
        ({"graphs": [{"name": 3}]}, r"damaged run report: graphs\[0\].mode is missing"),
        ({"task": 3}, "damaged run report: task must be str, got 3"),
        ({"replayed_tokens": True}, "replayed_tokens must be int, got True"),
        ({"plan": []}, r"plan must be an object, got \[\]"),
        ({"memory": {"at_s": "x"}}, "memory.kv_blocks is missing"),
        ({"surprise": 1}, "surprise is unknown"),
    ],
)
def test_other_files_are_refused(
    report: RunReport, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.json"
    write_report(report, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_report(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_no_page_can_show_are_refused(
    report: RunReport, tmp_path: Path, value: float
) -> None:
    """The page reads its data as JSON, which has no such numbers."""
    path = tmp_path / "run.json"
    write_report(replace(report, plan=replace(report.plan, capture_s=value)), path)
    with pytest.raises(ConfigError, match=r"plan\.capture_s must be a finite number"):
        read_report(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_files_that_are_no_report_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a run report"):
        read_report(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json cannot be read: No such file"):
        read_report(tmp_path / "none.json")


# --- memory over time ---------------------------------------------------------------------------


def test_memory_is_sampled_while_requests_run(llm: LLM, report: RunReport) -> None:
    memory = report.memory
    assert len({len(each) for each in asdict(memory).values()}) == 1
    assert len(memory.at_s) >= 5  # 40 steps, every eighth, and the end
    assert memory.at_s == sorted(memory.at_s)
    assert max(memory.num_running) == 3
    assert max(memory.kv_blocks) >= 3
    assert max(memory.graph_bytes) == llm.engine.runner.pool.num_bytes


def test_samples_stay_bounded_and_cover_the_whole_run(llm: LLM) -> None:
    samples = MemorySamples(llm.engine.runner, llm.engine.schedulers, period=1, most=8)
    for step in range(1, 101):
        if step % samples.period == 0:
            samples.take()
    assert len(samples.samples) == 6  # four of the first 64 steps, then every sixteenth
    assert samples.period == 16
    first, last = samples.samples[0].at_s, samples.samples[-1].at_s
    assert first == min(each.at_s for each in samples.samples) < last
