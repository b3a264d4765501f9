"""Tile configs for small-M GEMMs on a GPU, or the decision to use torch instead.

A choice is looked up by shape: first in this machine's measurements (a file in the user's cache),
then in the shipped table for known GPUs, whose choices were the fastest in the GEMM order of a
decode step. Missing shapes are measured once, before anything is captured
(``ops.gemm.tune_linears``). Shapes that were never measured get the choice of a model
(``ops.gemm.tile_config``). Plain Python: nothing here launches a kernel.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from pathlib import Path

from ostinato.ops.gemm.tile_config import (
    GemmChoice,
    Gpu,
    LinearShape,
    TileConfig,
    default_choice,
)
from ostinato.paths import cache_directory

logger = logging.getLogger(__name__)

_VERSION = 2  # of the kernels as far as tiles matter; a new number invalidates all measurements
_SHIPPED = "tuned_h200.json"


def choice_from_json(value: object) -> GemmChoice | None:
    """Parse a table entry; None if this version cannot use it."""
    if value == "torch":
        return "torch"
    if not isinstance(value, dict) or not {"block_n", "block_k", "num_warps"} <= value.keys():
        return None
    if not value.keys() <= set(TileConfig._fields):
        return None
    if not all(type(number) is int and 0 <= number <= 16384 for number in value.values()):
        return None
    config = TileConfig(**value)
    powers = (config.block_n, config.block_k, config.num_warps)
    if any(number < 1 or number & (number - 1) for number in powers):
        return None
    return config if config.num_stages >= 1 and config.split_k >= 1 else None


def read_table(text: str) -> dict[str, GemmChoice]:
    """The table entries that this version can use. Raises ValueError if it is not a table."""
    content = json.loads(text)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ValueError("it is not a table of choices")
    if content.get("version") != _VERSION:
        return {}
    choices = {key: choice_from_json(value) for key, value in entries.items()}
    return {key: choice for key, choice in choices.items() if choice is not None}


def write_table(choices: dict[str, GemmChoice]) -> str:
    entries = {
        key: choice if isinstance(choice, str) else choice.as_json()
        for key, choice in sorted(choices.items())
    }
    lines = (f"\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    return f'{{"version": {_VERSION}, "entries": {{' + ",".join(lines) + "\n}}\n"


def cache_file() -> Path:
    return cache_directory() / "tuning" / "linear.json"


class Tuning:
    """Known choices: the user's file over the shipped table, both read once."""

    def __init__(self, file: Path, shipped: dict[str, GemmChoice]) -> None:
        self._file = file
        self._shipped = shipped
        self._own = self._read()
        self._unsaved: dict[str, GemmChoice] = {}
        self._choices: dict[tuple[LinearShape, Gpu], GemmChoice] = {}  # cache

    def get(self, key: str) -> GemmChoice | None:
        return self._own.get(key) or self._unsaved.get(key) or self._shipped.get(key)

    def is_shipped(self, key: str) -> bool:
        return key in self._shipped

    def choice(self, shape: LinearShape, gpu: Gpu) -> GemmChoice:
        """The known choice for this shape, or else a default."""
        choices = self._choices
        choice = choices.get((shape, gpu))
        if choice is None:
            choice = self.get(shape.key(gpu.name)) or default_choice(shape, gpu)
            choices[shape, gpu] = choice
        return choice

    def remember(self, choices: dict[str, GemmChoice], *, unsaved: Collection[str] = ()) -> None:
        """Use ``choices`` from now on, in later processes too if the file can be written.

        Those of ``unsaved`` keys are for this process only. Two processes may write at once: each
        file is complete, and lost entries are measured again.
        """
        saved = {key: choice for key, choice in choices.items() if key not in unsaved}
        on_disk = self._read()
        self._own = on_disk | self._own | saved
        self._unsaved |= {key: choices[key] for key in unsaved}
        self._choices = {}  # not cleared: another thread may be about to add what was known before
        if not saved:
            return
        try:
            # This process keeps what it began with. On disk, another may have measured it better.
            _replace(self._file, write_table(self._own | on_disk | saved))
        except OSError as error:
            logger.warning(
                "cannot save GEMM measurements in %s: %s; the next process will measure again, and "
                "may round differently. Set OSTINATO_CACHE to use another directory",
                self._file,
                error,
            )

    def _read(self) -> dict[str, GemmChoice]:
        try:
            return read_table(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is ignored and will be recreated: %s", self._file, error)
            return {}


def _replace(file: Path, text: str) -> None:
    """Replace the file atomically: it never holds part of ``text``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=file.name, suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def tuning() -> Tuning:
    """The process-wide instance."""
    shipped = files("ostinato.ops.gemm").joinpath(_SHIPPED).read_text(encoding="utf-8")
    return Tuning(cache_file(), read_table(shipped))
