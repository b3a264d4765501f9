"""The model runner: runs the scheduler's plan of a step on the model.

It owns everything with a fixed address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled. A decode
batch is one replay, sampling included, and a second one if a request wants more than a temperature;
a batch with prompts is filled, run, and sampled (``MixedStep``).

Two models may share all of it: small batches then run the second (``SmallBatchModel``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata
from ostinato.config import GraphConfig
from ostinato.errors import CaptureError, ConfigError
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchShape, Choice
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.graph_memory import GraphMemory, GraphMemoryReport
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.next_capture import most_wanted
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.trust.ledger.sources import pool_ledger
from ostinato.loading.update import WeightUpdate, write_tensors
from ostinato.lora.adapter_weights import AdapterWeights, Matrices
from ostinato.models.base import CausalLM
from ostinato.parallel.agreed_dispatch import AgreedDispatch
from ostinato.parallel.agreement import Reducer
from ostinato.runner.autocast import without_autocast
from ostinato.runner.capture_run import compare_with_estimate, measured_capture, warn_of_no_capture
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.memory_names import RunnerMemory
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.sampling.sampler_graphs import SamplerGraphs
from ostinato.runner.sampling.step_sampler import StepSampler
from ostinato.runner.sleep.sleep_memory import SleepMemory
from ostinato.runner.small_batch_model import SmallBatchModel, check_can_agree
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.step_result import LogitsObserver, ResultRing, StepResult
from ostinato.runner.steps.decode_members import DecodeMembers
from ostinato.runner.steps.execution import StepExecution
from ostinato.runner.steps.mixed_step import MixedStep
from ostinato.scheduling.step_plan import DecodePlan, SchedulePlan, StepPlan

if TYPE_CHECKING:
    from ostinato.speculative.speculation import Speculation
    from ostinato.vision.image_inputs import ImageInputs

logger = logging.getLogger(__name__)

# Memory of a decode step beside its logits: hidden states, and what the sampler needs.
BESIDE_LOGITS = 8 * 2**20
_NO_WORK = SchedulePlan.of([], 0, [])


class ModelRunner:
    """Runs batches of one model on one device, through graphs where the plan has them.

    With an ``agreement``, the runners of all its ranks step together, each with different requests:
    they agree on the mode and the size of each step, by one all-reduce of CPU tensors. When one
    calls ``run``, all others must call ``run`` or ``run_idle``.

    Steps may run on one CUDA stream and then on another: each waits for the previous one on the
    device. In a step with a constrained request, ``sampler.catch_up`` is called between the forward
    and the sampler: it must commit all steps before this one (``step_masks``). ``execution``: what
    runs the graphs of a step; another class may watch them run (``StepExecution``). ``sleeping``:
    holds the weights of the models, and will hold the KV cache, if ``sleep`` may release them.
    """

    has_other_ranks = False

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
        execution: Callable[..., StepExecution] = StepExecution,
        sleeping: SleepMemory | None = None,
    ) -> None:
        check_can_agree(agreement, graphs, small)
        self.model = model
        self.plan = plan
        self.cache = cache
        self.backend = backend
        self.adapters = adapters
        self.images = images
        self.sleeping = sleeping
        self.memory = memory = StepMemory.allocate(
            model, plan, cache, backend, speculation, sleeping
        )
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
        self.results = ResultRing(max(plan.max_num_seqs, len(self.buffers.accepted)), model.device)
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0
        self.graph_memory = GraphMemoryReport()
        self.ledger = pool_ledger(self.pool, RunnerMemory(self.models, memory))
        self.execution = execution(memory, self._all_graphs, self.samplers, self.pool, self.ledger)
        self.verification = self.execution.report
        self.sampler = StepSampler(model, memory, self.samplers.stats)
        self._mixed = MixedStep(
            model, memory, self.execution, self.sampler, adapters=adapters, images=images
        )

    @property
    def on_logits(self) -> LogitsObserver | None:
        """If set, receives the logits of every step, in every graph mode."""
        return self.sampler.on_logits

    @on_logits.setter
    def on_logits(self, observer: LogitsObserver | None) -> None:
        self.sampler.on_logits = observer

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
            return self._run_mixed(plan, choice, across)
        members, rows = self._members, plan.req_indices
        if members is None or members.req_indices is not rows or members.choice is not choice:
            members = self._set_members(plan, choice)
        if members.graph is None or not self.execution.replays_directly:
            logits = self.execution.decode(members.graph, plan, choice, across)
        else:  # a replay runs no Python that the caller's autocast could change
            self.pool.replay(members.graph.tape)
            logits = members.graph.output.logits
        if self.sampler.on_logits is not None:
            self.sampler.show_logits(plan, logits)
        if members.has_masks:
            self.sampler.write_masks(plan)
        if members.sampler is not None:
            self.execution.sample(members.sampler, members.req_indices)
        if members.filtered is None:
            return self.results.send(members.sampled, members.logprobs)
        sampled = self.sampler.sample_again(members.filtered, plan, members.sampled, logits)
        return self.results.send(*sampled)

    @without_autocast
    def _run_mixed(self, plan: StepPlan, choice: Choice, across: torch.Tensor | None) -> StepResult:
        """Run a batch that is not one replay: it is filled, run, and sampled."""
        self.forget_rows()
        if plan.num_drafts:
            return self.results.send(*self._mixed.run_drafts(plan, choice, across))
        sampled = self._mixed.run(plan, choice, across)
        result = StepResult() if sampled is None else self.results.send(*sampled)
        self._mixed.read_by_proposer(plan)
        return result

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
        self.run_padding(agreed.choice, agreed.num_tokens_across_dp)
        return True

    @without_autocast
    def run_padding(self, choice: Choice, across: torch.Tensor | None = None) -> None:
        """Enqueue a batch that is all padding, as chosen. It changes no request.

        ``across``: how many tokens each rank runs, if several step together.
        """
        self._follow_stream()
        self.forget_rows()
        graph = self.graphs.decode_graph(choice) if choice.uniform_decode else None
        if choice.uniform_decode and choice.mode is not CUDAGraphMode.PIECEWISE:
            assert choice.padded_num_reqs is not None, "a decode batch has rows"
            self.buffers.set_rows([], choice.padded_num_reqs)
        if graph is not None:
            self.pool.replay(graph.tape)
        elif choice.uniform_decode and choice.mode is CUDAGraphMode.NONE:
            self.graphs.decode(choice, across)
        else:
            metadata = self._mixed.fill(_NO_WORK, choice)
            self.graphs.hidden_states(choice, metadata, choice.padded_num_tokens, across)

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
        self.capture_image_encoder()
        missing = [graphs for graphs in self._all_graphs if graphs.needs_capture()]
        if not missing:
            num_planned = sum(len(graphs.plan.entries) for graphs in self._all_graphs)
            warn_of_no_capture(num_planned, self.plan.mode)
            return 0
        largest = max(graphs.largest_tensor() for graphs in missing) + BESIDE_LOGITS
        wanted = [(graphs, None) for graphs in missing]
        self.capture_report = CaptureReport()
        taken = measured_capture(partial(self._capture, wanted, reserve=largest), self.pool)
        self.capture_bytes = taken.total
        self._set_taken(taken)
        return self.capture_bytes

    @without_autocast
    @torch.no_grad()
    def capture_image_encoder(self) -> None:
        """Capture its graphs, if the model has one: few, and not part of the plan."""
        if self.images is not None:
            self.images.vision.capture()

    @property
    def needs_capture(self) -> bool:
        """Whether a graph of the plans is neither captured nor refused."""
        return any(graphs.needs_capture() for graphs in self._all_graphs)

    def capture_next(self) -> bool:
        """Capture the missing graph that the most batches so far would have used, if there is one.

        Returns whether there was. The last one is followed by the comparison with the estimate.
        """
        for model, graphs in reversed(list(enumerate(self._all_graphs))):  # small batches first
            entry = most_wanted(graphs.plan, graphs.missing, self.stats.shapes)
            if entry is not None:
                self.capture_entry(model, graphs.plan.entries.index(entry))
                if not self.needs_capture:
                    compare_with_estimate(self.graph_memory)
                return True
        return False

    @without_autocast
    @torch.no_grad()
    def capture_entry(self, model: int, index: int) -> None:
        """Capture one entry of a model's plan. If that fails, its batches go on to run eagerly."""
        graphs, before = self._all_graphs[model], self.graph_memory.taken
        entry, reserve = graphs.plan.entries[index], None
        if not before.pool:
            # A larger graph may follow any smaller one: have room for all of them, in one block.
            largest = max(each.largest_tensor() for each in self._all_graphs) + BESIDE_LOGITS
            reserve = max(largest, self.graph_memory.estimated.pool)
        capture = partial(self._capture, [(graphs, entry)], reserve=reserve)
        try:
            taken = measured_capture(capture, self.pool)
        except CaptureError as error:
            if self.has_other_ranks:
                raise  # they have this graph
            graphs.refuse(entry)
            logger.warning("%s; its batches go on to run eagerly", error)
            return
        self.capture_bytes += taken.total
        self._set_taken(before.with_more(taken))

    def _set_taken(self, taken: GraphMemory) -> None:
        communicator = self.graph_memory.estimated.communicator  # connected before
        taken = replace(taken, communicator=communicator)
        self.graph_memory = replace(self.graph_memory, taken=taken)
        self.ledger.update()

    def clear_graphs(self) -> None:
        """Drop all graphs, the samplers' and the image encoder's included; steps run eagerly."""
        self._follow_stream()
        self.forget_rows()
        clear = [self.pool.clear_all_graphs, self.samplers.clear_graphs]
        if self.images is not None:
            clear.append(self.images.vision.pool.clear_all_graphs)
        close_each([*clear, self.pool.release_unused])
        self.graph_memory = replace(self.graph_memory, taken=GraphMemory())

    # --- sleep ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def sleep(self, *, keep_weights: bool) -> MemoryError | None:
        """Release the KV cache and the weights, which are kept in host memory or discarded.

        Waits for the device. Graphs must not run until ``wake``. Returns an error, on every rank,
        if host memory has no room, and has then released nothing.
        """
        sleeping = self._sleeping()
        self._follow_stream()
        self.forget_rows()
        prepare = partial(sleeping.prepare_release, keep_weights=keep_weights)
        error = self._all_or_none(prepare, undo=sleeping.forget_kept)
        if error is None:
            sleeping.release(keep_weights=keep_weights)
        return error

    @torch.inference_mode()
    def wake(self) -> MemoryError | None:
        """Have the memory again, at the same addresses: an empty KV cache, and the weights if they
        were kept, zeros otherwise.

        Returns an error, on every rank, if the device has no room, and has then changed nothing.
        """
        sleeping = self._sleeping()
        self._follow_stream()
        self.pool.release_unused()
        error = self._all_or_none(sleeping.map, undo=sleeping.unmap)
        if error is None:
            sleeping.refill()
        return error

    def _sleeping(self) -> SleepMemory:
        assert self.sleeping is not None, "checked by the engine"
        return self.sleeping

    def _all_or_none(
        self, allocate: Callable[[], None], *, undo: Callable[[], None]
    ) -> MemoryError | None:
        """Allocate on all ranks. If one has no room, ``undo`` it on the others."""
        error: MemoryError | None = None
        try:
            allocate()
        except MemoryError as raised:
            error = raised
        if not self._on_all_ranks(error is None) and error is None:
            undo()
            return MemoryError("another rank has no room")
        return error

    def _on_all_ranks(self, succeeded: bool) -> bool:
        """Whether all ranks have succeeded; here there is one."""
        return succeeded

    def _capture(
        self, wanted: Sequence[tuple[ModelGraphs, PlanEntry | None]], *, reserve: int | None
    ) -> CaptureReport:
        """Capture one entry of each, or all that are missing; the pool first gets a block."""
        self._follow_stream()
        self.forget_rows()
        if reserve is not None:
            self.pool.reserve(reserve)
        report = CaptureReport()
        new = [(graphs, graphs.missing if one is None else [one]) for graphs, one in wanted]
        for graphs, entry in wanted:
            self.buffers.reset()
            captured = graphs.capture(entry)
            report.entries += captured.entries
            report.buffer_bytes += captured.buffer_bytes
        for graphs, entries in new:
            self.execution.try_captured(graphs, entries, self._set_batch)
        self.forget_rows()
        self.capture_report.entries += report.entries
        self.capture_report.buffer_bytes = report.buffer_bytes
        return report

    def _set_batch(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Put a batch that is in the state into the buffers."""
        if choice.uniform_decode:
            self._set_members(plan, choice)
            return None
        return self._mixed.fill(plan, choice)

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
            self.sleeping = None
            if self.memory.proposer is not None:
                self.memory.proposer.close()
            self._all_graphs.clear()
            self.models.clear()
            if hasattr(self, "model"):
                del self.model, self.graphs, self.small_graphs
                del self.execution, self.sampler, self._mixed
