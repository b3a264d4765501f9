"""One model's graphs: what is captured of it, and how a batch in the buffers runs through them.

It owns no memory but the graphs': buffers, state and KV cache are the runner's, and several models
can run on them, one batch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.compile.backend import PiecewiseModel, compile_piecewise
from ostinato.config import GraphConfig
from ostinato.graphs.capture.capture_inputs import CaptureInputs, prepare_inputs_to_capture
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.context import get_forward_context, set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.manager import CudaGraphManager, PreparedBatch
from ostinato.graphs.policy.descriptor import BatchDescriptor, Choice
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.base import CausalLM, num_token_ranks, with_few_layers
from ostinato.ops.parts import MOST_ROWS
from ostinato.ops.triton.launch import next_power_of_2
from ostinato.ops.tuning import MAX_ROWS, row_class
from ostinato.paths import private_cache_directory
from ostinato.runner.decode_step import DecodeOutput, decode_step
from ostinato.runner.step_memory import StepMemory


def _kernels_of(num_ranks: int, entry: PlanEntry) -> tuple[int, ...]:
    """Which sizes launch the same kernels: products go by classes of rows, or in parts up to some
    powers of 2; attention, which pieces have none of, by powers of 2.

    Of a batch's tokens a rank has its share in products, and all of them in attention.
    """
    num_tokens = entry.descriptor.num_tokens
    num_rows = max(1, num_tokens // num_ranks)
    if entry.mode is not CUDAGraphMode.PIECEWISE:
        return next_power_of_2(num_tokens), next_power_of_2(num_rows)
    if num_rows <= MAX_ROWS:
        return (row_class(num_rows),)
    return (next_power_of_2(min(num_rows, MOST_ROWS + 1)),)


def _samples(entry: PlanEntry) -> bool:
    """Whether the graph is a whole decode step, logits and sampling included."""
    return entry.mode is CUDAGraphMode.FULL and entry.descriptor.uniform


class ModelGraphs:
    """The graphs of ``model`` by ``plan``, over ``memory``. ``head`` makes logits of its states.

    ``name`` is what the progress bar calls the model. With ``num_ranks``, so many data-parallel
    ranks run the same graphs at the same time, and the forward context says how many tokens each
    has.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: CapturePlan,
        *,
        head: CausalLM,
        memory: StepMemory,
        pool: GraphPool,
        graphs: GraphConfig,
        show_progress: bool = True,
        name: str = "model",
        num_ranks: int | None = None,
    ) -> None:
        self.plan = plan
        self._num_ranks = num_ranks
        self._model = model
        self._head = head
        self._memory = memory
        self._pool = pool
        self.manager: CudaGraphManager[CaptureInputs] = CudaGraphManager(
            plan,
            pool,
            num_warmups=graphs.warmups_on(memory.device),
            kernel_class=partial(_kernels_of, num_token_ranks(model)),
            eager_fallback=graphs.eager_fallback,
            show_progress=show_progress,
            name=name,
        )
        self.dispatch = self.manager.dispatcher.dispatch
        # Captures and replays under PIECEWISE, in pieces around attention; otherwise it is the
        # model's own forward, or what was compiled from it.
        self.piecewise = _in_pieces(model, pool, graphs)
        self._decode_outputs: dict[BatchDescriptor, DecodeOutput] = {}  # of the FULL graphs

    # --- one batch -----------------------------------------------------------------------------

    def decode(
        self, choice: Choice, num_tokens_across_dp: torch.Tensor | None = None
    ) -> DecodeOutput:
        """One token for each row in the buffers, padding included; they are worked out inside."""
        if choice.mode is CUDAGraphMode.FULL:
            self.manager.replay_fullgraph(choice.descriptor)
            return self._decode_outputs[choice.descriptor]
        padded, in_pieces = choice.padded_num_tokens, choice.mode is CUDAGraphMode.PIECEWISE
        if in_pieces and self._memory.selects:
            # The pieces are those of mixed batches, which read what is selected.
            self._memory.buffers.select_all_tokens(padded)
        metadata = self._memory.metadata(
            num_reqs=padded,
            num_tokens=padded,
            max_query_len=1,
            max_seq_len=self._memory.cache.max_model_len,
            selected=in_pieces,
        )
        with set_forward_context(
            choice.mode,
            choice.descriptor,
            attn_metadata=metadata,
            num_tokens_across_dp=num_tokens_across_dp,
        ):
            return self._decode(padded)

    def hidden_states(
        self,
        choice: Choice,
        metadata: AttentionMetadata,
        num_tokens: int,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the batch in the buffers [num_tokens, hidden], padding cut off."""
        if choice.mode is CUDAGraphMode.FULL:
            hidden = self.manager.run_fullgraph(choice.descriptor, num_tokens)
            assert isinstance(hidden, torch.Tensor)
            return hidden
        buffers, padded = self._memory.buffers, choice.padded_num_tokens
        with set_forward_context(
            choice.mode,
            choice.descriptor,
            attn_metadata=metadata,
            num_tokens_across_dp=num_tokens_across_dp,
        ):
            hidden = self.piecewise(buffers.input_ids[:padded], buffers.tokens.positions[:padded])
        return hidden[:num_tokens]

    def _decode(self, num_reqs: int) -> DecodeOutput:
        memory = self._memory
        return decode_step(self._head, self.piecewise, memory.state, memory.buffers, num_reqs)

    # --- capture -------------------------------------------------------------------------------

    def compile(self) -> None:
        """Trace and compile, if that was asked for; nothing is compiled after this."""
        if isinstance(self.piecewise, PiecewiseModel):
            buffers = self._memory.buffers
            self.piecewise.trace(buffers.input_ids[:2], buffers.tokens.positions[:2])

    def needs_capture(self) -> bool:
        return self.manager.needs_capture()

    def largest_tensor(self) -> int:
        """Bytes of the largest tensor in any graph of the plan, which is that of logits."""
        decode = [each.descriptor.num_tokens for each in self.plan.entries if _samples(each)]
        return max(decode, default=0) * self._head.vocab_size * self._head.dtype.itemsize

    def capture(self) -> CaptureReport:
        """Capture what is missing of the plan. The buffers must be as ``reset`` leaves them."""
        report = self.manager.capture(self._forward_captured, self._prepare_captured)
        self._let_go_of_logits()
        return report

    def _forward_captured(self, inputs: CaptureInputs) -> torch.Tensor:
        assert inputs.input_ids is not None
        context = get_forward_context()
        descriptor, is_warm_up = (
            context.batch_descriptor,
            context.cudagraph_runtime_mode is CUDAGraphMode.NONE,
        )
        # A compiled model has all of its layers, or might be traced with few of them.
        brief = is_warm_up and not isinstance(self.piecewise, PiecewiseModel)
        with with_few_layers(self._model) if brief else nullcontext():
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
            logits = self._pool.backend.weak(output.logits)
            self._decode_outputs[descriptor] = replace(output, logits=logits)

    def _prepare_captured(self, entry: PlanEntry) -> PreparedBatch[CaptureInputs]:
        self._let_go_of_logits()
        max_model_len = self._memory.cache.max_model_len
        inputs = prepare_inputs_to_capture(
            entry,
            self.plan,
            self._memory.buffers.tokens,
            max_model_len=max_model_len,
            build_attn_metadata=partial(
                self._captured_metadata, selected=not entry.descriptor.uniform
            ),
        )
        # More tokens than a request can have: the block table ends before.
        inputs.seq_lens.clamp_(max=max_model_len)
        across = None
        if self._num_ranks is not None:
            across = torch.full((self._num_ranks,), inputs.num_tokens, dtype=torch.int32)
        return PreparedBatch(
            inputs=inputs,
            attn_metadata=inputs.attn_metadata,
            slot_mapping=inputs.slot_mappings,
            num_tokens_across_dp=across,
        )

    def _captured_metadata(self, inputs: CaptureInputs, *, selected: bool) -> AttentionMetadata:
        return self._memory.metadata(
            num_reqs=inputs.num_reqs,
            num_tokens=inputs.num_tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            selected=selected,
        )

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """Nodes of an entry's graphs together: operators on the CPU, kernels and copies on CUDA."""
        if entry.mode is CUDAGraphMode.FULL:
            return self.manager.num_nodes(entry)
        wrappers: Sequence[CUDAGraphWrapper[Any]] = (
            self.piecewise.wrappers
            if isinstance(self.piecewise, PiecewiseModel)
            else [self.piecewise]
        )
        key = entry.descriptor
        tapes = [
            wrapper.concrete_cudagraph_entries[key].tape
            for wrapper in wrappers
            if key in wrapper.concrete_cudagraph_entries
        ]
        counts = [tape.num_nodes for tape in tapes if tape.num_nodes is not None]
        return sum(counts) if len(counts) == len(tapes) else None

    def clear_graphs(self) -> None:
        """Drop all graphs; everything dispatches eagerly until it is captured again."""
        self.manager.clear_graphs()


def _in_pieces(
    model: CausalLM, pool: GraphPool, graphs: GraphConfig
) -> CUDAGraphWrapper[torch.Tensor] | PiecewiseModel:
    if graphs.compiler is None:
        return CUDAGraphWrapper(
            model.forward, CUDAGraphMode.PIECEWISE, pool=pool, split_at_breaks=True
        )
    return compile_piecewise(
        model.forward,
        pool=pool,
        compiler=graphs.compiler,
        eager_fallback=graphs.eager_fallback,
        cache_dir=private_cache_directory() / "compiled",
        model_key=type(model).__name__,
    )
