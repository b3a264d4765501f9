"""Which token counts get a graph: the default ladder, validation, and the padding table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ostinato.errors import ConfigError
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.quoting import shown

LARGEST_DEFAULT_SIZE = 512
# On the CPU a larger batch is compute-bound, and replaying it saves almost nothing.
LARGEST_DEFAULT_SIZE_CPU = 16


def default_sizes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode_query_len: int = 1,
    device_type: str = "cuda",
    largest: int | None = None,
) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 256, then multiples of 16, up to ``largest``.

    ``largest`` defaults to twice the decode batch (``max_num_seqs`` requests of
    ``decode_query_len`` tokens), at most 512 (16 if ``device_type`` is "cpu"). Sizes never exceed
    ``max_num_batched_tokens``.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("decode_query_len", decode_query_len),
    ):
        check_positive_int(name, value)
    if largest is None:
        most = LARGEST_DEFAULT_SIZE_CPU if device_type == "cpu" else LARGEST_DEFAULT_SIZE
        largest = min(2 * max_num_seqs * decode_query_len, most, max_num_batched_tokens)
    check_positive_int("the largest capture size", largest)
    if largest > max_num_batched_tokens:
        raise ConfigError(
            f"the largest capture size {largest} is above max_num_batched_tokens="
            f"{max_num_batched_tokens}, so no batch could ever use it; lower it or raise the limit"
        )
    ladder = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return tuple(size for size in ladder if size <= largest)


def default_mixed_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """16, 32, then multiples of 64, with longer steps from 1,024 tokens on, up to the limit.

    For whole graphs of mixed batches where decode batches have their own. Each costs time at
    start-up, and GEMMs of this size compute whole tiles of 128 or 256 rows in any case. The largest
    batch, which long queues of prompts fill again and again, needs no padding.
    """
    check_positive_int("max_num_batched_tokens", max_num_batched_tokens)
    ladder = [
        *(16, 32),
        *range(64, 1024, 64),
        *range(1024, 2048, 128),
        *range(2048, 4096, 256),
        *range(4096, max_num_batched_tokens, 512),
    ]
    return (*(size for size in ladder if size < max_num_batched_tokens), max_num_batched_tokens)


def default_vision_sizes(device_type: str) -> tuple[int, ...]:
    """Numbers of image patches: powers of 2, and from 1,024 on the numbers half-way between them.

    On a GPU, an image of 896 x 896 pixels, in patches of 14 x 14, has the largest. On the CPU
    larger ones are compute-bound.
    """
    if device_type == "cpu":
        return (64, 256)
    return (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def validate_sizes(sizes: Iterable[int], *, max_num_batched_tokens: int | None) -> tuple[int, ...]:
    """Sort and de-duplicate a user's list. An unusable size raises; none is dropped silently."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise _not_sizes(sizes)
    try:
        listed = list(sizes)
    except TypeError:  # an array or a tensor of one number
        raise _not_sizes(sizes) from None
    if not listed:
        raise ConfigError("capture sizes are empty; give at least one, or use graph mode NONE")
    for size in listed:
        check_positive_int("capture size", size)
    largest = max(listed)
    if max_num_batched_tokens is not None and largest > max_num_batched_tokens:
        raise ConfigError(
            f"capture size {largest} is above max_num_batched_tokens={max_num_batched_tokens}, so "
            "no batch could ever use it; drop it or raise the limit"
        )
    return tuple(sorted(set(listed)))


def _not_sizes(sizes: object) -> ConfigError:
    return ConfigError(f"capture sizes must be a list of positive integers, got {shown(sizes)}")


def decode_sizes(
    sizes: Iterable[int], *, query_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Sizes rounded up to whole requests of ``query_len`` tokens, up to the largest batch."""
    largest = min(query_len * max_num_seqs, max_num_batched_tokens)
    rounded = {-(-size // query_len) * query_len for size in sizes}
    return tuple(sorted(size for size in rounded if size <= largest))


def get_cudagraph_sizes(
    capture_sizes: Sequence[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    cudagraph_mode: CUDAGraphMode,
    uniform_decode_query_len: int = 1,
    uniform_decode_cudagraph: bool = False,
) -> tuple[dict[int, int], dict[int, int]]:
    """Which size each number of tokens is padded to: in any batch, and in uniform decode batches.

    ``capture_sizes``: None or empty for no graphs. ``max_num_reqs`` and ``max_num_tokens``: most
    requests and tokens of a batch. With ``cudagraph_mode`` NONE there are no graphs either.
    ``uniform_decode_query_len``: tokens of each request in a decode batch.

    Numbers that are missing run eagerly. The second is empty without ``uniform_decode_cudagraph``.
    """
    for name, value in (
        ("max_num_reqs", max_num_reqs),
        ("max_num_tokens", max_num_tokens),
        ("uniform_decode_query_len", uniform_decode_query_len),
    ):
        check_positive_int(name, value)
    if not CUDAGraphMode.parse(cudagraph_mode) or not capture_sizes:
        return {}, {}
    sizes = validate_sizes(capture_sizes, max_num_batched_tokens=max_num_tokens)
    decode: tuple[int, ...] = ()
    if uniform_decode_cudagraph:
        decode = decode_sizes(
            sizes,
            query_len=uniform_decode_query_len,
            max_num_seqs=max_num_reqs,
            max_num_batched_tokens=max_num_tokens,
        )
    return _padded(sizes, 1), _padded(decode, uniform_decode_query_len)


def _padded(sizes: Sequence[int], smallest: int) -> dict[int, int]:
    table = padding_table(sizes)
    return {count: sizes[table[count]] for count in range(smallest, len(table))}


def padding_table(sizes: Sequence[int]) -> list[int]:
    """For each count from 0 to the largest size, the index of the smallest size that holds it."""
    return [bisect_left(sizes, count) for count in range(sizes[-1] + 1)] if sizes else []


def check_positive_int(name: str, value: object) -> None:
    # bool is a subclass of int, but `True` as a size is a mistake.
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {shown(value)}")
