"""Runs images through the vision encoder, in pieces around attention where possible.

It is the language model's runner in small: a plan by number of patches, graphs in a pool of their
own, and counts of replays and of reasons to run eagerly. Images are packed into one batch as long
as that has a graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch

from ostinato.config import GraphConfig
from ostinato.graphs.capture.capture_loop import CaptureReport
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.manager import CudaGraphManager
from ostinato.graphs.policy.dispatch import DispatchStats
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.graphs.prepared_batch import PreparedBatch
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.hf.vision.vision_encoder import HFVisionEncoder, VisionInputs
from ostinato.vision.prompt_images import ImagePatches
from ostinato.vision.vision_plan import images_shape, plan_vision

logger = logging.getLogger(__name__)


class VisionRunner:
    """Owns the graphs of ``encoder``, and their inputs. Call it without autocast.

    ``sizes``: numbers of patches to capture; none: every image runs eagerly. ``stats`` counts
    replays by size, and eager batches by reason.
    """

    def __init__(
        self,
        encoder: HFVisionEncoder,
        sizes: Sequence[int],
        *,
        graphs: GraphConfig,
        show_progress: bool = True,
    ) -> None:
        self.encoder = encoder
        self.plan = plan_vision(sizes, merge=encoder.merge)
        self._largest = max(self.plan.sizes, default=0)
        self.inputs = encoder.empty_inputs(self._largest)
        self.pool = GraphPool(encoder.device)
        self.manager: CudaGraphManager[int, torch.Tensor] = CudaGraphManager(
            self.plan,
            self.pool,
            num_warmups=graphs.warmups_on(encoder.device),
            eager_fallback=graphs.eager_fallback,
            show_progress=show_progress,
            name="vision encoder",
        )
        self._forward = CUDAGraphWrapper(
            encoder.forward, CUDAGraphMode.PIECEWISE, pool=self.pool, split_at_breaks=True
        )
        self.stats = DispatchStats()
        self.capture_report = CaptureReport()

    def encode(self, images: Sequence[ImagePatches]) -> list[torch.Tensor]:
        """Enqueue all images. Returns the rows of each, [num_tokens, width], in its own memory."""
        if self.pool.follow_stream():  # torch would only consider the stream of the allocation
            self._record_stream(torch.cuda.current_stream(self.encoder.device))
        rows: list[torch.Tensor] = []
        for pack in self._packs(images):
            tokens = self._run(pack)
            ends = [0]
            for image in pack:
                ends.append(ends[-1] + image.num_tokens)
                rows.append(tokens[ends[-2] : ends[-1]].clone())
        return rows

    def _packs(self, images: Sequence[ImagePatches]) -> Iterator[list[ImagePatches]]:
        pack: list[ImagePatches] = []
        num_patches = 0
        for image in images:
            count = image.pixels.shape[0]
            if pack and num_patches + count > self._largest:
                yield pack
                pack, num_patches = [], 0
            pack.append(image)
            num_patches += count
        if pack:
            yield pack

    def _run(self, pack: list[ImagePatches]) -> torch.Tensor:
        pixels = torch.cat([image.pixels for image in pack])
        grids = [image.grid for image in pack]
        num_patches = pixels.shape[0]
        choice = self.manager.dispatch(images_shape(num_patches, len(pack)))
        self.stats.record(choice, num_patches)
        given, device = self.encoder.inputs(pixels, grids), self.encoder.device
        if device.type == "cuda":  # copies of this size from other memory wait for the device
            given = given.each(torch.Tensor.pin_memory)
        if choice.mode is CUDAGraphMode.NONE:
            inputs = given.each(lambda each: each.to(device, non_blocking=True))
        else:
            inputs = self._fill(given, choice.padded_num_tokens)
        batch = self.encoder.batch(grids)
        with set_forward_context(choice.mode, choice.descriptor, attn_metadata=batch):
            return self._forward(*inputs)

    def _fill(self, given: VisionInputs, padded: int) -> VisionInputs:
        """Copy inputs to the buffers, cut to ``padded`` patches. Padding only has to be valid."""
        inputs = self._cut(padded)
        for buffer, values in zip(inputs, given, strict=True):
            if buffer is not None and values is not None:
                buffer[: values.shape[0]].copy_(values, non_blocking=True)
        if inputs.window_index is not None:  # each token once, or the order cannot be undone
            num_tokens = given.pixels.shape[0] // self.encoder.merge
            rest = torch.arange(num_tokens, padded // self.encoder.merge)
            inputs.window_index[num_tokens:].copy_(rest, non_blocking=True)
        return inputs

    def _cut(self, num_patches: int) -> VisionInputs:
        """The buffers of the first ``num_patches``; what is not one per patch is one per token."""
        largest = self._largest
        return self.inputs.each(lambda each: each[: each.shape[0] * num_patches // largest])

    # --- capture -------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self) -> None:
        """Capture every missing graph of the plan."""
        if not self.manager.needs_capture():
            return
        start = time.perf_counter()
        self.capture_report = self.manager.capture(self._forward_padding, self._prepare)
        logger.info(
            "captured %d graphs of the vision encoder in %.2f s",
            self.capture_report.num_graphs,
            time.perf_counter() - start,
        )

    def _forward_padding(self, num_patches: int) -> torch.Tensor:
        return self._forward(*self._cut(num_patches))

    def _prepare(self, entry: PlanEntry) -> PreparedBatch[int]:
        """An image one token high, as wide as the batch, all of it padding."""
        num_patches, side = entry.descriptor.num_tokens, self.encoder.merge_size
        batch = self.encoder.batch([(1, side, num_patches // side)])
        return PreparedBatch(inputs=num_patches, attn_metadata=batch)

    def _record_stream(self, stream: torch.cuda.Stream) -> None:
        for buffer in self.inputs:
            if buffer is not None:
                buffer.record_stream(stream)

    def close(self) -> None:
        """Drop the graphs and their memory. Closing twice is harmless."""
        self.pool.close()
