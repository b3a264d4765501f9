"""Options shared by several commands, and their conversion."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from ostinato.config import EngineConfig, GraphConfig
from ostinato.errors import ConfigError
from ostinato.offload.offload_config import OffloadConfig

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]

OF_RANKS = ("tensor_parallel_size", "ulysses_sequence_parallel_size", "shift_parallel_threshold")
# What decides which graphs are captured.
OF_PLANS = (
    *("device", "attention", "max_num_seqs", "max_num_batched_tokens", "enforce_eager"),
    *("mode", "capture_sizes", "mixed_capture_sizes", "max_cudagraph_capture_size", "speculative"),
    *("enable_lora", "max_loras"),
    *OF_RANKS,
)

# Options whose flag differs from their name.
_FLAGS = {
    "capture_sizes": ("--sizes",),
    "mixed_capture_sizes": ("--mixed-sizes",),
    "random_weights": ("--random-weights",),
}


def takes_model(
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    also: Mapping[str, type] | None = None,
) -> Callable[[Callable[..., None]], Any]:
    """Replace a command's argument ``config`` by the options of the engine and its graphs.

    The command line gets one option for each that declares a command-line type (restricted to
    ``only``, or to all but ``without``); the command gets all of them as one ``EngineConfig``.
    ``also``: other arguments that are replaced by the options of a dataclass.
    """
    of_others = {name: _declared(settings) for name, settings in (also or {}).items()}
    of_engine, of_graphs = (
        [
            each
            for each in _declared(config)
            if each.name not in without and (only is None or each.name in only)
        ]
        for config in (EngineConfig, GraphConfig)
    )

    def decorate(command: Callable[..., None]) -> Any:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            of_model = [*of_engine, *of_graphs]
            others = of_others.get(parameter.name, own)
            parameters += of_model if parameter.name == "config" else others

        @functools.wraps(command)
        def call(**values: Any) -> None:
            graphs = {each.name: values.pop(each.name) for each in of_graphs}
            for name in graphs.keys() & {"capture_sizes", "mixed_capture_sizes"}:
                graphs[name] = integers(graphs[name], *_FLAGS[name])
            engine = {each.name: values.pop(each.name) for each in of_engine}
            if engine.get("offload") is not None:
                engine["offload"] = OffloadConfig.parse(engine["offload"])
            for name, its_options in of_others.items():
                given = {each.name: values.pop(each.name) for each in its_options}
                values[name] = (also or {})[name](**given)
            command(config=EngineConfig(**engine, graphs=GraphConfig(**graphs)), **values)

        # typer reads a command's options from these.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return decorate


def _declared(config: type[Any]) -> list[inspect.Parameter]:
    """The command-line options of a dataclass, as typer takes them."""
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=_annotated(each),
        )
        for each in fields(config)
        if each.metadata["cli"] is not None
    ]


def _annotated(option: Field[Any]) -> Any:
    its_type, help_text = option.metadata["cli"], option.metadata["help"]
    shape = its_type | None if option.default is None else its_type
    return Annotated[shape, typer.Option(*_FLAGS.get(option.name, ()), help=help_text)]


def integers(text: str | None, option: str) -> list[int] | None:
    """Parse a comma-separated list of integers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes integers separated by commas, got {text!r}") from None


def numbers(text: str, option: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes numbers separated by commas, got {text!r}") from None
