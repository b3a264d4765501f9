"""``ostinato bench offload``: the cost of layers in host memory, and of their copies alone.

In one run: an engine with all weights on the device, one with offload, and all copies of a step
from the same host memory to the same slots on the same stream, without any work between them, below
which no step can be. Without ``plain``, only the last two, for models that do not fit otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from ostinato.bench.decode import OURS, Window, check_counts, measure_batch
from ostinato.bench.timing.baselines import from_engine
from ostinato.bench.timing.measure import about, timed
from ostinato.bench.timing.room import with_kv_cache_for, with_room
from ostinato.config import EngineConfig
from ostinato.llm import LLM
from ostinato.models.native.decoder import Decoder
from ostinato.offload.offload_config import OffloadConfig
from ostinato.offload.prefetch import PrefetchOffloader
from ostinato.progress import ProgressBar

PLAIN = "no offload"


def run(
    config: EngineConfig,
    *,
    batches: Sequence[int],
    offload: OffloadConfig,
    plain: bool = True,
    prompt_len: int = 128,
    new_tokens: int = 32,
    repeats: int = 3,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Time per output token of each batch size, and the time of a step's copies."""
    check_counts(batches, prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    window = Window(prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
    room = {"num_seqs": max(batches), "length": window.longest}
    config = with_kv_cache_for(with_room(config, **room, why=window.why), **room)
    with ExitStack() as stack:
        llm = stack.enter_context(LLM.from_config(replace(config, offload=offload)))
        subjects = {OURS: from_engine(llm)}
        if plain:
            subjects[PLAIN] = from_engine(stack.enter_context(LLM.from_config(config)))
        model = llm.engine.model
        assert isinstance(model, Decoder), "offload needs one"
        assert isinstance(model.offloader, PrefetchOffloader)
        copies_ms = _copies_ms(model, model.offloader, repeats)
        with ProgressBar(
            total=len(batches) * len(subjects) * (repeats + 1), disable=not show_progress
        ) as bar:
            rows = [
                measure_batch(subjects, model.vocab_size, batch, window, bar) for batch in batches
            ]
        for row in rows:
            times = row["tpot_ms"]
            if OURS in times:
                row["of_copies"] = times[OURS] / copies_ms
            if OURS in times and PLAIN in times:
                row["of_plain"] = times[OURS] / times[PLAIN]
        return {
            **about("offload", llm),
            "group": offload.group,
            "offloaded": offload.offloaded,
            "prefetch": offload.prefetch,
            "host_bytes": model.offloader.host_bytes,
            "slot_bytes": model.offloader.slot_bytes,
            "copies_ms": copies_ms,
            "bytes_per_s": model.offloader.host_bytes / copies_ms * 1e3,
            "prompt_len": prompt_len,
            "new_tokens": new_tokens,
            "repeats": repeats,
            "rows": rows,
        }


@torch.inference_mode()
def _copies_ms(model: Decoder, offloader: PrefetchOffloader, repeats: int) -> float:
    """The median of several rounds, after one that warms up."""

    def copy_all() -> None:
        with closing(offloader.over(model.decoder_layers())) as layers:
            for _ in layers:
                pass

    _, *seconds = (timed(copy_all)[1] for _ in range(repeats + 1))
    return statistics.median(seconds) * 1e3
