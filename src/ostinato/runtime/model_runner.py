"""The model runner: turns what the scheduler decided into one step of the model.

It owns everything that has an address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled. A decode
batch is one replay, sampling included; a batch with prompts in it is filled, run, and sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ostinato.compile.backend import PiecewiseModel, compile_piecewise
from ostinato.graphs.capture_inputs import CaptureInputs, prepare_capture_inputs
from ostinato.graphs.capture_loop import CaptureReport
from ostinato.graphs.context import get_forward_context, set_forward_context
from ostinato.graphs.counters import compilation_counter
from ostinato.graphs.descriptor import BatchDescriptor, BatchShape, Choice
from ostinato.graphs.manager import CudaGraphManager, PreparedBatch
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.plan import CapturePlan, PlanEntry
from ostinato.graphs.pool import GraphPool
from ostinato.graphs.stats import DispatchStats
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.runtime.attention.base import AttentionBackend, AttentionMetadata
from ostinato.runtime.config import GraphConfig
from ostinato.runtime.decode_step import DecodeOutput, decode_step
from ostinato.runtime.input_buffers import InputBuffers
from ostinato.runtime.kernels.launch import next_power_of_2
from ostinato.runtime.kv_cache import CacheSize, KVCache
from ostinato.runtime.models.base import CausalLM
from ostinato.runtime.models.embedded import cache_directory
from ostinato.runtime.operators.sampling import sample_rows
from ostinato.runtime.operators.tuning import MAX_ROWS, row_class
from ostinato.runtime.request_state import RequestState
from ostinato.runtime.sampler import SamplingFeatures, sample
from ostinato.runtime.schedule_plan import DecodePlan, IntArray, Plan
from ostinato.runtime.step_result import StepResult

logger = logging.getLogger(__name__)

# Of a decode step, while its logits are there: hidden states, and what the sampler needs.
_BESIDE_LOGITS = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class _FilteredRows:
    """The rows of a batch that need the full sampler: top-k and its kin, penalties, logprobs.

    ``on_device`` has the same positions; None if it is all rows of the batch.
    """

    positions: list[int]
    on_device: torch.Tensor | None
    features: SamplingFeatures


@dataclass(frozen=True, kw_only=True)
class _Members:
    """A decode batch whose rows are in the buffers; the same object from step to step."""

    slots: Sequence[int] | IntArray
    num_reqs: int  # padded
    filtered: _FilteredRows | None


def _samples(entry: PlanEntry) -> bool:
    """Whether the graph is a whole decode step, logits and sampling included."""
    return entry.mode is CUDAGraphMode.FULL and entry.descriptor.uniform


def _kernels_of(entry: PlanEntry) -> int:
    """Which sizes launch the same kernels: products go by classes of rows, attention, which pieces
    have none of, by powers of 2.
    """
    num_tokens = entry.descriptor.num_tokens
    if entry.mode is CUDAGraphMode.PIECEWISE:
        return row_class(num_tokens) if num_tokens <= MAX_ROWS else -1
    return next_power_of_2(num_tokens)


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
            kernel_class=_kernels_of,
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
        self._decode_outputs: dict[BatchDescriptor, DecodeOutput] = {}  # of the FULL graphs
        self._members: _Members | None = None
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0

    # --- one step ------------------------------------------------------------------------------

    def dispatch(self, shape: BatchShape) -> Choice:
        return self.graphs.dispatch(shape)

    def run(self, plan: Plan) -> StepResult:
        """Start one step: all of its work is enqueued, and nothing is waited for."""
        choice = self.dispatch(plan.shape)
        self.state.update(plan)
        self.stats.record(choice, plan.num_tokens)
        if plan.is_decode and self._is_decode_batch(choice):
            return self._run_decode(plan, choice)
        return self._run_mixed(plan, choice)

    def _is_decode_batch(self, choice: Choice) -> bool:
        """Whether the chosen batch has one token for each of its rows, padding included."""
        if choice.mode is CUDAGraphMode.FULL:
            return choice.descriptor.uniform
        eager = choice.mode is CUDAGraphMode.NONE
        return eager or choice.padded_num_tokens <= self.plan.max_num_seqs

    def _run_decode(self, plan: Plan, choice: Choice) -> StepResult:
        num_reqs = plan.num_tokens
        padded = num_reqs if choice.mode is CUDAGraphMode.NONE else choice.padded_num_tokens
        members = self._set_members(plan, padded)
        if choice.mode is CUDAGraphMode.FULL:
            self.graphs.run_fullgraph(choice.descriptor)
            output = self._decode_outputs[choice.descriptor]
        else:
            metadata = self.buffers.metadata(
                num_reqs=padded,
                num_tokens=padded,
                max_query_len=1,
                max_seq_len=self.cache.max_model_len,
                kv_cache=self.kv_cache,
                backend=self.backend,
            )
            with set_forward_context(choice.mode, choice.descriptor, attn_metadata=metadata):
                output = self._decode(padded)
        return self._result(
            members.filtered,
            output.token_ids[:num_reqs],
            output.logits[:num_reqs],
            self.buffers.slots[:num_reqs],
            self.buffers.tokens.seq_lens[:num_reqs],
        )

    def _set_members(self, plan: Plan, padded: int) -> _Members:
        """Put the rows of a decode batch into the buffers, unless they are there already."""
        members = self._members
        if isinstance(plan, DecodePlan):
            slots: Sequence[int] | IntArray = plan.slots
            if members is not None and members.slots is slots and members.num_reqs == padded:
                return members
            listed: list[int] = plan.slots.tolist()
        else:
            slots = listed = [item.slot for item in plan.requests]
        self.buffers.set_rows(listed, padded)
        members = _Members(slots=slots, num_reqs=padded, filtered=self._filtered_rows(listed))
        self._members = members
        return members

    def _run_mixed(self, plan: Plan, choice: Choice) -> StepResult:
        """A batch with prompts in it: filled by the host's word on how many tokens each has."""
        self._members = None
        requests = plan.requests
        num_reqs, num_tokens = len(requests), plan.num_tokens
        eager = choice.mode is CUDAGraphMode.NONE
        padded_reqs = num_reqs if eager else choice.descriptor.num_reqs or num_reqs
        padded_tokens = num_tokens if eager else choice.padded_num_tokens
        buffers, state = self.buffers, self.state
        buffers.fill(
            state,
            [item.slot for item in requests],
            [item.num_tokens for item in requests],
            num_reqs=padded_reqs,
            num_tokens=padded_tokens,
        )
        metadata = buffers.metadata(
            num_reqs=padded_reqs,
            num_tokens=padded_tokens,
            max_query_len=plan.max_query_len,
            max_seq_len=max(item.start + item.num_tokens for item in requests),
            kv_cache=self.kv_cache,
            backend=self.backend,
        )
        hidden = self._forward(choice, metadata, num_tokens)
        state.advance(buffers.slots[:num_reqs], buffers.query_lens[:num_reqs])
        sampling = [item.slot for item in requests if item.samples]
        if not sampling:
            return StepResult(None)
        rows, slots = self._sampled_rows(plan)
        logits = self.model.compute_logits(hidden if rows is None else hidden[rows])
        # A request that gets a token has computed all it has.
        lengths = state.num_computed[slots]
        token_ids = torch.empty_like(slots)
        parameters = state.sampling
        sample_rows(logits, slots, parameters.temperature, parameters.seed_key, lengths, token_ids)
        state.append(slots, token_ids)
        return self._result(self._filtered_rows(sampling), token_ids, logits, slots, lengths)

    def _forward(
        self, choice: Choice, metadata: AttentionMetadata, num_tokens: int
    ) -> torch.Tensor:
        """Hidden states of the batch in the buffers [num_tokens, hidden], padding cut off."""
        if choice.mode is CUDAGraphMode.FULL:
            hidden = self.graphs.run_fullgraph(choice.descriptor, num_tokens)
            assert isinstance(hidden, torch.Tensor)
            return hidden
        with set_forward_context(choice.mode, choice.descriptor, attn_metadata=metadata):
            padded = choice.padded_num_tokens
            hidden = self.piecewise(
                self.buffers.input_ids[:padded], self.buffers.tokens.positions[:padded]
            )
        return hidden[:num_tokens]

    def _sampled_rows(self, plan: Plan) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Tokens whose states are sampled from (None: all), and the slots they belong to."""
        requests = plan.requests
        if plan.is_decode:
            return None, self.buffers.slots[: len(requests)]
        last_tokens: list[int] = []
        their_slots: list[int] = []
        end = 0
        for item in requests:
            end += item.num_tokens
            if item.samples:
                last_tokens.append(end - 1)
                their_slots.append(item.slot)
        on_host = torch.tensor((last_tokens, their_slots))
        rows, slots = on_host.to(self.model.device, non_blocking=True)
        return rows, slots

    def _filtered_rows(self, slots: Sequence[int]) -> _FilteredRows | None:
        sampling = self.state.sampling
        positions = sampling.filtered_rows(slots)
        if not positions:
            return None
        on_device = None
        if len(positions) < len(slots):
            on_device = torch.tensor(positions).to(self.model.device, non_blocking=True)
        features = sampling.features(slots[position] for position in positions)
        return _FilteredRows(positions=positions, on_device=on_device, features=features)

    def _result(
        self,
        filtered: _FilteredRows | None,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
    ) -> StepResult:
        """Sample those rows again that ask for more than a temperature; send all tokens off."""
        if filtered is None:
            return StepResult(token_ids)
        state, rows = self.state, filtered.on_device
        if rows is not None:
            logits, slots, lengths = logits[rows], slots[rows], lengths[rows]
        output = sample(
            logits.float(), slots, lengths, state.sampling, state.token_ids, filtered.features
        )
        state.token_ids[slots, lengths] = output.token_ids.to(torch.int32)
        if rows is None:
            token_ids = output.token_ids
        else:
            token_ids[rows] = output.token_ids
        return StepResult(token_ids, output, filtered.positions)

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
        self._members = None
        self.pool.reserve(self._largest_logits() + _BESIDE_LOGITS)
        self.capture_report = self.graphs.capture(self._forward_captured, self._prepare_captured)
        self._let_go_of_logits()
        taken = self.capture_bytes = self._used_bytes() - bytes_before
        logger.info(
            "captured %d graphs in %.2f s, %.3f GiB",
            self.capture_report.num_graphs,
            time.perf_counter() - start,
            taken / 2**30,
        )
        return taken

    def _largest_logits(self) -> int:
        """Bytes of the largest tensor in any graph."""
        decode = [each.descriptor.num_tokens for each in self.plan.entries if _samples(each)]
        return max(decode, default=0) * self.model.vocab_size * self.model.dtype.itemsize

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
        descriptor = get_forward_context().descriptor
        if descriptor is None or not descriptor.uniform:
            return self.piecewise(inputs.input_ids, inputs.positions)
        output = self._decode(inputs.num_reqs)
        self._decode_outputs[descriptor] = output
        return output.token_ids

    def _let_go_of_logits(self) -> None:
        """Keep the address of captured logits without their memory, which other graphs may use.

        A replay leaves its logits there, and nothing else runs before they are read.
        """
        for descriptor, output in self._decode_outputs.items():
            logits = self.pool.backend.weak(output.logits)
            self._decode_outputs[descriptor] = replace(output, logits=logits)

    def _decode(self, num_reqs: int) -> DecodeOutput:
        return decode_step(self.model, self.piecewise, self.state, self.buffers, num_reqs)

    def _prepare_captured(self, entry: PlanEntry) -> PreparedBatch[CaptureInputs]:
        self._let_go_of_logits()
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
