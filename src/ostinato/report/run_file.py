"""A run report as a file: JSON with a version, and every value checked when it is read."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ostinato.errors import ConfigError
from ostinato.paths import writing
from ostinato.quoting import shown
from ostinato.report.records import RunReport

FORMAT = "ostinato run report"
FORMAT_VERSION = 1

T = TypeVar("T")


def report_text(report: RunReport) -> str:
    """The report as JSON, as it is in a file."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(report)}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def write_report(report: RunReport, path: str | PathLike[str]) -> None:
    """Write ``report`` to the file ``path``, which is replaced."""
    with writing(path):
        Path(path).write_text(report_text(report) + "\n", encoding="utf-8")


def read_report(path: str | PathLike[str]) -> RunReport:
    """The report that ``write_report`` has written to ``path``.

    Raises ``ConfigError`` for other files.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} is not a run report; LLM.report() and --report of `ostinato generate` and "
            "`ostinato bench throughput` make them"
        )
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} is a run report of format version {version!r}, and this Ostinato reads "
            f"version {FORMAT_VERSION}; use the Ostinato that wrote it, or write it again"
        )
    try:
        return _read_fields(RunReport, values, "")
    except _WrongValueError as error:
        raise ConfigError(f"{path} is a damaged run report: {error}; write it again") from None


class _WrongValueError(Exception):
    """Which value is not what it should be."""


def _read(its_type: Any, value: Any, where: str) -> Any:
    """``value`` as ``its_type``: a dataclass, or a plain, list, dict or optional type."""
    if isinstance(its_type, type) and is_dataclass(its_type):
        return _read_fields(its_type, value, where)
    origin, arguments = get_origin(its_type), get_args(its_type)
    if origin is UnionType:  # T | None
        (inner,) = (each for each in arguments if each is not NoneType)
        return None if value is None else _read(inner, value, where)
    if origin is list and type(value) is list:
        return [_read(arguments[0], each, f"{where}[{n}]") for n, each in enumerate(value)]
    if origin is dict and type(value) is dict:
        return {key: _read(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if its_type is float and type(value) in (int, float):
        if not abs(value) <= sys.float_info.max:  # JSON has no such number, so no page shows it
            raise _WrongValueError(f"{where} must be a finite number, got {shown(value)}")
        return value
    if type(value) is its_type:
        return value
    wanted = getattr(origin or its_type, "__name__", str(its_type))
    raise _WrongValueError(f"{where} must be {wanted}, got {shown(value)}")


def _read_fields(its_type: type[T], value: Any, where: str) -> T:
    if type(value) is not dict:
        raise _WrongValueError(f"{where} must be an object, got {shown(value)}")
    hints, prefix = get_type_hints(its_type), f"{where}." if where else ""
    known = {field.name: field for field in fields(its_type)}  # type: ignore[arg-type]
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise _WrongValueError(f"{prefix}{name} is missing")
    for name in value:
        if name not in known:
            raise _WrongValueError(f"{prefix}{name} is unknown")
    return its_type(
        **{name: _read(hints[name], each, prefix + name) for name, each in value.items()}
    )
