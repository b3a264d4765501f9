"""The capture plan: the one list of graphs that capture walks and dispatch is built from.

A plan is decided once, from the resolved mode and the limits of the engine. It is a value:
hashable, comparable between ranks by ``digest``, and complete: a graph that is not in it is never
captured and never chosen.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ostinato.errors import ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import check_positive_int, decode_sizes, validate_sizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One graph to capture: its runtime ``mode``, FULL or PIECEWISE, and key, ``descriptor``."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def phase(self) -> str:
        """The capture group it belongs to, as shown in the progress bar."""
        return f"{'decode' if self.descriptor.uniform else 'mixed'}, {self.mode.name}"


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """The ordered list of graphs, and the limits it follows from.

    Order of capture: PIECEWISE before FULL, mixed before decode, and the largest first in each, so
    that the memory pool is sized once and every later graph fits into it.

    ``mode``: resolved. ``sizes``: padded numbers of tokens, sorted; ``mixed_sizes``: those of mixed
    batches, which are the same unless given apart. ``decode_query_lens``: tokens of each request in
    uniform decode batches, and ``decode_max_reqs`` the most requests of each. ``max_num_seqs`` and
    ``max_num_batched_tokens``: most requests and tokens of a batch. ``max_loras``: most active
    adapters. ``entries``: the graphs.
    ``token_multiple``: all sizes and batches, eager ones too, have a multiple of this number of
    tokens, because tokens are split evenly over ranks.
    """

    mode: CUDAGraphMode
    sizes: tuple[int, ...]
    decode_query_lens: tuple[int, ...]
    decode_max_reqs: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    entries: tuple[PlanEntry, ...]
    token_multiple: int = 1
    mixed_sizes: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_query_lens: Iterable[int] | Mapping[int, int] = (1,),
        max_loras: int = 0,
        mixed_sizes: Iterable[int] | None = None,
    ) -> CapturePlan:
        """Plan the graphs of a *resolved* mode (see ``resolve_mode``).

        ``decode_query_lens`` may map each length to the most requests of batches with it.
        ``mixed_sizes``: for mixed batches, if they have separate graphs; None: ``sizes``. Sizes
        that get no decode graph are logged with the reason.
        """
        plan = cls.without_sizes(
            mode,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_query_lens=decode_query_lens,
            max_loras=max_loras,
        )
        # Without graphs, sizes are irrelevant, so an empty list is not a mistake.
        if plan.mode is CUDAGraphMode.NONE:
            return plan
        checked = validate_sizes(sizes, max_num_batched_tokens=max_num_batched_tokens)
        mixed = None
        if mixed_sizes is not None:
            if not (plan.mode.separate_routine() and plan.mode.mixed_mode()):
                raise ConfigError(
                    f"graph mode {plan.mode.name} has no separate graphs of mixed batches; leave "
                    "out their sizes (mixed_sizes, or mixed_capture_sizes)"
                )
            mixed = validate_sizes(mixed_sizes, max_num_batched_tokens=max_num_batched_tokens)
        plan = plan.with_sizes(checked, mixed_sizes=mixed)
        if not plan.entries:
            raise _nothing_to_capture(plan, checked)
        if plan.sizes_without_decode:
            _log_sizes_without_decode(plan)
        return plan

    @classmethod
    def without_sizes(
        cls,
        mode: CUDAGraphMode,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_query_lens: Iterable[int] | Mapping[int, int] = (1,),
        max_loras: int = 0,
    ) -> CapturePlan:
        """A plan that captures nothing, for ``with_sizes``."""
        check_positive_int("max_num_seqs", max_num_seqs)
        check_positive_int("max_num_batched_tokens", max_num_batched_tokens)
        if not isinstance(decode_query_lens, Iterable):
            raise ConfigError(
                f"decode_query_lens must be a list of query lengths, got {decode_query_lens!r}"
            )
        listed = list(decode_query_lens)
        if not listed:
            raise ConfigError("decode_query_lens is empty; use (1,) for decode without speculation")
        for query_len in listed:
            check_positive_int("decode query length", query_len)
        lengths = tuple(sorted(set(listed)))
        most = decode_query_lens if isinstance(decode_query_lens, Mapping) else {}
        max_reqs = [min(most.get(length, max_num_seqs), max_num_seqs) for length in lengths]
        for count in max_reqs:
            check_positive_int("most requests of a decode query length", count)
        if type(max_loras) is not int or max_loras < 0:
            raise ConfigError(f"max_loras must be 0 or a positive integer, got {max_loras!r}")
        return cls(
            mode=CUDAGraphMode.parse(mode),
            sizes=(),
            decode_query_lens=lengths,
            decode_max_reqs=tuple(max_reqs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_loras=max_loras,
            entries=(),
        )

    def with_sizes(
        self,
        sizes: tuple[int, ...],
        *,
        token_multiple: int = 1,
        mixed_sizes: tuple[int, ...] | None = None,
    ) -> CapturePlan:
        """The plan with these sizes. Without any, every batch is too large for it.

        ``mixed_sizes``: for mixed batches; None: ``sizes``.
        """
        check_positive_int("token_multiple", token_multiple)
        mixed = sizes if mixed_sizes is None else mixed_sizes
        uneven = [size for size in sorted({*sizes, *mixed}) if size % token_multiple]
        if uneven:
            raise ConfigError(
                f"sizes {uneven} are not multiples of {token_multiple}, the number of ranks that "
                "share the tokens of a batch; round them up"
            )
        draft = replace(
            self, sizes=sizes, mixed_sizes=mixed, token_multiple=token_multiple, entries=()
        )
        return replace(draft, entries=(*draft._mixed_entries(), *draft._decode_entries()))

    def padded_tokens(self, num_tokens: int) -> int:
        """``num_tokens`` rounded up to the plan's ``token_multiple``."""
        return -(-num_tokens // self.token_multiple) * self.token_multiple

    def is_uniform(self, num_tokens: int, query_len: int) -> bool:
        """Whether ``num_tokens`` is a multiple of ``query_len`` (0: not a decode batch)."""
        return (
            query_len > 0
            and num_tokens % query_len == 0
            and num_tokens <= query_len * self.max_num_seqs
        )

    @cached_property
    def lora_cases(self) -> tuple[int, ...]:
        """The numbers of active adapters with graphs: 0, powers of two, and the maximum."""
        powers = [1 << k for k in range(self.max_loras.bit_length()) if 1 << k < self.max_loras]
        return (0, *powers, self.max_loras) if self.max_loras else (0,)

    @cached_property
    def mixed_lora_cases(self) -> tuple[int, ...]:
        """The same for mixed batches; only 0, 1 and the maximum for whole graphs of other sizes.

        These sizes go up to the largest batch, and such graphs take the longest to capture.
        """
        cases = self.lora_cases
        if self.mode is not CUDAGraphMode.FULL_AND_FULL or self.mixed_sizes == self.sizes:
            return cases
        return tuple(sorted({*cases[:2], cases[-1]}))

    @cached_property
    def digest(self) -> str:
        """A hash that is equal on two ranks exactly when their plans are."""
        fields = (
            self.mode.value,
            self.sizes,
            self.decode_query_lens,
            self.decode_max_reqs,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_loras,
            self.token_multiple,
            self.mixed_sizes,
            [(entry.mode.value, repr(entry.descriptor)) for entry in self.entries],
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()

    @cached_property
    def sizes_without_decode(self) -> tuple[int, ...]:
        """Of ``sizes``, those without a decode graph, although the mode has some.

        Decode batches are smaller. Mixed batches use them, if the mode has mixed graphs of them.
        """
        if not self.mode.separate_routine():
            return ()
        fits = {length: set(self.decode_sizes_for(length)) for length in self.decode_query_lens}
        return tuple(
            size
            for size in self.sizes
            if not any(self._decode_size(size, length) in sizes for length, sizes in fits.items())
        )

    def largest_decode_batch(self, query_len: int) -> int:
        """Tokens of the largest batch of whole requests with ``query_len`` tokens each."""
        return min(self._max_reqs(query_len), self.max_num_batched_tokens // query_len) * query_len

    def _max_reqs(self, query_len: int) -> int:
        limits = dict(zip(self.decode_query_lens, self.decode_max_reqs, strict=True))
        return limits.get(query_len, self.max_num_seqs)

    def _decode_size(self, size: int, query_len: int) -> int:
        # Whole requests that also split evenly over ranks.
        step = math.lcm(query_len, self.token_multiple)
        return -(-size // step) * step

    def decode_sizes_for(self, query_len: int) -> tuple[int, ...]:
        """The captured numbers of tokens of decode batches with ``query_len`` tokens a request."""
        sizes = [self._decode_size(size, query_len) for size in self.sizes]
        limit = self._max_reqs(query_len)
        if limit < self.max_num_seqs:  # its largest batch has a graph of just that size
            largest = self._decode_size(limit * query_len, query_len)
            sizes = [min(size, largest) for size in sizes]
            limit = largest // query_len
        return decode_sizes(
            sizes,
            query_len=query_len,
            max_num_seqs=limit,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def mixed_descriptor(self, num_tokens: int, num_loras: int) -> BatchDescriptor:
        """The key of ``num_tokens``, of the smallest case that holds ``num_loras`` adapters."""
        num_loras = next(case for case in self.mixed_lora_cases if case >= num_loras)
        full = self.mode.mixed_mode() is CUDAGraphMode.FULL
        return BatchDescriptor(
            num_tokens,
            num_reqs=min(num_tokens, self.max_num_seqs) if full else None,
            has_lora=num_loras > 0,
            num_active_loras=num_loras,
        )

    def decode_descriptor(self, num_tokens: int, query_len: int, num_loras: int) -> BatchDescriptor:
        """The key of ``num_tokens``, ``query_len`` a request, for ``num_loras`` active adapters."""
        return BatchDescriptor(
            num_tokens,
            num_reqs=num_tokens // query_len,
            uniform=True,
            has_lora=num_loras > 0,
            num_active_loras=num_loras,
            query_len=query_len if len(self.decode_query_lens) > 1 else None,
        )

    def query_len_of(self, descriptor: BatchDescriptor) -> int:
        """The query length of ``descriptor``, a decode batch's."""
        return descriptor.query_len or self.decode_query_lens[0]

    def _mixed_entries(self) -> Iterator[PlanEntry]:
        mode = self.mode.mixed_mode()
        if mode is CUDAGraphMode.NONE:
            return
        for size in reversed(self.mixed_sizes):
            for num_loras in reversed(self.mixed_lora_cases):
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


def sequence_parallel_sizes(
    sizes: Iterable[int], *, sp: int, threshold: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Token counts captured for a model whose batches are split over ``sp`` ranks.

    Each of ``sizes`` is one rank's share. Batches of up to ``threshold`` tokens run another model.
    """
    totals = {size * sp for size in sizes}
    return tuple(sorted(n for n in totals if threshold < n <= max_num_batched_tokens))


def shift_sizes(sizes: Iterable[int], *, threshold: int) -> tuple[int, ...]:
    """Token counts captured for the model that runs batches of up to ``threshold`` tokens.

    These are all sizes up to the one that the threshold is padded to.
    """
    ladder = tuple(sorted(set(sizes)))
    return ladder[: bisect_left(ladder, threshold) + 1]


def _nothing_to_capture(plan: CapturePlan, sizes: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"graph mode {plan.mode.name} has nothing to capture: no size of {list(sizes)} fits "
        f"decode batches of {list(plan.decode_query_lens)} tokens a request, {plan.max_num_seqs} "
        f"requests and {plan.max_num_batched_tokens} tokens at most; add a smaller size"
    )


def _log_sizes_without_decode(plan: CapturePlan) -> None:
    """Log sizes without a decode graph; a warning if decode batches then run without one."""
    limits, uncovered = [], []
    other = {
        CUDAGraphMode.NONE: "eagerly",
        CUDAGraphMode.PIECEWISE: "in pieces",
        CUDAGraphMode.FULL: "through graphs of mixed batches, without sampling in the graph",
    }[plan.mode.mixed_mode()]
    for query_len in plan.decode_query_lens:
        most = plan.largest_decode_batch(query_len)
        held = max(plan.decode_sizes_for(query_len), default=0)
        limits.append(f"{most} tokens ({query_len} a request)")
        if held < most:
            first = held + query_len
            batches = f"{first} to {most}" if first < most else str(most)
            uncovered.append(f". Decode batches of {batches} tokens run {other}; add size {most}")
    text = (
        f"capture sizes {list(plan.sizes_without_decode)} get no decode graph: a decode batch has "
        f"at most {' or '.join(limits)}, by max_num_seqs={plan.max_num_seqs} and "
        f"max_num_batched_tokens={plan.max_num_batched_tokens}"
    )
    if uncovered:
        logger.warning("%s%s", text, "".join(uncovered))
    elif plan.mixed_sizes == plan.sizes:
        logger.info("%s; mixed batches use these sizes", text)
