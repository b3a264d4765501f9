"""Runs batches of packed sequences through an encoder, in pieces around attention where possible.

It owns what graphs refer to: one buffer for the inputs of all batches, and the graph pool. There
is no KV cache, so a sequence runs in one batch, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ostinato.attention.packed import PackedBatch
from ostinato.config import GraphConfig
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.manager import CudaGraphManager
from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan, PlanEntry
from ostinato.graphs.policy.verify import VerifyPolicy
from ostinato.graphs.prepared_batch import PreparedBatch
from ostinato.graphs.trust.ledger.sources import pool_ledger
from ostinato.graphs.trust.shadow.report import VerifyReport
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.base import Encoder
from ostinato.pooling.shadow import PackedShadow
from ostinato.runner.capture.measured_capture import measured_capture, warn_of_no_capture
from ostinato.runner.model_graphs import kernels_of


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one sequence; ``token_types``: which text of a pair each is from."""

    token_ids: list[int]
    token_types: list[int] | None = None


class PoolingRunner:
    """Runs batches of ``model`` by ``plan``, whose mode is PIECEWISE or NONE.

    Call it without autocast. ``stats`` counts replays by size, and eager batches by reason.
    ``verify``: which of them are compared with eager runs.
    """

    def __init__(
        self,
        model: Encoder,
        plan: CapturePlan,
        *,
        graphs: GraphConfig,
        show_progress: bool = True,
        verify: VerifyPolicy | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        # Rows: token ids, positions, token types. What is not in use is 0, valid for all three.
        self.inputs = torch.zeros(
            (3, plan.max_num_batched_tokens), dtype=torch.int64, device=model.device
        )
        self.pool = GraphPool(model.device)
        self.manager: CudaGraphManager[int, torch.Tensor] = CudaGraphManager(
            plan,
            self.pool,
            num_warmups=graphs.warmups_on(model.device),
            kernel_class=partial(kernels_of, 1),
            eager_fallback=graphs.eager_fallback,
            show_progress=show_progress,
        )
        self._forward = CUDAGraphWrapper(
            model.forward, CUDAGraphMode.PIECEWISE, pool=self.pool, split_at_breaks=True
        )
        self.shadow = (
            PackedShadow(verify, self.manager, self._forward, self.inputs, model, model.vocab_size)
            if verify
            else None
        )
        self.verification = VerifyReport() if self.shadow is None else self.shadow.report
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()
        self.capture_bytes = 0
        self.ledger = pool_ledger(self.pool, {"inputs": self.inputs, "model": model.module})

    def run(self, sequences: Sequence[Tokens]) -> tuple[torch.Tensor, PackedBatch]:
        """Enqueue one batch. Returns its hidden states [T, hidden_size] and where each sequence is.

        The states may be in a graph's memory, valid until the next batch.
        """
        if self.pool.follow_stream():  # torch would only consider the stream of the allocation
            self.inputs.record_stream(torch.cuda.current_stream(self.model.device))
        batch = PackedBatch([len(each.token_ids) for each in sequences], self.model.device)
        shape = BatchShape(batch.num_tokens, len(sequences), batch.max_len, has_prompts=True)
        choice = self.manager.dispatch(shape)
        self.stats.record(choice, batch.num_tokens)
        self._fill(sequences, batch, choice.padded_num_tokens)
        if self.shadow is not None and self.shadow.takes(choice):
            return self.shadow.run(choice, batch), batch
        with set_forward_context(choice.mode, choice.descriptor, attn_metadata=batch):
            hidden = self._run_padded(choice.padded_num_tokens)
        return hidden[: batch.num_tokens], batch

    def _fill(self, sequences: Sequence[Tokens], batch: PackedBatch, padded: int) -> None:
        first = self.model.first_position
        rows = (
            [token for each in sequences for token in each.token_ids],
            [first + position for length in batch.lengths for position in range(length)],
            [mark for each in sequences for mark in each.token_types or [0] * len(each.token_ids)],
        )
        num_padding = padded - batch.num_tokens
        on_host = F.pad(torch.tensor(rows), (0, num_padding))
        self.inputs[:, :padded].copy_(on_host, non_blocking=True)

    def _run_padded(self, num_tokens: int) -> torch.Tensor:
        input_ids, positions, token_types = self.inputs[:, :num_tokens]
        return self._forward(input_ids, positions, token_types)

    # --- capture -------------------------------------------------------------------------------

    @torch.no_grad()
    def capture_model(self) -> int:
        """Capture every missing graph of the plan; return the bytes it took."""
        if not self.manager.needs_capture():
            warn_of_no_capture(len(self.plan.entries), self.plan.mode)
            return 0
        self.capture_bytes = measured_capture(self._capture, self.pool).total
        self.ledger.update()
        return self.capture_bytes

    def _capture(self) -> CaptureReport:
        self.capture_report = self.manager.capture(self._run_padded, self._prepare)
        if self.shadow is not None and self.shadow.policy.at_capture:
            self.shadow.try_graphs(self.model.first_position)
        return self.capture_report

    def _prepare(self, entry: PlanEntry) -> PreparedBatch[int]:
        """A batch of padding, in as many sequences as one may have."""
        num_tokens = entry.descriptor.num_tokens
        num_seqs = min(num_tokens, self.plan.max_num_seqs)
        lengths = [num_tokens // num_seqs] * num_seqs
        lengths[-1] += num_tokens % num_seqs
        self.inputs.zero_()
        batch = PackedBatch(lengths, self.model.device)
        return PreparedBatch(inputs=num_tokens, attn_metadata=batch)

    def close(self) -> None:
        """Drop the graphs and their memory. Closing twice is harmless."""
        self.pool.close()
