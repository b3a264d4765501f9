"""The command that serves a model over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from ostinato.cli import options
from ostinato.cli.extras import needs_extra
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.quoting import shown
from ostinato.serving.http.server_config import ServerConfig


@options.takes_model(also={"server": ServerConfig})
def serve(
    *,
    server: ServerConfig,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter as NAME=DIRECTORY, served as a model. Repeatable."),
    ] = None,
    task: Annotated[
        str, typer.Option(help="What the model is for: auto, generate or embed.")
    ] = "auto",
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Run the model in replicas of a Ray cluster: RAY_ADDRESS, or a local one."
        ),
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the model, each with its ranks; with --ray.")
    ] = None,
    config: EngineConfig,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model to OpenAI's clients: completions, chats, embeddings, metrics."""
    num_replicas = _checked(replicas, ray)
    with needs_extra("serve", "serve"):
        from ostinato.serving.http.run import serve as run
    key = server.api_key
    if key is None:
        key = os.environ.get("OSTINATO_API_KEY")  # an empty one is refused: a secret was meant
    adapters = _adapters(adapter or ())
    extra: dict[str, Any] = {"task": task, "show_progress": not quiet}
    if adapters:
        extra["enable_lora"] = True
        extra["max_loras"] = max(config.max_loras, len(adapters))
    config, server = replace(config, **extra), replace(server, api_key=key)
    if not ray:
        run(config, server, adapters)
        return
    with needs_extra("serve --ray", "ray"):
        from ostinato.serving.replicas.run import serve_replicas
    serve_replicas(config, server, adapters, num_replicas=num_replicas)


def _checked(replicas: int | None, ray: bool) -> int:
    """The number of replicas."""
    if replicas is not None and replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}")
    if replicas is not None and not ray:
        raise ConfigError(
            "--replicas are started by Ray: add --ray; without it, --data-parallel-size runs "
            "copies of the model on the GPUs of this machine"
        )
    return replicas or 1


def _adapters(given: Sequence[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for name, path in map(_named, given):
        if adapters.setdefault(name, path) != path:
            raise ConfigError(
                f"--adapter gives {shown(name)} two directories, {shown(adapters[name])} and "
                f"{shown(path)}; choose another name for one of them"
            )
    return adapters


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--adapter takes NAME=DIRECTORY, got {shown(text)}")
    return name, path
