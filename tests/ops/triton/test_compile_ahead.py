"""Kernels compiled side by side ahead of their launch: for a GPU that need not be there.

Triton compiles for the GPU that its driver reports, and needs none to do so. It must not interpret,
as it does in the tests' own process, so these programs run in others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from ostinato import ConfigError, compat
from ostinato.ops.activation import triton_silu_and_mul
from ostinato.ops.triton.compile_ahead import (
    can_compile_ahead,
    compiling_ahead,
    triton_starting,
)
from ostinato.ops.triton.launch import is_interpreted, without_running

triton = pytest.importorskip("triton")

# No main guard: a script that builds an LLM at its top level must work.
PROGRAM = """
import json, logging, sys, torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from ostinato.ops.triton.compile_ahead import compiling_ahead
from ostinato.ops.triton.launch import launch

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
logging.basicConfig(level="WARNING", format="%(message)s")
compiled = []
def listen(src, cache_hit, **_):
    compiled.append((src.name, cache_hit))
triton.knobs.compilation.listener = listen

@triton.jit
def add_kernel(x, y, out, count, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.load(x + i, mask=i < count)
    if y is not None:
        total += tl.load(y + i, mask=i < count)
    tl.store(out + i, total, mask=i < count)

@triton.jit
def broken_kernel(x, WIDTH: tl.constexpr):
    tl.store(x + tl.arange(0, WIDTH), undefined)

x, out = torch.ones(64), torch.zeros(64)

def run_all():
    for y in (None, x):
        for width in (16, 32):
            launch(add_kernel, (1,), (x, y, out), (33,), WIDTH=width, num_warps=1)
"""

COMPILES = """
with compiling_ahead():
    run_all()
    run_all()
ahead = list(compiled)
for y in (None, x):  # what a launch does first; it finds every kernel
    for width in (16, 32):
        kernel = add_kernel.warmup(x, y, out, 33, grid=(1,), WIDTH=width, num_warps=1)
        assert kernel.asm["cubin"]
print(json.dumps({"ahead": ahead, "later": compiled[len(ahead):], "sum": out.sum().item()}))
"""

# The rest in one process: it takes seconds to start.
FAILS = """
with compiling_ahead():
    launch(broken_kernel, (1,), (x,), WIDTH=16)
    launch(add_kernel, (1,), (x, None, out), (33,), WIDTH=16, NO_SUCH=1)
    launch(add_kernel, (1,), (x, None, out), (33,), WIDTH=16)
try:
    broken_kernel.warmup(x, grid=(1,), WIDTH=16)
except triton.CompilationError as error:
    found["fails"] = {"ahead": list(compiled), "error": "undefined" in str(error)}
compiled.clear()
"""

# In Gluon, and with descriptors among its arguments.
PREFILLS = """
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.prefill_attention import prefill_attention

def bfloat16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)

batch = PagedBatch(
    key_cache=bfloat16(4, 16, 2, 64), value_cache=bfloat16(4, 16, 2, 64), out=bfloat16(128, 8, 64),
    query_start_loc=int32(3), seq_lens=int32(2), block_table=int32(2, 32),
    slot_mapping=torch.zeros(128, dtype=torch.int64), scale=0.125, max_seq_len=512, window=None,
    soft_cap=None, sinks=None, uniform_decode=False,
)
with compiling_ahead():
    prefill_attention(bfloat16(128, 8, 64), batch)
found["prefills"] = list(compiled)
"""

# What the interpreter does not check: types of both branches, sizes of dots.
LATENT = """
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.paged import PagedBatch
from ostinato.attention.triton.latent.latent_attention import latent_attention
from ostinato.attention.triton.latent.latent_expand import expand_latent
from ostinato.attention.triton.latent.latent_store import latent_store
from ostinato.attention.triton.latent.latent_tiles import LatentShape, latent_tile_config
from ostinato.attention.triton.prefill_attention import prefill_attention
from ostinato.ops.norm import Norm

def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

for dtype, num_tokens in ((torch.bfloat16, 2), (torch.bfloat16, 64)):
    cache = zeros(4, 16, 1, 48, dtype=dtype)
    batch = PagedBatch(
        key_cache=cache, value_cache=cache[..., :32], out=zeros(num_tokens, 16, 32, dtype=dtype),
        query_start_loc=zeros(3), seq_lens=zeros(2), block_table=zeros(2, 32),
        slot_mapping=zeros(num_tokens, dtype=torch.int64), scale=0.125, max_seq_len=512,
        window=None, soft_cap=None, sinks=None, uniform_decode=num_tokens == 2,
    )
    config = latent_tile_config(LatentShape.of(batch, 132))
    norm, up = Norm(zeros(32, dtype=dtype), 1e-6), zeros(16, 8, 32, dtype=dtype)
    embedding = LatentEmbedding(table=torch.zeros(64, 16), norm=norm, up=up)
    with compiling_ahead():
        rows, query = zeros(num_tokens, 48, dtype=dtype), zeros(num_tokens, 16, 32, dtype=dtype)
        positions = zeros(num_tokens, dtype=torch.int64)
        rope = latent_store(query[..., 16:], rows, embedding, positions, batch)
        latent_attention(query, rope, batch, config)
# The sizes of DeepSeek's heads, in the kernels for prompts.
cache, up = zeros(4, 16, 1, 576, dtype=dtype), zeros(16, 256, 512, dtype=dtype)
batch = batch._replace(key_cache=cache, value_cache=cache, out=zeros(256, 16, 128, dtype=dtype))
with compiling_ahead():
    expanded, _ = expand_latent(up, batch, 64, 171, 132)
    prefill_attention(zeros(256, 16, 192, dtype=dtype), expanded)
print(json.dumps(sorted(name for name, _ in compiled)))
"""

INTERRUPTED = """
try:
    with compiling_ahead():
        run_all()
        raise KeyboardInterrupt
except KeyboardInterrupt:
    kernel = add_kernel.warmup(x, x, out, 33, grid=(1,), WIDTH=64, num_warps=1)
    found["interrupted"] = bool(kernel.asm["cubin"])
"""


def run(program: str, tmp_path: Path) -> tuple[Any, str]:
    """What ``program`` prints, and its standard error."""
    script = tmp_path / "program.py"  # Triton reads the source of kernels
    script.write_text(PROGRAM + program)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
    }
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
def test_every_variant_is_compiled_once_and_found_on_disk(tmp_path: Path) -> None:
    first, _ = run(COMPILES, tmp_path)
    assert first["ahead"] == [["add_kernel", False]] * 4
    assert first["later"] == []
    assert first["sum"] == 0, "nothing runs"
    assert len(list(tmp_path.glob("cache/*/*.cubin"))) == 4
    second, _ = run(COMPILES, tmp_path)
    assert second["ahead"] == [["add_kernel", True]] * 4


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the programs find, by name, and their log."""
    programs = ["found = {}", FAILS, PREFILLS, INTERRUPTED, "print(json.dumps(found))"]
    found, log = run("\n".join(programs), tmp_path_factory.mktemp("programs"))
    return found, log


@pytest.mark.slow
def test_latent_attention_compiles_for_hopper(tmp_path: Path) -> None:
    names = [
        *("combine_latent_kernel", "latent_expand_kernel", "latent_kernel"),
        *("latent_plan_kernel", "latent_store_kernel", "prefill_kernel"),
    ]
    found, log = run(LATENT, tmp_path)
    assert (sorted(set(found)), log) == (names, "")
    assert found.count("latent_kernel") == 2


@pytest.mark.slow
def test_a_kernel_in_gluon_with_descriptors_is_compiled(
    outcome: tuple[dict[str, Any], str],
) -> None:
    found, log = outcome
    assert found["prefills"] == [["prefill_kernel", False]]
    assert "prefill_kernel" not in log


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_logged_and_raises_later(
    outcome: tuple[dict[str, Any], str],
) -> None:
    found, log = outcome
    assert found["fails"] == {"ahead": [["add_kernel", False]], "error": True}
    assert "broken_kernel could not be compiled ahead (CompilationError:" in log
    assert "add_kernel could not be compiled ahead (KeyError:" in log
    assert log.count("it is compiled again when it is launched") == 2


@pytest.mark.slow
def test_launches_compile_as_usual_after_an_interrupt(outcome: tuple[dict[str, Any], str]) -> None:
    assert outcome[0]["interrupted"] is True


def test_other_threads_launch_as_usual() -> None:
    # Where there is a GPU, kernels are not interpreted.
    x = torch.randn(4, 32, device="cuda" if torch.cuda.is_available() else "cpu")
    gate, up = x.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    results: list[torch.Tensor] = []
    asked: list[tuple[Any, ...]] = []
    with without_running(lambda *request: asked.append(request)):
        triton_silu_and_mul(x)
        thread = Thread(target=lambda: results.append(triton_silu_and_mul(x)))
        thread.start()
        thread.join()
    results.append(triton_silu_and_mul(x))
    assert len(asked) == 1
    for result in results:
        torch.testing.assert_close(result, expected)
    assert len(results) == 2


def test_where_nothing_can_be_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert is_interpreted()
    assert not can_compile_ahead()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert not is_interpreted()
    assert can_compile_ahead()
    monkeypatch.setattr(compat.PrivateName, "find", lambda self: None)
    assert not can_compile_ahead()
    with pytest.raises(ConfigError, match="they are compiled one after another"), compiling_ahead():
        pass


def test_triton_starts_beside_other_work(caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU its driver does not, which is for the first launch to say."""
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    with triton_starting(torch.device("cpu")):
        pass
    assert triton_key.cache_info().currsize == 0
    with (
        caplog.at_level("DEBUG"),
        pytest.raises(ConfigError, match="no such model"),
        triton_starting(torch.device("cuda")),
    ):
        raise ConfigError("no such model")
    assert triton_key.cache_info().currsize == 1
    assert ("Triton does not start" in caplog.text) is not torch.cuda.is_available()
