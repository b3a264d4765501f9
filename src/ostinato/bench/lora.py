"""``ostinato bench lora``: what LoRA adapters cost, against an engine without LoRA, in one run.

Adapters have random weights in all linears of the model. The requests of a batch take turns with
them, so a batch of 32 with 8 adapters has each four times.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch

from ostinato.bench.decode import OURS, Window, check_counts, measure_batch
from ostinato.bench.timing.baselines import Generate, from_engine
from ostinato.bench.timing.measure import about
from ostinato.bench.timing.room import with_kv_cache_for, with_room
from ostinato.config import EngineConfig
from ostinato.llm import LLM
from ostinato.progress import ProgressBar
from ostinato.sampling_params import SamplingParams


def run(
    config: EngineConfig,
    *,
    batches: Sequence[int],
    adapters: int = 8,
    rank: int = 16,
    prompt_len: int = 128,
    new_tokens: int = 128,
    repeats: int = 3,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Time per output token of each batch size: without LoRA, with none active, with adapters."""
    check_counts(
        batches,
        adapters=adapters,
        rank=rank,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        repeats=repeats,
    )
    window = Window(prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    room = {"num_seqs": max(batches), "length": window.longest}
    config = with_kv_cache_for(with_room(config, **room, why=window.why), **room)
    with_lora = replace(config, enable_lora=True, max_loras=adapters, max_lora_rank=rank)
    with ExitStack() as stack:
        plain, llm = (stack.enter_context(LLM.from_config(each)) for each in (config, with_lora))
        for number in range(adapters):
            _put_random(llm, f"adapter {number}", rank, seed=number)
        subjects = {
            OURS: from_engine(plain),
            "none active": from_engine(llm),
            f"{adapters} adapters": _with_adapters(llm),
        }
        total = len(batches) * len(subjects) * (repeats + 1)
        with ProgressBar(total=total, disable=not show_progress) as bar:
            vocab_size = llm.engine.model.vocab_size
            rows = [measure_batch(subjects, vocab_size, batch, window, bar) for batch in batches]
        return {
            **about("lora", llm),
            "adapters": adapters,
            "rank": rank,
            "prompt_len": prompt_len,
            "new_tokens": new_tokens,
            "repeats": repeats,
            "rows": rows,
        }


def _put_random(llm: LLM, name: str, rank: int, *, seed: int) -> None:
    weights = llm.engine.runner.adapters
    assert weights is not None, "built with enable_lora"
    generator = torch.Generator(weights.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=weights.device)
        return values.mul_(0.1 / shape[-1] ** 0.5).to(weights.dtype)

    matrices = {
        module: (draw(rank, target.inputs), draw(target.outputs, rank))
        for module, target in weights.targets.items()
    }
    llm.engine.adapters.put(name, matrices)


def _with_adapters(llm: LLM) -> Generate:
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        names = list(islice(cycle(llm.adapters), len(prompts)))
        outputs = llm.generate(prompts, params, adapter=names)
        return [output.outputs[0].token_ids for output in outputs]

    return generate
