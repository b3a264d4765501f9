"""The model runner: turns what the scheduler decided into one step of the model.

It owns everything that has an address: the request state, the input buffers, the KV cache and the
graphs. A step is dispatched first, so the padded size is known before a buffer is filled. A decode
batch is one replay, sampling included; a batch with prompts in it is filled, run, and sampled.

Two models may share all of it: batches of few tokens then run the second (``SmallBatchModel``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata
from ostinato.config import GraphConfig
from ostinato.errors import ConfigError
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.graphs.policy.descriptor import BatchShape, Choice
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.models.base import CausalLM
from ostinato.ops.sampling import sample_rows
from ostinato.parallel.agreed_dispatch import AgreedDispatch
from ostinato.parallel.agreement import Reducer
from ostinato.runner.autocast import without_autocast
from ostinato.runner.host_copy import HostCopy, Mailbox
from ostinato.runner.kv_cache import CacheSize
from ostinato.runner.model_graphs import ModelGraphs
from ostinato.runner.step_memory import StepMemory
from ostinato.runner.step_result import LogitsObserver, SampledLogits, StepResult
from ostinato.sampling.sampler import SamplingFeatures, sample
from ostinato.scheduling.schedule_plan import DecodePlan, IntArray, Plan, ScheduledRequest

logger = logging.getLogger(__name__)

# Of a decode step, while its logits are there: hidden states, and what the sampler needs.
_BESIDE_LOGITS = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class SmallBatchModel:
    """Another form of the model, for batches of up to ``threshold`` tokens, padding not counted.

    It keeps keys and values as the first does, and leaves the logits to the first's head.
    """

    model: CausalLM
    plan: CapturePlan
    threshold: int
    name: str


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
    sampled: torch.Tensor  # where a decode step leaves their tokens


class ModelRunner:
    """Runs batches of one model on one device, through graphs where the plan has them.

    With an ``agreement``, the runners of all its ranks step together, each with requests of its
    own: they agree on the mode and the size of each step, by one all-reduce of CPU tensors. Where
    one calls ``run``, all others must call ``run`` or ``run_idle``.

    Steps may be run on one CUDA stream and then on another: each waits for the one before, on the
    device. ``on_logits``, where set, is shown what every step samples from, in every graph mode.
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
    ) -> None:
        _check_can_agree(agreement, graphs, small)
        self.model = model
        self.plan = plan
        self.cache = cache
        self.backend = backend
        self.memory = memory = StepMemory.allocate(model, plan, cache, backend)
        self.state, self.buffers, self.kv_cache = memory.state, memory.buffers, memory.kv_cache
        self.pool = GraphPool(model.device)

        def graphs_of(model: CausalLM, plan: CapturePlan, name: str) -> ModelGraphs:
            return ModelGraphs(
                model,
                plan,
                head=self.model,
                memory=memory,
                pool=self.pool,
                graphs=graphs,
                show_progress=show_progress,
                name=name,
                num_ranks=None if agreement is None else agreement.size,
            )

        self.graphs = graphs_of(model, plan, name)
        self.small_graphs = (
            self.graphs if small is None else graphs_of(small.model, small.plan, small.name)
        )
        self.small_threshold = 0 if small is None else small.threshold
        self._agreed = (
            None if agreement is None else AgreedDispatch(agreement, plan, self.graphs.dispatch)
        )
        self._members: _Members | None = None
        self.on_logits: LogitsObserver | None = None
        self._mailbox = Mailbox(plan.max_num_seqs, model.device)
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0

    # --- one step ------------------------------------------------------------------------------

    def dispatch(self, shape: BatchShape) -> Choice:
        return self._graphs_for(shape.num_tokens).dispatch(shape)

    def _graphs_for(self, num_tokens: int) -> ModelGraphs:
        return self.graphs if num_tokens > self.small_threshold else self.small_graphs

    @without_autocast
    def run(self, plan: Plan) -> StepResult:
        """Start one step: all of its work is enqueued, and nothing is waited for."""
        self._follow_stream()
        across = None
        if self._agreed is None:
            choice = self.dispatch(plan.shape)
        else:
            agreed = self._agreed.step(plan.shape)
            assert agreed is not None, "this rank has work"
            choice, across = agreed.choice, agreed.num_tokens_across_dp
        graphs = self._graphs_for(plan.num_tokens)
        self.state.update(plan)
        self.stats.record(choice, plan.num_tokens)
        if plan.is_decode and self._is_decode_batch(choice):
            return self._run_decode(plan, choice, graphs, across)
        return self._run_mixed(plan, choice, graphs, across)

    @without_autocast
    def run_idle(self) -> bool:
        """A step in which this rank has no work: a padding batch, if any other rank has some.

        False if none has, and nothing was run.
        """
        if self._agreed is None:
            raise ConfigError("run_idle is for ranks that step together: give it an agreement")
        agreed = self._agreed.step(None)
        if agreed is None:
            return False
        choice, across = agreed.choice, agreed.num_tokens_across_dp
        self._follow_stream()
        self.forget_rows()
        if self._is_decode_batch(choice):
            self.buffers.set_rows([], choice.padded_num_tokens)
            self.graphs.decode(choice, across)
        else:
            metadata = self._fill([], choice, max_query_len=1)
            self.graphs.hidden_states(choice, metadata, choice.padded_num_tokens, across)
        return True

    def _follow_stream(self) -> None:
        """Put this step behind the last one, if that was on another stream."""
        if self.pool.follow_stream():
            # Tensors of the members were made on the other stream, whose later work may be given
            # their memory as soon as they are dropped, even if this stream still reads them.
            self.forget_rows()
            self.memory.record_stream(torch.cuda.current_stream(self.model.device))

    def forget_rows(self) -> None:
        """The next decode step writes its rows anew. Call it after writing to the buffers."""
        self._members = None

    def _show_logits(self, plan: Plan, logits: torch.Tensor) -> None:
        """Tell the observer. ``logits`` may have more rows, which are padding."""
        if self.on_logits is not None:
            names = [item.request.request_id for item in plan.requests if item.samples]
            self.on_logits(SampledLogits(request_ids=names, logits=logits[: len(names)]))

    def _is_decode_batch(self, choice: Choice) -> bool:
        """Whether the chosen batch has one token for each of its rows, padding included."""
        if choice.mode is CUDAGraphMode.FULL:
            return choice.descriptor.uniform
        return choice.padded_num_tokens <= self.plan.max_num_seqs

    def _run_decode(
        self, plan: Plan, choice: Choice, graphs: ModelGraphs, across: torch.Tensor | None
    ) -> StepResult:
        members = self._set_members(plan, choice.padded_num_tokens)
        logits = graphs.decode(choice, across).logits
        self._show_logits(plan, logits)
        slots, seq_lens = self.buffers.slots, self.buffers.tokens.seq_lens
        return self._result(members.filtered, members.sampled, logits, slots, seq_lens)

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
        members = self._members = _Members(
            slots=slots,
            num_reqs=padded,
            filtered=self._filtered_rows(listed),
            sampled=self.buffers.sampled[: len(listed)],
        )
        return members

    def _run_mixed(
        self, plan: Plan, choice: Choice, graphs: ModelGraphs, across: torch.Tensor | None
    ) -> StepResult:
        """A batch with prompts in it: filled by the host's word on how many tokens each has."""
        self.forget_rows()
        requests = plan.requests
        num_reqs, buffers, state = len(requests), self.buffers, self.state
        metadata = self._fill(requests, choice, max_query_len=plan.max_query_len)
        hidden = graphs.hidden_states(choice, metadata, plan.num_tokens, across)
        state.advance(buffers.slots[:num_reqs], buffers.query_lens[:num_reqs])
        sampling = [item.slot for item in requests if item.samples]
        if not sampling:
            return StepResult(HostCopy())
        rows, slots = self._sampled_rows(plan)
        logits = self.model.compute_logits(hidden if rows is None else hidden[rows])
        self._show_logits(plan, logits)
        # A request that gets a token has computed all it has.
        lengths = state.num_computed[slots]
        token_ids = torch.empty_like(slots)
        parameters = state.sampling
        sample_rows(logits, slots, parameters.temperature, parameters.seed_key, lengths, token_ids)
        state.append(slots, token_ids)
        return self._result(self._filtered_rows(sampling), token_ids, logits, slots, lengths)

    def _fill(
        self, requests: Sequence[ScheduledRequest], choice: Choice, *, max_query_len: int
    ) -> AttentionMetadata:
        """Put a batch into the buffers, padded as chosen; without requests it is all padding."""
        padded_tokens = choice.padded_num_tokens
        padded_reqs = self._padded_reqs(choice, max(len(requests), 1))
        self.buffers.fill(
            self.state,
            [item.slot for item in requests],
            [item.num_tokens for item in requests],
            num_reqs=padded_reqs,
            num_tokens=padded_tokens,
        )
        if self.memory.selects:
            self.buffers.select_last_tokens(padded_reqs)
        return self.memory.metadata(
            num_reqs=padded_reqs,
            num_tokens=padded_tokens,
            max_query_len=max_query_len,
            max_seq_len=max((item.start + item.num_tokens for item in requests), default=1),
            selected=True,
        )

    def _padded_reqs(self, choice: Choice, num_reqs: int) -> int:
        if choice.mode is CUDAGraphMode.NONE:
            return num_reqs
        if self.memory.selects:
            # Pieces too read which tokens are selected, in as many rows as they were captured with.
            return min(choice.padded_num_tokens, self.plan.max_num_seqs)
        return choice.descriptor.num_reqs or num_reqs

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
        """Sample those rows again that ask for more than a temperature; send all tokens off.

        The other tensors may have more rows than there are tokens.
        """
        if filtered is None:
            return StepResult(self._mailbox.send(token_ids))
        state, rows = self.state, filtered.on_device
        chosen = slice(token_ids.shape[0]) if rows is None else rows
        logits, slots, lengths = logits[chosen], slots[chosen], lengths[chosen]
        output = sample(
            logits.float(), slots, lengths, state.sampling, state.token_ids, filtered.features
        )
        state.token_ids[slots, lengths] = output.token_ids.to(torch.int32)
        if rows is None:
            token_ids = output.token_ids
        else:
            token_ids[rows] = output.token_ids
        return StepResult.sampled(token_ids, output, filtered.positions)

    # --- capture -------------------------------------------------------------------------------

    @property
    def _all_graphs(self) -> list[ModelGraphs]:
        small = self.small_graphs
        return [self.graphs] if small is self.graphs else [self.graphs, small]

    @without_autocast
    @torch.inference_mode()
    def compile_model(self) -> None:
        """Trace and compile, if that was asked for; nothing is compiled after this."""
        self._follow_stream()
        for graphs in self._all_graphs:
            graphs.compile()

    @without_autocast
    @torch.no_grad()  # leaving inference mode for every tensor that is kept would cost time
    def capture_model(self) -> int:
        """Capture every graph of the plans that is missing; the bytes that it took."""
        missing = [graphs for graphs in self._all_graphs if graphs.needs_capture()]
        if not missing:
            num_planned = sum(len(graphs.plan.entries) for graphs in self._all_graphs)
            if num_planned:
                logger.warning("nothing to capture: all %d graphs exist", num_planned)
            else:
                logger.warning(
                    "no graphs are captured: the graph mode (GraphConfig.mode) is %s",
                    self.plan.mode.name,
                )
            return 0
        compilation_counter.num_gpu_runner_capture_triggers += 1
        start, bytes_before = time.perf_counter(), self._used_bytes()
        self._follow_stream()
        self.forget_rows()
        self.pool.reserve(max(graphs.largest_tensor() for graphs in missing) + _BESIDE_LOGITS)
        report = self.capture_report = CaptureReport()
        for graphs in missing:
            self.buffers.reset()
            report.entries += graphs.capture().entries
        taken = self.capture_bytes = self._used_bytes() - bytes_before
        logger.info(
            "captured %d graphs in %.2f s, %.3f GiB",
            report.num_graphs,
            time.perf_counter() - start,
            taken / 2**30,
        )
        return taken

    def num_nodes(self, entry: PlanEntry) -> int | None:
        """Nodes of an entry's graphs together: operators on the CPU, kernels and copies on CUDA."""
        planned = (graphs for graphs in self._all_graphs if entry in graphs.plan.entries)
        return next(planned, self.graphs).num_nodes(entry)

    def _used_bytes(self) -> int:
        if self.model.device.type == "cuda":
            # Not the device: another engine's thread may be capturing, which that would break.
            torch.cuda.current_stream(self.model.device).synchronize()
            free, total = torch.cuda.mem_get_info(self.model.device)
            return total - free
        return self.pool.num_bytes

    def close(self) -> None:
        """Drop the graphs, their memory, the KV cache and the models. Twice is harmless."""
        try:
            self.pool.close()
        finally:
            self.kv_cache.layers.clear()
            if hasattr(self, "model"):
                del self.model, self.graphs, self.small_graphs


def _check_can_agree(
    agreement: Reducer | None, graphs: GraphConfig, small: SmallBatchModel | None
) -> None:
    if agreement is None:
        return
    ranks = f"{agreement.size} ranks that step together"
    if graphs.eager_fallback:
        raise ConfigError(
            f"eager_fallback is not for {ranks}: one that lacks a graph cannot run what they agree"
        )
    if small is not None:
        raise ConfigError(
            f"a {small.name} for small batches is not for {ranks}: they would run different models"
        )
