"""The native decoder over several ranks: the base model and the shift model of one layout.

The *base* model is sharded over TP ranks, and the tokens of a batch are split over SP (Ulysses).
The *shift* model is sharded over all ranks. In both, a rank has the keys and values of the same
heads, so one KV cache serves both, and a request may switch models at any step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from ostinato.errors import BatchError
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.weight_slot import WeightSlot
from ostinato.parallel.comm import Comm
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.rank_context import CommOf
from ostinato.parallel.rank_exchange import ReplicaExchange, TensorExchange, UlyssesExchange
from ostinato.parallel.sharded.sharding import Shard, base_shard, sharded_slots, shift_shard


class ShardedDecoder(Decoder):
    """One rank's part of a decoder; a ``CausalLM`` that returns states and logits of all tokens.

    ``tensor``: the ranks that share the weights. ``sequence``: the ranks that split the tokens of a
    batch, contiguously; the number of tokens must be a multiple of their number. ``replicas``: the
    ranks with the same part of other replicas, if experts are spread over all of them.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        tensor: Comm,
        sequence: Comm,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int | None = None,
        replicas: Comm | None = None,
    ) -> None:
        exchange = TensorExchange(tensor)
        if sequence.size > 1:
            exchange = UlyssesExchange(tensor, sequence)
        elif replicas is not None and replicas.size > 1:
            exchange = ReplicaExchange(tensor, replicas)
        super().__init__(
            shard.local_config,
            device=device,
            dtype=dtype,
            max_position=max_position,
            exchange=exchange,
        )
        self.shard = shard
        self.vocab_size = shard.config.vocab_size
        self._tensor = tensor
        self._sequence = sequence
        for layer in self.decoder_layers():  # attention sees one block of the shard's heads
            layer.spec = replace(
                layer.spec,
                num_heads=layer.spec.num_heads // sequence.size,
                # That of latent attention has one row for all.
                num_kv_heads=max(1, layer.spec.num_kv_heads // sequence.size),
            )
        self.attention_specs = [layer.spec for layer in self.decoder_layers()]

    @property
    def num_token_ranks(self) -> int:
        return self._sequence.size

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden_size] of all T tokens, on every rank."""
        num_ranks, num_tokens = self._sequence.size, input_ids.shape[0]
        if num_tokens % num_ranks:
            raise BatchError(
                f"{num_tokens} tokens cannot be split evenly over {num_ranks} ranks; pad them to "
                f"{-(-num_tokens // num_ranks) * num_ranks}"
            )
        count = num_tokens // num_ranks
        own = slice(self._sequence.index * count, (self._sequence.index + 1) * count)
        hidden = self._embed(input_ids[own])
        hidden = self._run_layers(hidden, positions[own], positions)
        return hidden if num_ranks == 1 else self._sequence.all_gather(hidden)

    def _token_slots(self, hidden: torch.Tensor) -> torch.Tensor | None:
        slots, count = super()._token_slots(hidden), hidden.shape[0]
        if slots is None or self._sequence.size == 1:
            return slots
        return slots[self._sequence.index * count :][:count]

    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """This rank's share of the counts: the sum over all ranks is the model's."""
        counts = super().expert_load(reset=reset)
        if self.shard.experts is not None or self.shard.index == 0:
            return counts
        return {layer: [0] * len(each) for layer, each in counts.items()}  # another rank has them

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._tensor.size == 1:
            return F.embedding(input_ids, self.embed_tokens.weight)
        vocabulary = self.shard.vocabulary
        local = input_ids - vocabulary.start
        owned = (local >= 0) & (local < len(vocabulary))
        hidden = F.embedding(local.masked_fill(~owned, 0), self.embed_tokens.weight)
        return self._tensor.all_reduce(hidden.masked_fill_(~owned.unsqueeze(1), 0.0))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] of hidden states [B, hidden_size], on every rank."""
        if self._tensor.size == 1:
            return super().compute_logits(hidden)
        if self.batch_invariant:
            logits = super().compute_logits(hidden)  # of the rank's vocabulary
        else:
            logits = self._scaled_logits(F.linear(self.norm(hidden), self.head_weight))
        return self._tensor.all_gather(logits, dim=1)[:, : self.vocab_size]

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The tensors of a checkpoint, and this rank's part of each."""
        return sharded_slots(self._own_slots(), self.shard)


def build_base(
    config: DecoderConfig,
    layout: ParallelLayout,
    rank: int,
    comm_of: CommOf,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
    experts: range | None = None,
    replicas: Comm | None = None,
) -> ShardedDecoder:
    """The model for large batches: weights over TP, tokens over SP.

    ``experts``: those of this rank, if they are spread over the ranks of all ``replicas``.
    """
    return ShardedDecoder(
        base_shard(config, layout, rank, experts),
        replicas=replicas,
        tensor=comm_of(layout.tensor_group(rank)),
        sequence=comm_of(layout.sequence_group(rank)),
        device=device,
        dtype=dtype,
        max_position=max_position,
    )


def build_shift(
    config: DecoderConfig,
    layout: ParallelLayout,
    rank: int,
    comm_of: CommOf,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_position: int | None = None,
) -> ShardedDecoder:
    """The model for small batches: weights over all ranks, in the order of the KV heads."""
    return ShardedDecoder(
        shift_shard(config, layout, rank),
        tensor=comm_of(layout.shift_group),
        sequence=comm_of((rank,)),
        device=device,
        dtype=dtype,
        max_position=max_position,
    )
