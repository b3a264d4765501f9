"""A program that ends without closing what it made ends in silence, with what it returned."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROGRAMS = {
    "a pool": """
        from ostinato import GraphPool
        pool = GraphPool(device, lazy_capture=True)
        x = torch.ones(4, 4, device=device)
        captured = pool.capture(lambda: x @ x + torch.rand_like(x))
        pool.replay(captured.tape)
    """,
    "a tape without its pool": """
        from ostinato import GraphPool
        x = torch.ones(4, device=device)
        tape = GraphPool(device, lazy_capture=True).capture(lambda: x * 2).tape
        tape.replay()
    """,
    "a closed pool and an open one": """
        from ostinato import GraphPool
        pools = [GraphPool(device, lazy_capture=True) for _ in range(3)]
        x = torch.ones(4, device=device)
        tapes = [pool.capture(lambda: x * 2).tape for pool in pools]
        pools[1].close()
        cycle = [pools, tapes]
        cycle.append(cycle)
    """,
    "a pool in a module that is still there": """
        import ostinato
        from ostinato import GraphPool
        ostinato.kept_pool = GraphPool(device, lazy_capture=True)
        x = torch.ones(4, device=device)
        torch.kept_tape = ostinato.kept_pool.capture(lambda: x * 2).tape
    """,
    "a graphed function": """
        from ostinato import graphed
        fast = graphed(torch.nn.Linear(4, 4, device=device), sizes=[2, 4])
        with torch.no_grad():
            fast(torch.ones(3, 4, device=device))
    """,
    "a model": """
        from ostinato import LLM, SamplingParams
        llm = LLM("tiny", random_weights=True, device=str(device), max_model_len=64,
                  max_num_seqs=4, kv_cache_memory_bytes="4M", show_progress=False)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_end_of_a_program_that_closes_nothing(name: str) -> None:
    program = "import torch\ndevice = torch.device('cuda', 0)\n"
    program += textwrap.dedent(PROGRAMS[name])
    program += "\ntorch.cuda.synchronize()\nprint('done')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")
