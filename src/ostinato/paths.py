"""Where Ostinato keeps what it can make again, and that no stranger writes there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ostinato.errors import ConfigError


def cache_directory() -> Path:
    """The directory, which may not be there yet."""
    if own := os.environ.get("OSTINATO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ostinato"
    return Path.home() / ".cache" / "ostinato"


def private_cache_directory() -> Path:
    """The directory, made if it is not there; raises where strangers can put files into it.

    Weights are read from it, and compiled code is run. It must belong to this user, or to root, and
    not be writable by everyone; a group that may write to it is trusted.
    """
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":
        return directory
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the cache directory {directory} belongs to another user (uid {status.st_uid}), who "
            "could change what is run from it; set OSTINATO_CACHE to a directory of your own"
        )
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"the cache directory {directory} can be written by everyone (mode "
            f"{stat.filemode(status.st_mode)}), who could change what is run from it; chmod o-w "
            "it, or set OSTINATO_CACHE to another directory"
        )
    return directory
