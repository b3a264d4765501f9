"""Ostinato: CUDA graphs for LLM inference, as a library and a runtime.

The names below are the public ones. They are imported when first used, so that ``import ostinato``
and the command line start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ReplayMismatchError": "errors",
    "RequestError": "errors",
    "OutOfBlocksError": "errors",
    "ModelLoadError": "errors",
    "OstinatoError": "errors",
    "ContextError": "errors",
    "ConfigError": "errors",
    "ConcurrentUseError": "errors",
    "ClosedError": "errors",
    "CaptureOutOfMemoryError": "errors",
    "CaptureError": "errors",
    "BatchError": "errors",
    "AttentionCGSupport": "graphs.policy.modes",
    "BatchDescriptor": "graphs.policy.descriptor",
    "BatchShape": "graphs.policy.descriptor",
    "CUDAGraphMode": "graphs.policy.modes",
    "CUDAGraphOptions": "graphs.wrapper",
    "CUDAGraphWrapper": "graphs.wrapper",
    "CapturePlan": "graphs.policy.plan",
    "Choice": "graphs.policy.descriptor",
    "CudaGraphManager": "graphs.manager",
    "GraphPool": "graphs.capture.pool",
    "Reason": "graphs.policy.descriptor",
    "compilation_counter": "graphs.policy.counters",
    "eager_break": "graphs.capture.segments",
    "get_forward_context": "graphs.capture.context",
    "GraphConfig": "config",
    "LLM": "llm",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "graphed": "graphs.graphed",
    "resolve_mode": "graphs.policy.modes",
    "set_forward_context": "graphs.capture.context",
}

# What `pip install ostinato` leaves out, and `ostinato[llm]` brings.
_OF_THE_RUNTIME = ("transformers", "tokenizers", "safetensors", "numpy", "filelock")

if TYPE_CHECKING:
    from ostinato.config import GraphConfig as GraphConfig
    from ostinato.errors import BatchError as BatchError
    from ostinato.errors import CaptureError as CaptureError
    from ostinato.errors import CaptureOutOfMemoryError as CaptureOutOfMemoryError
    from ostinato.errors import ClosedError as ClosedError
    from ostinato.errors import ConcurrentUseError as ConcurrentUseError
    from ostinato.errors import ConfigError as ConfigError
    from ostinato.errors import ContextError as ContextError
    from ostinato.errors import ModelLoadError as ModelLoadError
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.errors import OutOfBlocksError as OutOfBlocksError
    from ostinato.errors import ReplayMismatchError as ReplayMismatchError
    from ostinato.errors import RequestError as RequestError
    from ostinato.graphs.capture.context import get_forward_context as get_forward_context
    from ostinato.graphs.capture.context import set_forward_context as set_forward_context
    from ostinato.graphs.capture.pool import GraphPool as GraphPool
    from ostinato.graphs.capture.segments import eager_break as eager_break
    from ostinato.graphs.graphed import graphed as graphed
    from ostinato.graphs.manager import CudaGraphManager as CudaGraphManager
    from ostinato.graphs.policy.counters import compilation_counter as compilation_counter
    from ostinato.graphs.policy.descriptor import BatchDescriptor as BatchDescriptor
    from ostinato.graphs.policy.descriptor import BatchShape as BatchShape
    from ostinato.graphs.policy.descriptor import Choice as Choice
    from ostinato.graphs.policy.descriptor import Reason as Reason
    from ostinato.graphs.policy.modes import AttentionCGSupport as AttentionCGSupport
    from ostinato.graphs.policy.modes import CUDAGraphMode as CUDAGraphMode
    from ostinato.graphs.policy.modes import resolve_mode as resolve_mode
    from ostinato.graphs.policy.plan import CapturePlan as CapturePlan
    from ostinato.graphs.wrapper import CUDAGraphOptions as CUDAGraphOptions
    from ostinato.graphs.wrapper import CUDAGraphWrapper as CUDAGraphWrapper
    from ostinato.llm import LLM as LLM
    from ostinato.outputs import RequestOutput as RequestOutput
    from ostinato.sampling_params import SamplingParams as SamplingParams

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"ostinato.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in _OF_THE_RUNTIME:
            raise
        raise ImportError(
            f"ostinato.{name} needs the package {error.name}: pip install 'ostinato[llm]'"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
