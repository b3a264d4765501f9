"""The subjects of ``ostinato bench decode``: our engine with and without graphs, and transformers.

A subject is a function that generates. transformers runs the same checkpoint or, if the weights are
random, a model of the same shape with other random weights; both transformers subjects share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato import compat
from ostinato.config import GraphConfig
from ostinato.errors import ConfigError
from ostinato.llm import LLM
from ostinato.sampling_params import SamplingParams

BASELINES = ("eager", "hf", "hf-compile")
# Generates this many tokens for each prompt, and returns them.
Generate = Callable[[list[list[int]], int], list[list[int]]]

_REASON_CHARS = 300


def check_names(names: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(BASELINES))
    if unknown:
        raise ConfigError(f"unknown baselines {unknown}; choose from {list(BASELINES)}")


def open_baselines(
    llm: LLM, names: Sequence[str], stack: ExitStack, *, longest: int
) -> tuple[dict[str, Generate], dict[str, str]]:
    """The baselines that could be built, and the reason for each one that could not.

    ``stack`` closes them. ``longest``: the longest sequence, in tokens.
    """

    def eager() -> Generate:
        config = replace(llm.config, graphs=GraphConfig(mode="NONE"))
        return from_engine(stack.enter_context(LLM.from_config(config)))

    theirs = functools.cache(lambda: _transformers_model(llm))
    builders: dict[str, Callable[[], Generate]] = {
        "eager": eager,
        "hf": lambda: _transformers(theirs()),
        "hf-compile": lambda: _transformers_compiled(theirs(), longest),
    }
    built: dict[str, Generate] = {}
    failed: dict[str, str] = {}
    for name in BASELINES:
        if name in names:
            try:
                built[name] = builders[name]()
            except Exception as error:
                failed[name] = reason(error)
    return built, failed


def reason(error: Exception) -> str:
    """An error in one line; compiler errors run to pages."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."


def from_engine(llm: LLM) -> Generate:
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]

    return generate


def checkpoint(llm: LLM) -> Path | None:
    """Where the weights come from; None for random weights."""
    return None if llm.config.random_weights else llm.model_path


def _transformers_model(llm: LLM) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # has no types
    ours = llm.engine.model
    if (path := checkpoint(llm)) is not None:
        model = auto.from_pretrained(path, dtype=ours.dtype).to(ours.device)
    else:
        with ours.device:
            model = auto.from_config(llm.engine.model_config, dtype=ours.dtype)
    model.eval()
    model.generation_config.eos_token_id = None  # never stops early
    return model


def _transformers(model: Any) -> Generate:
    """transformers' ``generate`` unmodified: eager, with a growing cache."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        return _generate(model, prompts, num_tokens)

    return generate


def _transformers_compiled(model: Any, longest: int) -> Generate:
    """transformers' ``generate`` with its static cache, for which it compiles the decode step.

    Each batch size is compiled from scratch: on the second size Dynamo would switch to symbolic
    shapes, and after the eighth it would silently fall back to eager.
    """
    from transformers import CompileConfig

    compiling: Any = CompileConfig()
    compiling._compile_all_devices = True  # otherwise silently not compiled on the CPU
    options = {
        "cache_implementation": "static",
        "max_cache_len": longest,  # a single length, so that it compiles once
        "compile_config": compiling,
    }
    compiled_for = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        nonlocal compiled_for
        with compat.dynamo.demand().config.patch(fail_on_recompile_limit_hit=True):
            if compiled_for != len(prompts):
                compiled_for = 0  # if this fails, the next call compiles again
                torch.compiler.reset()
                for _ in range(2):  # compiles; captures CUDA graphs
                    _generate(model, prompts, num_tokens, **options)
                compiled_for = len(prompts)
            return _generate(model, prompts, num_tokens, **options)

    return generate


def _generate(
    model: Any, prompts: list[list[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    ids = torch.tensor(prompts, device=model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return [row[ids.shape[1] :] for row in result.tolist()]
