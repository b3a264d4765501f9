"""Ownership rules for one replica of a model on several ranks: arithmetic only.

Ranks, groups, heads, tokens and vocabulary are plain integers here. The module uses no torch and no
communication, so every rule can be tested for all sizes without starting a process.

A replica has SP x TP ranks; rank ``s * TP + t`` is at ``(s, t)``. The *base* model is sharded over
TP by ``t`` and splits tokens over ``s``; around attention, the ranks of equal ``t`` exchange tokens
for heads. The *shift* model is sharded over all ranks in the order ``i = t * SP + s``. That order,
unlike the order of rank numbers, gives every rank the same KV heads in both models, so that they
can share one KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """The ranks of one replica. Groups are tuples of ranks whose order is significant.

    ``dcp``: the number of tensor-parallel ranks, all with the same KV heads, that share out the
    tokens of the KV cache.
    """

    sp: int = 1
    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        _check_count("sequence parallel size (sp)", self.sp, least=1)
        _check_count("tensor parallel size (tp)", self.tp, least=1)
        _check_count("decode context parallel size (dcp)", self.dcp, least=1)
        if self.dcp > 1 and (self.sp > 1 or self.tp % self.dcp):
            raise ConfigError(
                f"decode context parallel size (dcp) {self.dcp} must divide the tensor parallel "
                f"size (tp), which is {self.tp}, and sp must be 1, not {self.sp}"
            )

    @property
    def world_size(self) -> int:
        return self.sp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """``(s, t)`` of a rank."""
        _check_index("rank", rank, self.world_size, self._words())
        return divmod(rank, self.tp)

    def rank_of(self, s: int, t: int) -> int:
        _check_index("sequence coordinate s", s, self.sp, self._words())
        _check_index("tensor coordinate t", t, self.tp, self._words())
        return s * self.tp + t

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of equal ``s``, ordered by ``t``: they hold the shards of one base model."""
        s, _ = self.coordinates(rank)
        return tuple(self.rank_of(s, t) for t in range(self.tp))

    def sequence_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of equal ``t``, ordered by ``s``: they exchange tokens for heads and back."""
        _, t = self.coordinates(rank)
        return tuple(self.rank_of(s, t) for s in range(self.sp))

    def context_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that share out the tokens of the KV cache, in the order of their heads."""
        _, t = self.coordinates(rank)
        first = t - t % self.dcp
        return tuple(range(first, first + self.dcp))

    @property
    def shift_group(self) -> tuple[int, ...]:
        """All ranks in the order of the shift model's shards: the rank at index i owns block i."""
        return tuple(self.rank_of(s, t) for t in range(self.tp) for s in range(self.sp))

    def shift_index(self, rank: int) -> int:
        """A rank's index in ``shift_group``: the block of heads it owns in both models."""
        s, t = self.coordinates(rank)
        return t * self.sp + s

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadLayout:
        """Ownership of attention heads. Raises if they cannot be distributed evenly."""
        return HeadLayout(layout=self, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def padded_tokens(self, num_tokens: int) -> int:
        """``num_tokens`` rounded up to a multiple of SP, so that all shares are equal.

        Shares are contiguous: the last ones may contain padding, or only padding if there are fewer
        tokens than ranks.
        """
        _check_count("num_tokens", num_tokens, least=0)
        return -(-num_tokens // self.sp) * self.sp

    def _words(self) -> str:
        return f"sp={self.sp}, tp={self.tp}"


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Which rank owns which attention heads, in head numbers of the whole model.

    Heads are divided into W = SP x TP blocks; the rank at index i of ``shift_group`` owns block i.
    With fewer KV heads than ranks, each block has one KV head, which several blocks share.
    """

    layout: ParallelLayout
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        _check_count("num_heads", self.num_heads, least=1)
        _check_count("num_kv_heads", self.num_kv_heads, least=1)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}; query heads share KV heads in groups of equal size, so "
                "check the model's config"
            )
        world = self.layout.world_size
        if self._deals_evenly(world):
            self._check_context_groups()
            return
        sizes = f"sp={self.layout.sp} x tp={self.layout.tp} = {world} ranks"
        if self.num_heads % world:
            what = f"{self.num_heads} query heads cannot be divided evenly among {sizes}"
        else:
            what = (
                f"{self.num_kv_heads} KV heads (num_heads={self.num_heads}) do not fit {sizes}: "
                "the number of KV heads must be a multiple or a divisor of the number of ranks"
            )
        works = [w for w in range(1, self.num_heads + 1) if self._deals_evenly(w)]
        raise ConfigError(
            f"{what}; with num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads}, "
            f"sp x tp can be {', '.join(map(str, works))}"
        )

    def _check_context_groups(self) -> None:
        world, dcp = self.layout.world_size, self.layout.dcp
        for i in range(0, world, dcp):
            if self.kv_heads(i) != self.kv_heads(i + dcp - 1):
                most = max(1, world // self.num_kv_heads)
                raise ConfigError(
                    f"decode_context_parallel_size {dcp} splits the keys of ranks that hold the "
                    f"same KV heads, but with {self.num_kv_heads} KV heads on {world} ranks only "
                    f"{most} do; use a divisor of {most}, or more ranks"
                )

    def query_heads(self, i: int) -> range:
        """The query heads of block i."""
        self._check_block(i)
        share = self.num_heads // self.layout.world_size
        return range(i * share, (i + 1) * share)

    def kv_heads(self, i: int) -> range:
        """The KV heads that the query heads of block i attend with."""
        self._check_block(i)
        world = self.layout.world_size
        first = i * self.num_kv_heads // world
        return range(first, first + max(1, self.num_kv_heads // world))

    def base_query_heads(self, t: int) -> tuple[int, ...]:
        """The query heads of the base model's shard t: its SP blocks, in order."""
        return tuple(head for i in self._blocks(t) for head in self.query_heads(i))

    def base_kv_heads(self, t: int) -> tuple[int, ...]:
        """The KV heads of the base model's shard t: those of its SP blocks, in order.

        A KV head that several blocks share appears once for each of them, so that the all-to-all
        sends parts of equal size.
        """
        return tuple(head for i in self._blocks(t) for head in self.kv_heads(i))

    def _blocks(self, t: int) -> range:
        _check_index("tensor coordinate t", t, self.layout.tp, f"tp={self.layout.tp}")
        return range(t * self.layout.sp, (t + 1) * self.layout.sp)

    def _check_block(self, i: int) -> None:
        world = self.layout.world_size
        _check_index("block of heads", i, world, f"sp={self.layout.sp}, tp={self.layout.tp}")

    def _deals_evenly(self, world: int) -> bool:
        kv = self.num_kv_heads
        return self.num_heads % world == 0 and (kv % world == 0 or world % kv == 0)


def vocabulary(vocab_size: int, parts: int, index: int) -> range:
    """The tokens of shard ``index`` when the vocabulary is split into ``parts``.

    Every shard is stored with ``ceil(vocab_size / parts)`` rows. The range covers the rows that are
    tokens: the last shards may have fewer, or none, and their remaining rows are padding.
    """
    _check_count("vocab_size", vocab_size, least=1)
    _check_count("parts of the vocabulary", parts, least=1)
    _check_index("part of the vocabulary", index, parts, f"vocab_size={vocab_size}")
    share = -(-vocab_size // parts)
    return range(min(index * share, vocab_size), min((index + 1) * share, vocab_size))


def _check_count(name: str, value: int, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")


def _check_index(name: str, value: int, size: int, where: str) -> None:
    if type(value) is not int or not 0 <= value < size:
        raise ConfigError(f"{name} must be an int from 0 to {size - 1} ({where}), got {value!r}")
