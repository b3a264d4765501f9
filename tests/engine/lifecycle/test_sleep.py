"""``sleep`` and ``wake``: memory is really given back, and comes back at the same addresses."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import save_adapter
from tiny_encoders import save_encoder
from tiny_hybrid import TINY_HYBRID
from tiny_models import TINY_GENERIC, TINY_MIXTURES, TINY_NATIVE, TINY_WITH_OPTIONS
from weight_sets import GREEDY, PROMPTS, WeightSets, open_llm, tokens_of

from ostinato import (
    LLM,
    AsleepError,
    ConfigError,
    DraftModel,
    GraphConfig,
    ModelLoadError,
    OffloadConfig,
    RequestError,
    SleepError,
    compilation_counter,
)
from ostinato.runner.sleep import mapped_cuda_memory
from ostinato.runner.sleep.mapped_memory import MappedHostMemory

FAMILIES = {
    "gpt2": TINY_GENERIC["gpt2"],
    **{name: TINY_MIXTURES[name] for name in ("gpt_oss", "deepseek_v3")},
    "gemma": TINY_WITH_OPTIONS["gemma"],
    "qwen3_next": TINY_HYBRID["qwen3_next"],
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "ab")


def open_sleeper(path: Path, device: Any = "cpu", **options: Any) -> LLM:
    return open_llm(path, device, enable_sleep_mode=True, **options)


@pytest.fixture
def llm(sets: WeightSets, device: torch.device) -> Iterator[LLM]:
    with open_sleeper(sets.paths["a"], device, graphs=GraphConfig(capture_sizes=[4])) as llm:
        yield llm


def addresses_of(llm: LLM) -> list[int]:
    runner = llm.engine.runner
    return [
        *(each.data_ptr() for each in llm.engine.model.parameters()),  # type: ignore[attr-defined]
        *(each.data_ptr() for layer in runner.kv_cache.layers for each in layer),
    ]


def used_bytes(device: torch.device) -> int:
    """By this process on the CPU, by all on a GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_level_1_keeps_the_weights(llm: LLM, sets: WeightSets) -> None:
    before = addresses_of(llm)
    assert tokens_of(llm) == sets.tokens("a")
    with compilation_counter.expect(num_cudagraph_captured=0):
        for _ in range(2):
            llm.sleep()
            assert llm.sleep_level == 1
            llm.wake()
            assert llm.sleep_level is None
            assert tokens_of(llm) == sets.tokens("a")
    assert addresses_of(llm) == before
    llm.ledger().check(thorough=True)


def test_level_2_discards_them(llm: LLM, sets: WeightSets) -> None:
    before = addresses_of(llm)
    llm.sleep(level=2)
    llm.wake()
    with pytest.raises(ModelLoadError, match=r"discarded the weights, and these .*update_weights"):
        tokens_of(llm)
    some = sets.of("b")
    last = some.popitem()
    with compilation_counter.expect(num_cudagraph_captured=0):
        llm.update_weights(some)
        with pytest.raises(ModelLoadError, match=f"not written yet: {last[0]};"):
            tokens_of(llm)
        llm.update_weights([last])
        assert tokens_of(llm) == sets.tokens("b")
    assert addresses_of(llm) == before


@pytest.mark.slow
def test_memory_is_given_back(device: torch.device) -> None:
    options: dict[str, Any] = {
        "random_weights": True,
        "enable_sleep_mode": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 512,
        "kv_cache_memory_bytes": "256M",
        "graphs": GraphConfig(mode="NONE"),
        "show_progress": False,
        "device": str(device),
    }
    with LLM("tiny", **options) as llm:
        caches = [each for layer in llm.engine.runner.kv_cache.layers for each in layer]
        num_bytes = sum(each.nbytes for each in caches)
        assert num_bytes > 32 * 2**20
        for each in caches:
            each.fill_(1)  # host pages exist once they are written
        before = used_bytes(device)
        llm.sleep(level=1)
        assert before - used_bytes(device) >= num_bytes * 0.95
        llm.wake()
        assert not any(each.any() for each in caches)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_weights(family: str, tmp_path: Path) -> None:
    """Shared storages, tied heads, experts, fused rows, tensors derived from weights."""
    sets = WeightSets(FAMILIES[family](), tmp_path)
    with open_sleeper(sets.paths["a"], graphs=GraphConfig(capture_sizes=[4])) as llm:
        assert tokens_of(llm) == sets.tokens("a")
        llm.sleep(level=1)
        llm.wake()
        assert tokens_of(llm) == sets.tokens("a")
        llm.sleep(level=2)
        llm.wake()
        llm.update_weights(sets.paths["b"])
        assert tokens_of(llm) == sets.tokens("b") != sets.tokens("a")


# --- what an engine does meanwhile ----------------------------------------------------------------


def test_nothing_runs_asleep(llm: LLM, sets: WeightSets) -> None:
    completions = llm.engine.prepare_request(PROMPTS[0], GREEDY)
    llm.sleep()
    llm.sleep()  # the same again is harmless
    for attempt in (
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: llm.stream(PROMPTS, GREEDY),
        lambda: llm.update_weights(sets.paths["b"]),
        lambda: llm.engine.add(completions[0]),
        llm.capture_graphs,
    ):
        with pytest.raises(AsleepError, match=r"asleep \(level 1\); call wake\(\) first"):
            attempt()
    with pytest.raises(AsleepError, match=r"asleep at level 1; call wake\(\) before sleep\(2\)"):
        llm.sleep(level=2)
    llm.reset_prefix_cache()
    llm.clear_graphs()
    llm.wake()
    llm.wake()  # harmless
    llm.capture_graphs()
    assert tokens_of(llm) == sets.tokens("a")


@pytest.mark.parametrize("level", [1, 2])
def test_ctrl_c_in_the_middle(
    llm: LLM, sets: WeightSets, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    """What is released and what the engine knows are the same afterwards."""
    if llm.engine.model.device.type != "cpu":
        pytest.skip("interrupts the CPU's memory")
    tokens_of(llm)
    with monkeypatch.context() as patch:
        unmap = MappedHostMemory.unmap

        def interrupted(memory: MappedHostMemory) -> None:
            signal.raise_signal(signal.SIGINT)
            unmap(memory)

        patch.setattr(MappedHostMemory, "unmap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.sleep(level)
    assert llm.sleep_level == level
    with pytest.raises(AsleepError):
        tokens_of(llm)
    llm.wake()
    if level == 2:
        with pytest.raises(ModelLoadError, match="discarded the weights"):
            tokens_of(llm)
        llm.update_weights(sets.paths["a"])
    assert tokens_of(llm) == sets.tokens("a")


def test_closing_an_engine_that_sleeps(sets: WeightSets, device: torch.device) -> None:
    llm = open_sleeper(sets.paths["a"], device)
    llm.sleep(level=2)
    llm.close()


def test_requests_in_flight_refuse_it(llm: LLM, sets: WeightSets) -> None:
    stream = llm.stream([PROMPTS[0]], GREEDY)
    tokens = next(stream).token_ids
    with pytest.raises(RequestError, match="cannot sleep while requests are unfinished"):
        llm.sleep()
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == sets.tokens("a")[0]
    llm.sleep()


def test_prefixes_are_forgotten(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    llm.sleep()
    llm.wake()
    assert [each.num_cached_tokens for each in llm.generate(PROMPTS, GREEDY)] == [0, 0, 0]


@pytest.mark.slow
def test_another_engine_serves_meanwhile(llm: LLM, sets: WeightSets, device: torch.device) -> None:
    with open_sleeper(sets.paths["b"], device) as other:
        llm.sleep()
        assert tokens_of(other) == sets.tokens("b")
        other.sleep(level=2)
        llm.wake()
        assert tokens_of(llm) == sets.tokens("a")
        other.wake()
        other.update_weights(sets.paths["a"])
        assert tokens_of(other) == sets.tokens("a")


@pytest.mark.slow
def test_adapters_and_draft_models_stay(
    sets: WeightSets, tmp_path: Path, device: torch.device
) -> None:
    path = save_adapter(tmp_path / "adapter", sets.paths["a"])
    options = {
        "enable_lora": True,
        "speculative": DraftModel(model=str(sets.paths["a"]), num_tokens=2),
    }
    with open_sleeper(sets.paths["a"], device, **options) as llm:
        llm.load_adapter("one", path)
        outputs = llm.generate(PROMPTS, GREEDY, adapter="one")
        expected = [each.outputs[0].token_ids for each in outputs]
        assert expected != sets.tokens("a")
        for level in (1, 2):
            llm.sleep(level)
            llm.wake()
            if level == 2:
                llm.update_weights(sets.paths["a"])
            outputs = llm.generate(PROMPTS, GREEDY, adapter="one")
            assert [each.outputs[0].token_ids for each in outputs] == expected
            assert tokens_of(llm) == sets.tokens("a")


# --- refusals ------------------------------------------------------------------------------------


def test_without_room_it_stays_asleep_and_can_be_woken_later(
    sets: WeightSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_sleeper(sets.paths["a"]) as llm:
        llm.sleep(level=1)
        calls = []

        def fail_at_third(memory: MappedHostMemory) -> None:
            calls.append(memory)
            if len(calls) == 3:
                raise MemoryError("no memory on the device")

        with monkeypatch.context() as patch:
            patch.setattr(MappedHostMemory, "map", fail_at_third)
            with pytest.raises(SleepError, match=r"cannot wake: no memory.*lost nothing.*again"):
                llm.wake()
        assert len(calls) == 3
        assert llm.sleep_level == 1
        with pytest.raises(AsleepError):
            tokens_of(llm)
        llm.wake()
        assert tokens_of(llm) == sets.tokens("a")


def test_without_bindings_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_cuda_memory, "driver", None)
    with pytest.raises(ConfigError, match="enable_sleep_mode needs CUDA's Python bindings"):
        mapped_cuda_memory.MappedCudaMemory(1, torch.device("cuda", 0))


def test_it_must_be_enabled(sets: WeightSets) -> None:
    with open_llm(sets.paths["a"]) as llm:
        with pytest.raises(ConfigError, match="built with enable_sleep_mode=True"):
            llm.sleep()
        llm.wake()
        assert tokens_of(llm) == sets.tokens("a")


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_levels(sets: WeightSets, shared: LLM, level: Any) -> None:
    with pytest.raises(ConfigError, match=r"level must be 1 .* or 2 .*, got"):
        shared.sleep(level)


@pytest.fixture(scope="module")
def shared(sets: WeightSets) -> Iterator[LLM]:
    with open_sleeper(sets.paths["a"]) as llm:
        yield llm


@pytest.mark.slow
def test_not_for_models_that_embed(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with pytest.raises(ConfigError, match="enable_sleep_mode is for models that generate"):
        LLM(tmp_path, device="cpu", enable_sleep_mode=True)


def test_not_with_offload(sets: WeightSets) -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode does not support offload"):
        open_sleeper(sets.paths["a"], offload=OffloadConfig(group=2, offloaded=1))
