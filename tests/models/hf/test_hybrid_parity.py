"""Models with recurrent layers: greedy tokens and logits equal transformers', in every mode.

Prompts of different lengths are batched together, and those that do not fit into a step are
computed in several. transformers runs each prompt alone, with its own cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_hybrid import TINY_HYBRID, Reference, random_prompts
from tiny_models import save_tiny

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.graphs.policy.modes import CUDAGraphMode, ModeName
from ostinato.runner.step_result import SampledLogits

NEW_TOKENS = 12
# Of a single token, of less and more than a convolution's window, and of more than two chunks.
LENGTHS = (1, 2, 5, 23, 64, 141)
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL")
CONVOLUTIONS = ("lfm2", "lfm2_moe")  # and no other recurrent layers
PROMPTS = random_prompts(LENGTHS)
# Every mode for one model of each kind, with prompts computed in several steps, which is the harder
# way; in one step, eagerly and in the mode that has both kinds of graphs.
CASES = [
    (name, mode, limit)
    for name in TINY_HYBRID
    for mode in MODES
    for limit in (256, 40)
    if (mode, limit) in (("NONE", 256), ("FULL_AND_PIECEWISE", 40))
    or (name in ("lfm2", "qwen3_next", "bamba") and (limit == 40 or mode == "FULL_AND_PIECEWISE"))
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, torch.device], tuple[Path, Reference, list[list[int]]]]:
    made: dict[tuple[str, str], tuple[Path, Reference, list[list[int]]]] = {}

    def make(name: str, device: torch.device) -> tuple[Path, Reference, list[list[int]]]:
        if (name, device.type) not in made:
            directory = save_tiny(TINY_HYBRID[name](), tmp_path_factory.mktemp(name))
            reference = Reference(directory, device)
            tokens = [reference.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
            made[name, device.type] = directory, reference, tokens
        return made[name, device.type]

    return make


@pytest.mark.parametrize(("name", "mode", "max_num_batched_tokens"), CASES)
def test_greedy_tokens_and_logits(
    name: str,
    mode: ModeName,
    max_num_batched_tokens: int,
    device: torch.device,
    checkpoint: Callable[[str, torch.device], tuple[Path, Reference, list[list[int]]]],
) -> None:
    directory, reference, expected = checkpoint(name, device)
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def record(sampled: SampledLogits) -> None:
        for request, row in zip(sampled.request_ids, sampled.logits.clone(), strict=True):
            rows[request].append(row)

    with LLM(
        directory,
        device=str(device),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=192,
        kv_cache_memory_bytes="64M",
        graphs=GraphConfig(mode=mode, capture_sizes=[4, 8, max_num_batched_tokens]),
        show_progress=False,
    ) as llm:
        llm.engine.runner.on_logits = record
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        results = llm.generate(PROMPTS, params)
        resolved, stats = llm.engine.resolved_mode, llm.engine.runner.stats
    tokens = [result.outputs[0].token_ids for result in results]
    assert tokens == expected
    assert len({tuple(each) for each in tokens}) == len(PROMPTS)  # the prompts matter
    for prompt, result in zip(PROMPTS, results, strict=True):
        logits = torch.stack(rows[f"{result.request_id}.0"])
        wanted = reference.logits(prompt, result.outputs[0].token_ids)
        assert (logits - wanted).abs().max() < 1e-4 * wanted.abs().max()
    if mode in ("FULL", "FULL_AND_FULL") and name not in CONVOLUTIONS:
        assert resolved.mode is CUDAGraphMode.FULL_AND_PIECEWISE
        assert "a recurrent layer is capturable for uniform decode" in str(resolved.reason)
    else:
        assert resolved.mode.name == mode
    if mode not in ("NONE", "FULL_DECODE_ONLY"):
        assert stats.misses == 0


def test_the_text_of_a_model_that_takes_images(tmp_path: Path) -> None:
    """Qwen3.5's checkpoints have an encoder of images, which is left out."""
    config = transformers.Qwen3_5Config(
        text_config=TINY_HYBRID["qwen3_5"]().to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
        },
    )
    save_tiny(config, tmp_path, auto=transformers.AutoModelForImageTextToText)
    reference = Reference(
        tmp_path, torch.device("cpu"), auto=transformers.AutoModelForImageTextToText
    )
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 192, "show_progress": False}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, device="cpu", dtype="float32", **settings) as llm:
        results = llm.generate(PROMPTS, params)
    tokens = [result.outputs[0].token_ids for result in results]
    assert tokens == [reference.generate(prompt, 8) for prompt in PROMPTS]
