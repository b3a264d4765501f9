"""The model runner: runs the scheduler's plan of a step on the model.

It owns everything with a fixed address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled. A decode
batch is one replay, sampling included, and a second one if a request wants more than a temperature;
a batch with prompts is filled, run, and sampled.

Two models may share all of it: small batches then run the second (``SmallBatchModel``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata
from ostinato.config import GraphConfig
from ostinato.errors import ConfigError
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchShape, Choice
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.trust.ledger.sources import pool_ledger
from ostinato.loading.update import WeightUpdate, write_tensors
from ostinato.lora.adapter_weights import AdapterWeights, Matrices
from ostinato.models.base import CausalLM
from ostinato.parallel.agreed_dispatch import AgreedDispatch
from ostinato.parallel.agreement import Reducer
from ostinato.runner.autocast import without_autocast
from ostinato.runner.capture_run import measured_capture, warn_of_no_capture
from ostinato.runner.decode_members import DecodeMembers
from ostinato.runner.decode_step import DecodeOutput
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.memory_names import RunnerMemory
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.sampling.filtered_rows import FilteredRows
from ostinato.runner.sampling.sampler_graphs import SamplerGraph, SamplerGraphs, SamplerLaunch
from ostinato.runner.sampling.step_masks import CatchUp, no_catch_up, write_masks
from ostinato.runner.small_batch_model import SmallBatchModel, check_can_agree
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.step_result import LogitsObserver, ResultRing, SampledLogits, StepResult
from ostinato.runner.verify.step_shadow import StepShadow
from ostinato.runner.verify.trials import try_graphs
from ostinato.scheduling.step_plan import DecodePlan, IntArray, SchedulePlan, StepPlan

if TYPE_CHECKING:
    from ostinato.speculative.speculation import Speculation
    from ostinato.vision.image_inputs import ImageInputs

# Memory of a decode step beside its logits: hidden states, and what the sampler needs.
_BESIDE_LOGITS = 8 * 2**20
_NO_WORK = SchedulePlan.of([], 0, [])


class ModelRunner:
    """Runs batches of one model on one device, through graphs where the plan has them.

    With an ``agreement``, the runners of all its ranks step together, each with different requests:
    they agree on the mode and the size of each step, by one all-reduce of CPU tensors. When one
    calls ``run``, all others must call ``run`` or ``run_idle``.

    Steps may run on one CUDA stream and then on another: each waits for the previous one on the
    device. ``on_logits``, if set, receives the logits of every step, in every graph mode. In a step
    with a constrained request, ``catch_up`` is called between the forward and the sampler: it must
    commit all steps before this one (``step_masks``).
    """

    def __init__(
        self,
        model: CausalLM,
        plan: CapturePlan,
        *,
        graphs: GraphConfig,
        cache: CacheSize,
        backend: AttentionBackend,
        show_progress: bool = True,
        name: str = "model",
        small: SmallBatchModel | None = None,
        agreement: Reducer | None = None,
        adapters: AdapterWeights | None = None,
        speculation: Speculation | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        check_can_agree(agreement, graphs, small)
        self.model = model
        self.plan = plan
        self.cache = cache
        self.backend = backend
        self.adapters = adapters
        self.images = images
        self.memory = memory = StepMemory.allocate(model, plan, cache, backend, speculation)
        self.state, self.buffers, self.kv_cache = memory.state, memory.buffers, memory.kv_cache
        self.pool = GraphPool(model.device, offloader=model.offloader)
        forms = [(model, plan, name)]
        if small is not None:
            forms.append((small.model, small.plan, small.name))
        self.models = [form for form, _, _ in forms]
        # By ``Choice.model``: the model, then the small-batch model if there is one.
        self._all_graphs = [
            ModelGraphs(
                form,
                its_plan,
                head=model,
                memory=memory,
                pool=self.pool,
                graphs=graphs,
                show_progress=show_progress,
                name=its_name,
                index=index,
                num_ranks=None if agreement is None else agreement.size,
            )
            for index, (form, its_plan, its_name) in enumerate(forms)
        ]
        self.graphs, self.small_graphs = self._all_graphs[0], self._all_graphs[-1]
        self.small_threshold = 0 if small is None else small.threshold
        self._agreed = (
            None if agreement is None else AgreedDispatch(agreement, plan, self.graphs.dispatch)
        )
        self.samplers = SamplerGraphs(
            memory, self.pool, vocab_size=model.vocab_size, max_num_rows=len(self.buffers.sampled)
        )
        self._members: DecodeMembers | None = None
        self.on_logits: LogitsObserver | None = None
        self.catch_up: CatchUp = no_catch_up
        self.shadow: StepShadow | None = None
        self.results = ResultRing(max(plan.max_num_seqs, len(self.buffers.accepted)), model.device)
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0
        self.ledger = pool_ledger(self.pool, RunnerMemory(self.models, memory))

    # --- one step ------------------------------------------------------------------------------

    def dispatch(self, shape: BatchShape) -> Choice:
        """Dispatch ``shape`` to the model for its number of tokens."""
        small = shape.num_tokens <= self.small_threshold
        return (self.small_graphs if small else self.graphs).dispatch(shape)

    def run(self, plan: StepPlan) -> StepResult:
        """Enqueue all work of one step; waits for nothing, unless a request is constrained."""
        self._follow_stream()
        across = None
        if self._agreed is None:
            choice = self.dispatch(plan.shape)
        else:
            agreed = self._agreed.step(plan.shape)
            assert agreed is not None, "this rank has work"
            choice, across = agreed.choice, agreed.num_tokens_across_dp
        if type(plan) is not DecodePlan or plan.new_blocks:
            self.state.update(plan)
            draft_sampling.admit_requests(self.memory, plan)
        self.stats.record(choice, plan.num_tokens)
        if not choice.uniform_decode:
            if plan.num_drafts:
                return self._run_drafts(plan, choice, across)
            return self._run_mixed(plan, choice, across)
        members, rows = self._members, plan.req_indices
        if members is None or members.req_indices is not rows or members.choice is not choice:
            members = self._set_members(plan, choice)
        if self.shadow is not None and self.shadow.takes(choice):
            logits = self._decode_both_ways(plan, choice, across)
        elif members.graph is None:
            logits = self._decode(choice, across).logits
        else:  # a replay runs no Python that the caller's autocast could change
            self.pool.replay(members.graph.tape)
            logits = members.graph.output.logits
        if self.on_logits is not None:
            self._show_logits(plan, logits)
        if members.has_masks:
            self._write_masks(plan)
        if members.sampler is not None:
            if self.shadow is not None and self.shadow.takes_sampler(members.sampler):
                self._sample_both_ways(members.sampler, members.req_indices)
            else:
                self.samplers.run(members.sampler)
        if members.filtered is None:
            return self.results.send(members.sampled, members.logprobs)
        if plan.num_drafts:
            return self._sample_drafts_again(members.filtered, plan, logits)
        req_indices, seq_lens = self.buffers.req_indices, self.buffers.tokens.seq_lens
        return self._sample_again(members.filtered, members.sampled, logits, req_indices, seq_lens)

    @without_autocast
    def run_idle(self) -> bool:
        """Take part in a step without work on this rank: run padding if any other rank has work.

        Returns False, and runs nothing, if no rank has.
        """
        if self._agreed is None:
            raise ConfigError("run_idle is for ranks that step together: pass agreement=...")
        agreed = self._agreed.step(None)
        if agreed is None:
            return False
        choice, across = agreed.choice, agreed.num_tokens_across_dp
        self._follow_stream()
        self.forget_rows()
        graph = self.graphs.decode_graph(choice) if choice.uniform_decode else None
        if graph is not None:
            assert choice.padded_num_reqs is not None, "it is a decode graph"
            self.buffers.set_rows([], choice.padded_num_reqs)
            self.pool.replay(graph.tape)
        else:
            metadata = self._fill(_NO_WORK, choice)
            self.graphs.hidden_states(choice, metadata, choice.padded_num_tokens, across)
        return True

    def _follow_stream(self) -> None:
        """Order this step after the previous one, if that ran on another stream."""
        if self.pool.follow_stream():
            # The members' tensors were allocated on the other stream. Once dropped, their memory
            # may go to its later work, even if this stream still reads them.
            self.forget_rows()
            stream = torch.cuda.current_stream(self.model.device)
            self.memory.record_stream(stream)
            self.samplers.record_stream(stream)
            if self.adapters is not None:
                self.adapters.record_stream(stream)
            if self.images is not None:
                self.images.record_stream(stream)

    @torch.inference_mode()
    def load_adapter(self, slot: int, matrices: Matrices) -> None:
        """Write an adapter to a slot that no request uses, behind all steps so far."""
        assert self.adapters is not None, "checked by the engine"
        self._follow_stream()
        self.adapters.write(slot, matrices)

    @without_autocast
    @torch.inference_mode()
    def write_weights(self, update: WeightUpdate) -> None:
        """Overwrite weights of the model, behind all steps so far. Graphs read the new ones."""
        self._follow_stream()
        update.write()

    @without_autocast
    @torch.inference_mode()
    def write_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same for some of the update's tensors, which another rank has checked."""
        self._follow_stream()
        write_tensors(self.models, tensors)

    def forget_rows(self) -> None:
        """Make the next decode step write its rows again. Call it after writing to the buffers."""
        self._members = None

    @without_autocast
    def _show_logits(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Pass the logits to the observer. Further rows of ``logits`` are padding."""
        if self.on_logits is not None:
            rows = range(1 + plan.num_drafts)
            requests = [item.request for item in plan.requests if item.samples]
            names = [request.request_id for request in requests for _ in rows]
            self.on_logits(SampledLogits(request_ids=names, logits=logits[: len(names)]))

    @without_autocast
    def _decode_both_ways(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.shadow is not None, "it takes the step"
        return self.shadow.decode(plan, choice, across)

    @without_autocast
    def _sample_both_ways(self, graph: SamplerGraph, rows: list[int] | IntArray) -> None:
        assert self.shadow is not None, "it takes the step"
        self.shadow.sampler(graph, [int(row) for row in rows])

    def _hidden_states(
        self,
        plan: StepPlan,
        choice: Choice,
        metadata: AttentionMetadata | None,
        across: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states of a mixed batch that is set in the buffers."""
        if self.shadow is not None and self.shadow.takes(choice):
            return self.shadow.hidden_states(plan, choice, metadata, across)
        graphs = self._all_graphs[choice.model]
        return graphs.hidden_states(choice, metadata, plan.num_tokens, across)

    @without_autocast
    def _decode(self, choice: Choice, across: torch.Tensor | None) -> DecodeOutput:
        return self._all_graphs[choice.model].decode(choice, across)

    def _set_members(self, plan: StepPlan, choice: Choice) -> DecodeMembers:
        """Put the rows of a decode batch into the buffers, and find its graph."""
        members = self._members
        if members is not None and members.hold(plan, choice):
            return members
        graph, length = self._all_graphs[choice.model].decode_graph(choice), plan.max_query_len
        members = DecodeMembers.place(
            plan.req_indices, length, choice, graph, self.memory, self.samplers
        )
        if self.adapters is not None and choice.descriptor.has_lora:
            slots = plan.lora_slots
            self.adapters.set_rows(slots, [length] * len(slots) if length > 1 else None)
        self._members = members
        return members

    @without_autocast
    def _run_mixed(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> StepResult:
        """Run a batch with prompts; the host passes the number of tokens of each request."""
        self.forget_rows()
        with self._images_of(plan):
            metadata = self._fill(plan, choice)
            hidden = self._hidden_states(plan, choice, metadata, across)
        if choice.mode is not CUDAGraphMode.FULL:
            self.memory.advance(len(plan.requests))
        result = self._sample_mixed(plan, hidden)
        if self.memory.drafts_read_all:
            draft_sampling.read_step(
                self.memory, self._metadata(plan, len(plan.requests), plan.num_tokens)
            )
        return result

    def _sample_mixed(self, plan: StepPlan, hidden: torch.Tensor) -> StepResult:
        """Sample after the last tokens of requests, where these are their last."""
        state = self.state
        sampling = [item.req_index for item in plan.requests if item.samples]
        if not sampling:
            return StepResult()
        rows, req_indices = self.buffers.sampling_rows(len(sampling))
        logits = self.model.compute_logits(hidden if plan.is_decode else hidden[rows])
        self._show_logits(plan, logits)
        # A request that samples has computed all its tokens.
        lengths = state.num_computed[req_indices]
        token_ids = torch.empty_like(req_indices)
        state.sampling.sample(logits, req_indices, lengths, token_ids)
        state.append(req_indices, lengths, token_ids)
        filtered = FilteredRows.among(sampling, state)
        if filtered is None:
            return self.results.send(token_ids)
        if filtered.features.any_mask:
            self._write_masks(plan)
        return self._sample_again(filtered, token_ids, logits, req_indices, lengths)

    def _write_masks(self, plan: StepPlan) -> None:
        """Write the masks of constrained requests, once the host has all their tokens."""
        start = time.perf_counter()
        self.catch_up()
        write_masks(plan, self.state.sampling)
        self.samplers.stats.masked_steps += 1
        self.samplers.stats.mask_seconds += time.perf_counter() - start

    @without_autocast
    def _run_drafts(
        self, plan: StepPlan, choice: Choice, across: torch.Tensor | None
    ) -> StepResult:
        """Run a decode batch with drafts as a mixed batch: it has no graph for its query length."""
        self.forget_rows()
        memory = self.memory
        req_indices, query_len = list(plan.req_indices), plan.max_query_len
        self.buffers.set_rows(req_indices, len(req_indices))
        rows = draft_sampling.decode_rows(self.state, self.buffers, len(req_indices), query_len)
        draft_sampling.propose_drafts(memory, rows, self.model.vocab_size)
        metadata = self._fill(plan, choice)
        hidden = self._hidden_states(plan, choice, metadata, across)
        draft_sampling.observe_step(memory, rows)
        logits = self.model.compute_logits(hidden)
        self._show_logits(plan, logits)
        draft_sampling.sample_drafts(memory, rows, logits)
        filtered = FilteredRows.among(req_indices, self.state, query_len)
        if filtered is None:
            return self.results.send(self.buffers.drafts(rows).accepted.flatten())
        return self._sample_drafts_again(filtered, plan, logits)

    @without_autocast
    def _sample_drafts_again(
        self, filtered: FilteredRows, plan: StepPlan, logits: torch.Tensor
    ) -> StepResult:
        """``_sample_again`` for a batch with drafts."""
        self.samplers.stats.launches[SamplerLaunch.NO_DECODE_GRAPH] += 1
        num_reqs, query_len = len(plan.requests), plan.max_query_len
        rows = draft_sampling.decode_rows(self.state, self.buffers, num_reqs, query_len)
        accepted, logprobs = draft_sampling.sample_again(self.memory, rows, logits, filtered)
        return self.results.send(accepted, logprobs, filtered.positions)

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """``CausalLM.expert_load`` of the models together; on several ranks, of the whole model."""
        loads = [graphs.model.expert_load(reset=reset) for graphs in self._all_graphs]
        return {
            layer: [sum(counts) for counts in zip(*(load[layer] for load in loads), strict=True)]
            for layer in loads[0]
        }

    def learn(self, token_ids: Sequence[int]) -> None:
        """A request has ended with this output: drafts for others may come from it."""
        if self.memory.proposer is not None:
            self._follow_stream()
            self.memory.proposer.learn(token_ids)

    def _images_of(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Inside, the model and the inputs have the images of the batch."""
        offsets = self.buffers.position_offsets
        if self.images is None or offsets is None:
            return nullcontext()
        return self.images.placed(plan.requests, offsets)

    def _fill(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Fill the buffers with a batch, padded as chosen; without requests it is all padding.

        A FULL graph does most of that itself, and needs no metadata.
        """
        requests, padded_tokens = plan.requests, choice.padded_num_tokens
        padded_reqs = choice.padded_num_reqs or max(len(requests), 1)
        self.buffers.set_queries(
            [item.req_index for item in requests],
            [item.num_tokens for item in requests],
            [item.samples for item in requests],
        )
        if self.adapters is not None and choice.descriptor.has_lora:
            self.adapters.set_rows(plan.lora_slots, [item.num_tokens for item in requests])
        if choice.mode is CUDAGraphMode.FULL:
            return None
        self.memory.fill(num_reqs=padded_reqs, num_tokens=padded_tokens)
        return self._metadata(plan, padded_reqs, padded_tokens)

    def _metadata(self, plan: StepPlan, num_reqs: int, num_tokens: int) -> AttentionMetadata:
        """The batch in the buffers as attention sees it, padded or not."""
        most = max((item.max_seq_len for item in plan.requests), default=1)
        return self.memory.metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max(plan.max_query_len, 1),
            max_seq_len=min(most, self.cache.max_model_len),
            selected=True,
            uniform_decode=False,
            query_lens=[item.num_tokens for item in plan.requests],
        )

    @without_autocast
    def _sample_again(
        self,
        filtered: FilteredRows,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        req_indices: torch.Tensor,
        lengths: torch.Tensor,
    ) -> StepResult:
        """Sample the filtered rows again, then start the copy of all tokens to the host."""
        self.samplers.stats.launches[SamplerLaunch.NO_DECODE_GRAPH] += 1
        token_ids, logprobs = filtered.sample(self.state, token_ids, logits, req_indices, lengths)
        return self.results.send(token_ids, logprobs, filtered.positions)

    # --- capture -------------------------------------------------------------------------------

    @without_autocast
    @torch.inference_mode()
    def compile_model(self) -> None:
        """Trace and compile, if configured; nothing is compiled after this."""
        self._follow_stream()
        for graphs in self._all_graphs:
            graphs.compile()

    @without_autocast
    @torch.no_grad()  # not inference mode: leaving it for every tensor that is kept costs time
    def capture_model(self) -> int:
        """Capture every missing graph of the plans; return the bytes it took."""
        missing = [graphs for graphs in self._all_graphs if graphs.needs_capture()]
        if not missing:
            num_planned = sum(len(graphs.plan.entries) for graphs in self._all_graphs)
            warn_of_no_capture(num_planned, self.plan.mode)
            return 0
        self.capture_bytes = measured_capture(partial(self._capture, missing), self.pool)
        self.ledger.update()
        return self.capture_bytes

    def _capture(self, missing: Sequence[ModelGraphs]) -> CaptureReport:
        self._follow_stream()
        self.forget_rows()
        self.pool.reserve(max(graphs.largest_tensor() for graphs in missing) + _BESIDE_LOGITS)
        report = self.capture_report = CaptureReport()
        for graphs in missing:
            self.buffers.reset()
            report.entries += graphs.capture().entries
        if self.shadow is not None and self.shadow.policy.at_capture:
            for graphs in missing:
                self.buffers.reset()
                try_graphs(graphs, self.shadow, self.memory, self._set_trial)
            self.buffers.reset()
            self.forget_rows()
        return report

    def _set_trial(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Put a batch that is in the state into the buffers."""
        if choice.uniform_decode:
            self._set_members(plan, choice)
            return None
        return self._fill(plan, choice)

    def verify(self, policy: VerifyPolicy, agree: Callable[[bool], bool] | None = None) -> None:
        """Compare graphs with eager runs as ``policy`` says. Call it before any is captured.

        ``agree``: whether it holds on any of the ranks that run the same steps; None: one rank.
        """
        owners = RunnerMemory(self.models, self.memory)
        self.shadow = StepShadow(
            policy,
            self.memory,
            self._all_graphs,
            self.samplers,
            self.pool,
            owners=owners,
            ledger=self.ledger,
            agree=agree,
        )

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """All nodes of an entry's graphs: operators on the CPU, kernels and copies on CUDA."""
        planned = (graphs for graphs in self._all_graphs if entry in graphs.plan.entries)
        return next(planned, self.graphs).num_nodes(entry)

    def check(self) -> None:
        """Raise if another rank has failed; here there is none."""

    def close(self) -> None:
        """Drop the graphs, their memory, the KV cache and the models. Closing twice is harmless."""
        try:
            images = () if self.images is None else (self.images.close,)
            close_each((self.samplers.close, self.pool.close, *images))
        finally:
            self.kv_cache.layers.clear()
            if self.memory.states is not None:
                self.memory.states.layers.clear()
            self._members = self.adapters = self.images = self.pool.offloader = None
            self.shadow = None
            if self.memory.proposer is not None:
                self.memory.proposer.close()
            self._all_graphs.clear()
            self.models.clear()
            if hasattr(self, "model"):
                del self.model, self.graphs, self.small_graphs
