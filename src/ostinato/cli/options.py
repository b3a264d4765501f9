"""Options that several commands share, and what they become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.runtime.config import EngineConfig, GraphConfig

Model = Annotated[
    str | None,
    typer.Option("--model", help="Directory, hub name or shape. Default: the embedded SmolLM2."),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Seeded weights; no download, no tokenizer.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Mode = Annotated[
    str | None, typer.Option("--mode", help="Graph mode: NONE, FULL, FULL_DECODE_ONLY, ...")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Split and compile the model with torch.compile.")
]
Sizes = Annotated[str | None, typer.Option("--sizes", help="Sizes to capture: 1,2,4,8.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests in one step.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens in one step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence.")]
KVCacheMemory = Annotated[str | None, typer.Option(help="Memory of the KV cache: 512M, 4GiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


def integers(text: str | None, option: str) -> list[int] | None:
    """A comma-separated list of integers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes integers separated by commas, got {text!r}") from None


def graph_config(mode: str | None, sizes: str | None, compiled: bool) -> GraphConfig:
    from ostinato.runtime.config import GraphConfig

    return GraphConfig(mode=mode, capture_sizes=integers(sizes, "--sizes"), compile=compiled)


def engine_config(
    *,
    model: str | None,
    random_weights: bool = False,
    device: str,
    dtype: str = "auto",
    mode: str | None,
    sizes: str | None,
    compiled: bool = False,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None = None,
    kv_cache_memory: str | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> EngineConfig:
    from ostinato.runtime.config import EngineConfig

    return EngineConfig(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        graphs=graph_config(mode, sizes, compiled),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        seed=seed,
        show_progress=not quiet,
    )
