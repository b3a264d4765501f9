"""The full sampler of decode steps, in graphs that are replayed behind the step's own.

The graph of a decode step samples by temperature alone and leaves its logits in the pool. Batches
in which a request wants more replay a second, small graph, which samples such rows again and
computes log-probabilities; other batches have nothing to do with it.

These graphs are captured when they are needed: the first step with a decode graph and a kind of
sampling is launched, which compiles the kernels, the second is captured, and all later ones are
replayed. Most engines need few of them or none, so start-up takes no longer and no memory is held
for them; a capture delays its step by a few milliseconds, once. They have a pool of their own,
because in the pool of the decode graphs they would use the memory of the logits. If a capture
fails, its steps go on being launched.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.capture.closing import close_each
from ostinato.graphs.capture.pool import GraphPool
from ostinato.graphs.capture.segments import Tape
from ostinato.graphs.manager import FullGraph
from ostinato.graphs.trust.ledger.owners import MemoryKind, NamedMemory
from ostinato.ops.sampling.logprobs import write_requested_logprobs
from ostinato.ops.sampling.resampling import resample_rows
from ostinato.ops.triton.launch import next_power_of_2
from ostinato.runner.ambient import without_autocast
from ostinato.runner.sampling.draft_sampling import accept_again, decode_rows, restore_drafts
from ostinato.runner.step_memory import StepMemory
from ostinato.sampling.sampler import SamplingFeatures
from ostinato.sampling_params import MAX_LOGPROBS

logger = logging.getLogger(__name__)

# Memory of a row in the sampler, beside two copies of its logits for penalties, bias, min_tokens.
_BYTES_PER_ROW = 2**18


class SamplerKind(NamedTuple):
    """What a graph contains. All of it costs little where no row uses it."""

    changes: bool
    filters: bool
    logprobs: bool
    masks: bool = False

    @classmethod
    def of(cls, features: SamplingFeatures) -> SamplerKind:
        """One of five: few, so that a batch with another mix of requests seldom needs a new one."""
        changes = features.any_penalty or features.any_bias or features.any_min_tokens
        changes = changes or features.any_mask
        return cls(
            changes=changes,
            filters=changes or features.any_filter,
            logprobs=changes or features.num_logprobs >= 0,
            masks=features.any_mask,
        )


class SamplerLaunch(Enum):
    """Why the full sampler of a step was launched, not replayed."""

    NO_DECODE_GRAPH = "the step did not run through the graph of a whole decode step"
    NOT_CAPTURED = "it was the first of its size and kind; the second is captured"
    CAPTURE_FAILED = "the capture failed, as a warning in the log says"
    QUARANTINED = "a shadow run found that the graph differs from eager (verify)"


@dataclass
class SamplerStats:
    """Steps in which a request needs the full sampler: each is counted once.

    ``capture_seconds``: how long the captures delayed their steps, together. ``masked_steps``:
    those with a constrained request, in which the host read all earlier tokens before it enqueued
    the sampler; that, and computing the masks, took ``mask_seconds`` while the forward ran.
    """

    replays: int = 0
    captures: int = 0
    capture_seconds: float = 0.0
    launches: Counter[SamplerLaunch] = field(default_factory=Counter)
    masked_steps: int = 0
    mask_seconds: float = 0.0

    def reset(self) -> None:
        self.replays = self.captures = self.masked_steps = 0
        self.capture_seconds = self.mask_seconds = 0.0
        self.launches.clear()


class SamplerGraph:
    """The sampler of one kind, on the logits of one decode graph."""

    def __init__(self, logits: torch.Tensor, kind: SamplerKind, query_len: int) -> None:
        self.logits = logits
        self.kind = kind
        self.query_len = query_len
        self.tape: Tape | None = None
        self.why_launched = SamplerLaunch.NOT_CAPTURED
        self.has_run = False
        self.is_compared = False  # with an eager run, at least once


class SamplerGraphs:
    """Owns the sampler graphs of all decode graphs in ``decode_pool``, which run over ``memory``.

    ``max_num_rows``: most rows of a decode graph's logits.
    """

    def __init__(
        self, memory: StepMemory, decode_pool: GraphPool, *, vocab_size: int, max_num_rows: int
    ) -> None:
        self.stats = SamplerStats()
        self._memory = memory
        self._vocab_size = vocab_size
        self._max_num_rows = max_num_rows
        self._graphs: dict[tuple[int, SamplerKind], SamplerGraph] = {}
        self._pool: GraphPool | None = None
        self.observe: Callable[[GraphPool], None] | None = None  # called with the pool, once
        self._reserved_bytes = 0
        self._logprobs: tuple[torch.Tensor, torch.Tensor] | None = None
        decode_pool.register(self)

    @property
    def pool(self) -> GraphPool | None:
        """The pool of the sampler graphs; None before the first is captured."""
        return self._pool

    @property
    def num_bytes(self) -> int:
        """Memory of the graphs captured so far."""
        return 0 if self._pool is None else self._pool.num_bytes

    def graph(
        self, decode: FullGraph, features: SamplingFeatures, query_len: int = 1
    ) -> SamplerGraph:
        """The sampler for a batch with these features, behind ``decode``; captures nothing."""
        kind = SamplerKind.of(features)
        key = decode.tape.serial, kind
        if key not in self._graphs:
            self._graphs[key] = SamplerGraph(decode.output.logits, kind, query_len)
        return self._graphs[key]

    def run(self, graph: SamplerGraph) -> None:
        """Sample the rows in the buffers again, right after the decode graph was replayed."""
        if graph.tape is None:
            self._run_uncaptured(graph)
        else:
            assert self._pool is not None, "the tape is in it"
            self._pool.replay(graph.tape)
            self.stats.replays += 1

    def logprobs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ``run`` writes tokens and their log-probabilities, for each row as many as wanted.

        Both [num_rows, width]; valid until the next step.
        """
        if self._logprobs is None:
            shape = self._max_num_rows, 1 + min(MAX_LOGPROBS, self._vocab_size)
            device = self._memory.device
            with torch.inference_mode(False):
                tokens = torch.zeros(shape, dtype=torch.int64, device=device)
                values = torch.zeros(shape, dtype=torch.float32, device=device)
            self._logprobs = tokens, values
        tokens, values = self._logprobs
        return tokens[:num_rows], values[:num_rows]

    # --- capture -------------------------------------------------------------------------------

    @without_autocast
    def _run_uncaptured(self, graph: SamplerGraph) -> None:
        if graph.has_run and graph.why_launched is SamplerLaunch.NOT_CAPTURED:
            start = time.perf_counter()
            try:
                self._capture(graph)
            except (CaptureError, torch.OutOfMemoryError) as error:
                graph.why_launched = SamplerLaunch.CAPTURE_FAILED
                logger.warning(
                    "the sampler of %d rows is launched instead of replayed, because its capture "
                    "failed: %s",
                    graph.logits.shape[0],
                    error,
                )
            else:
                self.stats.captures += 1
                self.stats.capture_seconds += time.perf_counter() - start
                return
        self.sample(graph)
        graph.has_run = True
        self.stats.launches[graph.why_launched] += 1

    def _capture(self, graph: SamplerGraph) -> None:
        if self._pool is None:
            self._pool = GraphPool(self._memory.device, lazy_capture=True)
            if self.observe is not None:
                self.observe(self._pool)
        self._reserve(graph)
        # A full garbage collection could take longer than many steps.
        captured = self._pool.capture(partial(self.sample, graph), collect_garbage=False)
        graph.tape = captured.tape

    def _reserve(self, graph: SamplerGraph) -> None:
        """Reserve memory that smaller graphs can share; by powers of 2, as larger ones come."""
        assert self._pool is not None
        num_rows = min(next_power_of_2(graph.logits.shape[0]), self._max_num_rows)
        copies = 8 * self._vocab_size if graph.kind.changes else 0
        num_bytes = num_rows * (copies + _BYTES_PER_ROW)
        if num_bytes > self._reserved_bytes:
            self._pool.reserve(num_bytes)
            self._reserved_bytes = num_bytes

    def quarantine(self, graph: SamplerGraph) -> None:
        """Launch this sampler from now on."""
        assert graph.tape is not None, "it was replayed"
        graph.tape.close()
        graph.tape, graph.why_launched = None, SamplerLaunch.QUARANTINED

    def sample(self, graph: SamplerGraph) -> None:
        """Launch what the graph contains, all of it at fixed addresses.

        Padding rows have a request that uses nothing.
        """
        logits, kind = graph.logits, graph.kind
        num_rows, memory = logits.shape[0], self._memory
        state, buffers = memory.state, memory.buffers
        sampling, tokens = state.sampling, buffers.sampled[:num_rows]
        # A graph without masks must not hold memory that only the first mask allocates.
        tables = sampling.tables if kind.masks else sampling.unmasked_tables
        rows = decode_rows(state, buffers, num_rows // graph.query_len, graph.query_len)
        if graph.query_len == 1:
            req_indices, lengths = rows.req_indices, buffers.tokens.seq_lens[:num_rows]
        else:
            drafts = buffers.drafts(rows)
            req_indices, lengths = drafts.req_indices, drafts.lengths
        if kind.filters:
            if graph.query_len > 1:
                restore_drafts(memory, rows)
            resample_rows(
                logits,
                req_indices,
                lengths,
                tables,
                kind.changes,
                kind.masks,
                state.token_ids,
                tokens,
            )
            if graph.query_len > 1:
                accept_again(memory, rows)
        if kind.logprobs:
            token_ids, values = self.logprobs(num_rows)
            write_requested_logprobs(logits, tokens, req_indices, tables.ints, values, token_ids)

    # --- ownership -----------------------------------------------------------------------------

    def tapes(self) -> list[tuple[str, Tape]]:
        """The captured graphs, by name."""
        return [
            (f"sampler of {graph.logits.shape[0]} rows, {_listed(graph.kind)}", graph.tape)
            for graph in self._graphs.values()
            if graph.tape is not None
        ]

    def named_memory(self) -> Iterator[NamedMemory]:
        """What the graphs write besides the state."""
        for name, tensor in zip(("tokens", "values"), self._logprobs or (), strict=False):
            yield NamedMemory(MemoryKind.OUTPUT, f"log-probabilities: {name}", tensor)

    def discard(self, serials: range) -> None:
        """Drop the graphs that read the logits of these decode graphs."""
        self._drop([key for key in self._graphs if key[0] in serials])

    def clear_graphs(self) -> None:
        self._drop(list(self._graphs))

    def _drop(self, keys: list[tuple[int, SamplerKind]]) -> None:
        dropped = [self._graphs.pop(key) for key in keys]
        close_each(graph.tape.close for graph in dropped if graph.tape is not None)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch that steps run on ``stream``, as in ``StepMemory``."""
        for tensor in self._logprobs or ():
            tensor.record_stream(stream)

    def close(self) -> None:
        """Drop the graphs and their memory. Closing twice is harmless."""
        self._logprobs = None
        try:
            self.clear_graphs()
        finally:
            if self._pool is not None:
                self._pool.close()


def _listed(kind: SamplerKind) -> str:
    return ", ".join(name for name, value in kind._asdict().items() if value)
