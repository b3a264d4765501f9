"""Places the images of a step's prompts among its tokens, and keeps what the encoder computed.

A step that computes tokens of an image needs the image's rows. They are encoded in the first step
that needs them, and kept while there is room: for the later chunks of the prompt, for its other
samples, after a preemption, and for other prompts with the same image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from ostinato.models.hf.vision.image_rows import ImageRows
from ostinato.models.hf.vision.vision_language import VisionLM
from ostinato.scheduling.step_plan import ScheduledRequest
from ostinato.vision.prompt_images import ImagePatches, PromptImages
from ostinato.vision.vision_runner import VisionRunner


class _Slice(NamedTuple):
    """Rows ``first`` to ``stop`` of an image, at the batch's tokens from ``token`` on."""

    image: ImagePatches
    first: int
    stop: int
    token: int


class ImageInputs:
    """The images of running steps. Sets ``model.images``, which graphs refer to.

    ``max_num_tokens``: of a step. ``max_cached_tokens``: rows of images that are kept.
    """

    def __init__(
        self,
        model: VisionLM,
        runner: VisionRunner,
        *,
        max_num_tokens: int,
        max_cached_tokens: int,
    ) -> None:
        self.vision = runner
        self._target = model.images = ImageRows(
            model.vision, max_num_tokens, model.attention_specs[0].head_dim
        )
        self._max_cached = max_cached_tokens
        self._cache: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # least recent first
        self._row_bytes = model.vision.width * model.dtype.itemsize

    @property
    def reserved_bytes(self) -> int:
        """Memory that the kept rows may take, and is not allocated yet."""
        return self._max_cached * self._row_bytes

    @property
    def num_cached_tokens(self) -> int:
        """Rows that are kept now."""
        return sum(rows.shape[0] for rows in self._cache.values())

    @contextmanager
    def placed(self, requests: Sequence[ScheduledRequest], offsets: torch.Tensor) -> Iterator[None]:
        """Inside, the model finds the images of these requests; afterwards none.

        ``offsets`` [3, max_num_tokens]: what is added to the tokens' positions; 0 outside.
        """
        starts = np.cumsum([0, *(item.num_tokens for item in requests)]).tolist()
        slices: list[_Slice] = []
        added = np.zeros((3, starts[-1]), dtype=np.int64)
        for item, token in zip(requests, starts, strict=False):
            images: PromptImages | None = item.request.images
            if images is None or item.start >= images.stop:
                continue
            stop = min(item.start + item.num_tokens, images.stop)
            added[:, token : token + stop - item.start] = images.offsets[:, item.start : stop]
            for each in images.images:
                first, last = max(each.start, item.start), min(each.stop, stop)
                if first < last:
                    at = token + first - item.start
                    slices.append(_Slice(each.image, first - each.start, last - each.start, at))
        if not added.any() and not slices:
            yield
            return
        try:
            self._copy(slices, starts[-1])
            offsets[:, : starts[-1]].copy_(torch.from_numpy(added), non_blocking=True)
            yield
        finally:
            # Behind the step, which has been enqueued.
            self._target.is_image.zero_()
            offsets.zero_()

    def _copy(self, slices: list[_Slice], num_tokens: int) -> None:
        rows = self._rows_of([each.image for each in slices])
        is_image = np.zeros((num_tokens, 1), dtype=np.bool_)
        for image, first, stop, token in slices:
            end = token + stop - first
            self._target.rows[token:end].copy_(rows[image.digest][first:stop])
            is_image[token:end] = True
        self._target.is_image[:num_tokens].copy_(torch.from_numpy(is_image), non_blocking=True)

    def _rows_of(self, images: list[ImagePatches]) -> dict[bytes, torch.Tensor]:
        """The rows of all ``images``, encoded if they are not known, by digest."""
        needed = {image.digest: image for image in images}
        missing = [image for digest, image in needed.items() if digest not in self._cache]
        for image, rows in zip(missing, self.vision.encode(missing), strict=True):
            self._cache[image.digest] = rows
        found = {}
        for digest in needed:
            self._cache.move_to_end(digest)
            found[digest] = self._cache[digest]
        while self.num_cached_tokens > self._max_cached and len(self._cache) > 1:
            self._cache.popitem(last=False)
        return found

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that steps run on ``stream``, as in ``StepMemory``."""
        for tensor in (*vars(self._target).values(), *self._cache.values()):
            tensor.record_stream(stream)

    def close(self) -> None:
        """Drop the encoder's graphs and all rows. Closing twice is harmless."""
        self._cache.clear()
        self.vision.close()
