"""Captures one model's graphs, and runs the batch in the buffers through them.

It owns only the memory of the graphs. The runner owns buffers, state and KV cache, and several
models can share them, one batch each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from ostinato.attention.base import AttentionMetadata
from ostinato.compile.backend import PiecewiseModel, compile_piecewise
from ostinato.config import GraphConfig
from ostinato.graphs.capture.capture_inputs import CaptureInputs, prepare_inputs_to_capture
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.manager import CudaGraphManager, FullGraph
from ostinato.graphs.policy.descriptor import Choice, Reason
from ostinato.graphs.policy.dispatch import Dispatcher
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.prepared_batch import PreparedBatch
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.base import CausalLM
from ostinato.ops.gemm.split_k import MOST_ROWS
from ostinato.ops.gemm.tile_config import MAX_ROWS, row_class
from ostinato.ops.triton.launch import next_power_of_2
from ostinato.paths import private_cache_directory
from ostinato.runner.decode_step import DecodeOutput, decode_step
from ostinato.runner.step_memory import StepMemory

Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Mixed batches of up to this size are warmed up one by one; larger ones fill any GPU.
_LARGEST_OWN_CLASS = 1024


def kernels_of(num_ranks: int, entry: PlanEntry) -> tuple[int, ...]:
    """A key that is equal for entries that launch the same kernels.

    GEMM kernels follow the row class, then powers of 2 up to ``MOST_ROWS``. Attention kernels,
    which pieces do not contain, follow powers of 2 and the query length of decode batches; but at
    some size, which depends on the model and the GPU, prompts get another one. A rank computes
    GEMMs for its share of a batch's tokens, and attention for all of them. Batches with adapters
    have kernels of their own.
    """
    num_tokens, has_lora = entry.descriptor.num_tokens, entry.descriptor.has_lora
    num_rows = max(1, num_tokens // num_ranks)
    if entry.mode is not CUDAGraphMode.PIECEWISE:
        if not entry.descriptor.uniform and num_tokens <= _LARGEST_OWN_CLASS:
            return num_tokens, has_lora
        query_len = entry.descriptor.query_len or 0
        return next_power_of_2(num_tokens), next_power_of_2(num_rows), query_len, has_lora
    if num_rows <= MAX_ROWS:
        return row_class(num_rows), has_lora
    return next_power_of_2(min(num_rows, MOST_ROWS + 1)), has_lora


def _samples(entry: PlanEntry) -> bool:
    """Whether the graph is a whole decode step, logits and sampling included."""
    return entry.mode is CUDAGraphMode.FULL and entry.descriptor.uniform


def prepare_batch(
    entry: PlanEntry, plan: CapturePlan, memory: StepMemory, *, num_ranks: int | None = None
) -> PreparedBatch[CaptureInputs]:
    """The padded batch that ``entry`` is captured with, in the buffers."""
    max_model_len = memory.cache.max_model_len
    inputs = prepare_inputs_to_capture(
        entry, plan, memory.buffers.tokens, max_model_len=max_model_len
    )
    # A request cannot have more tokens than this, where its block table ends.
    inputs.seq_lens.clamp_(max=max_model_len)
    # Attention runs eagerly between pieces, now for this batch and later for others.
    single = inputs.num_reqs == inputs.num_tokens
    uniform = single and (entry.descriptor.uniform or entry.mode is CUDAGraphMode.PIECEWISE)
    across = None
    if num_ranks is not None:
        across = torch.full((num_ranks,), inputs.num_tokens, dtype=torch.int32)
    return PreparedBatch(
        inputs=inputs,
        attn_metadata=memory.metadata(
            num_reqs=inputs.num_reqs,
            num_tokens=inputs.num_tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            selected=not entry.descriptor.uniform,
            uniform_decode=uniform,
        ),
        slot_mapping=inputs.slot_mappings,
        num_tokens_across_dp=across,
        output_in_place=_samples(entry),
    )


def _full_metadata(memory: StepMemory, num_reqs: int, num_tokens: int) -> AttentionMetadata:
    """A mixed batch as attention sees it in a whole graph: any batch of this padded size."""
    return memory.metadata(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=num_tokens // num_reqs,
        max_seq_len=memory.cache.max_model_len,
        selected=True,
        uniform_decode=False,
    )


class ModelGraphs:
    """The graphs of ``model`` by ``plan``, over ``memory``. ``head`` computes the logits.

    The progress bar shows ``name``, and choices refer to the model as ``index``. ``num_ranks`` data
    parallel ranks run the same graphs at the same time, and the forward context holds the number of
    tokens of each.
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
        index: int = 0,
        num_ranks: int | None = None,
    ) -> None:
        self.plan = plan
        self._num_ranks = num_ranks
        self.model = model
        self._head = head
        self._memory = memory
        # Pieces that read the selected tokens read as many rows as they were captured with.
        dispatcher = Dispatcher(plan, model=index, fixed_reqs=memory.selects)
        self.manager: CudaGraphManager[CaptureInputs, Any] = CudaGraphManager(
            plan,
            pool,
            dispatcher=dispatcher,
            num_warmups=graphs.warmups_on(memory.device),
            kernel_class=partial(kernels_of, model.num_token_ranks),
            eager_fallback=graphs.eager_fallback,
            show_progress=show_progress and not graphs.lazy_capture,
            name=name,
        )
        self.dispatch = dispatcher.dispatch
        # Under PIECEWISE it captures and replays pieces around attention; otherwise it is the
        # model's forward, or its compiled form.
        self.piecewise = _in_pieces(model, pool, graphs)

    # --- one batch -----------------------------------------------------------------------------

    def decode_graph(self, choice: Choice) -> FullGraph | None:
        """The graph of a whole decode step, with a ``DecodeOutput``; None if there is none.

        Set the rows in the buffers before a replay; the graph computes all other inputs.
        """
        if choice.mode is not CUDAGraphMode.FULL:
            return None
        return self.manager.full_graph(choice.descriptor)

    def decode(
        self,
        choice: Choice,
        num_tokens_across_dp: torch.Tensor | None = None,
        *,
        eager_forward: Forward | None = None,
    ) -> DecodeOutput:
        """Run a decode step without such a graph: eagerly, or in pieces.

        With an ``eager_forward`` it runs eagerly, whatever is chosen, in that padded size.
        """
        padded, in_pieces = choice.padded_num_tokens, choice.mode is CUDAGraphMode.PIECEWISE
        num_reqs = choice.padded_num_reqs
        assert num_reqs is not None, "a decode batch has as many rows as it is padded to"
        query_len = padded // num_reqs
        if in_pieces and self._memory.selects:
            # The pieces were captured for mixed batches, and read the selected tokens.
            self._memory.buffers.select_all_tokens(padded)
        metadata = self._memory.metadata(
            num_reqs=num_reqs,
            num_tokens=padded,
            max_query_len=query_len,
            max_seq_len=self._memory.cache.max_model_len,
            selected=in_pieces,
            uniform_decode=query_len == 1,
        )
        with set_forward_context(
            choice.mode if eager_forward is None else CUDAGraphMode.NONE,
            choice.descriptor,
            attn_metadata=metadata,
            num_tokens_across_dp=num_tokens_across_dp,
        ):
            forward = eager_forward or self.piecewise
            return decode_step(self._head, forward, self._memory, num_reqs, query_len)

    def hidden_states(
        self,
        choice: Choice,
        metadata: AttentionMetadata | None,
        num_tokens: int,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the batch in the buffers [num_tokens, hidden], without padding.

        A FULL graph fills the buffers itself, for the queries that are set, and advances the state.
        """
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
            positions = buffers.tokens.positions[..., :padded]
            hidden = self.piecewise(buffers.input_ids[:padded], positions)
        return hidden[:num_tokens]

    def eager_hidden_states(
        self,
        choice: Choice,
        metadata: AttentionMetadata | None,
        num_tokens: int,
        num_tokens_across_dp: torch.Tensor | None,
        forward: Forward,
    ) -> torch.Tensor:
        """``hidden_states`` by ``forward``, without a graph, in the padded size of the choice."""
        memory, padded = self._memory, choice.padded_num_tokens
        buffers, full = memory.buffers, choice.mode is CUDAGraphMode.FULL
        num_reqs = choice.padded_num_reqs
        if full:
            assert num_reqs is not None, "whole graphs have a number of rows"
            metadata = _full_metadata(memory, num_reqs, padded)
            memory.fill(num_reqs=num_reqs, num_tokens=padded)
        with set_forward_context(
            CUDAGraphMode.NONE,
            choice.descriptor,
            attn_metadata=metadata,
            num_tokens_across_dp=num_tokens_across_dp,
        ):
            hidden = forward(buffers.input_ids[:padded], buffers.tokens.positions[..., :padded])
        if full:
            assert num_reqs is not None
            memory.advance(num_reqs)
        return hidden[:num_tokens]

    @property
    def eager_forward(self) -> Forward:
        """The model's forward without graphs."""
        assert isinstance(self.piecewise, CUDAGraphWrapper), "checked by the configuration"
        return self.piecewise.unwrap()

    def tape(self, choice: Choice) -> Tape:
        """What a step that runs as chosen replays; PIECEWISE models that are compiled have many."""
        if choice.mode is CUDAGraphMode.FULL:
            return self.manager.full_graph(choice.descriptor).tape
        assert isinstance(self.piecewise, CUDAGraphWrapper), "checked by the configuration"
        return self.piecewise.concrete_cudagraph_entries[choice.descriptor].tape

    def _decode(self, num_reqs: int, query_len: int) -> DecodeOutput:
        return decode_step(self._head, self.piecewise, self._memory, num_reqs, query_len)

    def refuse(self, entry: PlanEntry) -> None:
        """Run the batches of an entry eagerly: it could not be captured."""
        self.manager.dispatcher.mark_refused(entry, Reason.CAPTURE_FAILED)

    def quarantine(self, choice: Choice) -> None:
        """Run the batches of this graph eagerly from now on."""
        entry = PlanEntry(mode=choice.mode, descriptor=choice.descriptor)
        self.manager.dispatcher.mark_refused(entry, Reason.QUARANTINED)

    # --- capture -------------------------------------------------------------------------------

    def compile(self) -> None:
        """Trace and compile, if configured; nothing is compiled after this."""
        if isinstance(self.piecewise, PiecewiseModel):
            buffers = self._memory.buffers
            self.piecewise.trace(buffers.input_ids[:2], buffers.tokens.positions[:2])

    def needs_capture(self) -> bool:
        return self.manager.needs_capture()

    def largest_tensor(self) -> int:
        """Bytes of the largest tensor in any graph of the plan, the logits."""
        decode = [each.descriptor.num_tokens for each in self.plan.entries if _samples(each)]
        return max(decode, default=0) * self._head.vocab_size * self._head.dtype.itemsize

    def capture(self, entry: PlanEntry | None = None) -> CaptureReport:
        """Capture ``entry``, or all missing ones of the plan.

        The buffers must be as ``reset`` leaves them.
        """
        # A compiled model must run all its layers, or it might be traced with only a few.
        compiled = isinstance(self.piecewise, PiecewiseModel)
        warm_up = None if compiled else self._forward_briefly
        if entry is None:
            return self.manager.capture(self._forward, self._prepare, warm_up=warm_up)
        return self.manager.capture_graph(entry, self._forward, self._prepare, warm_up=warm_up)

    @property
    def missing(self) -> list[PlanEntry]:
        """Entries of the plan that are neither captured nor refused."""
        return [entry for entry in self.plan.entries if self.manager.dispatcher.is_open(entry)]

    def _prepare(self, entry: PlanEntry) -> PreparedBatch[CaptureInputs]:
        return prepare_batch(entry, self.plan, self._memory, num_ranks=self._num_ranks)

    def _forward(self, inputs: CaptureInputs) -> torch.Tensor | DecodeOutput:
        if inputs.uniform_decode:
            return self._decode(inputs.num_reqs, inputs.max_query_len)
        assert inputs.input_ids is not None
        if self.plan.mode.mixed_mode() is not CUDAGraphMode.FULL:
            return self.piecewise(inputs.input_ids, inputs.positions)
        self._memory.fill(num_reqs=inputs.num_reqs, num_tokens=inputs.num_tokens)
        hidden = self.piecewise(inputs.input_ids, inputs.positions)
        self._memory.advance(inputs.num_reqs)
        return hidden

    def _forward_briefly(self, inputs: CaptureInputs) -> torch.Tensor | DecodeOutput:
        with self.model.few_layers():
            return self._forward(inputs)

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """All nodes of an entry's graphs: operators on the CPU, kernels and copies on CUDA."""
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
        """Drop all graphs; every batch runs eagerly until they are captured again."""
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
        splitting_ops=model.splitting_ops,
        compiler=graphs.compiler,
        eager_fallback=graphs.eager_fallback,
        cache_dir=private_cache_directory() / "compiled",
        model_key=type(model).__name__,
    )
