"""Launches Triton kernels, and knows the device properties that a launch depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from threading import get_ident
from typing import Any, NamedTuple

import torch

from ostinato.compat import current_device, raw_stream, triton_launches
from ostinato.graphs.backends.operator_log import open_log


class _Variant(NamedTuple):
    """A kernel compiled for one kind of arguments and one device."""

    run: Callable[..., None]
    function: int
    metadata: tuple[Any, ...]
    constants: tuple[Any, ...]  # the constants that are parameters, in order


_variants: dict[tuple[Any, ...], _Variant] = {}
_MOST_VARIANTS = 1 << 14  # beyond this, the cache starts over

Request = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_requests: dict[int, tuple[Request, set[tuple[Any, ...]]]] = {}  # by thread


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float | None] = (),
    *,
    descriptors: Sequence[Any] = (),
    **constants: Any,
) -> None:
    """``kernel[grid](*tensors, *numbers, **constants)``, with less Python after the first call.

    ``tensors`` and then ``numbers`` are all arguments that are not kernel constants, except for
    ``descriptors``, Triton's descriptors of tensors for bulk copies, which come first. Triton
    inspects each of them, and every option, to find the compiled variant, which takes longer than
    the rest of a launch; a capture makes about ten thousand. Here a variant is looked up by types
    and values, and by whether 16 divides an address. Triton's debug settings, and globals that a
    kernel reads, count as they were on the first call.

    Runs on the device of the first tensor, regardless of the current device.
    """
    first = tensors[0]
    assert first is not None, "a kernel's first argument is never optional"
    device = first.get_device()
    if first.is_cuda and device != current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, descriptors=descriptors, **constants)
        return
    requested = _requests.get(get_ident()) if _requests else None
    log = open_log()
    if log is not None and requested is None:
        log.note_launch(kernel, tensors, [each.base for each in descriptors])
    knobs = triton_launches() if first.is_cuda else None
    if requested is None and (
        knobs is None or knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls
    ):
        kernel[grid](*descriptors, *tensors, *numbers, **constants)
        return
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    kinds = [
        None if each is None else (each.dtype, each.is_cuda, address % 16 == 0)
        for each, address in zip(tensors, addresses, strict=True)
    ]
    # Includes the types of numbers, because 1 equals 1.0.
    key = (kernel.fn, device, *kinds, *numbers, *map(type, numbers), *constants.items())
    if descriptors:
        key += tuple((each.base.dtype, *each.block_shape) for each in descriptors)
    if requested is not None:
        request, seen = requested
        if key not in seen:
            seen.add(key)
            request(kernel, (*descriptors, *tensors, *numbers), constants)
        return
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[grid](*descriptors, *tensors, *numbers, **constants)
        if compiled is not None:  # None under Triton's interpreter
            names = kernel.arg_names[len(descriptors) + len(tensors) + len(numbers) :]
            _remember(key, compiled, tuple(constants[name] for name in names))
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = raw_stream(device)
    run, function, metadata, rest = variant
    arguments = (*descriptors, *addresses, *numbers, *rest)
    run(x, y, z, stream, function, metadata, None, None, None, *arguments)


def _remember(key: tuple[Any, ...], compiled: Any, constants: tuple[Any, ...]) -> None:
    if len(_variants) >= _MOST_VARIANTS:
        _variants.clear()
    _variants[key] = _Variant(compiled.run, compiled.function, compiled.packed_metadata, constants)


@contextmanager
def without_running(request: Request) -> Iterator[None]:
    """Inside, launches of this thread run nothing, so whatever they would write is left as it is.

    ``request(kernel, arguments, constants)`` gets one launch of each variant.
    """
    thread = get_ident()
    assert thread not in _requests, "it does not nest"
    _requests[thread] = request, set()
    try:
        yield
    finally:
        del _requests[thread]


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET); it must be installed."""
    return bool(import_module("triton").knobs.runtime.interpret)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one is done: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch arguments for a kernel that takes OVERLAP (programmatic dependent launch)."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
