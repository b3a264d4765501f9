"""Times latent attention: prompts with their keys expanded or absorbed, and decode steps.

The model is the shape of DeepSeek-V2-Lite with random weights. Prompts run eagerly, where one
process can do both ways in turns; decode steps are graphs. With ``--layer``, only the attention of
one layer, without a model, over lengths around the point from which expansion pays off.

    PYTHONPATH=src python benchmarks/latent_prompts.py            # about 45 s on an H200
    PYTHONPATH=src python benchmarks/latent_prompts.py --layer    # about 15 s
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ostinato import LLM, GraphConfig, SamplingParams
from ostinato.attention import triton_paged
from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.attention.latent_rope import LatentEmbedding
from ostinato.attention.reference import latent_cpu
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.ops.norm import Norm

LENGTHS, BATCHES = (2048, 8192), (1, 32, 256)
# New tokens, and tokens in the cache before them.
LAYER_BATCHES = ((128, 0), (192, 0), (384, 0), (1024, 0), (8192, 0), (128, 8192), (192, 8192))
LAYER_BATCHES += ((512, 8192), (2048, 14336))
HEADS, RANK, NOPE, ROPE, VALUE, BLOCK_SIZE = 16, 512, 128, 64, 128, 16


@contextmanager
def absorbed_only() -> Iterator[None]:
    """No keys are expanded, in eager steps of this process."""
    modules: tuple[Any, ...] = (latent_cpu, triton_paged)
    rule = triton_paged.least_queries
    for module in modules:
        module.least_queries = lambda *_: None
    try:
        yield
    finally:
        for module in modules:
            module.least_queries = rule


def of_both(measure: Callable[[], float], repeats: int) -> dict[str, float]:
    """Median milliseconds, expanded and absorbed in turns; the first of each is not counted."""
    samples: dict[str, list[float]] = {"expanded": [], "absorbed": []}
    for _ in range(repeats + 1):
        samples["expanded"].append(measure())
        with absorbed_only():
            samples["absorbed"].append(measure())
    return {f"{way}_ms": statistics.median(times[1:]) * 1e3 for way, times in samples.items()}


def of_model(model: str, repeats: int, lengths: tuple[int, ...], batches: tuple[int, ...]) -> None:
    longest = max(lengths) + 128
    with LLM(
        model,
        random_weights=True,
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=longest,
        kv_cache_tokens=max(longest, max(batches) * 128),
        enable_prefix_caching=False,
        graphs=GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=list(batches)),
        show_progress=False,
    ) as llm:
        source, vocab = random.Random(0), llm.engine.model.vocab_size

        def seconds(num_reqs: int, length: int, max_tokens: int) -> float:
            prompts = [[source.randrange(vocab) for _ in range(length)] for _ in range(num_reqs)]
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - start

        for length in lengths:
            times = of_both(lambda length=length: seconds(1, length, 1), repeats)
            print(json.dumps({"first_token_of": length, **times}), flush=True)
        for batch in batches:
            steps = [seconds(batch, 16, 65) - seconds(batch, 16, 1) for _ in range(4)][1:]
            step_ms = statistics.median(steps) / 64 * 1e3
            print(json.dumps({"decode_batch": batch, "step_ms": step_ms}), flush=True)


def of_layer(repeats: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_blocks = 1 + max(new + old for new, old in LAYER_BATCHES) // BLOCK_SIZE
    cache = torch.randn(num_blocks, BLOCK_SIZE, 1, RANK + ROPE, device=device, dtype=dtype)
    embedding = LatentEmbedding(
        table=torch.rand(num_blocks * BLOCK_SIZE, ROPE, device=device),
        norm=Norm(torch.ones(RANK, device=device, dtype=dtype), 1e-6),
        up=torch.randn(HEADS, NOPE + VALUE, RANK, device=device, dtype=dtype) / RANK**0.5,
    )
    spec = AttentionSpec(
        layer=0, num_heads=HEADS, num_kv_heads=1, head_dim=RANK + ROPE, value_dim=RANK,
        scale=192**-0.5, values_in_keys=True,
    )  # fmt: skip
    backend = TritonPagedAttention()
    for new, old in LAYER_BATCHES:
        positions = torch.arange(old, old + new, device=device)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, new], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([old + new], dtype=torch.int32, device=device),
            block_table=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            slot_mapping=positions,
            max_query_len=new,
            max_seq_len=old + new,
            kv_caches=[(cache, cache[..., :RANK])],
            backend=backend,
        )
        query = torch.randn(new, HEADS, NOPE + ROPE, device=device, dtype=dtype)
        rows = torch.randn(new, RANK + ROPE, device=device, dtype=dtype)
        out = query.new_empty((new, HEADS, VALUE))
        batch = (spec, query, rows, embedding, positions, metadata, out)

        def measure(batch: tuple[Any, ...] = batch) -> float:
            """Ten layers at a time, so that launches are hidden."""
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            start.record()
            for _ in range(10):
                backend.forward_latent(*batch)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e4

        print(json.dumps({"new": new, "cached": old, **of_both(measure, repeats)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="deepseek-v2-lite", help="a named shape, or a folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--layer", action="store_true", help="attention of one layer, no model")
    options = parser.parse_args()
    if options.layer:
        of_layer(options.repeats)
    else:
        of_model(options.model, options.repeats, tuple(options.lengths), tuple(options.batches))


if __name__ == "__main__":
    main()
