"""Everything of a step that has an address: request state, input buffers, KV cache.

All models that serve the same requests share one; their graphs hold the addresses.
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

    ``selects``: the models spare tokens some of their layers, and are told which tokens need all.
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
        """For the batches of ``plan``, and the keys and values of ``model``."""
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
        """Steps will run on ``stream``: memory that is let go of is not given away before they end.

        Otherwise torch would only look at the stream that it was allocated on.
        """
        state, sampling, buffers = vars(self.state), vars(self.state.sampling), vars(self.buffers)
        for tensor in tensors_in((state, sampling, buffers, self.kv_cache.layers)):
            tensor.record_stream(stream)

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

        ``selected``: models that spare tokens some layers may, except for one token of each row.
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
