"""The memory of a step at fixed addresses: request state, input buffers, KV cache, layers' states.

All models that serve the same requests share it, and their graphs hold its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ostinato.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from ostinato.errors import ConfigError
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.graphs.tree import leaves_with_path
from ostinato.graphs.trust.ledger.owners import MemoryKind, NamedMemory
from ostinato.models.base import CausalLM
from ostinato.quoting import shown
from ostinato.recurrent.base import RecurrentStates
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.kv_cache import CacheSize, KVCache
from ostinato.runner.request_state import RequestState
from ostinato.runner.sleep.sleep_memory import SleepMemory
from ostinato.speculative.proposer import Proposer, ProposerContext

if TYPE_CHECKING:
    from ostinato.sampling.sampling_state import SamplingState
    from ostinato.speculative.speculation import Speculation


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Owned by the runner. ``cache`` is the size of ``kv_cache``, which ``backend`` reads.

    ``selects``: the models skip some layers for all but the selected tokens. ``proposer`` writes
    drafts into ``state``, if there are any. ``states``: of the model's recurrent layers, if it has
    some, by request row.
    """

    state: RequestState
    buffers: InputBuffers
    kv_cache: KVCache
    cache: CacheSize
    backend: AttentionBackend
    selects: bool = False
    proposer: Proposer | None = None
    states: RecurrentStates | None = None

    @classmethod
    def allocate(
        cls,
        model: CausalLM,
        plan: CapturePlan,
        cache: CacheSize,
        backend: AttentionBackend,
        speculation: Speculation | None = None,
        sleeping: SleepMemory | None = None,
    ) -> StepMemory:
        """Allocate for the batches of ``plan``, and the keys and values of ``model``.

        ``sleeping``: where KV caches are, if they may be released.
        """
        device, max_query_len = model.device, plan.decode_query_lens[-1]
        mrope, max_num_seqs = model.uses_mrope, plan.max_num_seqs
        state = RequestState(
            max_num_seqs=max_num_seqs,
            cache=cache,
            device=device,
            mrope=mrope,
            vocab_size=model.vocab_size,
        )

        def new_kv_cache(specs: Sequence[AttentionSpec]) -> KVCache:
            return KVCache(
                specs,
                num_blocks=cache.num_blocks,
                block_size=cache.block_slots,
                dtype=model.dtype,
                device=device,
                sleeping=sleeping,
            )

        proposer = None
        if speculation is not None:
            proposer = _build_proposer(
                speculation, model, plan, cache, backend, state.sampling, new_kv_cache
            )
        return cls(
            state=state,
            buffers=InputBuffers(
                max_num_seqs=plan.max_num_seqs,
                max_num_tokens=plan.padded_tokens(plan.max_num_batched_tokens),
                cache=cache,
                device=device,
                max_query_len=max_query_len,
                mrope=mrope,
            ),
            kv_cache=new_kv_cache(model.attention_specs),
            cache=cache,
            backend=backend,
            selects=model.selects_tokens,
            proposer=proposer,
            states=RecurrentStates(
                model.recurrent_specs,
                num_rows=max_num_seqs + 1,
                dtype=model.dtype,
                device=device,
            )
            if model.recurrent_specs
            else None,
        )

    @property
    def drafts_read_all(self) -> bool:
        """Whether what proposes drafts must see every token."""
        return self.proposer is not None and self.proposer.reads_all_tokens

    @property
    def device(self) -> torch.device:
        return self.state.device

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that steps run on ``stream``, so that it reuses freed memory only after them.

        Otherwise torch would only consider the stream of the allocation.
        """
        for named in self.named_memory():
            named.tensor.record_stream(stream)

    def named_memory(self) -> Iterator[NamedMemory]:
        """All of it, by name."""
        for number, (keys, values) in enumerate(self.kv_cache.layers):
            yield NamedMemory(MemoryKind.KV_CACHE, f"layer {number}, keys", keys)
            yield NamedMemory(MemoryKind.KV_CACHE, f"layer {number}, values", values)
        for name, tensor in _named_tensors(vars(self.buffers)):
            yield NamedMemory(MemoryKind.INPUT, name, tensor)
        kinds = {"request state": vars(self.state), "sampling state": vars(self.state.sampling)}
        if self.states is not None:
            kinds["recurrent state"] = {"layers": self.states.layers}
        if self.proposer is not None:
            kinds["draft state"] = {"tensors": self.proposer.tensors()}
        for kind, tensors in kinds.items():
            for name, tensor in _named_tensors(tensors):
                yield NamedMemory(MemoryKind.STATE, f"{kind} {name!r}", tensor)

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
        query_lens: Sequence[int] | None = None,
    ) -> AttentionMetadata:
        """The batch in the buffers as attention sees it.

        ``selected``: models may skip some layers for all but one token of each row. ``query_lens``:
        the tokens of each request, without padding; None: the host does not know.
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
            states=self.states,
            query_lens=query_lens,
        )

    def close(self) -> None:
        """Drop the KV cache, the recurrent states, and what proposes drafts."""
        self.kv_cache.layers.clear()
        if self.states is not None:
            self.states.layers.clear()
        if self.proposer is not None:
            self.proposer.close()


def _named_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        for path, leaf in leaves_with_path(value, name.removeprefix("_")):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf


def _build_proposer(
    speculation: Speculation,
    model: CausalLM,
    plan: CapturePlan,
    cache: CacheSize,
    backend: AttentionBackend,
    sampling: SamplingState,
    new_kv_cache: Callable[[Sequence[AttentionSpec]], KVCache],
) -> Proposer:
    """What ``speculation`` builds, with the hidden states that it asks for."""
    num_rows = plan.padded_tokens(plan.max_num_batched_tokens)
    aux = {
        layer: torch.zeros((num_rows, model.hidden_size), dtype=model.dtype, device=model.device)
        for layer in speculation.aux_hidden_state_layers
    }
    if aux:
        model.set_aux_hidden_states(aux)
    proposer = speculation.build(
        ProposerContext(
            device=model.device,
            num_rows=plan.max_num_seqs + 1,
            max_model_len=cache.max_model_len,
            blocks_per_request=cache.blocks_per_request,
            max_num_drafts=plan.decode_query_lens[-1] - 1,
            vocab_size=model.vocab_size,
            sampling=sampling,
            backend=backend,
            new_kv_cache=lambda specs: new_kv_cache(specs).layers,
            aux_hidden_states=tuple(aux.values()),
        )
    )
    if Proposer not in type(proposer).__mro__:
        raise ConfigError(
            f"{type(speculation).__name__}.build() returned {shown(proposer)}, which is not a "
            "Proposer; return an object of a class that derives from ostinato.Proposer"
        )
    return proposer
