"""What the caller has set in torch changes no answer: autocast, the default dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "double": lambda: default_dtype(torch.float64),
    "half": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),  # where no tensor of the host is made by mistake
    "inference": torch.inference_mode,
}


@pytest.mark.sweep
@pytest.mark.parametrize("around", ["building", "using"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_settings_change_nothing(
    device: torch.device, mode: str, setting: str, around: str
) -> None:
    options = {"device": str(device), "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
    options |= {"random_weights": True, "show_progress": False, "kv_cache_memory_bytes": "4M"}
    options |= {"speculative": "ngram"}
    graphs = GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [1, 4])

    def as_set(when: str) -> AbstractContextManager[object]:
        return SETTINGS[setting]() if when == around else nullcontext()

    with LLM("tiny", graphs=graphs, **options) as llm:
        expected = answers(llm)
    with as_set("building"):
        llm = LLM("tiny", graphs=graphs, **options)
    with llm, as_set("using"):
        assert answers(llm) == expected
        llm.clear_graphs()
        llm.capture_graphs()
        assert answers(llm) == expected
        with llm.stream(PROMPTS[0], PARAMS) as stream:
            assert [token for delta in stream for token in delta.token_ids] == expected[0][0]
