"""The memory of a step at fixed addresses: request state, input buffers, KV cache.

All models that serve the same requests share it, and their graphs hold its addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata
from ostinato.graphs.capture.tree import tensors_in
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.models.base import CausalLM
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.kv_cache import CacheSize, KVCache
from ostinato.runner.request_state import RequestState


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Owned by the runner. ``cache`` is the size of ``kv_cache``, which ``backend`` reads.

    ``selects``: the models skip some layers for all but the selected tokens.
    """

    state: RequestState
    buffers: InputBuffers
    kv_cache: KVCache
    cache: CacheSize
    backend: AttentionBackend
    selects: bool = False

    @classmethod
    def allocate(
        cls, model: CausalLM, plan: CapturePlan, cache: CacheSize, backend: AttentionBackend
    ) -> StepMemory:
        """Allocate for the batches of ``plan``, and the keys and values of ``model``."""
        device = model.device
        return cls(
            state=RequestState(max_num_seqs=plan.max_num_seqs, cache=cache, device=device),
            buffers=InputBuffers(
                max_num_seqs=plan.max_num_seqs,
                max_num_tokens=plan.padded_tokens(plan.max_num_batched_tokens),
                cache=cache,
                device=device,
            ),
            kv_cache=KVCache(
                model.attention_specs,
                num_blocks=cache.num_blocks,
                block_size=cache.block_size,
                dtype=model.dtype,
                device=device,
            ),
            cache=cache,
            backend=backend,
            selects=model.selects_tokens,
        )

    @property
    def device(self) -> torch.device:
        return self.state.device

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that steps run on ``stream``, so that it reuses freed memory only after them.

        Otherwise torch would only consider the stream of the allocation.
        """
        state, sampling, buffers = vars(self.state), vars(self.state.sampling), vars(self.buffers)
        for tensor in tensors_in((state, sampling, buffers, self.kv_cache.layers)):
            tensor.record_stream(stream)

    def fill(self, *, num_reqs: int, num_tokens: int) -> None:
        """Fill the buffers, both numbers padded, for the queries that are set, on the device."""
        self.buffers.load(self.state, num_reqs=num_reqs, num_tokens=num_tokens)
        if self.selects:
            self.buffers.select_last_tokens(num_reqs)

    def advance(self, num_reqs: int) -> None:
        """Count the tokens of these rows of a filled batch as computed; padding has none."""
        buffers = self.buffers
        self.state.advance(buffers.req_indices[:num_reqs], buffers.query_lens[:num_reqs])

    def metadata(
        self,
        *,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        selected: bool,
        uniform_decode: bool,
    ) -> AttentionMetadata:
        """The batch in the buffers as attention sees it.

        ``selected``: models may skip some layers for all but one token of each row.
        """
        return self.buffers.metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            kv_cache=self.kv_cache,
            backend=self.backend,
            selected=selected and self.selects,
            uniform_decode=uniform_decode,
        )
