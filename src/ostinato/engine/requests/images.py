"""The images of an engine's requests: read for models that take them, refused for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.errors import RequestError
from ostinato.loading.load import LoadedModel, as_hf

if TYPE_CHECKING:
    from ostinato.vision.image_reader import ImageReader
    from ostinato.vision.prompt_images import PromptImages


class EngineImages:
    """Reads images for the model of ``loaded``, of at most ``max_tokens`` in one prompt."""

    def __init__(self, loaded: LoadedModel, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._reader: ImageReader | None = None
        if loaded.model.uses_mrope:
            # transformers' modules take long to import.
            from ostinato.models.hf.vision.vision_language import VisionLM
            from ostinato.vision.image_reader import ImageReader

            assert isinstance(loaded.model, VisionLM), "no other model uses M-RoPE"
            self._reader = ImageReader(loaded.model, loaded.path)
            self._video_token_id = getattr(as_hf(loaded.config), "video_token_id", None)

    @property
    def are_taken(self) -> bool:
        """Whether the model takes images."""
        return self._reader is not None

    def place(
        self, name: str, prompt_token_ids: list[int], images: Sequence[Any]
    ) -> tuple[list[int], PromptImages | None]:
        """Read images; returns the prompt with as many tokens for each as it takes, and them."""
        if self._reader is not None:
            if self._video_token_id in prompt_token_ids:
                raise RequestError(
                    f"{name} has a placeholder of a video (token {self._video_token_id}); videos "
                    "are not supported: give images"
                )
            return self._reader.place(name, prompt_token_ids, images, self._max_tokens)
        if images:
            raise RequestError(
                f"{name} has {len(images)} images, but this model takes text only; leave them out"
            )
        return prompt_token_ids, None
