"""Turns users' prompts and parameters into plain values, or raises and names the bad one."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ostinato.errors import RequestError
from ostinato.quoting import is_failure, said, shown
from ostinato.sampling_params import SamplingParams

# Text, token ids (a list, or a 1-D NumPy array or tensor of integers), or {"prompt": text} /
# {"prompt_token_ids": ids} as in vLLM.
Prompt: TypeAlias = str | Sequence[int] | torch.Tensor | Any

_KEYS = ("prompt", "prompt_token_ids")
_A_PROMPT = "a prompt is text or a list of token ids"
# A text is cut here, in characters per token that a sequence may have, to see whether it can fit at
# all: words have four or five of them on average.
_CHARACTERS_PER_TOKEN = 8
# A text that is cut may have more tokens at its end than it has there as a whole.
_MORE_AT_A_CUT = 64
# A tokenizer may rewrite texts, and so lengthen them: honest ones by a few times, where a character
# stands for a phrase by 18. Long texts are tried by this many of their characters first.
_NUM_TRIED = 500
_MOST_EXPANSION = 32


def list_prompts(
    prompts: Any, *, one: str = "the prompt", several: str = "prompts"
) -> list[tuple[str, Any]]:
    """One prompt or a list of them, as a list of prompts with their names in errors.

    Errors call a single one ``one``, and others by their number in ``several``.

    Integers are one prompt of token ids. The rows of a 2-D array or tensor are prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [(one, prompts)]
    if _is_array(prompts):
        if prompts.ndim != 2:
            return [(one, prompts)]
        prompts = list(prompts.unbind() if isinstance(prompts, torch.Tensor) else prompts)
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"{several} are text or token ids, one or a list of them, got {shown(prompts)}"
            + _advice(prompts)
        )
    if not prompts:
        raise RequestError(f"there are no {several}; give at least one")
    if isinstance(prompts, range) or all(_is_token(item) for item in prompts):
        return [(one, prompts)]
    if len(prompts) == 1:
        return [(one, prompts[0])]
    return [(f"{several}[{number}]", prompt) for number, prompt in enumerate(prompts)]


def read_prompt(
    name: str,
    prompt: Any,
    tokenizer: Any,
    max_model_len: int,
    *,
    num_generated: int = 1,
    truncate: bool = False,
) -> tuple[str | None, list[Any]]:
    """The text of a prompt, if it is text, and its tokens; the engine checks their range.

    Text that is far longer than ``max_model_len`` tokens raises here, unless ``truncate`` cuts it
    there. ``num_generated``: tokens to leave room for.
    """
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or next(iter(prompt)) not in _KEYS:
            keys = ", ".join(shown(key) for key in prompt) or "none"
            raise RequestError(
                f"{name} is a dict, and must have exactly one of the keys 'prompt' and "
                f"'prompt_token_ids', got the keys {keys}"
            )
        ((key, prompt),) = prompt.items()
        name = f"{name}[{key!r}]"
        if isinstance(prompt, str) != (key == "prompt"):
            kind = "text" if key == "prompt" else "a list of token ids"
            raise RequestError(f"{name} must be {kind}, got {shown(prompt)}" + _advice(prompt))
    if not isinstance(prompt, str):
        if truncate and (isinstance(prompt, Sequence) or _is_array(prompt)):
            prompt = prompt[:max_model_len]
        return None, _token_ids(name, prompt, max_model_len, num_generated)
    check_text(name, prompt)
    if tokenizer is None:
        raise RequestError(
            f"{name} is text, and this model has no tokenizer (random weights of a named shape "
            "have none); give the prompt as token ids"
        )
    return prompt, encode(name, prompt, tokenizer, max_model_len, truncate=truncate)


def encode(
    name: str,
    text: str,
    tokenizer: Any,
    max_model_len: int,
    *,
    add_special_tokens: bool = True,
    truncate: bool = False,
) -> list[int]:
    """The tokens of a text, unless it is far longer than ``max_model_len`` of them.

    With ``truncate`` it is cut to that length, special tokens at its end excepted.
    """
    with _tokenizer_errors_named(name):
        _check_expansion(name, text, tokenizer)
        if truncate:
            return list(tokenizer.encode(text, truncation=True, max_length=max_model_len))
        _check_length(name, text, tokenizer, max_model_len)
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def encode_pair(
    name: str, texts: tuple[str, str], tokenizer: Any, max_model_len: int, *, truncate: bool
) -> tuple[list[int], list[int]]:
    """The tokens of two texts as one sequence, and which of the two each belongs to.

    With ``truncate``, tokens of the longer text are dropped beyond ``max_model_len``.
    """
    with _tokenizer_errors_named(name):
        for text in texts:
            _check_expansion(name, text, tokenizer)
            if not truncate:
                _check_length(name, text, tokenizer, max_model_len)
        limit = {"truncation": True, "max_length": max_model_len} if truncate else {}
        encoded = tokenizer(*texts, return_token_type_ids=True, **limit)
        return list(encoded["input_ids"]), list(encoded["token_type_ids"])


@contextmanager
def _tokenizer_errors_named(name: str) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise RequestError(
            f"the model's tokenizer cannot read {name}: {said(error)}; give the prompt as token ids"
        ) from error


def text_of(tokenizer: Any, token: object) -> str:
    """The text of one token; empty if the tokenizer does not have it."""
    if type(token) is not int or not 0 <= token < 2**31:
        return ""
    try:
        return str(tokenizer.decode([token]))
    except BaseException as error:
        if not is_failure(error):
            raise
        return ""


def _check_expansion(name: str, text: str, tokenizer: Any) -> None:
    """Raise for a long text if the tokenizer makes its start far longer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or len(text) < 4 * _NUM_TRIED:
        return
    start = text[:_NUM_TRIED]
    if backend.normalizer is not None:
        start = backend.normalizer.normalize_str(start)
    length = len(start)
    if backend.pre_tokenizer is not None:
        length = sum(len(word) for word, _ in backend.pre_tokenizer.pre_tokenize_str(start))
    length = max(length, len(backend.encode(text[:_NUM_TRIED]).ids))
    if length > _MOST_EXPANSION * _NUM_TRIED:
        raise RequestError(
            f"the model's tokenizer turns the first {_NUM_TRIED} characters of {name} into "
            f"{length:,} characters or tokens, more than {_MOST_EXPANSION} times as many; give the "
            "prompt as token ids"
        )


def _check_length(name: str, text: str, tokenizer: Any, max_model_len: int) -> None:
    """Raise for a text that is far too long, without tokenizing all of it."""
    length = _CHARACTERS_PER_TOKEN * max_model_len
    while length < len(text):
        num_tokens = len(tokenizer.encode(text[:length]))
        if num_tokens > max_model_len + _MORE_AT_A_CUT:
            raise RequestError(
                f"{name} has {len(text)} characters, and the first {length} of them are "
                f"{num_tokens} tokens, but a sequence has at most {max_model_len} (max_model_len); "
                "shorten the prompt or raise the limit"
            )
        length *= 2


def check_text(name: str, text: str) -> None:
    """Raise for text that a tokenizer cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a lone surrogate, {text[error.start]!r} at character {error.start}, which "
            "is not text; decode the bytes it came from with errors='replace', or remove it"
        ) from None


def list_params(params: Any, count: int) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(
            "sampling_params must be one SamplingParams, or a list with one per prompt, got "
            f"{shown(params)}; write SamplingParams(temperature=0, max_tokens=32)"
        )
    for number, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise RequestError(
                "sampling_params must be one SamplingParams, or a list with one per prompt, but "
                f"sampling_params[{number}] is {shown(each)}"
            )
    if len(params) != count:
        raise RequestError(
            f"got {len(params)} SamplingParams for {count} prompts; give one for each, or one for "
            "all"
        )
    return list(params)


def list_adapters(adapter: Any, count: int) -> list[str | None]:
    """The name of the adapter, or None, of each of ``count`` prompts."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Sequence) or not all(
        each is None or isinstance(each, str) for each in adapter
    ):
        raise RequestError(
            "adapter is the name of a loaded adapter, or a list with a name or None per prompt, "
            f"got {shown(adapter)}"
        )
    if len(adapter) != count:
        raise RequestError(
            f"{len(adapter)} adapters for {count} prompts; give one for each, or one for all"
        )
    return list(adapter)


def check_num_tokens(
    name: str, num_tokens: int, max_model_len: int, *, num_generated: int = 1
) -> None:
    """Raise for a prompt that leaves no room for ``num_generated`` tokens of an answer."""
    if num_tokens + num_generated <= max_model_len:
        return
    if num_generated:
        raise RequestError(
            f"{name} has {num_tokens} tokens, but a sequence has at most {max_model_len} "
            "(max_model_len), one of them generated; shorten the prompt or raise the limit"
        )
    raise RequestError(
        f"{name} has {num_tokens} tokens, but a sequence has at most {max_model_len} "
        "(max_model_len, max_num_batched_tokens); shorten it, or pass truncate=True"
    )


def check_token_ids(name: str, prompt: list[Any], vocab_size: int, tokenizer: Any) -> None:
    """Raise for a prompt without tokens, or with one that the model does not have."""
    if not prompt:
        raise RequestError(f"{name} is empty; give at least one token")
    # Faster than a loop, whose errors are better.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for position, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise _unknown_token(name, position, token, vocab_size, tokenizer)


def _unknown_token(
    name: str, position: int, token: object, vocab_size: int, tokenizer: Any
) -> RequestError:
    if tokenizer is not None and (piece := text_of(tokenizer, token)):
        return RequestError(
            f"{name} contains the token {token} ({shown(piece)}) at position {position}, but "
            f"the model has {vocab_size:,} tokens, with ids from 0 to {vocab_size - 1}, and "
            f"its tokenizer has {len(tokenizer):,}; leave that text out, or fetch the "
            "tokenizer files that belong to the model"
        )
    return RequestError(
        f"{name} contains {shown(token)}; token ids are integers from 0 to {vocab_size - 1}"
    )


def _token_ids(name: str, prompt: Any, max_model_len: int, num_generated: int) -> list[Any]:
    """A list of plain integers from any form of token ids."""
    if _is_array(prompt):
        return _array_ids(name, prompt, max_model_len, num_generated)
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise RequestError(f"{name} is {shown(prompt)}; {_A_PROMPT}" + _advice(prompt))
    # A range can be of any length.
    check_num_tokens(name, len(prompt), max_model_len, num_generated=num_generated)
    if set(map(type, prompt)) <= {int}:  # nearly always, and a long prompt is waited for
        return list(prompt)
    for position, token in enumerate(prompt):
        if not _is_token(token):
            raise RequestError(
                f"{name} contains {shown(token)} at position {position}; token ids are integers"
            )
    return [int(token) for token in prompt]


def _array_ids(name: str, array: Any, max_model_len: int, num_generated: int) -> list[int]:
    nested = isinstance(array, torch.Tensor) and array.is_nested
    shape = "of several lengths" if nested else f"of shape {tuple(array.shape)}"
    kind = f"{type(array).__name__} {shape} and dtype {array.dtype}"
    if array.ndim != 1:
        raise RequestError(
            f"{name} is a {kind}; token ids are a 1-D array, and a batch of prompts a 2-D one, "
            "without padding"
        )
    if not _has_integers(array):
        raise RequestError(
            f"{name} is a {kind}; token ids are integers, in a dense array: convert them first"
        )
    # An expanded one takes no memory yet.
    check_num_tokens(name, len(array), max_model_len, num_generated=num_generated)
    ids: list[int] = array.tolist()
    return ids


def _is_array(value: object) -> bool:
    """Whether it is a tensor, a NumPy array, or similar (JAX's)."""
    return isinstance(value, torch.Tensor) or (
        not isinstance(value, type)
        and all(hasattr(value, name) for name in ("ndim", "dtype", "shape", "tolist"))
        and not isinstance(value, numbers.Number)
    )


def _has_integers(array: Any) -> bool:
    if isinstance(array, torch.Tensor):
        dtype = array.dtype
        plain = array.layout is torch.strided and not (array.is_nested or array.is_meta)
        return plain and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return getattr(array.dtype, "kind", None) in ("i", "u")


def _is_token(value: object) -> bool:
    """Whether it is an integer of any library, but not a bool; its range is checked later."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    if isinstance(value, numbers.Integral):
        return True
    return _is_array(value) and value.ndim == 0 and _has_integers(value)  # type: ignore[attr-defined]


def _advice(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "; decode bytes first, as in prompt.decode()"
    if isinstance(value, str | Mapping | Sequence | int | float | None):
        return ""
    return "; make a list of it first"
