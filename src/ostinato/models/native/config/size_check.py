"""The check that a size in a config is one that a model can have."""

from __future__ import annotations

from ostinato.errors import ConfigError
from ostinato.quoting import shown


def check_size(what: str, value: object, most: int) -> None:
    """Raise ConfigError unless ``value`` is an integer from 1 to ``most``."""
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{what} must be an integer from 1 to {most:,}, not {shown(value)}")
