"""Which missing graph to capture next: the one that most batches so far would have run through.

Pure, and the same on every rank that has seen the same batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from ostinato.graphs.policy.plan import CapturePlan, PlanEntry


def most_wanted(
    plan: CapturePlan, missing: Iterable[PlanEntry], shapes: Mapping[tuple[bool, int], int]
) -> PlanEntry | None:
    """Of ``missing`` entries, the one for the most batches of ``shapes`` (``DispatchStats``).

    Of equals, decode before mixed batches and small before large ones, which are the more frequent
    in most services. None if nothing is missing.
    """

    # Decode batches without a graph of their own run through those for mixed batches.
    largest_decode = 0
    if plan.mode.separate_routine():
        decode_sizes = map(plan.decode_sizes_for, plan.decode_query_lens)
        largest_decode = max((size for sizes in decode_sizes for size in sizes), default=0)

    def wanted(entry: PlanEntry) -> tuple[int, bool, int]:
        descriptor = entry.descriptor
        size, uniform = descriptor.num_tokens, descriptor.uniform
        sizes = plan.mixed_sizes
        if uniform:
            sizes = plan.decode_sizes_for(plan.query_len_of(descriptor))
        smaller = sizes[bisect_left(sizes, size) - 1] if size > sizes[0] else 0
        num_batches = sum(
            count
            for (is_decode, num_tokens), count in shapes.items()
            if (is_decode and num_tokens <= largest_decode) is uniform
            and smaller < num_tokens <= size
        )
        return num_batches, uniform, -size

    return max(missing, key=wanted, default=None)
