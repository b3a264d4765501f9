"""Plans the graphs of the vision encoder, by number of patches; needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.graphs.policy.descriptor import BatchShape
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import CapturePlan


def plan_vision(sizes: Sequence[int], *, merge: int) -> CapturePlan:
    """Pieces for each of ``sizes``, in whole tokens of ``merge`` patches; two may become one."""
    rounded = sorted({-(-size // merge) * merge for size in sizes})
    limit = max(rounded, default=1)
    return CapturePlan.build(
        CUDAGraphMode.PIECEWISE if rounded else CUDAGraphMode.NONE,
        rounded,
        max_num_seqs=limit,
        max_num_batched_tokens=limit,
    )


def images_shape(num_patches: int, num_images: int) -> BatchShape:
    """A batch of images, as dispatch sees it."""
    return BatchShape(num_patches, num_images, num_patches, has_prompts=True)
