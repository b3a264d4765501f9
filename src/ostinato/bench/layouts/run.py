"""``ostinato bench parallel``: one rank's compute time per step, for each layout, on one device.

Communication is excluded: the sharded decoder's collectives return results of the right shape and
move nothing. All ranks have equal shards, so the first stands for all. Every step is one FULL
graph, which excludes launches too. The model and its head are measured separately and added: the
shift model uses the base model's head, and layouts share equal parts. A mixture of experts is also
measured as a replica that has its share of the experts, and runs them on drawn tokens of all.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ostinato.attention import create_attention
from ostinato.attention.base import AttentionMetadata
from ostinato.bench.layouts.rank_step import (
    Batch,
    DrawnComm,
    SilentComm,
    make_batch,
    make_cache,
)
from ostinato.bench.timing.measure import machine
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.capture.context import set_forward_context
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.policy.descriptor import BatchDescriptor
from ostinato.graphs.policy.modes import CUDAGraphMode
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.graphs.wrapper import CUDAGraphWrapper
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.shapes import draw_weights, shape_config
from ostinato.parallel.layout import ParallelLayout
from ostinato.parallel.sharded.sharded_decoder import ShardedDecoder, build_base, build_shift
from ostinato.parallel.sharded.sharding import own_experts
from ostinato.planner.communication import Model
from ostinato.planner.cost import KINDS, Kind, check_layout, default_layouts

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
EXCLUDED = (
    "excluded: one device computes one rank's part; collectives, and the copies that pack and "
    "unpack their tensors, take no time"
)

Times: TypeAlias = dict[tuple[Kind, int], float]  # seconds, by kind and number of tokens


def run(
    model: str,
    *,
    layouts: Sequence[ParallelLayout] | None = None,
    tokens: Sequence[int] = TOKENS,
    context: int = 512,
    repeats: int = 10,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, Any]:
    """Median milliseconds of base and shift for each layout, kind of batch and number of tokens.

    ``model``: a named shape. ``layouts`` None: all of 2 to 8 ranks that it can run on. ``context``:
    keys that each decoded token attends to. A prefill is one prompt from its beginning.
    """
    chosen = EngineConfig(device=device, dtype=dtype)
    on = chosen.torch_device()
    config = DecoderConfig.from_hf(shape_config(model))
    if layouts is None:
        layouts = default_layouts(config)
    _check(config, layouts, tokens, context=context, repeats=repeats)
    bench = _Bench(
        config=config,
        tokens=sorted(set(tokens)),
        context=context,
        repeats=repeats,
        device=on,
        dtype=chosen.torch_dtype(on),
    )
    with torch.inference_mode():
        rows = bench.rows(list(dict.fromkeys(layouts)))
        spread = bench.spread_rows(dict.fromkeys(layout.world_size for layout in layouts))
    return {
        "command": "ostinato bench parallel",
        "machine": machine(),
        "model": model,
        "random_weights": True,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device": on.type,
        "communication": EXCLUDED,
        "context": context,
        "repeats": repeats,
        "rows": rows,
        "expert_parallel": spread,
    }


def _check(
    config: DecoderConfig, layouts: Sequence[ParallelLayout], tokens: Sequence[int], **counts: int
) -> None:
    if not layouts or not tokens:
        raise ConfigError("nothing to measure; give at least one layout and one size")
    for layout in layouts:
        check_layout(config, layout)
    for size in tokens:
        check_positive_int("number of tokens", size)
    for name, count in counts.items():
        check_positive_int(name, count)


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """Builds and measures models one at a time; keeps none."""

    config: DecoderConfig
    tokens: list[int]
    context: int
    repeats: int
    device: torch.device
    dtype: torch.dtype
    heads: dict[int, dict[int, float]] = field(default_factory=dict)  # seconds by TP, then by rows

    def rows(self, layouts: Sequence[ParallelLayout]) -> list[dict[str, Any]]:
        rows = []
        shifts: dict[int, Times] = {}  # by the number of ranks, which is all they depend on
        for layout in layouts:
            base = self._measure(layout, "base")
            shift = base  # without sequence parallelism they are the same model
            if layout.sp > 1:
                ranks = layout.world_size
                if ranks not in shifts:
                    shifts[ranks] = self._measure(layout, "shift")
                shift = shifts[ranks]
            rows += [self._row(layout, kind, size, base, shift) for kind, size in base]
        return rows

    def spread_rows(self, num_ranks: Iterable[int]) -> list[dict[str, Any]]:
        """Replicas with the experts spread over them; none if they cannot be."""
        experts = self.config.experts
        return [
            {"gpus": count, "kind": kind, "num_tokens": size, "ms": seconds * 1e3}
            for count in num_ranks
            if count > 1 and experts is not None and experts.num_experts % count == 0
            for (kind, size), seconds in self._measure_spread(count).items()
        ]

    def _row(
        self, layout: ParallelLayout, kind: Kind, size: int, base: Times, shift: Times
    ) -> dict[str, Any]:
        head = self.heads[layout.tp][size if kind == "decode" else 1]
        return {
            "sp": layout.sp,
            "tp": layout.tp,
            "kind": kind,
            "num_tokens": size,
            "base_ms": (base[kind, size] + head) * 1e3,
            "shift_ms": (shift[kind, size] + head) * 1e3,
            "head_ms": head * 1e3,
        }

    def _measure(self, layout: ParallelLayout, name: Model) -> Times:
        times = self._measure_model(layout, name)
        self._free()
        return times

    def _measure_spread(self, num_ranks: int) -> Times:
        times = self._measure_replica(num_ranks)
        self._free()
        return times

    def _free(self) -> None:
        gc.collect()  # the pool referred to the last batch, and the batch to the cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure_model(self, layout: ParallelLayout, name: Model) -> Times:
        """Measure the model without its head; also the head, if it is the first of its size."""
        model = self._build(layout, name)
        batch = self._batches(model, self.tokens[-1])
        times: Times = {}
        with GraphPool(self.device) as pool, pool.capturing():
            for kind in KINDS:
                for size in reversed(self.tokens):  # largest first, so that the others fit in it
                    padded = layout.padded_tokens(size) if name == "base" else size
                    ids, positions, metadata = batch(kind, size, padded)
                    times[kind, size] = self._seconds(model, (ids, positions), metadata, pool)
            if name == "base" and layout.tp not in self.heads:
                self.heads[layout.tp] = self._measure_head(model, pool)
        return {(kind, size): times[kind, size] for kind in KINDS for size in self.tokens}

    def _measure_replica(self, num_ranks: int) -> Times:
        """Measure a replica with an equal part of the batch, head included."""
        assert self.config.experts is not None, "they are spread"
        model = build_base(
            self.config,
            ParallelLayout(),
            0,
            partial(SilentComm, rank=0),
            device=self.device,
            dtype=self.dtype,
            max_position=max(self.context, self.tokens[-1]),
            experts=own_experts(self.config.experts.num_experts, num_ranks, 0),
            replicas=DrawnComm(range(num_ranks), 0),
        )
        draw_weights(model, seed=0)
        batch = self._batches(model, -(-self.tokens[-1] // num_ranks))
        times: Times = {}
        with GraphPool(self.device) as pool, pool.capturing():
            for kind in KINDS:
                for size in reversed(self.tokens):
                    share = -(-size // num_ranks)
                    ids, positions, metadata = batch(kind, share, share)
                    seconds = self._seconds(model, (ids, positions), metadata, pool)
                    num_reqs = share if kind == "decode" else 1
                    times[kind, size] = seconds + self._head_seconds(model, num_reqs, pool)
        return {(kind, size): times[kind, size] for kind in KINDS for size in self.tokens}

    def _batches(self, model: ShardedDecoder, max_tokens: int) -> Callable[[Kind, int, int], Batch]:
        """Makes batches of a kind, a number of tokens and one with padding, over one cache."""
        cache = make_cache(
            model.attention_specs,
            max_tokens=max_tokens,
            context=self.context,
            device=self.device,
            dtype=self.dtype,
        )
        return partial(
            make_batch,
            context=self.context,
            vocab_size=self.config.vocab_size,
            cache=cache,
            attention=create_attention("auto", self.device),
        )

    def _build(self, layout: ParallelLayout, name: Model) -> ShardedDecoder:
        # The shift model uses the base model's head.
        config = self.config if name == "base" else replace(self.config, tied_head=True)
        model = (build_base if name == "base" else build_shift)(
            config,
            layout,
            0,
            partial(SilentComm, rank=0),
            device=self.device,
            dtype=self.dtype,
            max_position=max(self.context, self.tokens[-1]),
        )
        draw_weights(model, seed=0)
        return model

    def _measure_head(self, model: ShardedDecoder, pool: GraphPool) -> dict[int, float]:
        sizes = sorted({1, *self.tokens}, reverse=True)
        return {num_reqs: self._head_seconds(model, num_reqs, pool) for num_reqs in sizes}

    def _head_seconds(self, model: ShardedDecoder, num_reqs: int, pool: GraphPool) -> float:
        width = self.config.hidden_size
        hidden = torch.randn(num_reqs, width, device=self.device, dtype=self.dtype)
        return self._seconds(model.compute_logits, (hidden,), None, pool)

    def _seconds(
        self,
        runnable: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        metadata: AttentionMetadata | None,
        pool: GraphPool,
    ) -> float:
        """Median time of replaying one FULL graph."""
        with set_forward_context(attn_metadata=metadata):
            runnable(*inputs)  # compiles kernels, which a capture must not do
        graphs = CUDAGraphWrapper(runnable, CUDAGraphMode.FULL, pool=pool)
        descriptor = BatchDescriptor(inputs[0].shape[0], num_reqs=1)
        with set_forward_context(CUDAGraphMode.FULL, descriptor, attn_metadata=metadata):
            graphs(*inputs)  # captures
            replay = partial(graphs, *inputs)
            replay()
            seconds = [_timed(replay, self.device) for _ in range(self.repeats)]
        graphs.clear_graphs()
        return statistics.median(seconds)


def _timed(replay: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        replay()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()  # keeps the GPU busy while the host launches the timed replays
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
