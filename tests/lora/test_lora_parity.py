"""Greedy tokens of every request in a mixed batch equal those of PEFT.

In every family of the native decoder, and in every mode for one of them.

Adapters differ in rank, in the linears they change and in how they are scaled. PEFT runs each
request alone, on transformers' model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import LINEARS, save_adapter
from tiny_models import TINY_NATIVE, VOCAB_SIZE, save_tiny
from transformers import AutoModelForCausalLM
from transformers_tokens import greedy_tokens

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.graphs.policy.modes import ModeName

peft = pytest.importorskip("peft")

NEW_TOKENS = 8
QUICK = ("FULL_AND_PIECEWISE", "FULL_AND_FULL")  # the defaults of the CPU and of CUDA
SLOW = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE")
CASES = [
    *(("llama", mode) for mode in QUICK),
    *(pytest.param("llama", mode, marks=pytest.mark.slow) for mode in SLOW),
    *(
        pytest.param(name, None, marks=pytest.mark.slow, id=f"{name}-default")
        for name in TINY_NATIVE
        if name not in ("llama", "gemma", "olmo3", "seed_oss", "ernie4_5")  # like others of them
    ),
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8, "targets": LINEARS},
    "attention": {
        "rank": 3,
        "targets": ("q_proj", "v_proj", "qkv_proj"),
        "alpha_pattern": {r"layers\.1\.self_attn\.(v|qkv)_proj": 7},
    },
    "mlp": {
        "rank": 16,
        "targets": ("up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj"),
        "ranks": {"down_proj": 5},
        "use_rslora": True,
        "lora_alpha": 4,
    },
}
# In the batch; None is the model alone. One batch has all of them, others have fewer.
WANTED = ("all", None, "attention", "mlp", "all", None)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Made = tuple[Path, dict[str, Path], list[list[int]], list[list[int]]]


def reference(
    model: Path, adapters: dict[str, Path], prompts: list[list[int]], device: torch.device
) -> list[list[int]]:
    """PEFT's tokens for each prompt, with the adapters of ``WANTED``."""
    base: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    base.generation_config.eos_token_id = None
    (first, path), *others = adapters.items()
    peft_model = peft.PeftModel.from_pretrained(base, path, adapter_name=first)
    for name, path in others:
        peft_model.load_adapter(path, adapter_name=name)
    peft_model = peft_model.to(device).eval()

    results = []
    for prompt, name in zip(prompts, WANTED, strict=True):
        if name is None:
            with peft_model.disable_adapter():
                results.append(greedy_tokens(peft_model, prompt, NEW_TOKENS))
        else:
            peft_model.set_adapter(name)
            results.append(greedy_tokens(peft_model, prompt, NEW_TOKENS))
    return results


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.device], Made]:
    """The checkpoint, the adapters, the prompts and PEFT's tokens of an architecture."""
    known: dict[tuple[str, str], Made] = {}

    def make(name: str, device: torch.device) -> Made:
        if (name, device.type) not in known:
            directory = tmp_path_factory.mktemp(name)
            model = save_tiny(TINY_NATIVE[name](), directory / "model")
            adapters = {
                each: save_adapter(directory / each, model, seed=seed, **options)
                for seed, (each, options) in enumerate(ADAPTERS.items())
            }
            source = random.Random(name)
            # The same prompt with and without an adapter, and others.
            lengths = (9, 9, 1, 23, 5, 40)
            prompts = [[source.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
            prompts[1] = prompts[0]
            tokens = reference(model, adapters, prompts, device)
            known[name, device.type] = model, adapters, prompts, tokens
        return known[name, device.type]

    return make


def open_llm(model: Path, device: torch.device, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": str(device),
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 96,
        "kv_cache_memory_bytes": "4M",
        "enable_lora": True,
        "max_loras": 3,
        "show_progress": False,
        "graphs": GraphConfig(capture_sizes=[2, 8, 96]),
    }
    return LLM(str(model), **{**defaults, **options})


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_mixed_batch_equals_peft(
    made: Callable[[str, torch.device], Made],
    device: torch.device,
    name: str,
    mode: ModeName | None,
) -> None:
    model, adapters, prompts, tokens = made(name, device)
    graphs = GraphConfig(mode=mode, capture_sizes=[2, 8, 96])
    with open_llm(model, device, graphs=graphs) as llm:
        for each, path in adapters.items():
            llm.load_adapter(each, path)
        assert tokens_of(llm.generate(prompts, GREEDY, adapter=WANTED)) == tokens
        # The test compares something: adapters change tokens.
        assert tokens[0] != tokens[1]
        for chosen in ([0], [1, 2], [1, 5], [2, 3, 4]):  # one active adapter, none, two, three
            some = [prompts[index] for index in chosen]
            outputs = llm.generate(some, GREEDY, adapter=[WANTED[index] for index in chosen])
            assert tokens_of(outputs) == [tokens[index] for index in chosen]
        eager = llm.engine.runner.stats.eager
        assert (eager.total() > 0) == (mode in ("NONE", "FULL_DECODE_ONLY"))


@pytest.mark.slow
def test_chunked_and_preempted_requests_equal_peft(
    made: Callable[[str, torch.device], Made], device: torch.device
) -> None:
    """Prompts in chunks of 7 tokens; blocks for less than half of the requests' tokens."""
    model, adapters, prompts, tokens = made("llama", device)
    with open_llm(
        model,
        device,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=7,
        block_size=4,
        kv_cache_memory_bytes="52K",
        enable_prefix_caching=False,
        max_model_len=72,
        graphs=GraphConfig(capture_sizes=[2, 8, 16]),
    ) as llm:
        for each, path in adapters.items():
            llm.load_adapter(each, path)
        preempted = 0
        schedule = llm.engine.scheduler.schedule

        def counting() -> Any:
            nonlocal preempted
            plan = schedule()
            preempted += len(plan.preempted)
            return plan

        llm.engine.scheduler.schedule = counting  # type: ignore[method-assign]
        assert tokens_of(llm.generate(prompts, GREEDY, adapter=WANTED)) == tokens
        assert preempted > 0
