"""Options: declared once, documented, and unknown names refused with a hint."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ostinato import LLM, AsyncLLM, ConfigError, GraphConfig, SamplingParams, other_engines
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.cli.app import app
from ostinato.config import EngineConfig


@pytest.mark.parametrize("options", [EngineConfig, GraphConfig, SamplingParams])
def test_every_option_is_explained(options: Any) -> None:
    for each in dataclasses.fields(options):
        assert len(each.metadata["help"]) > 10, each.name
        assert f"{each.name}: " in options.__doc__
        assert f"default: {each.default!r}" in " ".join(options.__doc__.split())


def test_an_llm_has_the_options_of_an_engine() -> None:
    ours, theirs = (inspect.signature(each).parameters for each in (LLM, EngineConfig))
    assert ours == theirs
    assert all(f"{name}: " in (LLM.__doc__ or "") for name in theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(0.8), r"0\.8 was given without one; write .*temperature="),
        (lambda: SamplingParams(temprature=0.8), "did you mean temperature"),
        (lambda: SamplingParams(best_of=3), r"best_of \(got 3\): write n"),
        (lambda: LLM("tiny", "cpu"), "takes its options by name, but 'cpu'"),
        (lambda: LLM(max_seqs=3), "LLM has no option 'max_seqs'; did you mean max_num_seqs"),
        (lambda: LLM(zzz=3), r"LLM has no option 'zzz'; help\(\) lists"),
        (lambda: LLM(swap_space=4), r"LLM has no option swap_space \(got 4\): requests that do"),
        (lambda: LLM(trust_remote_code=True), "never executed"),
        (lambda: LLM(enable_reasoning=True), "stays in the text"),  # no hint at another option
        (lambda: LLM(graphs={"mode": "FULL"}), "graphs must be a GraphConfig, got {'mode'"),
        (
            lambda: LLM(enforce_eager=True, graphs=GraphConfig(mode="FULL")),
            "enforce_eager turns graphs off, but graphs has mode",
        ),
        (
            lambda: GraphConfig(mode="NONE", cudagraph_mode="FULL"),
            "both mode and cudagraph_mode",
        ),
        (
            lambda: GraphConfig(max_cudagraph_capture_size=8, capture_sizes=[1, 2]),
            "give only one of the two",
        ),
        (lambda: LLM(attention=object()), "has no name, support, forward, forward_qkv"),
        (lambda: LLM(attention=TorchPagedAttention), "is a class: pass an instance"),
        (
            lambda: LLM(attention=TorchPagedAttention(), tensor_parallel_size=2),
            "cannot be sent to 2",
        ),
    ],
)
def test_what_is_refused_says_what_to_write(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "foreign"),
    [
        (EngineConfig, other_engines.ENGINE_OPTIONS),
        (GraphConfig, other_engines.GRAPH_OPTIONS),
        (SamplingParams, other_engines.SAMPLING_OPTIONS),
    ],
)
def test_other_engines_options_are_taken_where_they_ask_for_what_happens(
    options: Any, foreign: dict[str, other_engines.Foreign]
) -> None:
    for name, each in foreign.items():
        assert name not in inspect.signature(options).parameters
        for value in each.harmless:
            assert options(**{name: value}) == options()
        for odd in (object(), torch.zeros(2)):
            with pytest.raises(ConfigError, match=name):
                options(**{name: odd})


def test_names_of_vllm_are_taken() -> None:
    sizes = EngineConfig(
        graphs=GraphConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=[2, 1])
    ).graphs
    assert sizes == GraphConfig(mode="FULL", capture_sizes=[1, 2])
    assert EngineConfig(enforce_eager=True).graphs == GraphConfig(mode="NONE")
    assert EngineConfig(cp_kv_cache_interleave_size=4).dcp_kv_cache_interleave_size == 4


def test_calls_say_what_to_write_too() -> None:
    generate: Any = AsyncLLM.generate
    assert inspect.iscoroutinefunction(generate)
    with pytest.raises(ConfigError, match=r"AsyncLLM\.generate has no option request_id \(got '1'"):
        asyncio.run(generate(None, "prompt", request_id="1"))
    stream: Any = AsyncLLM.stream
    with pytest.raises(ConfigError, match="did you mean adapter"):
        stream(None, "prompt", adaptor="sql")


def test_the_ladder_ends_where_it_is_told_to() -> None:
    cpu = torch.device("cpu")
    ends_at = {
        largest: EngineConfig(
            graphs=GraphConfig(max_cudagraph_capture_size=largest), max_num_batched_tokens=2048
        ).capture_sizes(cpu)
        for largest in (1, 3, 100, 520, 1024)
    }
    assert ends_at[1] == (1,)
    assert ends_at[3] == (1, 2)
    assert ends_at[100][-2:] == (88, 96)
    assert ends_at[520][-2:] == (496, 512)
    assert ends_at[1024][-2:] == (1008, 1024)
    config = EngineConfig(graphs=GraphConfig(max_cudagraph_capture_size=513))
    with pytest.raises(ConfigError, match="513 is above max_num_batched_tokens=512"):
        config.capture_sizes(cpu)


def test_options_are_values() -> None:
    params = SamplingParams(n=2, detokenize=True)
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3) == SamplingParams(n=3)


def test_the_command_line_has_them() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "300"}).stdout
    for config in (EngineConfig, GraphConfig):
        for each in dataclasses.fields(config):
            if each.metadata["cli"] is not None and not each.name.endswith("capture_sizes"):
                assert f"--{each.name.replace('_', '-')}" in shown
    answer = CliRunner().invoke(
        app, ["explain", "--tokens", "3", "--reqs", "3", "--sizes", "1,2,4", "--device", "cpu"]
    )
    assert answer.exit_code == 0, answer.output
    assert "4" in answer.stdout


def test_attention_may_be_an_object() -> None:
    class Counting(TorchPagedAttention):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            super().forward(*args, **kwargs)

    backend = Counting()
    options: dict[str, Any] = {"random_weights": True, "device": "cpu", "show_progress": False}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM("tiny", attention=backend, **options) as llm:
        result = llm.generate([1, 2, 3], sampling_params=params, use_tqdm=False)
    assert backend.calls > 0
    with LLM("tiny", attention="torch", **options) as llm:
        expected = llm.generate([1, 2, 3], params)
    assert result[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
