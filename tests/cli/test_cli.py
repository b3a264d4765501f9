"""The ``ostinato`` command: what it prints, what it returns, and how it fails."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Merged, save_adapter
from command_line import Run, command_line
from tiny_models import save_talking

from ostinato import LLM, SamplingParams, cli, read_report, report_page
from ostinato.config import EngineConfig, GraphConfig
from ostinato.graphs.trust.shadow.report import Cause, Finding, Mismatch, VerifyReport
from ostinato.ops.numba import has_numba
from ostinato.self_test import FaultResult

TINY = ["--model", "tiny", "--random-weights", "--device", "cpu", "--max-model-len", "64"]
PROMPT = "1,2,3"


@pytest.fixture
def ostinato(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return command_line(capfd, monkeypatch)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens that the library generates for the same prompt."""
    with LLM(
        "tiny", random_weights=True, device="cpu", max_model_len=64, show_progress=False
    ) as llm:
        (result,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=6))
        return result.outputs[0].token_ids


# --- generate -------------------------------------------------------------------------------------


def test_generate_json(ostinato: Run, expected: list[int]) -> None:
    result = ostinato("generate", PROMPT, *TINY, "--max-tokens", "6", "--json")
    answer = result.json
    assert answer["prompt_token_ids"] == [1, 2, 3]
    (output,) = answer["outputs"]
    assert output["token_ids"] == expected
    assert output["finish_reason"] == "length"
    assert result.err == ""  # no progress bars in JSON output


@pytest.mark.slow
def test_generate_reports_its_run(ostinato: Run, tmp_path: Path) -> None:
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    ostinato("generate", PROMPT, *TINY, "--max-tokens", "6", "--quiet", "--report", str(run))
    assert sum(row.replays for row in read_report(run).graphs) == 6
    result = ostinato("report", str(run), "-o", str(page))
    assert result.out.startswith(f"{page}: ")
    assert page.read_text() == report_page(read_report(run))
    ostinato("report", str(run))
    assert (tmp_path / "run.html").read_text() == page.read_text()


@pytest.mark.parametrize("mode", ["NONE", "full", "PIECEWISE"])
def test_generate_streams(ostinato: Run, expected: list[int], mode: str) -> None:
    result = ostinato("generate", PROMPT, *TINY, "--max-tokens", "6", "--mode", mode, "--quiet")
    assert result.exit_code == 0
    assert result.out == "".join(f"[{token}] " for token in expected) + "\n"
    assert "it/s" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_generate_with_drafts(ostinato: Run, expected: list[int], method: str) -> None:
    result = ostinato(
        "generate", PROMPT, *TINY, "--max-tokens", "6", "--speculative", method, "--json"
    )
    assert result.json["outputs"][0]["token_ids"] == expected
    refused = ostinato("generate", PROMPT, *TINY, "--speculative", "magic")
    assert "speculative must be 'ngram', 'suffix'" in refused.err


def test_generate_shows_progress_apart_from_the_text(ostinato: Run) -> None:
    result = ostinato("generate", PROMPT, *TINY, "--max-tokens", "1", "--sizes", "1,2")
    assert "decode, FULL" in result.err
    assert "decode" not in result.out


@pytest.mark.slow
def test_generate_samples_with_a_seed(ostinato: Run, expected: list[int]) -> None:
    options = ["--temperature", "2.0", "--top-k", "40", "--top-p", "0.9", "--max-tokens", "6"]
    answers = [
        ostinato("generate", PROMPT, *TINY, *options, "--seed", seed, "--json").json["outputs"]
        for seed in ("3", "3", "4")
    ]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0]["token_ids"] != expected


def test_generate_with_an_adapter(ostinato: Run, tmp_path: Path) -> None:
    model = save_talking(tmp_path / "model", None)
    adapter = save_adapter(tmp_path / "adapter", model)
    command = ["generate", "1,2,3", "--model", str(model), "--device", "cpu", "--max-tokens", "6"]
    answer = ostinato(*command, "--adapter", str(adapter), "--json").json
    tokens = answer["outputs"][0]["token_ids"]
    assert tokens == Merged(model, adapter).tokens(answer["prompt_token_ids"], 6)
    assert tokens != ostinato(*command, "--json").json["outputs"][0]["token_ids"]


def test_explain_with_adapters(ostinato: Run) -> None:
    options = ["--device", "cpu", "--enable-lora", "--max-loras", "5"]
    command = ["explain", "--tokens", "3", "--reqs", "3", *options, "--json"]
    assert "num_active_loras=4" in ostinato(*command, "--adapters", "3").json["key"]
    refused = ostinato(*command, "--adapters", "6")
    assert refused.exit_code == 1
    assert "the batch has 6 adapters, but at most 5 are" in refused.err


# --- with a tokenizer -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose tokens are words: w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("talking")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "w7 {{ messages[0]['content'] }} w9"
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("chat", "ids"), [([], [4, 5]), (["--chat"], [7, 4, 5, 9])])
def test_generate_takes_and_gives_text(
    ostinato: Run, talking: str, chat: list[str], ids: list[int]
) -> None:
    command = [
        "generate",
        "w4 w5",
        "--model",
        talking,
        "--device",
        "cpu",
        "--max-tokens",
        "5",
        *chat,
    ]
    answer = ostinato(*command, "--json").json
    assert answer["prompt_token_ids"] == ids
    (output,) = answer["outputs"]
    assert output["text"].split() == [f"w{token}" for token in output["token_ids"]]
    shown = ostinato(*command, "--quiet")
    assert shown.out == output["text"] + "\n"


# --- capture --------------------------------------------------------------------------------------


def test_capture_json(ostinato: Run) -> None:
    result = ostinato("capture", *TINY, "--sizes", "1,4", "--max-num-seqs", "4", "--json")
    answer = result.json
    assert answer["mode"] == "FULL_AND_PIECEWISE"
    shapes = [(row["phase"], row["num_tokens"], row["num_reqs"]) for row in answer["graphs"]]
    assert shapes == [
        ("mixed, PIECEWISE", 4, None),
        ("mixed, PIECEWISE", 1, None),
        ("decode, FULL", 4, 4),
        ("decode, FULL", 1, 1),
    ]
    assert [row["graphs"] for row in answer["graphs"]] == [3, 3, 1, 1]  # two layers, two breaks
    assert all(row["nodes"] > 10 for row in answer["graphs"])
    assert sum(row["bytes"] for row in answer["graphs"]) > 0
    assert all(row["ms"] > 0 for row in answer["graphs"])
    assert result.err == ""


def test_capture_table(ostinato: Run) -> None:
    result = ostinato("capture", *TINY, "--sizes", "2", "--mode", "PIECEWISE", "--quiet")
    assert result.exit_code == 0
    assert "1 sizes captured, mode PIECEWISE" in result.out
    header, row = (line for line in result.out.splitlines() if line[:1] in "┃│")
    assert header.strip("┃").replace(" ", "").split("┃") == [
        "phase", "num_tokens", "num_reqs", "graphs", "nodes", "bytes", "ms",
    ]  # fmt: skip
    *cells, nodes = row.strip("│").replace(" ", "").split("│")[:5]
    assert cells == ["mixed,PIECEWISE", "2", "-", "3"]
    assert int(nodes) > 10


def test_capture_of_nothing(ostinato: Run) -> None:
    nothing = ostinato("capture", *TINY, "--mode", "NONE", "--json").json
    assert (nothing["mode"], nothing["graphs"]) == ("NONE", [])
    assert set(nothing["memory"]["taken"].values()) == {0}
    table = ostinato("capture", *TINY, "--mode", "NONE")
    assert table.exit_code == 0
    assert "nothing captured" in table.out


# --- explain --------------------------------------------------------------------------------------


def test_explain_a_graph(ostinato: Run) -> None:
    answer = ostinato(
        "explain", "--tokens", "5", "--reqs", "5", "--device", "cpu", "--sizes", "1,8", "--json"
    ).json
    assert (answer["runs"], answer["padded_to"], answer["padding"]) == ("FULL graph", 8, 3)
    assert answer["reason"] == "uniform decode batch with a captured graph"
    assert answer["captured_sizes"] == [1, 8]
    shown = ostinato("explain", "--tokens", "5", "--reqs", "5", "--device", "cpu").out
    assert "│ sizes without decode graph │ - " in shown


def test_explain_a_step_with_drafts(ostinato: Run) -> None:
    batch = ["--tokens", "10", "--reqs", "2", "--device", "cpu", "--sizes", "1,8,16"]
    answer = ostinato("explain", *batch, "--speculative", "ngram", "--json").json
    assert (answer["runs"], answer["padded_to"]) == ("FULL graph", 10)
    assert "query_len=5" in answer["key"]


def test_explain_a_step_with_images(ostinato: Run) -> None:
    batch = ["--tokens", "30", "--reqs", "1", "--device", "cpu", "--patches", "100"]
    answer = ostinato("explain", *batch, "--json").json
    assert answer["images"] == "100 patches, PIECEWISE graph of 256 patches"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--mode", "NONE"], "graph mode is NONE"),
        (["--sizes", "1,4"], "more tokens than the largest captured size"),
        (["--mode", "full_decode_only"], "the graph mode has graphs for uniform decode batches"),
    ],
)
def test_explain_an_eager_batch(ostinato: Run, options: list[str], reason: str) -> None:
    batch = ["--tokens", "9", "--reqs", "2", "--max-query-len", "8", "--device", "cpu"]
    answer = ostinato("explain", *batch, *options, "--json").json
    assert (answer["runs"], answer["padded_to"], answer["key"]) == ("eagerly", 9, "-")
    assert answer["reason"].startswith(reason)
    table = ostinato("explain", *batch, *options)
    assert table.exit_code == 0
    for text in ("9 tokens, 2 requests, longest query 8", "eagerly", "mode in force"):
        assert text in table.out


# --- errors ---------------------------------------------------------------------------------------

EXPLAIN = ["explain", "--device", "cpu", "--tokens", "4", "--reqs", "2"]
GENERATE = ["generate", PROMPT, *TINY]
DECODE = ["bench", "decode", *TINY[:-2], "--batch", "2", "--prompt-len", "4", "--new-tokens", "2"]
ERRORS: list[tuple[list[str], str]] = [
    ([*EXPLAIN, "--mode", "fullish"], "ConfigError: unknown graph mode 'fullish'; choose one of "),
    ([*EXPLAIN, "--mode", "[/red]"], "ConfigError: unknown graph mode '[/red]'; choose one of "),
    ([*EXPLAIN, "--mode", "[bold]"], "ConfigError: unknown graph mode '[bold]'; choose one of "),
    ([*EXPLAIN, "--sizes", "1;2"], "ConfigError: --sizes takes integers separated by commas, got "),
    ([*EXPLAIN, "--sizes", ""], "ConfigError: --sizes takes integers separated by commas, got ''"),
    ([*EXPLAIN, "--sizes", "0"], "ConfigError: capture size must be a positive integer, got 0"),
    ([*EXPLAIN, "--device", "tpu"], "ConfigError: unknown device 'tpu'; choose auto, cpu or cuda"),
    ([*EXPLAIN, "--max-query-len", "1"], "BatchError: max_query_len is 1, but the longest query"),
    ([*GENERATE[:1], "hello", *TINY], "ConfigError: the prompt of this model takes integers "),
    ([*GENERATE[:1], "1,512", *TINY], "RequestError: the prompt contains 512; token ids are "),
    ([*GENERATE, "--chat"], "RequestError: this model has no chat template"),
    ([*GENERATE, "--top-p", "0"], "ConfigError: top_p must be a number in (0, 1], got 0.0"),
    (
        [*GENERATE, "--kv-cache-memory-bytes", "lots"],
        "ConfigError: not an amount of memory: 'lots'",
    ),
    (
        [*GENERATE, "--max-model-len", "9999"],
        "ConfigError: the longest sequence was set to 9999 tokens",
    ),
    (["generate", "hi", "--model", "no/such/model/here"], "ModelLoadError: "),
    ([*DECODE, "--baselines", "vllm"], "ConfigError: unknown baselines ['vllm']; choose from "),
    ([*DECODE, "--batch", "x"], "ConfigError: --batch takes integers separated by commas, got 'x'"),
    ([*DECODE, "--batch", "1,0"], "ConfigError: batch size must be a positive integer, got 0"),
    ([*DECODE, "--prompt-len", "0"], "ConfigError: prompt_len must be a positive integer, got 0"),
    ([*DECODE, "--new-tokens", "0"], "ConfigError: new_tokens must be a positive integer, got 0"),
    ([*DECODE, "--repeats", "0"], "ConfigError: repeats must be a positive integer, got 0"),
    ([*DECODE, "--max-num-seqs", "1"], "ConfigError: max_num_seqs 1 is too small for this measure"),
    ([*DECODE, "--max-model-len", "22"], "ConfigError: max_model_len 22 is too small for"),
    ([*DECODE, "--profile", "t.txt"], "ConfigError: a Chrome trace is a .json or .json.gz file, "),
    ([*DECODE, "--profile", "/no/t.json"], "ConfigError: /no/t.json cannot be written: there is "),
    (
        [*DECODE, "--profile-batch", "2"],
        "ConfigError: no trace file for profiling batches [2]; give ",
    ),
    (
        [*DECODE, "--profile", "t.json", "--profile-batch", "2,3"],
        "ConfigError: batches [3] are profiled but not measured; ",
    ),
    (
        [*DECODE, "--profile", "t.json", "--max-model-len", "30"],
        "ConfigError: max_model_len 30 is too small for this measurement, ",
    ),
    (["bench", "plot", "none.json", "--out", "a.gif"], "ConfigError: a plot must be one of .png, "),
    (["bench", "plot", "none.json", "--out", "a.png"], "ConfigError: cannot read a result from "),
    (
        ["bench", "throughput", *TINY, "--mix", "talk"],
        "ConfigError: unknown mixes ['talk']; choose",
    ),
    (
        ["bench", "throughput", *TINY, "--arrival", "poisson", "--rate", "0"],
        "ConfigError: rate must be a positive number, got 0.0",
    ),
    (
        ["bench", "serve", *TINY, "--in-process", "--url", "http://127.0.0.1:9"],
        "ConfigError: give one of --in-process, --url and --baselines",
    ),
    (
        ["bench", "serve", "--url", "http://192.0.2.1"],
        "ConfigError: '192.0.2.1' is a remote host",
    ),
    (["bench", "serve", *TINY, "--in-process"], "ConfigError: the mix 'chat' has sequences of up "),
    (["bench", "throughput", *TINY], "ConfigError: the mix 'chat' has sequences of up to 1408 "),
    (["bench", "sampling", "--device", "tpu"], "ConfigError: unknown device 'tpu'; choose auto, "),
    (["report", "none.json"], "ConfigError: none.json cannot be read: No such file"),
    (["report", "a.html"], "ConfigError: the page would replace a.html; choose another file"),
    (
        ["generate", "1", *TINY, "--report", "no/run.json"],
        "ConfigError: no/run.json cannot be written: there is no directory ",
    ),
    (["generate", "1", *TINY, "--report", "/"], "ConfigError: / cannot be written: it is a dir"),
    (["bench", "core", "--output", "no/x.json"], "ConfigError: no/x.json cannot be written: "),
    ([*DECODE, "--output", "/"], "ConfigError: / cannot be written: it is a directory"),
    (
        ["plan", "graphs", *TINY, "--trace", "none", "--save-costs", "no/costs.json"],
        "ConfigError: no/costs.json cannot be written: there is no directory",
    ),
    (["bench", "capture", *TINY, "--modes", "FULL,HALF"], "ConfigError: unknown graph mode 'HALF'"),
]


@pytest.mark.parametrize(("command", "message"), ERRORS, ids=str)
def test_errors_are_one_line(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrow, and still one line
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = ostinato(*command, *(["--quiet"] if command[0] == "generate" else []))
    assert result.exit_code == 1
    assert result.out == ""
    assert result.err.startswith(message)
    assert result.err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a disk without space")
def test_a_full_disk_loses_no_result(ostinato: Run) -> None:
    result = ostinato("plan", "parallel", "--gpus", "2", "--json", "--output", "/dev/full")
    assert result.exit_code == 1
    assert json.loads(result.out)["model"] == "llama-3.1-8b"
    assert result.err == "ConfigError: /dev/full cannot be written: No space left on device\n"


def test_a_page_does_not_replace_its_report(
    ostinato: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ostinato("report", "run.json", "-o", str(tmp_path / "run.json"))
    assert result.err.startswith("ConfigError: the page would replace run.json; ")


def test_brackets_in_values_are_printed(ostinato: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes ``[cpu]`` for markup: doctor told users to install 'ostinato'."""
    from ostinato import doctor

    advice = "pip install 'ostinato[cpu]'"
    graphs = {"attention": "[torch]", "batches": []}
    found = {
        "environment": {"cache": "/home/[me]/cache"},
        "fast_paths": [{"name": "kernels", "on": False, "why": advice}],
        "private_names": {"found": 1, "missing": [{"path": "torch._x", "without": "[bold]"}]},
        "graphs": graphs,
    }
    monkeypatch.setattr(doctor, "examine", lambda config: found)
    shown = ostinato("doctor").out
    for text in (advice, "/home/[me]/cache", "[bold]", "[torch]"):
        assert text in shown


@pytest.mark.slow
def test_errors_of_the_installed_command() -> None:
    """In a separate process: one line, exit code 1, no traceback."""
    command = [sys.executable, "-m", "ostinato", "explain", "--tokens", "1", "--reqs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "BatchError: num_tokens is 1 and num_reqs is 2, but every request has at least one token; "
        "use 1 <= num_reqs <= num_tokens\n"
    )


@pytest.mark.slow
def test_any_locale_and_closed_streams() -> None:
    """The help has an ellipsis and a box, which an ASCII terminal does not; torch reads some of its
    own files in the encoding of the locale.
    """
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in (["generate", "--help"], ["doctor"], ["plan", "parallel", "--gpus", "2"]):
        done = run_command(*command, env=ascii_only)
        assert (done.returncode, done.stderr) == (0, ""), command
    command = f"exec {sys.executable} -m ostinato generate 1,2 {' '.join(TINY)} >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a disk without space")
@pytest.mark.slow
@pytest.mark.parametrize("command", [["--version"], ["explain", "--tokens", "2", "--reqs", "2"]])
def test_output_to_a_full_disk(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_command(*command, stdout=full)
    message = "ostinato: stdout cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def run_command(
    *arguments: str, env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ostinato", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )


def test_names_are_whole_on_narrow_terminals(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    shown = ostinato(*EXPLAIN).out
    assert "FULL_AND_PIE" in shown
    assert "…" not in shown


def test_errors_that_are_not_ours_are_not_hidden(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.engine import explain

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(explain, "explain_batch", broken)
    with pytest.raises(ZeroDivisionError):
        cli.app(EXPLAIN)


# --- bench ----------------------------------------------------------------------------------------

MODES = "NONE,FULL_DECODE_ONLY,PIECEWISE,FULL_AND_PIECEWISE,FULL,FULL_AND_FULL"


def test_bench_capture(ostinato: Run, tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    options = [*TINY, "--sizes", "1,4", "--modes", MODES, "--output", str(path)]
    answer = ostinato("bench", "capture", *options, "--json").json
    assert answer == json.loads(path.read_text())
    assert answer["model"] == "tiny"
    assert answer["machine"]["torch"] == torch.__version__
    assert [(row["mode"], row["graphs"]) for row in answer["rows"]] == [
        ("NONE", 0),
        ("FULL_DECODE_ONLY", 2),
        ("PIECEWISE", 6),
        ("FULL_AND_PIECEWISE", 8),
        ("FULL", 2),
        ("FULL_AND_FULL", 4),
    ]
    for row in answer["rows"]:
        assert 0 <= row["capture_s"] < row["ready_s"]
        assert (row["bytes"] > 0) == (row["mode"] != "NONE")
        assert (row["addresses"] == {}) == (row["mode"] == "NONE")
        assert row["check_ms"] > 0


def test_bench_capture_table(ostinato: Run) -> None:
    result = ostinato("bench", "capture", *TINY, "--sizes", "1", "--modes", "FULL")
    assert result.exit_code == 0
    assert "tiny: capture" in result.out
    assert f"torch {torch.__version__}" in result.out
    assert "FULL" in result.out


def test_bench_prefill(ostinato: Run) -> None:
    options = ["--lengths", "4,9", "--sizes", "4", "--modes", "PIECEWISE", "--repeats", "2"]
    answer = ostinato("bench", "prefill", *TINY, *options, "--json").json
    assert [row["prompt_len"] for row in answer["rows"]] == [4, 9]
    for row in answer["rows"]:
        assert list(row["ttft_ms"]) == ["NONE", "PIECEWISE"]
        assert row["same_tokens_as_eager"] == {"NONE": True, "PIECEWISE": True}
        assert row["fraction_of_eager"]["NONE"] == 1
    first, second = (row["steps"]["PIECEWISE"] for row in answer["rows"])
    assert first == {"replayed": 3}  # two measured, one to warm up
    assert second == {"replayed": 3, "TOO_LARGE": 3}


@pytest.mark.slow
def test_bench_sampling(ostinato: Run) -> None:
    options = ["--batch", "1,3", "--vocab-size", "500", "--history", "20", "--repeats", "1"]
    command = ["bench", "sampling", *options, "--device", "cpu"]
    answer = ostinato(*command, "--json").json
    assert {row["batch"] for row in answer["rows"]} == {1, 3}
    for row in answer["rows"]:
        assert row["same_tokens"] == row["batch"]
        assert min(row["milliseconds"].values()) > 0
    assert "Sampling from 500 tokens" in ostinato(*command).out
    for wrong in (["--repeats", "0"], ["--batch", "0"]):
        assert ostinato(*command, *wrong).exit_code == 1
    tiny = ostinato(*command, "--batch", "1", "--vocab-size", "3", "--history", "1", "--json").json
    assert all(row["same_tokens"] == 1 for row in tiny["rows"])  # fewer tokens than logprobs


@pytest.mark.slow
def test_bench_lora(ostinato: Run) -> None:
    lengths = ["--prompt-len", "4", "--new-tokens", "16", "--repeats", "1", "--quiet"]
    options = ["--batch", "1,3", "--adapters", "2", "--rank", "4", *lengths]
    command = ["bench", "lora", *TINY, "--sizes", "1,4", *options]
    answer = ostinato(*command, "--json").json
    assert [row["batch"] for row in answer["rows"]] == [1, 3]
    for row in answer["rows"]:
        assert row["same_tokens_as"]["none active"]
        assert set(row["seconds"]) == {"ostinato", "none active", "2 adapters"}
    assert "rank 4" in ostinato(*command).out
    assert ostinato(*command, "--adapters", "0").exit_code == 1


@pytest.mark.slow
def test_bench_spec(ostinato: Run) -> None:
    options = ["--batch", "1,2", "--num-tokens", "3", "--acceptance", "1.0", "--repeats", "1"]
    lengths = ["--prompt-len", "8", "--new-tokens", "40"]
    command = ["bench", "spec", *TINY[:-2], *options, *lengths]
    answer = ostinato(*command, "--json").json
    assert [row["batch"] for row in answer["rows"]] == [1, 2]
    for row in answer["rows"]:
        per_step = {name: cell["tokens_per_step"] for name, cell in row["subjects"].items()}
        assert per_step == {
            "no drafts": 1,
            "never right": 1,
            "100% right": pytest.approx(4, abs=0.3),
        }
        assert row["subjects"]["no drafts"]["speedup"] == 1
    assert "3 drafts per request" in ostinato(*command).out
    assert "acceptance must be in [0, 1], got 2.0" in ostinato(*command, "--acceptance", "2").err


THROUGHPUT = ["bench", "throughput", *TINY, "--num-requests", "3", "--scale", "0.01", "--quiet"]


def test_bench_throughput(ostinato: Run, tmp_path: Path) -> None:
    options = ["--mix", "prompts,chat", "--repeats", "1", "--seed", "7"]
    poisson = ["--arrival", "poisson", "--rate", "300"]
    report = ["--report", str(tmp_path / "run.json")]
    answer = ostinato(*THROUGHPUT, *options, *poisson, *report, "--json").json
    assert read_report(tmp_path / "run.json").model == "tiny"
    assert "--report" not in answer["command"]
    assert (answer["model"], answer["seed"], answer["repeats"]) == ("tiny", 7, 1)
    assert (answer["arrival"], answer["rate"], answer["scale"]) == ("poisson", 300, 0.01)
    prompts, chat = answer["rows"]
    assert (prompts["mix"], prompts["num_requests"]) == ("prompts", 3)
    assert (prompts["prompt_tokens"], prompts["output_tokens"]) == (3 * 20, 3)
    assert chat["mix"] == "chat"


def test_bench_throughput_table_of_large_numbers(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "mix": "long-in-short-out",
        "num_requests": 10_000,
        "requests_per_s": 1234.56,
        "duration_s": 1234.56,
        "output_tokens_per_s": 123456.7,
        "tokens_per_s": 1234567.8,
        "ttft_ms": {"p50": 12345.6, "p90": 23456.7, "p99": 34567.8},
        "tpot_ms": {"p50": 1.234, "p90": 12.345, "p99": 123.456},
        "longest_gap_ms": 1234.56,
        "steps": {"FULL": 10, "PIECEWISE": 20, "eager": 7},
        "eager_reasons": {"TOO_LARGE": 7},
        "padding_fraction": 0.123,
        "preemptions": 12345,
        "prefix_hit_tokens": 0,
        "prompt_tokens": 123456,
    }
    about = {"model": "llama-3.1-8b", "dtype": "bfloat16", "mode": "FULL", "rate": 20.0}
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-16"}
    results = {**about, "machine": machine, "rows": [row]}
    monkeypatch.setattr("ostinato.bench.throughput.run", lambda *_, **__: results)
    shown = ostinato("bench", "throughput").out
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown.splitlines()
        if "│" in line
    ]
    assert cells == [
        ["long-in-short-out", "10000 (1234.6/s)", "1234.56", "123,457", "1,234,568"],
        ["long-in-short-out", "12346 / 23457 / 34568", "1.23 / 12.3 / 123.5", "1234.6"],
    ]
    assert "bfloat16, FULL, 20 requests/s" in shown
    assert "steps 10 FULL, 20 PIECEWISE, 7 eager (TOO_LARGE 7); 12.3% of " in shown


def test_bench_throughput_table(ostinato: Run) -> None:
    mixes = "chat,long-in-short-out,short-in-long-out,prompts"
    result = ostinato(*THROUGHPUT, "--scale", "0.006", "--mix", mixes)
    assert result.exit_code == 0
    assert "all at once" in result.out
    for name in mixes.split(","):
        assert result.out.count(f"│ {name} ") == 2  # not broken into lines
        assert f"\n{name}: steps " in result.out
    assert "prompt tokens from the prefix cache" in " ".join(result.out.split())


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth is measured on less memory; no test checks its value."""
    monkeypatch.setattr("ostinato.bench.timing.floor._CPU_BYTES", 2**20)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating takes a time that depends on its tokens, however busy the machine is."""

    def timed(generate: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
        tokens = generate()
        return tokens, 5e-3 + 1e-3 * len(tokens) * len(tokens[0])

    monkeypatch.setattr("ostinato.bench.decode.timed", timed)


@pytest.fixture
def noisy_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3 take varying times."""
    times = itertools.cycle([0.3, 0.2, 0.1])

    def timed(generate: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
        tokens = generate()
        steady = 5e-3 + 1e-3 * len(tokens) * len(tokens[0])
        return tokens, next(times) if len(tokens) == 3 else steady

    monkeypatch.setattr("ostinato.bench.decode.timed", timed)


SHORT_RUN = ["--prompt-len", "5", "--new-tokens", "8", "--repeats", "2"]


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode(ostinato: Run) -> None:
    answer = ostinato("bench", "decode", *TINY, "--batch", "1,3", *SHORT_RUN, "--json").json
    assert (answer["prompt_len"], answer["new_tokens"], answer["repeats"]) == (5, 8, 2)
    assert (answer["model"], answer["random_weights"]) == ("tiny", True)
    assert (answer["dtype"], answer["mode"]) == ("float32", "FULL_AND_PIECEWISE")
    assert [row["batch"] for row in answer["rows"]] == [1, 3]
    rate, weights, kv = (
        answer["bandwidth"]["bytes_per_s"], answer["weight_bytes"], answer["kv_bytes_per_sequence"]
    )  # fmt: skip
    for row in answer["rows"]:
        times = row["tpot_ms"]
        assert list(times) == list(row["tokens_per_s"]) == ["ostinato", "eager", "hf"]
        assert row["floor_ms"] == pytest.approx((weights + row["batch"] * kv) / rate * 1e3)
        for name, milliseconds in times.items():
            assert row["tokens_per_s"][name] == pytest.approx(row["batch"] * 1e3 / milliseconds)
            assert row["of_floor"][name] == pytest.approx(row["floor_ms"] / milliseconds)
        for name in ("eager", "hf"):
            ratio = times[name] / times["ostinato"]
            assert row["speedup_over"][name] == pytest.approx(ratio)
        # transformers' random weights differ, so there is nothing to compare.
        assert row["same_tokens_as"] == {"eager": True, "hf": None}
        # A warm-up of 25 tokens, and twice 17 and 25, for each request.
        requests, tokens = 5 * row["batch"], (25 + 2 * (17 + 25)) * row["batch"]
        assert row["agreement"] == {
            "eager": {
                "requests": requests,
                "of_requests": requests,
                "tokens": tokens,
                "of_tokens": tokens,
            },
            "hf": None,
        }
        assert row["failed"] == row["unusable"] == {}
    assert answer["profiles"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode_of_a_checkpoint(ostinato: Run, talking: str) -> None:
    """The same weights: the tokens must match transformers."""
    options = ["--batch", "2", "--prompt-len", "5", "--new-tokens", "4", "--repeats", "1"]
    command = ["bench", "decode", "--model", talking, "--device", "cpu", *options]
    (row,) = ostinato(*command, "--baselines", "hf", "--json").json["rows"]
    assert row["same_tokens_as"] == {"hf": True}
    table = ostinato(*command)
    assert table.exit_code == 0
    shown = [(row[0], row[1], row[-1]) for row in cells(table.out)]
    assert shown == [
        ("2", "floor", ""),
        ("2", "ostinato", ""),
        ("2", "eager", "yes"),
        ("2", "hf", "yes"),
    ]
    assert "…" not in table.out  # all of it fits into 80 columns


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "noisy_clock")
def test_bench_decode_says_what_noise_exceeds(ostinato: Run, tmp_path: Path) -> None:
    """It is marked, the rest is reported, and the command fails."""
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    command = ["bench", "decode", *TINY, "--batch", "1,3", *SHORT_RUN, "--baselines", "eager"]
    shown = ostinato(*command, "--json", "--output", str(result), "--quiet")
    assert shown.exit_code == 1
    assert shown.err.startswith(
        "MeasurementError: noise exceeds 2 of the measurements: ostinato at batch 3, eager at "
    )
    assert shown.err.count("\n") == 1
    assert json.loads(shown.out) == json.loads(result.read_text())
    good, bad = json.loads(shown.out)["rows"]
    assert list(good["tpot_ms"]) == ["ostinato", "eager"]
    assert good["unusable"] == {}
    for name in ("tpot_ms", "tpot_quartiles_ms", "tokens_per_s", "speedup_over", "of_floor"):
        assert bad[name] == {}
    assert list(bad["unusable"]) == ["ostinato", "eager"]
    assert bad["same_tokens_as"] == {"eager": True}
    assert [len(times["long"]) for times in bad["seconds"].values()] == [2, 2]
    table = ostinato(*command)
    assert table.exit_code == 1
    assert [row[2] for row in cells(table.out) if row[0] == "3" and row[1] != "floor"] == [
        "noise",
        "noise",
    ]
    assert "ostinato, batch 3, unusable: noise: short runs took" in table.out
    assert "measure on a quieter machine" in " ".join(table.out.split())
    pytest.importorskip("matplotlib")
    assert ostinato("bench", "plot", str(result), "--out", str(picture)).exit_code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode_shows_progress_apart_from_results(ostinato: Run) -> None:
    command = ["bench", "decode", *TINY, "--batch", "1,3", *SHORT_RUN, "--baselines", "eager"]
    result = ostinato(*command, "--json")
    assert "batch" in result.json["rows"][0]
    for text in ("batch 1, ostinato, warm-up", "batch 3, eager, repeat 2 of 2", "12/12"):
        assert text in result.err
    assert ostinato(*command, "--json", "--quiet").err == ""


def cells(table: str) -> list[list[str]]:
    """The contents of the rows in ``table``."""
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode_without_baselines(ostinato: Run) -> None:
    options = ["--batch", "1", "--prompt-len", "3", "--new-tokens", "2", "--repeats", "1"]
    answer = ostinato("bench", "decode", *TINY, *options, "--baselines", "", "--json").json
    (row,) = answer["rows"]
    assert list(row["tpot_ms"]) == ["ostinato"]
    assert row["speedup_over"] == row["same_tokens_as"] == {}


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode_goes_on_when_a_baseline_fails(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cannot be built; another fails at one batch size."""
    from ostinato.bench.timing import baselines

    def fails_at_3(model: Any) -> baselines.Generate:
        def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
            if len(prompts) == 3:
                raise RuntimeError("three\nis too many")
            return [[0] * num_tokens for _ in prompts]

        return generate

    def not_built(model: Any, longest: int) -> baselines.Generate:
        raise ImportError("no compiler")

    monkeypatch.setattr(baselines, "_transformers_model", lambda llm: None)
    monkeypatch.setattr(baselines, "_transformers", fails_at_3)
    monkeypatch.setattr(baselines, "_transformers_compiled", not_built)
    command = ["bench", "decode", *TINY, "--batch", "1,3", *SHORT_RUN, "--baselines"]
    one, three = ostinato(*command, "hf,hf-compile", "--json").json["rows"]
    assert list(one["tpot_ms"]) == ["ostinato", "hf"]
    assert list(three["tpot_ms"]) == ["ostinato"]
    assert one["failed"] == {"hf-compile": "ImportError: no compiler"}
    assert three["failed"] == {**one["failed"], "hf": "RuntimeError: three is too many"}
    table = ostinato(*command, "hf")
    assert cells(table.out)[-1][:3] == ["3", "hf", "failed"]
    assert "hf, batch 3, failed: RuntimeError: three is too many" in table.out


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_decode_profile(ostinato: Run, tmp_path: Path) -> None:
    options = ["--batch", "1,3", *SHORT_RUN, "--baselines", "", "--profile-batch", "3"]
    profile = ["--profile", str(tmp_path / "trace.json")]
    command = ["bench", "decode", *TINY, *options, *profile]
    (answer,) = ostinato(*command, "--json").json["profiles"]
    assert (answer["batch"], answer["trace"]) == (3, "trace.batch3.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.batch3.json"]
    names = {
        event["name"]
        for event in json.loads((tmp_path / answer["trace"]).read_text())["traceEvents"]
    }
    attention = "compiled_rotary_attention" if has_numba() else "paged_attention"
    assert f"ostinato::{attention}" in names
    parts = answer["parts"]
    assert list(parts) == ["GEMM", "attention", "small kernels", "copies", "gaps"]
    assert sum(part["us"] for part in parts.values()) == pytest.approx(answer["window_us"])
    assert parts["attention"]["count"] == 2  # layers
    assert parts["GEMM"]["count"] == 2 * 4 + 1  # four per layer, and the head
    assert min(answer["step_us"], answer["host_us"]) > 0
    shown = ostinato(*command)
    rows = [row[0] for row in cells(shown.out) if row[1].endswith("µs")]
    assert rows == [*parts, "together", "step(), not profiled", "gaps, not profiled",
                    "host, not profiled"]  # fmt: skip
    assert f"ostinato::{attention}" in shown.out


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory", "steady_clock")
def test_bench_plot(ostinato: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    options = [*TINY, "--batch", "1,3", *SHORT_RUN, "--baselines", ""]
    assert ostinato("bench", "decode", *options, "--output", str(result)).exit_code == 0
    assert ostinato("bench", "plot", str(result), "--out", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- the commands themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_help(ostinato: Run, group: list[str]) -> None:
    result = ostinato(*group, "--help")
    assert result.exit_code == 0
    names = (
        ("core", "decode", "capture", "plot", "throughput")
        if group
        else ("generate", "capture", "explain", "bench")
    )
    assert all(name in result.out for name in names)


MODEL_OPTIONS: list[tuple[list[str], str, Any]] = [
    (["--model", "tiny"], "model", "tiny"),
    (["--random-weights"], "random_weights", True),
    (["--device", "cpu"], "device", "cpu"),
    (["--dtype", "float16"], "dtype", "float16"),
    (["--mode", "full"], "graphs", GraphConfig(mode="FULL")),
    (["--sizes", "2,4"], "graphs", GraphConfig(capture_sizes=[2, 4])),
    (["--compile"], "graphs", GraphConfig(compile=True)),
    (["--max-num-seqs", "3"], "max_num_seqs", 3),
    (["--max-num-batched-tokens", "9"], "max_num_batched_tokens", 9),
    (["--max-model-len", "7"], "max_model_len", 7),
    (["--swiftkv-layers", "5"], "swiftkv_layers", 5),
    (["--kv-cache-memory-bytes", "1M"], "kv_cache_memory_bytes", 2**20),
]


@pytest.mark.parametrize(("given", "name", "value"), MODEL_OPTIONS, ids=str)
def test_options_of_the_model_reach_the_engine(
    ostinato: Run, monkeypatch: pytest.MonkeyPatch, given: list[str], name: str, value: Any
) -> None:
    """One at a time; all others keep the library's defaults."""
    configs = []

    def kept(config: EngineConfig, **_: Any) -> dict[str, Any]:
        configs.append(config)
        return {"rows": []}

    monkeypatch.setattr("ostinato.bench.decode.run", kept)
    assert ostinato("bench", "decode", *given, "--json").exit_code == 0
    assert configs == [replace(EngineConfig(show_progress=False), **{name: value})]


@pytest.mark.parametrize("command", ["capture", "prefill"])
def test_commands_that_choose_the_mode_do_not_take_one(ostinato: Run, command: str) -> None:
    result = ostinato("bench", command, *TINY, "--mode", "FULL")
    assert result.exit_code == 2
    assert "--mode" in result.err


def test_unknown_options_are_refused(ostinato: Run) -> None:
    result = ostinato("explain", "--tokens", "1", "--reqs", "1", "--size", "3")
    assert result.exit_code == 2
    assert "--size" in result.err


def test_tune_says_that_it_needs_a_gpu(ostinato: Run) -> None:
    result = ostinato("tune", "--model", "tiny", "--random-weights", "--device", "cpu")
    assert result.exit_code == 1
    assert "ConfigError: there is nothing to tune on cpu" in result.err


@pytest.mark.slow
def test_verify_compares_every_graph(ostinato: Run) -> None:
    found = ostinato("verify", *TINY, "--sizes", "2,4", "--json").json
    assert found["compared"] >= 4
    assert found["mismatches"] == []
    result = ostinato("verify", *TINY, "--sizes", "2", "--quiet")
    assert result.exit_code == 0
    assert "comparisons with eager, 0 mismatches" in result.out


def test_verify_names_what_differs(ostinato: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that differs makes the command fail, for scripts."""
    found = Mismatch(
        graph="FULL graph of 4 tokens",
        found="at capture",
        tensor="the logits",
        max_difference=0.5,
        finding=Finding(cause=Cause.PADDING, operator="aten.mean.dim"),
    )
    monkeypatch.setattr(LLM, "verification", VerifyReport(num_compared=1, mismatches=[found]))
    result = ostinato("verify", *TINY, "--sizes", "2", "--quiet")
    assert result.exit_code == 1
    assert "the logits by up to 0.5; padding rows change the results of real rows" in result.out
    result = ostinato("verify", *TINY, "--sizes", "2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.out)["mismatches"][0]["finding"]["cause"] == "PADDING"


def test_the_self_test_of_verify(ostinato: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = FaultResult(fault="a leak", mode="FULL", mismatches=[], named=True, serves_on=True)
    monkeypatch.setattr("ostinato.self_test.self_test", lambda device, dtype: [missed])
    result = ostinato("verify", "--self-test", "--device", "cpu")
    assert result.exit_code == 1
    assert "missed  a leak, FULL" in result.out
    assert "nothing was found" in result.out
    result = ostinato("verify", "--self-test", "--json")
    assert (result.exit_code, json.loads(result.out)[0]["passed"]) == (1, False)
