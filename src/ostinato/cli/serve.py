"""The command that serves a model over HTTP."""

from __future__ import annotations

import os
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
    config: EngineConfig,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model to OpenAI's clients: completions, chats, embeddings, metrics."""
    with needs_extra("serve", "serve"):
        from ostinato.serving.http.run import serve as run
    key = server.api_key or os.environ.get("OSTINATO_API_KEY") or None
    adapters = dict(_named(each) for each in adapter or ())
    extra: dict[str, Any] = {"task": task, "show_progress": not quiet}
    if adapters:
        extra["enable_lora"] = True
        extra["max_loras"] = max(config.max_loras, len(adapters))
    run(replace(config, **extra), replace(server, api_key=key), adapters)


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--adapter takes NAME=DIRECTORY, got {shown(text)}")
    return name, path
