"""Options that several commands share, and what they become.

``ModelOptions`` is the one list of options that say which model runs and how; ``takes_model``
gives them to a command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.config import EngineConfig

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, where, and through which graphs; each field is an option."""

    model: Annotated[
        str | None,
        typer.Option(help="Directory, hub name or shape. Default: the embedded SmolLM2."),
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Seeded weights; no download, no tokenizer.")
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    mode: Annotated[
        str | None, typer.Option(help="Graph mode: NONE, FULL, FULL_DECODE_ONLY, ...")
    ] = None
    sizes: Annotated[str | None, typer.Option(help="Sizes to capture: 1,2,4,8.")] = None
    compiled: Annotated[
        bool, typer.Option("--compile", help="Split and compile the model with torch.compile.")
    ] = False
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests in one step.")] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step.")] = (
        None
    )
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence.")] = None
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory of the KV cache: 512M, 4GiB.")
    ] = None
    swiftkv_layers: Annotated[
        int | None,
        typer.Option(help="Later layers run only for tokens whose logits are wanted (SwiftKV)."),
    ] = None
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that the weights are split over.")] = 1
    sequence_parallel: Annotated[
        int, typer.Option(help="Ranks that the tokens of a batch are split over.")
    ] = 1
    shift_parallel_threshold: Annotated[
        int | None,
        typer.Option(help="Batches of up to so many tokens split the weights over all ranks."),
    ] = None

    def engine_config(self, *, quiet: bool) -> EngineConfig:
        from ostinato.config import EngineConfig, GraphConfig

        return EngineConfig(
            model=self.model,
            random_weights=self.random_weights,
            device=self.device,
            dtype=self.dtype,
            graphs=GraphConfig(
                mode=self.mode,
                capture_sizes=integers(self.sizes, "--sizes"),
                compile=self.compiled,
            ),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            kv_cache_memory=self.kv_cache_memory,
            swiftkv_layers=self.swiftkv_layers,
            show_progress=not quiet,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            shift_parallel_threshold=self.shift_parallel_threshold,
        )


def takes_model(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Put the fields of ``ModelOptions`` in place of a command's argument ``chosen``.

    The command line then has one option for each field, except for those in ``without``, which
    keep their defaults; the command gets all of them as one ``ModelOptions``.
    """
    types = get_type_hints(ModelOptions, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=types[field.name],
        )
        for field in fields(ModelOptions)
        if field.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Any:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            parameters += options if parameter.name == "chosen" else own

        @functools.wraps(command)
        def call(**values: Any) -> None:
            chosen = ModelOptions(**{option.name: values.pop(option.name) for option in options})
            command(chosen=chosen, **values)

        # What typer reads a command's options from.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return decorate


def integers(text: str | None, option: str) -> list[int] | None:
    """A comma-separated list of integers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes integers separated by commas, got {text!r}") from None
