"""The model runner: turns what the scheduler decided into one step of the model.

It owns everything that has an address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled; then
prepared, run, and sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.compile.backend import PiecewiseModel, compile_piecewise
from ostinato.graphs.capture_inputs import CaptureInputs, prepare_capture_inputs
from ostinato.graphs.capture_loop import CaptureReport
from ostinato.graphs.context import set_forward_context
from ostinato.graphs.counters import compilation_counter
from ostinato.graphs.descriptor import BatchShape, Choice
from ostinato.graphs.manager import CudaGraphManager, PreparedBatch
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.plan import CapturePlan, PlanEntry
from ostinato.graphs.pool import GraphPool
from ostinato.graphs.stats import DispatchStats
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.runtime.attention.base import AttentionBackend, AttentionMetadata
from ostinato.runtime.config import GraphConfig
from ostinato.runtime.input_buffers import InputBuffers
from ostinato.runtime.kv_cache import CacheSize, KVCache
from ostinato.runtime.models.base import CausalLM
from ostinato.runtime.models.embedded import cache_directory
from ostinato.runtime.request_state import RequestState
from ostinato.runtime.sampler import SamplerOutput, SamplingFeatures, sample
from ostinato.runtime.schedule_plan import SchedulePlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """One step with its inputs in place.

    ``sampled_tokens`` are the tokens whose hidden states a new token is sampled from (None: all),
    ``sampled_slots`` the requests they belong to; both on the device.
    """

    choice: Choice
    metadata: AttentionMetadata
    num_reqs: int
    num_tokens: int
    sampled_tokens: torch.Tensor | None
    sampled_slots: torch.Tensor
    features: SamplingFeatures


class ModelRunner:
    """Runs batches of one model on one device, through graphs where the plan has them."""

    def __init__(
        self,
        model: CausalLM,
        plan: CapturePlan,
        *,
        graphs: GraphConfig,
        cache: CacheSize,
        backend: AttentionBackend,
        show_progress: bool = True,
    ) -> None:
        device = model.device
        self.model = model
        self.plan = plan
        self.cache = cache
        self.backend = backend
        self.kv_cache = KVCache(
            model.attention_specs,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            dtype=model.dtype,
            device=device,
        )
        self.state = RequestState(max_num_seqs=plan.max_num_seqs, cache=cache, device=device)
        self.buffers = InputBuffers(
            max_num_seqs=plan.max_num_seqs,
            max_num_tokens=plan.max_num_batched_tokens,
            cache=cache,
            device=device,
        )
        self.pool = GraphPool(device)
        self.graphs: CudaGraphManager[CaptureInputs] = CudaGraphManager(
            plan,
            self.pool,
            num_warmups=graphs.warmups_on(device),
            eager_fallback=graphs.eager_fallback,
            show_progress=show_progress,
        )
        # Captures and replays under PIECEWISE, in pieces around attention; otherwise it is the
        # model's own forward, or what was compiled from it.
        self.piecewise: CUDAGraphWrapper[torch.Tensor] | PiecewiseModel
        if graphs.compiler is None:
            self.piecewise = CUDAGraphWrapper(
                model.forward, CUDAGraphMode.PIECEWISE, pool=self.pool, split_at_breaks=True
            )
        else:
            self.piecewise = compile_piecewise(
                model.forward,
                pool=self.pool,
                compiler=graphs.compiler,
                eager_fallback=graphs.eager_fallback,
                cache_dir=cache_directory() / "compiled",
                model_key=type(model).__name__,
            )
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0

    # --- one step ------------------------------------------------------------------------------

    def dispatch(self, shape: BatchShape) -> Choice:
        return self.graphs.dispatch(shape)

    def prepare(self, plan: SchedulePlan, choice: Choice) -> PreparedStep:
        """Write the state of new requests, and fill the buffers to the chosen size."""
        requests = plan.requests
        self.state.update(requests)
        num_reqs, num_tokens = len(requests), plan.num_tokens
        eager = choice.mode is CUDAGraphMode.NONE
        padded_reqs = num_reqs if eager else choice.descriptor.num_reqs or num_reqs
        padded_tokens = num_tokens if eager else choice.padded_num_tokens
        self.buffers.fill(
            self.state,
            [item.slot for item in requests],
            [item.num_tokens for item in requests],
            num_reqs=padded_reqs,
            num_tokens=padded_tokens,
        )
        sampled_tokens, sampled_slots = self._sampled_rows(plan)
        return PreparedStep(
            choice=choice,
            metadata=self.buffers.metadata(
                num_reqs=padded_reqs,
                num_tokens=padded_tokens,
                max_query_len=plan.max_query_len,
                max_seq_len=max(item.start + item.num_tokens for item in requests),
                kv_cache=self.kv_cache,
                backend=self.backend,
            ),
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            sampled_tokens=sampled_tokens,
            sampled_slots=sampled_slots,
            features=self.state.sampling.features(item.slot for item in requests if item.samples),
        )

    def _sampled_rows(self, plan: SchedulePlan) -> tuple[torch.Tensor | None, torch.Tensor]:
        requests = plan.requests
        if plan.num_tokens == len(requests) and all(item.samples for item in requests):
            return None, self.buffers.slots[: len(requests)]
        rows_and_slots = []
        end = 0
        for item in requests:
            end += item.num_tokens
            if item.samples:
                rows_and_slots.append((end - 1, item.slot))
        on_host = torch.tensor(rows_and_slots, dtype=torch.int64).reshape(-1, 2)
        rows, slots = on_host.T.to(self.model.device, non_blocking=True)
        return rows, slots

    def forward(self, step: PreparedStep) -> torch.Tensor:
        """Hidden states of the step's tokens [num_tokens, hidden], padding cut off."""
        choice = step.choice
        self.stats.record(choice, step.num_tokens)
        if choice.mode is CUDAGraphMode.FULL:
            hidden = self.graphs.run_fullgraph(choice.descriptor, step.num_tokens)
            assert isinstance(hidden, torch.Tensor)
            return hidden
        with set_forward_context(choice.mode, choice.descriptor, attn_metadata=step.metadata):
            padded = choice.padded_num_tokens
            hidden = self.piecewise(
                self.buffers.input_ids[:padded], self.buffers.tokens.positions[:padded]
            )
        return hidden[: step.num_tokens]

    def sample(self, step: PreparedStep, hidden: torch.Tensor) -> SamplerOutput | None:
        """Sample the next tokens and bring the state up to date. None if no request gets one."""
        buffers, state, slots = self.buffers, self.state, step.sampled_slots
        state.advance(buffers.slots[: step.num_reqs], buffers.query_lens[: step.num_reqs])
        if len(slots) == 0:
            return None
        last = hidden if step.sampled_tokens is None else hidden[step.sampled_tokens]
        logits = self.model.compute_logits(last)
        # A request that gets a token has computed all it has.
        lengths = state.num_computed[slots]
        output = sample(logits, slots, lengths, state.sampling, state.token_ids, step.features)
        state.append(slots, output.token_ids)
        return output

    # --- capture -------------------------------------------------------------------------------

    @torch.inference_mode()
    def compile_model(self) -> None:
        """Trace and compile, if that was asked for; nothing is compiled after this."""
        if isinstance(self.piecewise, PiecewiseModel):
            self.piecewise.trace(self.buffers.input_ids[:2], self.buffers.tokens.positions[:2])

    @torch.no_grad()  # leaving inference mode for every tensor that is kept would cost time
    def capture_model(self) -> int:
        """Capture every graph of the plan that is missing; the bytes that it took."""
        if not self.graphs.needs_capture():
            if self.plan.entries:
                logger.warning("nothing to capture: all %d graphs exist", len(self.plan.entries))
            else:
                logger.warning(
                    "no graphs are captured: the graph mode (GraphConfig.mode) is %s",
                    self.plan.mode.name,
                )
            return 0
        compilation_counter.num_gpu_runner_capture_triggers += 1
        start, bytes_before = time.perf_counter(), self._used_bytes()
        self.buffers.reset()
        self.capture_report = self.graphs.capture(self._forward_captured, self._prepare_captured)
        taken = self.capture_bytes = self._used_bytes() - bytes_before
        logger.info(
            "captured %d graphs in %.2f s, %.3f GiB",
            self.capture_report.num_graphs,
            time.perf_counter() - start,
            taken / 2**30,
        )
        return taken

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """Nodes of an entry's graphs together: operators on the CPU, kernels and copies on CUDA."""
        if entry.mode is CUDAGraphMode.FULL:
            return self.graphs.num_nodes(entry)
        wrappers: Sequence[CUDAGraphWrapper[Any]] = (
            self.piecewise.wrappers
            if isinstance(self.piecewise, PiecewiseModel)
            else [self.piecewise]
        )
        key = entry.descriptor
        tapes = [wrapper.entries[key].tape for wrapper in wrappers if key in wrapper.entries]
        counts = [tape.num_nodes for tape in tapes if tape.num_nodes is not None]
        return sum(counts) if len(counts) == len(tapes) else None

    def _forward_captured(self, inputs: CaptureInputs) -> torch.Tensor:
        assert inputs.input_ids is not None
        return self.piecewise(inputs.input_ids, inputs.positions)

    def _prepare_captured(self, entry: PlanEntry) -> PreparedBatch[CaptureInputs]:
        max_model_len = self.cache.max_model_len
        inputs = prepare_capture_inputs(
            entry,
            self.plan,
            self.buffers.tokens,
            max_model_len=max_model_len,
            build_attn_metadata=self._captured_metadata,
        )
        # More tokens than a request can have: the block table ends before.
        inputs.seq_lens.clamp_(max=max_model_len)
        return PreparedBatch(
            inputs=inputs,
            attn_metadata=inputs.attn_metadata,
            slot_mapping=inputs.slot_mappings,
        )

    def _captured_metadata(self, inputs: CaptureInputs) -> AttentionMetadata:
        return self.buffers.metadata(
            num_reqs=inputs.num_reqs,
            num_tokens=inputs.num_tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            kv_cache=self.kv_cache,
            backend=self.backend,
        )

    def _used_bytes(self) -> int:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
            free, total = torch.cuda.mem_get_info(self.model.device)
            return total - free
        return self.pool.num_bytes

    def close(self) -> None:
        """Drop the graphs, their memory, the KV cache and the model. Closing twice is harmless."""
        self.pool.close()
        self.kv_cache.layers.clear()
        if hasattr(self, "model"):
            del self.model, self.piecewise
