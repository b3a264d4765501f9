"""Turns a loaded model into one whose results do not depend on the batch, or says why it cannot."""

from __future__ import annotations

import torch

from ostinato.errors import ConfigError
from ostinato.loading.load import LoadedModel
from ostinato.models.native.decoder import Decoder

_HALVES = (torch.float16, torch.bfloat16)


def make_batch_invariant(loaded: LoadedModel, *, is_split: bool) -> None:
    """Have ``loaded.model`` run batch-invariant kernels, before anything of it is captured.

    ``is_split``: it is one rank's part.
    """
    reason = _unsupported_reason(loaded, is_split)
    if reason is not None:
        raise ConfigError(f"batch_invariant does not support this model: {reason}")
    model = loaded.model
    assert isinstance(model, Decoder), "all others are unsupported"
    model.make_batch_invariant()


def _unsupported_reason(loaded: LoadedModel, is_split: bool) -> str | None:
    """Why there are no batch-invariant kernels for the model, and what to do."""
    model = loaded.model
    if not isinstance(model, Decoder):
        return f"the native decoder does not run it ({loaded.generic_reason}); leave it out"
    for there, what in (
        (model.uses_mrope, "it takes images"),
        (model.selects_tokens, "it is a SwiftKV model"),
        (model.config.experts is not None, "it has a mixture of experts"),
        (model.config.latent is not None, "it has latent attention"),
        (bool(model.recurrent_specs), "it has recurrent layers"),
        (is_split and model.config.qk_norm == "full", "it norms queries over all ranks"),
    ):
        if there:
            return f"{what}, whose kernels depend on the batch; leave batch_invariant out"
    if model.device.type != "cuda":
        return None
    if model.dtype not in _HALVES:
        return f"its weights are {model.dtype} on CUDA; choose dtype='bfloat16' or 'float16'"
    major, minor = torch.cuda.get_device_capability(model.device)
    if major != 9:
        return (
            f"the GPU has compute capability {major}.{minor}, and that sums have one order was "
            "shown for 9.0 (Hopper) alone; run on Hopper or on the CPU"
        )
    return None
