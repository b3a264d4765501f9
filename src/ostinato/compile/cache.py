"""Where compiled code is kept between runs: one directory per model, versions and settings.

What is in it is inductor's own cache; a manifest beside it says, for people, what it was made from.
A directory is whole when it has its manifest. Without one, or with parts missing, inductor makes
anew what it does not find.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_VERSION = 1  # of this layout
_MANIFEST = "manifest.json"


class CompileCache:
    """Compiled code of one model under one set of settings, below ``directory``."""

    def __init__(self, directory: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self._contents = {
            "model": model,
            "settings": dict(settings),
            "versions": _versions(),
            "layout": _VERSION,
        }
        text = json.dumps(self._contents, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.path = directory / "compiled" / digest[:16]

    @property
    def is_filled(self) -> bool:
        """Whether a compilation with this key was finished here before."""
        try:
            found = json.loads((self.path / _MANIFEST).read_text())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("layout") == _VERSION

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What is compiled inside the block is looked up here first, and kept here."""
        self.path.mkdir(parents=True, exist_ok=True)
        logger.info("%s compiled code in %s", "reusing" if self.is_filled else "keeping", self.path)
        # Inductor and Triton know of no other way to be told.
        with (
            _environment("TORCHINDUCTOR_CACHE_DIR", str(self.path / "inductor")),
            _environment("TRITON_CACHE_DIR", str(self.path / "triton")),
        ):
            yield
        self._write_manifest()

    def _write_manifest(self) -> None:
        text = json.dumps(self._contents, sort_keys=True, indent=1, default=str)
        partial = self.path / f"{_MANIFEST}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(self.path / _MANIFEST)


def _versions() -> dict[str, str]:
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["device"] = torch.cuda.get_device_name()
    return versions


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
