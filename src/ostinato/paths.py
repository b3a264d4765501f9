"""Where files are written: those that users name, and the cache of what can be made again."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from ostinato.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise now, not after minutes of work, if ``path`` cannot become a file."""
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {directory}")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory; name a file in it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


@contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Say which file it was that the code inside could not write."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def cache_directory() -> Path:
    """The cache directory, which may not exist yet."""
    try:
        if own := os.environ.get("OSTINATO_CACHE"):
            return Path(own).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared) / "ostinato"
        return Path.home() / ".cache" / "ostinato"
    except RuntimeError as error:
        raise ConfigError(
            f"no directory for the cache was found: {error} Set OSTINATO_CACHE to one of your own"
        ) from None


def private_cache_directory() -> Path:
    """Create the cache directory if needed; raise if other users can put files into it.

    Weights are read from it, and compiled code runs from it. It must belong to this user or to
    root, and not be world-writable; a group with write access is trusted.
    """
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":
        return directory
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the cache directory {directory} belongs to another user (uid {status.st_uid}), who "
            "could change what runs from it; set OSTINATO_CACHE to a directory of your own"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"the cache directory {directory} is world-writable (mode "
            f"{stat.filemode(status.st_mode)}), so anyone could change what runs from it; chmod "
            "o-w it, or set OSTINATO_CACHE to another directory"
        )
    return directory
