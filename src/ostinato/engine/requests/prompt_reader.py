"""``PromptReader``: users' prompts and conversations, read into tokens and images.

It uses no device and no state of the engine, so it may read in one thread while the engine steps
in another, with a tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.engine.requests.images import EngineImages
from ostinato.errors import RequestError
from ostinato.graphs.capture.closing import Owner
from ostinato.text.chat import render_chat
from ostinato.text.chat_options import NO_CHAT_OPTIONS, ChatOptions
from ostinato.text.image_parts import take_images
from ostinato.text.prompts import Prompt, check_text, check_token_ids, encode, read_prompt
from ostinato.text.template_process import TemplateProcess

if TYPE_CHECKING:
    from ostinato.vision.prompt_images import PromptImages


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt as the engine takes it; errors call it ``name``.

    ``text``: None if it was given as tokens. ``images``: None if it has none.
    """

    name: str
    text: str | None
    token_ids: list[int]
    images: PromptImages | None


class PromptReader(Owner):
    """Reads prompts of at most ``max_model_len`` tokens, in one thread at a time."""

    def __init__(self, tokenizer: Any, images: EngineImages, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._max_model_len = max_model_len
        self._templates = TemplateProcess()

    def read(self, name: str, prompt: Prompt) -> ReadPrompt:
        """Read text, token ids, or a dict with one of them and images."""
        prompt, images = take_images(name, prompt)
        text, token_ids = read_prompt(name, prompt, self._tokenizer, self._max_model_len)
        token_ids, placed = self._images.place(name, token_ids, images)
        return ReadPrompt(name=name, text=text, token_ids=token_ids, images=placed)

    def conversation(
        self, name: str, messages: Any, options: ChatOptions = NO_CHAT_OPTIONS
    ) -> Prompt:
        """A conversation as a prompt that ``read`` takes."""
        token_ids, images = self.render(name, messages, options)
        return {"prompt_token_ids": token_ids, "images": images} if images else token_ids

    def render(
        self, name: str, messages: Any, options: ChatOptions = NO_CHAT_OPTIONS
    ) -> tuple[list[int], list[Any]]:
        """The token ids of a conversation, with a placeholder for each image, and its images."""
        images: list[Any] | None = [] if self._images.are_taken else None
        token_ids = render_chat(
            self._templates, self._tokenizer, messages, self._max_model_len, name, images, options
        )
        return token_ids, images or []

    def encode(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text."""
        check_text(name, text)
        tokenizer, limit = self._the_tokenizer(), self._max_model_len
        return encode(name, text, tokenizer, limit, add_special_tokens=add_special_tokens)

    def decode(self, name: str, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        tokenizer = self._the_tokenizer()
        if token_ids:
            check_token_ids(name, list(token_ids), len(tokenizer), tokenizer)
        return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _the_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; use token ids")
        return self._tokenizer

    def close(self) -> None:
        """End the process that renders chat templates. Closing twice is harmless."""
        self._templates.close()
