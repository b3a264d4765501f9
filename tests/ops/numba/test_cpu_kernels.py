"""Kernels compiled by Numba: where they come from, and what happens without them."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.ops import numba as cpu_kernels

numba = pytest.importorskip("numba")
from ostinato.ops.numba.compiled import compilers  # noqa: E402

KERNELS = """
from ostinato.ops.numba.compiled import compilers
_, kernel = compilers(nogil=True)

@kernel("i8(i8)")
def twice(x):
    return 2 * x
"""
SCRIPT = "import some_kernels; assert some_kernels.twice(20) == 40"


@pytest.fixture
def asked_anew() -> Iterator[None]:
    cpu_kernels.has_numba.cache_clear()
    yield
    cpu_kernels.has_numba.cache_clear()


def test_a_numba_that_cannot_be_imported_is_none(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(name: str, *args: Any) -> None:
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.2 or less. Got NumPy 2.3.")

    monkeypatch.delitem(sys.modules, "numba")
    finder = type("Finder", (), {"find_spec": staticmethod(find)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with caplog.at_level(logging.WARNING):
        assert not cpu_kernels.has_numba()
        assert not cpu_kernels.runs_compiled(torch.ones(1))
    assert "Numba needs NumPy 2.2 or less" in caplog.text


def test_no_numba_is_no_reason_to_complain(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not cpu_kernels.has_numba()
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [OSError("no space left"), EOFError(), RuntimeError("no locator")]
)
def test_a_cache_that_fails_is_done_without(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise error
        return plain(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    inlined, kernel = compilers(nogil=True)
    twice = inlined(lambda x: 2 * x)
    assert kernel("i8(i8)")(lambda x: twice(x) + 1)(20) == 41


@pytest.mark.slow
def test_what_is_kept_is_used_by_the_next_process_and_may_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    run()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert kept
    run()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept
    (damaged,) = kept
    damaged.write_bytes(damaged.read_bytes()[:100])
    run()


def test_every_kernel_is_kept() -> None:
    compiled = {
        name: value
        for name, value in vars(cpu_kernels.load_kernels()).items()
        if isinstance(value, numba.core.dispatcher.Dispatcher) and not name.startswith("_")
    }
    assert "silu_and_mul" in compiled
    for name, kernel in compiled.items():
        assert list(Path(kernel.stats.cache_path).glob(f"kernels.{name}-*.nbc")), name


@pytest.mark.slow
def test_every_kernel_is_compiled_when_it_is_imported() -> None:
    kernels = importlib.import_module("ostinato.ops.numba.kernels")
    public = [value for name, value in vars(kernels).items() if hasattr(value, "signatures")]
    by_name = {each.__name__: each for each in public if not each.__name__.startswith("_")}
    assert {"attention", "rotary_attention", "rms_norm", "add_rms_norm", "silu_and_mul"} == set(
        by_name
    )
    for each in by_name.values():
        (types,) = each.signatures
        with pytest.raises(TypeError, match="No matching definition"):  # it compiles no others
            each(*[1] * len(types))


@pytest.mark.slow
def test_the_exponential_is_right_to_the_last_place() -> None:
    kernels = importlib.import_module("ostinato.ops.numba.kernels")

    @numba.njit
    def each(x: Any, factors: Any, bits: Any) -> None:
        for i in range(x.shape[0]):
            factors[i], bits[i] = kernels._exponential(x[i])

    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    factors, bits = np.empty_like(x), np.empty(x.shape, np.int32)
    each(x, factors, bits)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(factors * bits.view(np.float32) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 1
