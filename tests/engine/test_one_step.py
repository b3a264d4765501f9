"""One steady decode step, from ``LLM.generate`` to the replay and back: files it goes through."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import ostinato
from ostinato import LLM, GraphConfig, SamplingParams

SOURCE = Path(ostinato.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
STEP = 20  # of the 40 that run; no request starts a block in it


def documented_walk() -> list[str]:
    _, table = ARCHITECTURE.read_text().split("<!-- the walk -->")
    rows = [line for line in table.strip().split("\n\n")[0].splitlines() if line.startswith("| `")]
    return [re.match(r"\| `([^`]+)`", row).group(1) for row in rows]  # type: ignore[union-attr]


def traced_walk(llm: LLM) -> list[str]:
    """Functions of one pass through the loop of ``generate``, without those that a graph runs."""
    calls: list[str] = []
    num_steps, graph = 0, None

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_steps, graph
        code = frame.f_code
        if event == "call" and code.co_qualname == "Submission.step":
            num_steps += 1
        if num_steps != STEP or not code.co_filename.startswith(str(SOURCE)):
            return
        if graph is None and event == "call":
            file = Path(code.co_filename).relative_to(SOURCE).as_posix()
            calls.append(f"{file}: {code.co_qualname}")
        if code.co_qualname == "CpuGraph.replay":
            graph = None if event == "return" else frame

    prompts = [[1, 2, number] for number in range(3, 7)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    llm.generate(prompts, params)
    sys.setprofile(note)
    try:
        llm.generate(prompts, params)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_goes_through_the_files_that_are_listed() -> None:
    with LLM(
        "tiny",
        random_weights=True,
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=96,
        kv_cache_memory_bytes="4M",
        async_scheduling=True,
        graphs=GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[8]),
        show_progress=False,
    ) as llm:
        calls = traced_walk(llm)
    files = {"llm.py", *(call.split(":")[0] for call in calls)}  # llm.py has the loop itself
    assert files == set(documented_walk())
    assert len(files) <= 9
    assert len(calls) <= 25, "\n".join(calls)
