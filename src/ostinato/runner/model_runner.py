"""The model runner: runs the scheduler's plan of a step on the model.

It owns everything with a fixed address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled. A decode
batch is one replay, sampling included, and a second one if a request wants more than a temperature;
a batch with prompts is filled, run, and sampled (``MixedStep``).

Two models may share all of it: small batches then run the second (``SmallBatchModel``).

The file is long because a step must not pass through another, and because ranks override the rest:
these are thin methods, over capture/, sleep/ and steps/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ostinato.graphs.policy.graph_memory import GraphMemoryReport
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.trust.ledger.sources import pool_ledger
from ostinato.loading.update import WeightUpdate, write_tensors
from ostinato.lora.adapter_weights import AdapterWeights, Matrices
from ostinato.models.base import CausalLM
from ostinato.parallel.agreed_dispatch import AgreedDispatch
from ostinato.parallel.agreement import Reducer
from ostinato.runner.ambient import without_autocast
from ostinato.runner.capture.measured_capture import compare_with_estimate
from ostinato.runner.capture.planned_capture import PlannedCapture
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.memory_names import RunnerMemory
from ostinato.runner.sampling import draft_sampling
from ostinato.runner.sampling.sampler_graphs import SamplerGraphs
from ostinato.runner.sampling.step_sampler import StepSampler
from ostinato.runner.sleep.sleep_memory import SleepMemory
from ostinato.runner.small_batch_model import (
    SmallBatchModel,
    check_can_agree,
    graphs_of_forms,
)
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.step_result import LogitsObserver, ResultRing, StepResult
from ostinato.runner.steps.decode_members import DecodeMembers
from ostinato.runner.steps.execution import StepExecution
from ostinato.runner.steps.mixed_step import MixedStep
from ostinato.scheduling.step_plan import DecodePlan, SchedulePlan, StepPlan

if TYPE_CHECKING:
    from ostinato.speculative.speculation import Speculation
    from ostinato.vision.image_inputs import ImageInputs

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
    ``graph_memory``: what the graphs were estimated to take.
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
        graph_memory: GraphMemoryReport | None = None,
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
        self._all_graphs = graphs_of_forms(
            model,
            plan,
            small,
            memory=memory,
            pool=self.pool,
            graphs=graphs,
            show_progress=show_progress,
            name=name,
            num_ranks=None if agreement is None else agreement.size,
        )
        self.models = [graphs.model for graphs in self._all_graphs]
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
        self.ledger = pool_ledger(self.pool, RunnerMemory(self.models, memory))
        self.execution = execution(memory, self._all_graphs, self.samplers, self.pool, self.ledger)
        self.verification = self.execution.report
        self._capture = PlannedCapture(
            self._all_graphs,
            self.buffers,
            self.pool,
            self.ledger,
            graph_memory or GraphMemoryReport(),
        )
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
        self.follow_stream()
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
        self.follow_stream()
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

    def follow_stream(self) -> None:
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
        self.follow_stream()
        self.adapters.write(slot, matrices)

    @without_autocast
    @torch.inference_mode()
    def write_weights(self, update: WeightUpdate) -> None:
        """Overwrite weights of the model, behind all steps so far. Graphs read the new ones."""
        self.follow_stream()
        update.write()

    @without_autocast
    @torch.inference_mode()
    def write_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same for some of the update's tensors, which another rank has checked."""
        self.follow_stream()
        write_tensors(self.models, tensors)

    def forget_rows(self) -> None:
        """Make the next decode step write its rows again. Call it after writing to the buffers."""
        self._members = None

    def _set_members(self, plan: StepPlan, choice: Choice) -> DecodeMembers:
        """Put the rows of a decode batch into the buffers, and find its graph."""
        members = self._members
        if members is not None and members.hold(plan, choice):
            return members
        graph = self._all_graphs[choice.model].decode_graph(choice)
        members = DecodeMembers.place(
            plan, choice, graph, self.memory, self.samplers, self.adapters
        )
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
            self.follow_stream()
            self.memory.proposer.learn(token_ids)

    # --- capture -------------------------------------------------------------------------------

    @without_autocast
    @torch.inference_mode()
    def compile_model(self) -> None:
        """Trace and compile, if configured; nothing is compiled after this."""
        self.follow_stream()
        for graphs in self._all_graphs:
            graphs.compile()

    @without_autocast
    @torch.no_grad()  # not inference mode: leaving it for every tensor that is kept costs time
    def capture_model(self) -> int:
        """Capture every missing graph of the plans; return the bytes it took."""
        self.capture_image_encoder()
        return self._capture.capture_missing(self)

    @without_autocast
    @torch.no_grad()
    def capture_image_encoder(self) -> None:
        """Capture its graphs, if the model has one: few, and not part of the plan."""
        if self.images is not None:
            self.images.vision.capture()

    @property
    def needs_capture(self) -> bool:
        """Whether a graph of the plans is neither captured nor refused."""
        return self._capture.is_needed

    def capture_next(self) -> bool:
        """Capture the missing graph that the most batches so far would have used, if there is one.

        Returns whether there was. The last one is followed by the comparison with the estimate.
        """
        wanted = self._capture.most_wanted(self.stats.shapes)
        if wanted is None:
            return False
        self.capture_entry(*wanted)
        if not self.needs_capture:
            compare_with_estimate(self.graph_memory)
        return True

    @without_autocast
    @torch.no_grad()
    def capture_entry(self, model: int, index: int) -> None:
        """Capture one entry of a model's plan. If that fails, its batches go on to run eagerly."""
        self._capture.capture_entry(self, model, index)

    def set_batch(self, plan: StepPlan, choice: Choice) -> AttentionMetadata | None:
        """Put a batch that is in the state into the buffers."""
        if choice.uniform_decode:
            self._set_members(plan, choice)
            return None
        return self._mixed.fill(plan, choice)

    def clear_graphs(self) -> None:
        """Drop all graphs, the samplers' and the image encoder's included; steps run eagerly."""
        self.follow_stream()
        self.forget_rows()
        others = [self.samplers.clear_graphs]
        if self.images is not None:
            others.append(self.images.vision.pool.clear_all_graphs)
        self._capture.clear_graphs(others)

    @property
    def capture_report(self) -> CaptureReport:
        """What was captured, since the last ``clear_graphs``."""
        return self._capture.report

    @property
    def capture_bytes(self) -> int:
        """What those graphs took."""
        return self._capture.num_bytes

    @property
    def graph_memory(self) -> GraphMemoryReport:
        """The memory of all graphs, beside its estimate."""
        return self._capture.memory

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """All nodes of an entry's graphs: operators on the CPU, kernels and copies on CUDA."""
        planned = (graphs for graphs in self._all_graphs if entry in graphs.plan.entries)
        return next(planned, self.graphs).num_nodes(entry)

    # --- sleep ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def sleep(self, *, keep_weights: bool) -> MemoryError | None:
        """Release the KV cache and the weights, which are kept in host memory or discarded.

        Waits for the device. Graphs must not run until ``wake``. Returns an error, on every rank,
        if host memory has no room, and has then released nothing.
        """
        assert self.sleeping is not None, "checked by the engine"
        self.follow_stream()
        self.forget_rows()
        return self.sleeping.sleep(keep_weights=keep_weights, on_all_ranks=self._on_all_ranks)

    @torch.inference_mode()
    def wake(self) -> MemoryError | None:
        """Map the memory again, at the same addresses: an empty KV cache, and the weights if they
        were kept, zeros otherwise.

        Returns an error, on every rank, if the device has no room, and has then changed nothing.
        """
        assert self.sleeping is not None, "checked by the engine"
        self.follow_stream()
        self.pool.release_unused()
        return self.sleeping.wake(on_all_ranks=self._on_all_ranks)

    def _on_all_ranks(self, succeeded: bool) -> bool:
        """Whether all ranks have succeeded; here there is one."""
        return succeeded

    def check(self) -> None:
        """Raise if another rank has failed; here there is none."""

    def close(self) -> None:
        """Drop the graphs, their memory, the KV cache and the models. Closing twice is harmless."""
        try:
            images = () if self.images is None else (self.images.close,)
            close_each((self.samplers.close, self.pool.close, *images))
        finally:
            self._members = self.adapters = self.images = self.pool.offloader = None
            self.sleeping = None
            self.memory.close()
            self._all_graphs.clear()
            self.models.clear()
            if hasattr(self, "model"):
                del self.model, self.graphs, self.small_graphs
                del self.execution, self.sampler, self._mixed
