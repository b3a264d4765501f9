"""The vision encoder of Qwen's image-and-text models, on the packed patches of several images.

transformers' module is unchanged except for attention, which is ours. Everything that depends on
the images' grids (rotary positions, windows, position embeddings) is computed on the host and
passed as tensors, so ``forward`` reads nothing there and its pieces can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ostinato import compat
from ostinato.attention.packed import PackedBatch, PackedSpec
from ostinato.graphs.tree import holds_no_tensors
from ostinato.models.hf.packed import packed_attention

# By "flash" in the name, transformers passes all images in one call, without reading their lengths.
VISION = "ostinato_flash_vision"

Grid: TypeAlias = tuple[int, int, int]  # patches in time, by height and by width


@holds_no_tensors
@dataclass(frozen=True, kw_only=True)
class VisionSpec(PackedSpec):
    """An attention layer whose patches see their image, or only their window of it."""

    windowed: bool = False


class VisionBatch:
    """The images of one batch, as attention sees them: whole, and by windows if there are any."""

    def __init__(self, images: PackedBatch, windows: PackedBatch | None) -> None:
        self._images = images
        self._windows = images if windows is None else windows

    def attend(
        self,
        spec: VisionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        batch = self._windows if spec.windowed else self._images
        batch.attend(spec, query, key, value, out)


class VisionInputs(NamedTuple):
    """Of P patches: ``pixels`` [P, patch_dim] and what follows from the images' grids.

    ``position_ids`` [P, 2]: row and column. ``window_index`` [P / merge]: the order of merged
    patches by windows. ``interp_indices``, ``interp_weights`` [P, 4]: the position embeddings that
    a patch adds up. None: the model has no such input.
    """

    pixels: torch.Tensor
    position_ids: torch.Tensor
    window_index: torch.Tensor | None = None
    interp_indices: torch.Tensor | None = None
    interp_weights: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> VisionInputs:
        """The inputs that there are, changed one by one."""
        pixels, position_ids, *others = self
        changed = [None if other is None else change(other) for other in others]
        return VisionInputs(change(pixels), change(position_ids), *changed)


AttentionInterface.register(VISION, packed_attention)


def _embed_patches(projection: nn.Conv3d, pixels: torch.Tensor) -> torch.Tensor:
    weight = projection.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), projection.bias)


class HFVisionEncoder:
    """transformers' vision encoder ``visual``, which it modifies.

    ``merge``: neighbouring patches that become one token. ``num_levels``: rows of ``hidden_size``
    that a token has: its embedding, then what is added to the states after the first layers.
    """

    def __init__(self, visual: Any, *, hidden_size: int) -> None:
        self._visual = visual
        self._positions: Any = compat.vision_positions.demand()
        config: Any = visual.config
        self.dtype: torch.dtype = visual.dtype
        self.device: torch.device = visual.device
        self.merge_size: int = config.spatial_merge_size
        self.merge = self.merge_size**2
        self.patch_size: int = config.patch_size
        self.temporal_patch_size: int = config.temporal_patch_size
        self.patch_dim = config.in_channels * self.temporal_patch_size * self.patch_size**2
        self.num_levels = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
        self.width = self.num_levels * hidden_size  # of a token's rows
        self.num_layers = len(visual.blocks)
        self._window_size: int | None = getattr(config, "window_size", None)
        self._grid_side: int | None = getattr(visual, "num_grid_per_side", None)
        whole = getattr(config, "fullatt_block_indexes", range(self.num_layers))
        for layer, block in enumerate(visual.blocks):
            attention = block.attn
            attention.ostinato_packed = VisionSpec(
                scale=attention.scaling, windowed=layer not in whole
            )
        config._attn_implementation = VISION
        # Patches do not overlap: one GEMM, which is faster than a convolution, and exact in float32
        # on CUDA, where convolutions are not.
        visual.patch_embed.forward = partial(_embed_patches, visual.patch_embed.proj)
        # Never read: attention finds the images in the forward context.
        self._no_seqlens = torch.zeros(2, dtype=torch.int32, device=self.device)

    def inputs(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> VisionInputs:
        """The inputs of images of these ``grids``, whose patches are ``pixels``, on the host."""
        shapes = torch.tensor(grids)
        window_index = indices = weights = None
        if self._window_size is not None:
            window_index, _ = self._windows(shapes)
        if self._grid_side is not None:
            indices, weights = self._positions.get_vision_interpolation_indices_and_weights(
                shapes,
                num_grid_per_side=self._grid_side,
                mode=self._visual.interpolation_mode,
                align_corners=self._visual.interpolation_align_corners,
                spatial_merge_size=self.merge_size,
            )
        positions = self._positions.get_vision_position_ids(shapes, self.merge_size)
        return VisionInputs(pixels, positions, window_index, indices, weights)

    def empty_inputs(self, num_patches: int) -> VisionInputs:
        """Buffers on the device for inputs of ``num_patches``. Their values are valid padding."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        windows = indices = weights = None
        if self._window_size is not None:
            windows = torch.arange(num_patches // self.merge, device=self.device)
        if self._grid_side is not None:
            indices = zeros(num_patches, 4)
            weights = zeros(num_patches, 4, dtype=torch.float32)
        pixels = zeros(num_patches, self.patch_dim, dtype=self.dtype)
        return VisionInputs(pixels, zeros(num_patches, 2), windows, indices, weights)

    def batch(self, grids: Sequence[Grid]) -> VisionBatch:
        """Images of these ``grids`` as attention sees them."""
        images = PackedBatch([h * w for t, h, w in grids for _ in range(t)], self.device)
        if self._window_size is None:
            return VisionBatch(images, None)
        _, ends = self._windows(torch.tensor(grids))
        return VisionBatch(images, PackedBatch(ends.diff().tolist(), self.device))

    def _windows(self, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The order of merged patches by windows, and the windows' ends in patches."""
        assert self._window_size is not None, "the caller knows that there are windows"
        windows: tuple[torch.Tensor, torch.Tensor] = self._positions.get_vision_window_index(
            grids,
            spatial_merge_size=self.merge_size,
            window_size=self._window_size,
            patch_size=self.patch_size,
        )
        return windows

    def forward(
        self,
        pixels: torch.Tensor,
        position_ids: torch.Tensor,
        window_index: torch.Tensor | None,
        interp_indices: torch.Tensor | None,
        interp_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows of tokens [P / merge, width], for the ``VisionBatch`` in the forward context."""
        given: dict[str, Any] = {
            "window_index": window_index,
            "interp_indices": interp_indices,
            "interp_weights": interp_weights,
        }
        if window_index is not None:
            given |= {"cu_window_seqlens": self._no_seqlens, "max_window_seqlen": 1}
        outputs = self._visual(
            pixels,
            grid_thw=None,
            position_ids=position_ids,
            cu_seqlens=self._no_seqlens,
            max_seqlen=1,
            **{name: value for name, value in given.items() if value is not None},
        )
        deeper = getattr(outputs, "deepstack_features", None) or []
        return torch.cat([outputs.pooler_output, *deeper], dim=-1)
