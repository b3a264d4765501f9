"""Weights that another process on the same GPU holds, by CUDA IPC handles: no value is copied.

``share_weights`` describes tensors as plain JSON, and ``open_weights`` maps their memory. Nothing
is unpickled, and no function is called that the message names; but the sender chooses which memory
of the GPU is read, so take messages only from a trainer that you trust.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ostinato.errors import ConfigError
from ostinato.models.given_tensors import NamedTensors, named_tensors
from ostinato.quoting import said, shown

_FORMAT = "ostinato-weights-1"
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
# The arguments of torch's rebuild_cuda_tensor between the dtype and the device, in its order.
_FIELDS = (
    "handle",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "needs_event",
)
_BYTES = ("handle", "counter_handle", "event_handle")


def share_weights(weights: NamedTensors) -> str:
    """Describe ``weights``, CUDA tensors by name, for ``open_weights`` of another process.

    Keep the tensors as they are until the other process has read them: it reads their own memory.
    """
    described = {}
    for name, tensor in named_tensors(weights):
        if tensor.device.type != "cuda" or str(tensor.dtype) not in _DTYPES:
            raise ConfigError(
                f"the weight {name} is {tensor.dtype} on {tensor.device}; share_weights takes "
                f"{', '.join(_DTYPES)} on a GPU"
            )
        _, arguments = reduce_tensor(tensor.detach())
        _, size, stride, offset, _, dtype, device, *rest = arguments
        values = dict(zip(_FIELDS, rest, strict=True))
        described[name] = {
            "device": str(torch.cuda.get_device_properties(device).uuid),
            "dtype": str(dtype),
            "shape": list(size),
            "stride": list(stride),
            "offset": offset,
            **values,
            **{key: base64.b64encode(values[key]).decode() for key in _BYTES},
        }
    return json.dumps({"format": _FORMAT, "weights": described})


def open_weights(message: str) -> dict[str, torch.Tensor]:
    """The tensors of a ``share_weights`` message, for ``update_weights``; drop them soon after.

    Both processes must see the GPU that the tensors are on.
    """
    devices = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    try:
        return {name: _opened(name, given, devices) for name, given in _read(message).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the weights of share_weights are damaged ({type(error).__name__}: {said(error)}): "
            f"{shown(message)}"
        ) from error


def _read(message: str) -> Mapping[str, Any]:
    try:
        read = json.loads(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the message is not one of share_weights ({said(error)}): {shown(message)}"
        ) from error
    if not isinstance(read, dict) or read.get("format") != _FORMAT:
        raise ConfigError(
            f"the message is not one of share_weights, whose format is {_FORMAT}: "
            f"{shown(message)}; both processes must run the same version"
        )
    weights: Mapping[str, Any] = read["weights"]
    return weights


def _opened(name: str, given: Mapping[str, Any], devices: Mapping[str, int]) -> torch.Tensor:
    if given["device"] not in devices:
        raise ConfigError(
            f"the weight {name} is on the GPU {given['device']}, which this process does not see; "
            f"it sees {', '.join(devices) or 'none'}"
        )
    values = {**given, **{key: base64.b64decode(given[key]) for key in _BYTES}}
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(given["shape"]),
        tuple(given["stride"]),
        given["offset"],
        torch.UntypedStorage,
        _DTYPES[given["dtype"]],
        devices[given["device"]],
        *(values[key] for key in _FIELDS),
    )
    return tensor
