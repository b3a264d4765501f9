"""Which graphs exist: the one list that capture walks and dispatch is built from.

A plan is decided once, from the resolved mode and the limits of the engine. It is a value:
hashable, comparable between ranks by ``digest``, and complete: what is not in it is never captured
and never chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ostinato.errors import ConfigError
from ostinato.graphs.descriptor import BatchDescriptor
from ostinato.graphs.modes import CUDAGraphMode
from ostinato.graphs.sizes import check_positive_int, decode_sizes, validate_sizes


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One graph to capture: the runtime mode it belongs to and its key."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def phase(self) -> str:
        """The group it is captured in, as the progress bar names it."""
        return f"{'decode' if self.descriptor.uniform else 'mixed'}, {self.mode.name}"


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """The ordered list of graphs, and the numbers it follows from.

    Order of capture: PIECEWISE before FULL, mixed before decode, and the largest first in each, so
    that the memory pool is sized once and every later graph fits into it.
    """

    mode: CUDAGraphMode
    sizes: tuple[int, ...]
    decode_query_lens: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    entries: tuple[PlanEntry, ...]

    @classmethod
    def build(
        cls,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_query_lens: Iterable[int] = (1,),
        max_loras: int = 0,
    ) -> CapturePlan:
        """Plan the graphs of a *resolved* mode (see ``resolve_mode``)."""
        mode = CUDAGraphMode.parse(mode)
        check_positive_int("max_num_seqs", max_num_seqs)
        check_positive_int("max_num_batched_tokens", max_num_batched_tokens)
        listed = list(decode_query_lens)
        if not listed:
            raise ConfigError("decode_query_lens is empty; use (1,) for decode without speculation")
        for query_len in listed:
            check_positive_int("decode query length", query_len)
        query_lens = tuple(sorted(set(listed)))
        if type(max_loras) is not int or max_loras < 0:
            raise ConfigError(f"max_loras must be 0 or a positive integer, got {max_loras!r}")
        # With no graphs, sizes mean nothing; an empty list is then not a mistake.
        checked: tuple[int, ...] = ()
        if mode is not CUDAGraphMode.NONE:
            checked = validate_sizes(sizes, max_num_batched_tokens=max_num_batched_tokens)
        draft = cls(
            mode=mode,
            sizes=checked,
            decode_query_lens=query_lens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_loras=max_loras,
            entries=(),
        )
        entries = (*draft._mixed_entries(), *draft._decode_entries())
        if mode is not CUDAGraphMode.NONE and not entries:
            raise ConfigError(
                f"graph mode {mode.name} has nothing to capture: no size of {list(checked)} fits "
                f"decode batches of {list(query_lens)} tokens a request, {max_num_seqs} requests "
                f"and {max_num_batched_tokens} tokens at most; add a smaller size"
            )
        return replace(draft, entries=entries)

    @cached_property
    def lora_cases(self) -> tuple[int, ...]:
        """Numbers of active adapters that have graphs: 0, powers of two, and the maximum."""
        powers = [1 << k for k in range(self.max_loras.bit_length()) if 1 << k < self.max_loras]
        return (0, *powers, self.max_loras) if self.max_loras else (0,)

    @cached_property
    def digest(self) -> str:
        """A hash that is equal on two ranks exactly when their plans are."""
        fields = (
            self.mode.value,
            self.sizes,
            self.decode_query_lens,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_loras,
            [(entry.mode.value, repr(entry.descriptor)) for entry in self.entries],
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()

    def decode_sizes_for(self, query_len: int) -> tuple[int, ...]:
        return decode_sizes(
            self.sizes,
            query_len=query_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def mixed_descriptor(self, num_tokens: int, num_loras: int) -> BatchDescriptor:
        full = self.mode.mixed_mode() is CUDAGraphMode.FULL
        return BatchDescriptor(
            num_tokens,
            num_reqs=min(num_tokens, self.max_num_seqs) if full else None,
            has_lora=num_loras > 0,
            num_active_loras=num_loras,
        )

    def decode_descriptor(self, num_tokens: int, query_len: int, num_loras: int) -> BatchDescriptor:
        return BatchDescriptor(
            num_tokens,
            num_reqs=num_tokens // query_len,
            uniform=True,
            has_lora=num_loras > 0,
            num_active_loras=num_loras,
            query_len=query_len if len(self.decode_query_lens) > 1 else None,
        )

    def query_len_of(self, descriptor: BatchDescriptor) -> int:
        """The query length of a decode key."""
        return descriptor.query_len or self.decode_query_lens[0]

    def _mixed_entries(self) -> Iterator[PlanEntry]:
        mode = self.mode.mixed_mode()
        if mode is CUDAGraphMode.NONE:
            return
        for size in reversed(self.sizes):
            for num_loras in reversed(self.lora_cases):
                descriptor = self.mixed_descriptor(size, num_loras)
                yield PlanEntry(mode=mode, descriptor=descriptor)

    def _decode_entries(self) -> Iterator[PlanEntry]:
        if not self.mode.separate_routine():
            return
        keys = [
            (size, query_len, num_loras)
            for query_len in self.decode_query_lens
            for size in self.decode_sizes_for(query_len)
            for num_loras in self.lora_cases
        ]
        for key in sorted(keys, reverse=True):
            yield PlanEntry(mode=CUDAGraphMode.FULL, descriptor=self.decode_descriptor(*key))
