"""A corpus of broken checkpoints: each is refused by an error of ours, soon and for little memory,
or runs, and then what it says is what transformers makes of it.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from broken_checkpoints import Change, cases, save_bases
from time_limit import within_seconds

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.errors import OstinatoError

BASES = ["llama", "qwen2", "gpt2", "mixtral"]
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]  # longer than the window
MOST_SECONDS = 2.0
MOST_BYTES = 200 * 2**20
LONGEST_MESSAGE = 1000
HANGS_AFTER_S = 60.0


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = save_bases(tmp_path_factory.mktemp("healthy"))
    for path in saved.values():  # imports are no case's own time and memory
        run(path)
    return saved


@pytest.fixture(autouse=True)
def quiet() -> Any:
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity_warning()


def run(path: Path) -> torch.Tensor:
    """Log-probabilities of the token after the prompt, through everything that a user runs."""
    llm = LLM(
        path,
        device="cpu",
        graphs=GraphConfig(mode="NONE"),
        max_num_seqs=1,
        kv_cache_memory_bytes="1MiB",
        show_progress=False,
    )
    with llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=64)
        (output,) = llm.generate([PROMPT], params)
        assert output.outputs[0].logprobs is not None
        (top,) = output.outputs[0].logprobs
        return torch.tensor([top[token].logprob for token in sorted(top)])


def by_transformers(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)


def peak_bytes() -> int:
    """The most memory that this process had since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def fault_of(path: Path, healthy: torch.Tensor) -> str | None:
    """What is wrong with how the checkpoint at ``path`` was treated; None if nothing is."""
    forget_peak()
    before, start = peak_bytes(), time.process_time()
    try:
        found = within_seconds(HANGS_AFTER_S, lambda: run(path))
    except OstinatoError as error:
        seconds, grown = time.process_time() - start, peak_bytes() - before
        if seconds > MOST_SECONDS:
            return f"took {seconds:.1f} s to refuse"
        if grown > MOST_BYTES:
            return f"took {grown / 2**20:.0f} MiB to refuse"
        message = str(error)
        if len(message) > LONGEST_MESSAGE or "\n" in message:
            return f"has a message of {len(message)} characters: {message[:200]!r}"
        return None
    except BaseException as error:
        return f"ended in {type(error).__name__}: {str(error)[:200]}"
    try:
        expected = by_transformers(path)
    except Exception:
        # Something that has no part in the numbers, such as the generation config.
        expected = healthy
    if found.shape != expected.shape or not torch.allclose(found, expected, atol=2e-4):
        return "runs, and says something else than transformers"
    return None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("base", BASES)
def test_broken_checkpoints(base: str, bases: dict[str, Path], tmp_path: Path) -> None:
    healthy = by_transformers(bases[base])
    assert torch.allclose(run(bases[base]), healthy, atol=2e-4)
    broken: list[tuple[str, Change]] = [
        (name, change) for name, its_base, change in cases(bases) if its_base == base
    ]
    assert len(broken) > 100
    faults = {}
    for name, change in broken:
        path = tmp_path / "broken"
        shutil.copytree(bases[base], path)
        change(path)
        fault = fault_of(path, healthy)
        if fault is not None:
            faults[name] = fault
        shutil.rmtree(path)
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults.items())
