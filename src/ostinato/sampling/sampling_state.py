"""The sampling parameters of the running requests on the device, one row per request.

The sampler reads them by request row (``req_index``), so a batch is described by its rows alone,
and parameters are copied to the device once per request. ``SamplingFeatures`` is the part that the
host needs, because it decides which operators run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_

import torch

from ostinato.errors import ConfigError
from ostinato.ops.sampling.counter_random import spread_seed
from ostinato.ops.sampling.sampling import sample_rows
from ostinato.ops.sampling.sampling_reference import SamplingTables, Steps
from ostinato.sampling.token_masks import TokenMasks
from ostinato.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from ostinato.scheduling.request import Request

# Room for a request's stop ids and the model's end-of-sequence ids.
STOP_IDS_WIDTH = MAX_STOP_TOKEN_IDS + 16

_RANDOM, _FILTER, _PENALTY, _BIAS, _MIN_TOKENS, _MASK = (1 << bit for bit in range(6))
_LOGPROBS_SHIFT = 6
# Beyond these a float32 would overflow, and the result no longer changes anyway.
_SMALLEST, _LARGEST = 1e-30, 1e30
_LARGEST_INT = 2**31 - 1


def feature_bits(params: SamplingParams) -> int:
    """The sampler features that ``params`` needs; ``|`` of several is what a batch needs.

    n logprobs are n + 1 ones, so that the union of two counts is the larger.
    """
    bits = 0
    if not params.is_greedy:
        bits |= _RANDOM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            bits |= _FILTER
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        bits |= _PENALTY
    if params.logit_bias:
        bits |= _BIAS
    if params.min_tokens:
        bits |= _MIN_TOKENS
    if params.structured_outputs is not None:
        bits |= _MASK
    if params.logprobs is not None:
        bits |= ((1 << (params.logprobs + 1)) - 1) << _LOGPROBS_SHIFT
    return bits


@dataclass(frozen=True, kw_only=True)
class SamplingFeatures:
    """Which parts of the sampler a batch needs. A feature that is off costs nothing.

    ``num_logprobs`` is the number of most likely tokens to report: 0 for just the sampled token,
    -1 for none. A feature that is on but used by no request changes no token.
    """

    any_random: bool = False
    any_filter: bool = False
    any_penalty: bool = False
    any_bias: bool = False
    any_min_tokens: bool = False
    any_mask: bool = False
    num_logprobs: int = -1

    @property
    def steps(self) -> Steps:
        """The steps of the operator that samples."""
        return Steps(
            noise=self.any_random,
            filters=self.any_filter,
            penalties=self.any_penalty,
            bias=self.any_bias,
            min_tokens=self.any_min_tokens,
            masks=self.any_mask,
        )

    @staticmethod
    def of(params: Iterable[SamplingParams]) -> SamplingFeatures:
        """The union over ``params``; on a hot path use ``SamplingState.features`` instead."""
        return SamplingFeatures.of_bits(reduce(or_, map(feature_bits, params), 0))

    @staticmethod
    def of_bits(bits: int) -> SamplingFeatures:
        """Features from the union of ``feature_bits``."""
        return _features_of_bits(bits)


@cache  # a few in practice, 66 * 64 at most
def _features_of_bits(bits: int) -> SamplingFeatures:
    return SamplingFeatures(
        any_random=bool(bits & _RANDOM),
        any_filter=bool(bits & _FILTER),
        any_penalty=bool(bits & _PENALTY),
        any_bias=bool(bits & _BIAS),
        any_min_tokens=bool(bits & _MIN_TOKENS),
        any_mask=bool(bits & _MASK),
        num_logprobs=(bits >> _LOGPROBS_SHIFT).bit_length() - 1,
    )


class SamplingState:
    """Parameters of up to ``max_num_seqs`` running requests, at fixed addresses on ``device``.

    Owns its tensors. Graphs may read them: a replay sees what was last written. A row that was
    never written is greedy, and a stale row is harmless: requests read only their own.

    ``masks`` of constrained requests over a vocabulary of ``vocab_size`` (0: there are none) are
    allocated when the first such request is written, and ``masked_tables`` then have them.
    """

    def __init__(
        self, max_num_seqs: int, device: torch.device | str, *, vocab_size: int = 0
    ) -> None:
        device = torch.device(device)
        self.masks = TokenMasks(max_num_seqs, vocab_size, device)
        self._floats = _Table((max_num_seqs, 6), torch.float32, 0.0, device)
        self._ints = _Table((max_num_seqs, 6), torch.int64, 0, device)
        self._bias_ids = _Table((max_num_seqs, MAX_LOGIT_BIAS), torch.int64, -1, device)
        self._bias_values = _Table((max_num_seqs, MAX_LOGIT_BIAS), torch.float32, 0.0, device)
        self._stop_ids = _Table((max_num_seqs, STOP_IDS_WIDTH), torch.int64, -1, device)
        for req_index in range(max_num_seqs):
            self._floats.host[req_index] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
        self._floats.on_device.copy_(self._floats.staging)
        self._bits = [0] * max_num_seqs

        # For rows without masks. Graphs that were captured with these keep their addresses when
        # masks are allocated.
        self.unmasked_tables = SamplingTables(
            floats=self._floats.on_device,
            ints=self._ints.on_device,
            bias_ids=self._bias_ids.on_device,
            bias_values=self._bias_values.on_device,
            stop_ids=self._stop_ids.on_device,
            masks=self.masks.on_device,  # a placeholder
        )
        self.masked_tables: SamplingTables | None = None
        # The columns by name, as views.
        floats, ints = self._floats.on_device.unbind(1), self._ints.on_device.unbind(1)
        self.temperature, self.top_p, self.min_p = floats[:3]
        self.presence, self.frequency, self.repetition = floats[3:]
        self.top_k, self.seed_key, self.prompt_len, self.min_tokens = ints[:4]
        self.bias_ids, self.bias_values, self.stop_ids = self.unmasked_tables[2:5]

    @property
    def tables(self) -> SamplingTables:
        """Those of all rows, with masks if there are any."""
        return self.masked_tables or self.unmasked_tables

    def sample(
        self,
        logits: torch.Tensor,
        req_indices: torch.Tensor,
        lengths: torch.Tensor,
        out_tokens: torch.Tensor,
    ) -> None:
        """``sample_rows`` by these parameters: temperature and seed, no filters."""
        sample_rows(logits, req_indices, self.temperature, self.seed_key, lengths, out_tokens)

    def write(self, req_index: int, request: Request) -> None:
        """Write ``request`` to row ``req_index``: two small copies, more for rare parameters.

        The copies are enqueued on the current stream and not waited for. They read staging memory
        of this row alone, so the next write to the row may overtake a copy still in flight; only
        work enqueued for the row's previous request could notice.
        """
        params = request.params
        floats = (
            min(params.temperature, _LARGEST),
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            min(max(params.repetition_penalty, _SMALLEST), _LARGEST),
        )
        min_tokens = min(params.min_tokens, _LARGEST_INT)
        top_k = min(max(params.top_k, 0), _LARGEST_INT)
        num_reported = 0 if params.logprobs is None else 1 + params.logprobs
        seed_key, prompt_len = spread_seed(request.seed), len(request.prompt_token_ids)
        bits = feature_bits(params)
        if bits & _MASK and self.masked_tables is None:
            self.masks.allocate()
            self.masked_tables = self.unmasked_tables._replace(masks=self.masks.on_device)
        is_masked = int(bits & _MASK != 0)
        ints = (top_k, seed_key, prompt_len, min_tokens, num_reported, is_masked)
        self._floats.write(req_index, floats)
        self._ints.write(req_index, ints)
        if min_tokens:  # with 0 the row's stop ids are ignored
            self._write_stop_ids(req_index, request)
        if (bits | self._bits[req_index]) & _BIAS:
            self._bits[req_index] |= _BIAS  # an interrupt must not leave a bias that is not known
            bias = params.logit_bias or {}
            self._bias_ids.write(req_index, tuple(bias.keys()))
            self._bias_values.write(req_index, tuple(bias.values()))
        self._bits[req_index] = bits

    def _write_stop_ids(self, req_index: int, request: Request) -> None:
        if len(request.stop_token_ids) > STOP_IDS_WIDTH:
            raise ConfigError(
                f"request {request.request_id!r} has min_tokens and "
                f"{len(request.stop_token_ids)} stop and end-of-sequence token ids, but at most "
                f"{STOP_IDS_WIDTH} can be suppressed"
            )
        self._stop_ids.write(req_index, tuple(request.stop_token_ids))

    def filtered_rows(self, req_indices: Iterable[int]) -> list[int]:
        """Positions in ``req_indices`` of requests that use more than a temperature."""
        bits = self._bits
        return [
            position for position, req_index in enumerate(req_indices) if bits[req_index] & ~_RANDOM
        ]

    def has_masks(self, req_indices: Iterable[int]) -> bool:
        """Whether a request of these rows is constrained."""
        bits = self._bits
        return any(bits[req_index] & _MASK for req_index in req_indices)

    def features(self, req_indices: Iterable[int]) -> SamplingFeatures:
        """The features of the requests last written to ``req_indices``; cheap, on the host."""
        return _features_of_bits(reduce(or_, map(self._bits.__getitem__, req_indices), 0))


class _Table:
    """Rows on the device with a staging copy on the host, pinned if that lets copies overlap."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, fill: float, device: torch.device
    ) -> None:
        self.fill = fill
        self.on_device = torch.full(shape, fill, dtype=dtype, device=device)
        self.staging = torch.full(shape, fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self.staging.numpy()  # the same memory, faster to write from Python

    def write(self, req_index: int, values: tuple[float, ...]) -> None:
        """Replace row ``req_index``; columns beyond ``values`` get the fill value."""
        row = self.host[req_index]
        row[: len(values)] = values
        row[len(values) :] = self.fill
        self.on_device[req_index].copy_(self.staging[req_index], non_blocking=True)
