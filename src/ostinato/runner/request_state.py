"""The state of running requests, on the device.

Each running request has a row, at its ``req_index``. A step reads its inputs from here and writes
the sampled tokens back, so the next step can start before the host has read a token. The host
writes a row when a request is admitted, and adds blocks as they are allocated.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from ostinato.runner.kv_cache import CacheSize
from ostinato.sampling.sampler import SamplingState
from ostinato.scheduling.step_plan import DecodePlan, IntArray, ScheduledRequest, StepPlan


class RequestState:
    """Device tensors by request row; the last row, ``padding_req_index``, is for padding.

    ``token_ids`` [rows, max_model_len + 1]: prompt and output, plus the token sampled at the
    length limit. ``num_computed`` [rows]: tokens in the KV cache, and so the position of the next
    one. ``block_table`` [rows, blocks]. ``rope_delta`` [rows]: by how much a request's positions
    differ from its numbers of tokens, after its images; None without M-RoPE.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        cache: CacheSize,
        device: torch.device,
        mrope: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self.padding_req_index = max_num_seqs
        self.device = device

        def zeros(*row: int) -> torch.Tensor:
            return torch.zeros((max_num_seqs + 1, *row), dtype=torch.int32, device=device)

        self.token_ids = zeros(cache.max_model_len + 1)
        self.num_computed = zeros()
        self.block_table = zeros(cache.blocks_per_request)
        self.rope_delta = zeros() if mrope else None
        self.sampling = SamplingState(max_num_seqs + 1, device, vocab_size=vocab_size)

    def update(self, plan: StepPlan) -> None:
        """Update rows with the scheduler's plan, before the inputs of the step are filled."""
        if isinstance(plan, DecodePlan):
            if plan.new_blocks:
                entries = np.array(plan.new_blocks, dtype=np.int64)
                entries[:, 0] = plan.req_indices[entries[:, 0]]
                self._append_blocks(entries)
            return
        grown: list[tuple[int, int, int]] = []
        for item in plan.requests:
            if item.is_new:
                self._write_row(item)
            else:
                for offset, block in enumerate(item.new_blocks):
                    grown.append((item.req_index, item.first_new_block + offset, block))
        if grown:
            self._append_blocks(np.array(grown, dtype=np.int64))

    def _write_row(self, item: ScheduledRequest) -> None:
        request, req_index = item.request, item.req_index
        # By way of an array, which takes a list several times faster than a tensor does.
        tokens = torch.frombuffer(array("i", request.all_token_ids), dtype=torch.int32)
        self.token_ids[req_index, : len(tokens)].copy_(tokens, non_blocking=True)
        blocks = torch.frombuffer(array("i", request.block_ids), dtype=torch.int32)
        self.block_table[req_index, : len(blocks)].copy_(blocks, non_blocking=True)
        self.num_computed[req_index].fill_(item.start)
        if self.rope_delta is not None:
            delta = 0 if request.images is None else request.images.rope_delta
            self.rope_delta[req_index].fill_(delta)
        self.sampling.write(req_index, request)

    def _append_blocks(self, entries: IntArray) -> None:
        """Write [N, 3] of request row, index in its block table, and block, in one copy."""
        on_device = torch.from_numpy(entries).to(self.device, non_blocking=True)
        rows, columns, blocks = on_device.unbind(1)
        self.block_table[rows, columns] = blocks.to(torch.int32)

    def advance(self, req_indices: torch.Tensor, query_lens: torch.Tensor) -> None:
        """Add to the computed tokens of these requests."""
        self.num_computed[req_indices] += query_lens

    def append(
        self, req_indices: torch.Tensor, lengths: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Append a token to requests of these lengths."""
        self.token_ids[req_indices, lengths] = token_ids.to(torch.int32)
