"""``ostinato plan graphs``: traces through the scheduler, measured costs, and the chosen sizes."""

import json
from collections import Counter
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.cli.app import app
from ostinato.errors import ConfigError
from ostinato.graphs.policy.choose_sizes import GraphLimits
from ostinato.planner.graphs.observed import read_shapes, shapes_of_trace
from ostinato.planner.graphs.plan import as_flags, plan_graphs
from ostinato.planner.graphs.step_costs import KindCosts, StepCosts, curve, measure
from ostinato.planner.graphs.trace import (
    WORKLOADS,
    TracedRequest,
    generate_trace,
    read_trace,
)

KIND = KindCosts(
    replay=((1, 1.0), (4, 1.0), (8, 2.0), (16, 4.0)),
    eager=((1, 5.0), (16, 6.0)),
    graph_seconds=0.1,
    graph_bytes=100,
)
COSTS = StepCosts(
    model="m",
    machine="a machine",
    max_num_seqs=16,
    max_num_batched_tokens=16,
    pool_bytes_per_token=10.0,
    decode=KIND,
    mixed=KIND,
)
TINY = {"random_weights": True, "device": "cpu", "kv_cache_memory_bytes": "8M"}


def request(arrival, prompt, output):
    return TracedRequest(arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)


def test_a_trace_runs_as_the_engine_would_run_it():
    """A prompt of 20 tokens in steps of 16; the second request comes while the first decodes."""
    shapes = shapes_of_trace([request(0.0, 20, 3), request(5.5, 3, 2)], COSTS)
    # 16 tokens take 4 s, the other 4 take 1 s, and one decodes for 1 s.
    assert shapes == {"mixed": Counter({16: 1, 4: 2}), "decode": Counter({1: 2})}


@pytest.mark.slow
def test_steps_of_a_trace_are_those_of_the_engine():
    requests = [request(0.0, prompt, output) for prompt, output in ((5, 4), (9, 2), (3, 7))]
    graphs = GraphConfig(capture_sizes=[1, 2, 4, 8, 16])
    with LLM("tiny", graphs=graphs, **TINY, max_num_seqs=4, show_progress=False) as llm:
        costs = measure(llm, repeats=1)
        llm.generate(
            [list(range(1, 1 + each.prompt_tokens)) for each in requests],
            [SamplingParams(max_tokens=n.output_tokens, ignore_eos=True) for n in requests],
        )
        counted = llm.step_shapes()
    assert shapes_of_trace(requests, costs) == counted
    assert [size for size, _ in costs.decode.replay] == [1, 2, 4]
    assert [size for size, _ in costs.mixed.replay] == [1, 2, 4, 8, 16]
    assert all(seconds > 0 for _, seconds in (*costs.decode.eager, *costs.mixed.replay))


def test_the_plan_beats_the_ladder_with_fewer_graphs():
    shapes = {"decode": Counter({6: 90, 3: 10}), "mixed": Counter()}
    result = plan_graphs(shapes, COSTS, GraphLimits(max_graphs=2))
    # Between 4 and 8 tokens the cost is interpolated: a step of 6 takes 1.5 s.
    assert result["planned"]["sizes"] == {"decode": [3, 6]}
    assert result["planned"]["ms_per_step"] == pytest.approx(1450)
    assert result["default"]["ms_per_step"] == pytest.approx(1900)
    assert result["gain"] == pytest.approx(1 - 1.45 / 1.9)
    assert result["planned"]["bytes"] == 2 * 100 + 60


def test_costs_between_measured_sizes():
    seconds = curve(((2, 1.0), (4, 3.0)))
    assert [seconds(size) for size in (1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_costs_are_read_as_written(tmp_path):
    COSTS.write(tmp_path / "costs.json")
    assert StepCosts.read(tmp_path / "costs.json") == COSTS


def write_trace(requests, path):
    path.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in requests))


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_drawn_from_their_distributions(name, tmp_path):
    load, drawn = WORKLOADS[name], generate_trace(name, 400, seed=3)
    assert drawn == generate_trace(name, 400, seed=3) != generate_trace(name, 400, seed=4)
    prompts = sorted(each.prompt_tokens for each in drawn)
    assert prompts[200] == pytest.approx(load.prompt[0], rel=0.25)
    assert prompts[-1] <= load.most_prompt
    expected = 400 / load.rate if load.rate else 0
    assert drawn[-1].arrival_s == pytest.approx(expected, rel=0.2)
    write_trace(drawn, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == drawn


def test_the_command(tmp_path):
    COSTS.write(tmp_path / "costs.json")
    (tmp_path / "stats.json").write_text(json.dumps({"decode": {"6": 9}, "mixed": {"3": 2}}))
    command = ["plan", "graphs", "--stats", str(tmp_path / "stats.json"), "--max-graphs", "2"]
    shown = CliRunner().invoke(app, [*command, "--costs", str(tmp_path / "costs.json")])
    assert shown.exit_code == 0
    assert "--sizes 6\n--mixed-sizes 3\n" in shown.stdout
    assert "less time per step than with the default sizes" in shown.stdout


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({"decode": [1, 3], "mixed": [9]}, "--sizes 1,3 --mixed-sizes 9"),
        ({"decode": [3], "mixed": []}, "--mode FULL_DECODE_ONLY --sizes 3"),
        ({"decode": [3]}, "--mode FULL_DECODE_ONLY --sizes 3"),
        ({"decode": [], "mixed": [9]}, "--mode FULL --sizes 9"),
        ({"decode": [], "mixed": []}, "--mode NONE"),
    ],
)
def test_flags_capture_what_was_planned(sizes, flags):
    given = as_flags(sizes)
    assert " ".join(given) == flags
    words = [word.split(",") for flag in given for word in flag.split()]
    options = {flag: values for (flag,), values in zip(words[::2], words[1::2], strict=True)}
    names = {"--mode": "mode", "--sizes": "capture_sizes", "--mixed-sizes": "mixed_capture_sizes"}
    GraphConfig(
        **{
            names[flag]: values[0] if flag == "--mode" else [int(each) for each in values]
            for flag, values in options.items()
        }
    )


def test_a_plan_that_is_slower_than_the_ladder_says_so(tmp_path):
    COSTS.write(tmp_path / "costs.json")
    (tmp_path / "stats.json").write_text(json.dumps({"decode": {"6": 9}, "mixed": {"3": 2}}))
    command = ["plan", "graphs", "--stats", str(tmp_path / "stats.json"), "--max-graphs", "0"]
    shown = CliRunner().invoke(app, [*command, "--costs", str(tmp_path / "costs.json")])
    assert "% more time per step than with the default sizes\n--mode NONE\n" in shown.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{}", r"line 1 of .* is not a request"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be a pos"),
        ("[3]", r"line 1 of .* is not a request: \[3\] is not an object"),
        ("[" * 100_000, "is not a request: maximum recursion depth"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1e9}', "of at most 16777216, got"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a finite"),
        *(
            (f'{{"arrival_s": {each}, "prompt_tokens": 1, "output_tokens": 1}}', "a finite number")
            for each in ("Infinity", "true", f"1{'0' * 400}")
        ),
    ],
)
def test_a_bad_trace_is_refused(tmp_path, text, message):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        *(f'{{"decode": {{"1": {each}}}, "mixed": {{}}}}' for each in ("-2", "2.5", "1e400")),
        "[" * 100_000,
        '{"decode": {}}',
    ],
)
def test_bad_step_shapes_are_refused(tmp_path, text):
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot read step shapes from"):
        read_shapes(tmp_path / "stats.json")


@pytest.mark.parametrize(
    "damage",
    [
        {"decode": {"replay": []}},
        {"decode": {"replay": [[4, 1.0], [1, 1.0]]}},
        {"mixed": {"eager": [[1, float("nan")]]}},
        {"mixed": {"eager": [[1, -1.0]]}},
        {"mixed": {"graph_bytes": "many"}},
        {"decode": {"graph_seconds": -0.1}},
        {"max_num_seqs": 0},
        {"pool_bytes_per_token": float("inf")},
    ],
)
def test_bad_costs_are_refused(tmp_path, damage):
    costs = asdict(COSTS)
    for name, value in damage.items():
        costs[name] = {**costs[name], **value} if isinstance(value, dict) else value
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    with pytest.raises(ConfigError, match=r"cannot read step costs from .*--save-costs"):
        StepCosts.read(tmp_path / "costs.json")


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "bad.json").write_text('{"decode": 3}')
    with pytest.raises(ConfigError, match=r"cannot read step shapes from .*LLM\.step_shapes\(\)"):
        read_shapes(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match=r"cannot read step costs from .*--save-costs"):
        StepCosts.read(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="cannot read a trace from"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read a trace from"):
        read_trace(tmp_path / "binary")
    with pytest.raises(ConfigError, match="unknown workload 'video'; choose one of chat"):
        generate_trace("video", 1)


def test_shapes_that_were_not_measured_are_refused():
    with pytest.raises(ConfigError, match="decode steps of 99 tokens were observed, but costs"):
        plan_graphs({"decode": Counter({99: 1}), "mixed": Counter()}, COSTS, GraphLimits())
    with pytest.raises(ConfigError, match="no step was observed"):
        plan_graphs({"decode": Counter(), "mixed": Counter()}, COSTS, GraphLimits())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "as --trace or as --stats, exactly one"),
        (["--stats", "s", "--max-graphs", "-1"], "max_graphs must be an integer of at least 0"),
        (["--stats", "STATS", "--costs", "c", "--save-costs", "d"], "--save-costs writes what is"),
    ],
)
def test_bad_commands_are_refused(tmp_path, given, message):
    (tmp_path / "stats.json").write_text('{"decode": {}, "mixed": {}}')
    stats = str(tmp_path / "stats.json")
    words = [stats if each == "STATS" else each for each in given]
    result = CliRunner().invoke(app, ["plan", "graphs", *words])
    assert message in str(result.exception)


@pytest.mark.slow
def test_costs_need_both_kinds_of_graphs():
    with (
        LLM("tiny", graphs=GraphConfig(mode="PIECEWISE"), **TINY, show_progress=False) as llm,
        pytest.raises(ConfigError, match="graph mode PIECEWISE does not have both"),
    ):
        measure(llm)


@pytest.mark.slow
def test_graphs_of_lazy_capture_are_captured_to_be_measured():
    graphs = GraphConfig(capture_sizes=[1, 4], lazy_capture=True)
    with LLM("tiny", graphs=graphs, **TINY, show_progress=False) as llm:
        costs = measure(llm, repeats=1)
    assert [size for size, _ in costs.mixed.replay] == [1, 4]


@pytest.mark.slow
def test_costs_need_sizes_of_both_kinds():
    graphs = GraphConfig(capture_sizes=[64])
    with (
        LLM("tiny", graphs=graphs, max_num_seqs=4, **TINY, show_progress=False) as llm,
        pytest.raises(ConfigError, match="no sizes of decode batches are captured"),
    ):
        measure(llm)


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--ulysses-sequence-parallel-size"])
def test_costs_are_measured_on_one_rank(tmp_path, option):
    """A padding batch on one rank would wait for the others for ever."""
    write_trace([request(0.0, 2, 2)], tmp_path / "trace.jsonl")
    command = ["plan", "graphs", "--trace", str(tmp_path / "trace.jsonl"), "--model", "tiny"]
    result = CliRunner().invoke(app, [*command, "--random-weights", option, "2"])
    assert "the costs of steps are measured on one rank" in str(result.exception)
