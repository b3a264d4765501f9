"""The caller's autocast is not the model's: tokens are those of the types it was loaded with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from tiny_models import TINY_NATIVE, save_tiny

from ostinato import LLM, GraphConfig, SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [7] * 12, [9, 8]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def answers(llm: LLM) -> list[tuple[list[int], float | None]]:
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, PARAMS)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL_AND_FULL"])
@pytest.mark.parametrize("around", ["building", "generating"])
def test_autocast_changes_nothing(
    tmp_path: Path, device: torch.device, mode: str, around: str
) -> None:
    path = save_tiny(TINY_NATIVE["llama"](), tmp_path)

    def cast(when: str) -> AbstractContextManager[object]:
        return (
            torch.autocast(device.type, dtype=torch.bfloat16) if when == around else nullcontext()
        )

    options = {"device": str(device), "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
    with LLM(str(path), graphs=GraphConfig(mode=mode), **options) as llm:
        expected = answers(llm)
    with cast("building"):
        llm = LLM(str(path), graphs=GraphConfig(mode=mode), **options)
    with llm, cast("generating"):
        assert answers(llm) == expected
