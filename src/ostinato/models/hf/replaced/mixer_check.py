"""Checks recurrent layers when a model is loaded, on batches without a runner."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.models.hf.quiet import without_messages
from ostinato.models.hf.replaced.mixers import Mixer
from ostinato.recurrent.base import RecurrentBatch, RecurrentStates

# A prompt in two parts, of which the first is longer than a chunk, then a decode step.
_PARTS = (70, 3, 1)


def tokens_apart(
    mixers: Sequence[Mixer], num_tokens: int, dtype: torch.dtype
) -> RecurrentBatch | None:
    """A batch in which every token is a request of its own; None if there are no ``mixers``."""
    if not mixers:
        return None
    states = _states(mixers, num_tokens, dtype)
    return _batch(states, num_reqs=num_tokens, query_len=1, num_before=0)


def check_mixers(mixers: Sequence[Mixer], dtype: torch.dtype) -> None:
    """Raise unless a mixer of each kind does what transformers' own code does."""
    for mixer in {type(mixer.module): mixer for mixer in reversed(mixers)}.values():
        module: Any = mixer.module
        shape = (sum(_PARTS), module.out_proj.out_features)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(shape, generator=generator).to(_device_of(mixer), dtype)
        # Its advice is to install kernels that would not run here.
        with without_messages("transformers.integrations.hub_kernels"):
            expected = type(module).forward(module, hidden_states=hidden[None]).squeeze(0)
        states = _states(mixers, 1, dtype)
        results, start = [], 0
        for length in _PARTS:
            batch = _batch(states, num_reqs=1, query_len=length, num_before=start)
            with set_forward_context(attn_metadata=SimpleNamespace(recurrent=batch)):
                results.append(mixer.mix(hidden[start : start + length]))
            start += length
        difference = (torch.cat(results).float() - expected.float()).abs().max()
        # Both round in ``dtype`` at other places; anything else that differs is of another size.
        if not difference <= max(1e-4, 16 * torch.finfo(dtype).eps) * expected.float().abs().max():
            raise ConfigError(
                f"{type(module).__name__} does not compute what this version of Ostinato expects; "
                "it cannot be run with this version of transformers, or with this config"
            )


def _device_of(mixer: Mixer) -> torch.device:
    return next(mixer.module.parameters()).device  # type: ignore[no-any-return]


def _states(mixers: Sequence[Mixer], num_rows: int, dtype: torch.dtype) -> RecurrentStates:
    return RecurrentStates(
        [mixer.spec for mixer in mixers],
        num_rows=num_rows,
        dtype=dtype,
        device=_device_of(mixers[0]),
    )


def _batch(
    states: RecurrentStates, *, num_reqs: int, query_len: int, num_before: int
) -> RecurrentBatch:
    """Requests in the first rows, with ``query_len`` tokens each after ``num_before`` others."""
    device = states.layers[0].window.device
    rows = torch.arange(num_reqs + 1, device=device)
    return RecurrentBatch(
        states=states.layers,
        req_indices=rows[:-1],
        query_start_loc=rows * query_len,
        seq_lens=torch.full((num_reqs,), num_before + query_len, device=device),
        uniform_decode=query_len == 1,
        query_lens=[query_len] * num_reqs,
    )
