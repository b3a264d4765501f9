"""Commands that need an optional part of the package say how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.errors import ConfigError

_OF_EXTRAS = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "httpx", "ray")


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Turn the absence of a package into an error that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRAS:
            raise
        raise ConfigError(
            f"ostinato {command} needs the package {error.name}: pip install 'ostinato[{extra}]'"
        ) from error
