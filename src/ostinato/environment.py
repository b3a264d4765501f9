"""What this machine has: versions, devices, and fast paths with the reasons why some are off."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from ostinato import compat
from ostinato.graphs.backends.cuda.bindings import HAS_BINDINGS
from ostinato.ops.numba import has_numba
from ostinato.paths import cache_directory
from ostinato.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numba",
    "cuda-bindings",
)


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """An optional feature that makes runs faster or reports more complete."""

    name: str
    on: bool
    why: str  # its purpose, or why it is off


def environment() -> Iterator[tuple[str, str]]:
    """Versions of what is installed, and devices, each with its name."""
    yield "ostinato", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        yield package, _version_of(package)
    yield "cuda of torch", str(torch.version.cuda)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / 2**30:.0f} GiB"
            yield (
                f"cuda:{index}",
                f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}",
            )
    yield "cpu threads", str(torch.get_num_threads())
    yield "cache", str(cache_directory())


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def fast_paths() -> Iterator[FastPath]:
    """All of them, on or off."""
    on_cuda = torch.cuda.is_available()
    no_gpu = "torch finds no CUDA device"
    has_triton = _version_of("triton") != "not installed"
    yield FastPath(
        name="CUDA graphs",
        on=on_cuda,
        why="" if on_cuda else f"{no_gpu}: graphs are recorded and replayed on the CPU",
    )
    yield FastPath(
        name="Triton kernels",
        on=on_cuda and has_triton,
        why=no_gpu if not on_cuda else "" if has_triton else "the package triton is not installed",
    )
    knows_triton = has_triton and compat.triton_launches() is not None
    yield FastPath(
        name="fast launches of Triton kernels",
        on=on_cuda and knows_triton,
        why=no_gpu if not on_cuda else "" if knows_triton else compat.launch_settings.without,
    )
    compiles_ahead = has_triton and compat.triton_compile_mode() is not None
    yield FastPath(
        name="Triton kernels compiled side by side at start-up",
        on=on_cuda and compiles_ahead,
        why=no_gpu if not on_cuda else "" if compiles_ahead else compat.compile_mode.without,
    )
    overlaps = on_cuda and torch.cuda.get_device_capability() >= (9, 0)
    yield FastPath(
        name="programmatic dependent launch",
        on=overlaps,
        why="" if overlaps else no_gpu if not on_cuda else "needs compute capability 9.0 or higher",
    )
    on_hopper = on_cuda and torch.cuda.get_device_capability()[0] == 9
    has_gluon = on_hopper and knows_triton and compat.gluon.find() is not None
    yield FastPath(
        name="kernels written for Hopper",
        on=has_gluon,
        why=""
        if has_gluon
        else no_gpu
        if not on_cuda
        else compat.gluon.without
        if on_hopper
        else "needs compute capability 9.x; the kernels for all GPUs run",
    )
    has_guards = compat.tensor_guards.find() is not None
    yield FastPath(
        name="replay arguments checked in one call",
        on=has_guards,
        why="" if has_guards else compat.tensor_guards.without,
    )
    compares = bool(compat.compare_addresses)
    yield FastPath(
        name="moved weights detected in one call",
        on=compares,
        why="" if compares else "only in CUDA builds of torch; checked one by one, 20 us for 300",
    )
    yield FastPath(
        name="CUDA graph node counts, private capture streams",
        on=on_cuda and HAS_BINDINGS,
        why=no_gpu if not on_cuda else "" if HAS_BINDINGS else "cuda-bindings is not installed",
    )
    yield FastPath(
        name="compiled CPU kernels",
        on=has_numba(),
        why="" if has_numba() else "numba is not installed: pip install 'ostinato[cpu]'",
    )
