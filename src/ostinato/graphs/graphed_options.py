"""What ``graphed()`` is given: the names of its options, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from ostinato.errors import BatchError, ConfigError
from ostinato.graphs.backends import check_generators
from ostinato.graphs.capture.call_layout import BatchDim
from ostinato.graphs.capture.pool import GraphPool, check_pool
from ostinato.graphs.graph_set import GraphSetOptions
from ostinato.graphs.policy.modes import CUDAGraphMode, ModeName
from ostinato.graphs.tree import tensors_of_call
from ostinato.quoting import shown


class GraphedOptions(TypedDict, total=False):
    """The options of ``graphed()``, which documents them."""

    sizes: Iterable[int] | None
    mode: CUDAGraphMode | ModeName
    batch_dims: Mapping[str, BatchDim] | None
    padding: float | Mapping[str, float]
    copy_outputs: bool
    num_warmups: int
    lazy: bool
    eager_fallback: bool
    generators: Sequence[torch.Generator]
    pool: GraphPool | None
    verify: bool
    check_state_every: int
    show_progress: bool


def check_options(options: GraphedOptions) -> None:
    """Refuse values of another type; the rest is checked where it is used."""
    for name in ("copy_outputs", "lazy", "eager_fallback", "verify", "show_progress"):
        if not isinstance(value := options[name], bool):
            raise ConfigError(f"{name} must be True or False, got {shown(value)}")
    batch_dims, padding = options["batch_dims"], options["padding"]
    if batch_dims is not None and not isinstance(batch_dims, Mapping):
        raise ConfigError(
            "batch_dims must map names of arguments to their batch dimensions, got "
            f"{shown(batch_dims)}"
        )
    for number in padding.values() if isinstance(padding, Mapping) else (padding,):
        if not isinstance(number, (int, float, complex)):
            raise ConfigError(
                "padding must be a number, or map names of arguments to numbers, got "
                f"{shown(padding)}"
            )
    check_generators(options["generators"])
    if options["pool"] is not None:
        check_pool(options["pool"])


def graph_set_options(
    *,
    mode: CUDAGraphMode | ModeName,
    num_warmups: int,
    eager_fallback: bool,
    verify: bool,
    check_state_every: int,
    show_progress: bool,
) -> GraphSetOptions:
    """What a set of graphs needs of them; refuses bad values."""
    runtime_mode = CUDAGraphMode.parse(mode)
    if runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        raise ConfigError(
            f"graphed() runs FULL (one graph) or PIECEWISE (split at @eager_break), not "
            f"{runtime_mode.name}"
        )
    for name, value in (("num_warmups", num_warmups), ("check_state_every", check_state_every)):
        if type(value) is not int or value < 0:
            raise ConfigError(f"{name} must be 0 or a positive integer, got {value!r}")
    return GraphSetOptions(
        mode=runtime_mode,
        num_warmups=num_warmups,
        eager_fallback=eager_fallback,
        verify=verify,
        watch=check_state_every > 0,
        show_progress=show_progress,
    )


def common_device(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device:
    """The device of all tensors among the arguments, and of those of a module."""
    tensors = tensors_of_call(args, kwargs)
    if not tensors:
        raise BatchError(
            "graphed() found no tensor among the arguments, so it cannot find the batch size; "
            "pass the batch as a tensor"
        )
    if isinstance(function, torch.nn.Module):
        tensors += [*function.parameters(), *function.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ConfigError(
            f"graphed() works on one device, but the model and its arguments are on "
            f"{', '.join(devices)}; move them to one, or use one graphed() per device"
        )
    return tensors[0].device
