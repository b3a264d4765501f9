"""Ostinato: CUDA graphs for LLM inference, as a library, a runtime and a server.

The names below are the public API. They are imported on first use, so that ``import ostinato`` and
the command line start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ostinato.version import __version__

_HOME = {
    "AsleepError": "errors",
    "AsyncLLM": "serving.async_llm",
    "AttentionBackend": "attention.base",
    "AttentionCGSupport": "graphs.policy.modes",
    "AttentionMetadata": "attention.base",
    "AttentionSpec": "attention.base",
    "BatchDescriptor": "graphs.policy.descriptor",
    "BatchError": "errors",
    "BatchShape": "graphs.policy.descriptor",
    "CaptureError": "errors",
    "CaptureInputs": "graphs.capture.capture_inputs",
    "CaptureOutOfMemoryError": "errors",
    "CapturePlan": "graphs.policy.plan",
    "CaptureReport": "graphs.capture.capture_loop",
    "Choice": "graphs.policy.descriptor",
    "ClassificationOutput": "outputs",
    "ClosedError": "errors",
    "compilation_counter": "graphs.policy.counters",
    "CompletionOutput": "outputs",
    "ConcurrentUseError": "errors",
    "ConfigError": "errors",
    "ContextError": "errors",
    "CUDAGraphEntry": "graphs.wrapper",
    "CudaGraphManager": "graphs.manager",
    "CUDAGraphMode": "graphs.policy.modes",
    "CUDAGraphOptions": "graphs.wrapper",
    "CUDAGraphWrapper": "graphs.wrapper",
    "default_sizes": "graphs.policy.sizes",
    "Dispatcher": "graphs.policy.dispatch",
    "DraftModel": "speculative.options",
    "eager_break": "graphs.capture.segments",
    "EagleDrafts": "speculative.options",
    "EmbeddingOutput": "outputs",
    "EngineConfig": "config",
    "EngineFailedError": "errors",
    "EngineStats": "serving.records",
    "ForwardContext": "graphs.capture.context",
    "get_cudagraph_sizes": "graphs.policy.sizes",
    "get_forward_context": "graphs.capture.context",
    "GraphConfig": "config",
    "graphed": "graphs.graphed",
    "GraphedCallable": "graphs.graphed_callable",
    "GraphedModule": "graphs.graphed_module",
    "GraphedStats": "graphs.policy.stats",
    "GraphMemoryReport": "graphs.policy.graph_memory",
    "GraphPool": "graphs.capture.pool",
    "inspect_graph": "graphs.trust.ledger.sources",
    "Ledger": "graphs.trust.ledger.ledger",
    "LLM": "llm",
    "Logprob": "outputs",
    "MemoryKind": "graphs.trust.ledger.owners",
    "MemoryPart": "graphs.trust.shadow.memory_part",
    "ModelLoadError": "errors",
    "NamedMemory": "graphs.trust.ledger.owners",
    "NgramDrafts": "speculative.options",
    "OffloadConfig": "offload.offload_config",
    "open_weights": "loading.weight_handles",
    "OstinatoError": "errors",
    "OutOfBlocksError": "errors",
    "PlanEntry": "graphs.policy.plan",
    "pool_ledger": "graphs.trust.ledger.sources",
    "prepare_inputs_to_capture": "graphs.capture.capture_inputs",
    "PreparedBatch": "graphs.prepared_batch",
    "Proposer": "speculative.proposer",
    "ProposerContext": "speculative.proposer",
    "RankFailedError": "errors",
    "read_report": "report.run_file",
    "Reason": "graphs.policy.descriptor",
    "ReplayedDrafts": "speculative.options",
    "ReplayMismatchError": "errors",
    "report_page": "report.page",
    "RequestError": "errors",
    "RequestFailedError": "errors",
    "RequestOutput": "outputs",
    "resolve_mode": "graphs.policy.modes",
    "ResolvedMode": "graphs.policy.modes",
    "RunReport": "report.records",
    "SamplingParams": "sampling_params",
    "ScoreOutput": "outputs",
    "set_forward_context": "graphs.capture.context",
    "share_weights": "loading.weight_handles",
    "SleepError": "errors",
    "Speculation": "speculative.speculation",
    "SpeculationStats": "scheduling.draft_steps",
    "StaleAddress": "graphs.trust.ledger.records",
    "StaleGraphError": "errors",
    "StructuredOutputsParams": "structured.params",
    "SuffixDrafts": "speculative.options",
    "TextDelta": "outputs",
    "TextStream": "engine.text_stream",
    "TokenBuffers": "graphs.capture.capture_inputs",
    "VerifyOptions": "graphs.manager_shadow",
    "VerifyReport": "graphs.trust.shadow.report",
    "WeightGroup": "loading.weight_group",
    "WeightOffloader": "graphs.capture.pool",
    "write_report": "report.run_file",
}

# Packages that `pip install ostinato` leaves out and `ostinato[llm]` installs.
_OF_THE_RUNTIME = ("transformers", "tokenizers", "safetensors", "numpy", "filelock")

if TYPE_CHECKING:
    from ostinato.attention.base import AttentionBackend as AttentionBackend
    from ostinato.attention.base import AttentionMetadata as AttentionMetadata
    from ostinato.attention.base import AttentionSpec as AttentionSpec
    from ostinato.config import EngineConfig as EngineConfig
    from ostinato.config import GraphConfig as GraphConfig
    from ostinato.engine.text_stream import TextStream as TextStream
    from ostinato.errors import AsleepError as AsleepError
    from ostinato.errors import BatchError as BatchError
    from ostinato.errors import CaptureError as CaptureError
    from ostinato.errors import CaptureOutOfMemoryError as CaptureOutOfMemoryError
    from ostinato.errors import ClosedError as ClosedError
    from ostinato.errors import ConcurrentUseError as ConcurrentUseError
    from ostinato.errors import ConfigError as ConfigError
    from ostinato.errors import ContextError as ContextError
    from ostinato.errors import EngineFailedError as EngineFailedError
    from ostinato.errors import ModelLoadError as ModelLoadError
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.errors import OutOfBlocksError as OutOfBlocksError
    from ostinato.errors import RankFailedError as RankFailedError
    from ostinato.errors import ReplayMismatchError as ReplayMismatchError
    from ostinato.errors import RequestError as RequestError
    from ostinato.errors import RequestFailedError as RequestFailedError
    from ostinato.errors import SleepError as SleepError
    from ostinato.errors import StaleGraphError as StaleGraphError
    from ostinato.graphs.capture.capture_inputs import CaptureInputs as CaptureInputs
    from ostinato.graphs.capture.capture_inputs import TokenBuffers as TokenBuffers
    from ostinato.graphs.capture.capture_inputs import (
        prepare_inputs_to_capture as prepare_inputs_to_capture,
    )
    from ostinato.graphs.capture.capture_loop import CaptureReport as CaptureReport
    from ostinato.graphs.capture.context import ForwardContext as ForwardContext
    from ostinato.graphs.capture.context import get_forward_context as get_forward_context
    from ostinato.graphs.capture.context import set_forward_context as set_forward_context
    from ostinato.graphs.capture.pool import GraphPool as GraphPool
    from ostinato.graphs.capture.pool import WeightOffloader as WeightOffloader
    from ostinato.graphs.capture.segments import eager_break as eager_break
    from ostinato.graphs.graphed import graphed as graphed
    from ostinato.graphs.graphed_callable import GraphedCallable as GraphedCallable
    from ostinato.graphs.graphed_module import GraphedModule as GraphedModule
    from ostinato.graphs.manager import CudaGraphManager as CudaGraphManager
    from ostinato.graphs.manager_shadow import VerifyOptions as VerifyOptions
    from ostinato.graphs.policy.counters import compilation_counter as compilation_counter
    from ostinato.graphs.policy.descriptor import BatchDescriptor as BatchDescriptor
    from ostinato.graphs.policy.descriptor import BatchShape as BatchShape
    from ostinato.graphs.policy.descriptor import Choice as Choice
    from ostinato.graphs.policy.descriptor import Reason as Reason
    from ostinato.graphs.policy.dispatch import Dispatcher as Dispatcher
    from ostinato.graphs.policy.graph_memory import GraphMemoryReport as GraphMemoryReport
    from ostinato.graphs.policy.modes import AttentionCGSupport as AttentionCGSupport
    from ostinato.graphs.policy.modes import CUDAGraphMode as CUDAGraphMode
    from ostinato.graphs.policy.modes import ResolvedMode as ResolvedMode
    from ostinato.graphs.policy.modes import resolve_mode as resolve_mode
    from ostinato.graphs.policy.plan import CapturePlan as CapturePlan
    from ostinato.graphs.policy.plan import PlanEntry as PlanEntry
    from ostinato.graphs.policy.sizes import default_sizes as default_sizes
    from ostinato.graphs.policy.sizes import get_cudagraph_sizes as get_cudagraph_sizes
    from ostinato.graphs.policy.stats import GraphedStats as GraphedStats
    from ostinato.graphs.prepared_batch import PreparedBatch as PreparedBatch
    from ostinato.graphs.trust.ledger.ledger import Ledger as Ledger
    from ostinato.graphs.trust.ledger.owners import MemoryKind as MemoryKind
    from ostinato.graphs.trust.ledger.owners import NamedMemory as NamedMemory
    from ostinato.graphs.trust.ledger.records import StaleAddress as StaleAddress
    from ostinato.graphs.trust.ledger.sources import inspect_graph as inspect_graph
    from ostinato.graphs.trust.ledger.sources import pool_ledger as pool_ledger
    from ostinato.graphs.trust.shadow.memory_part import MemoryPart as MemoryPart
    from ostinato.graphs.trust.shadow.report import VerifyReport as VerifyReport
    from ostinato.graphs.wrapper import CUDAGraphEntry as CUDAGraphEntry
    from ostinato.graphs.wrapper import CUDAGraphOptions as CUDAGraphOptions
    from ostinato.graphs.wrapper import CUDAGraphWrapper as CUDAGraphWrapper
    from ostinato.llm import LLM as LLM
    from ostinato.loading.weight_group import WeightGroup as WeightGroup
    from ostinato.loading.weight_handles import open_weights as open_weights
    from ostinato.loading.weight_handles import share_weights as share_weights
    from ostinato.offload.offload_config import OffloadConfig as OffloadConfig
    from ostinato.outputs import ClassificationOutput as ClassificationOutput
    from ostinato.outputs import CompletionOutput as CompletionOutput
    from ostinato.outputs import EmbeddingOutput as EmbeddingOutput
    from ostinato.outputs import Logprob as Logprob
    from ostinato.outputs import RequestOutput as RequestOutput
    from ostinato.outputs import ScoreOutput as ScoreOutput
    from ostinato.outputs import TextDelta as TextDelta
    from ostinato.report.page import report_page as report_page
    from ostinato.report.records import RunReport as RunReport
    from ostinato.report.run_file import read_report as read_report
    from ostinato.report.run_file import write_report as write_report
    from ostinato.sampling_params import SamplingParams as SamplingParams
    from ostinato.scheduling.draft_steps import SpeculationStats as SpeculationStats
    from ostinato.serving.async_llm import AsyncLLM as AsyncLLM
    from ostinato.serving.records import EngineStats as EngineStats
    from ostinato.speculative.options import DraftModel as DraftModel
    from ostinato.speculative.options import EagleDrafts as EagleDrafts
    from ostinato.speculative.options import NgramDrafts as NgramDrafts
    from ostinato.speculative.options import ReplayedDrafts as ReplayedDrafts
    from ostinato.speculative.options import SuffixDrafts as SuffixDrafts
    from ostinato.speculative.proposer import Proposer as Proposer
    from ostinato.speculative.proposer import ProposerContext as ProposerContext
    from ostinato.speculative.speculation import Speculation as Speculation
    from ostinato.structured.params import StructuredOutputsParams as StructuredOutputsParams

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
