"""The on-disk cache of compiled code: one directory per model, versions and settings.

It holds inductor's own cache, and a manifest for people that says what it was made from. A
directory with a manifest is complete. If the manifest or other files are missing, inductor compiles
what it does not find.
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

_VERSION = 1  # of the directory layout
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
        """Whether an earlier compilation with this key finished here."""
        try:
            found = json.loads((self.path / _MANIFEST).read_text())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("layout") == _VERSION

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compilations inside the block read from and write to this cache."""
        self.path.mkdir(parents=True, exist_ok=True)
        logger.info("%s compiled code in %s", "reusing" if self.is_filled else "keeping", self.path)
        # Inductor and Triton accept this only through the environment.
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
