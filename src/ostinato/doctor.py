"""What ``ostinato doctor`` reports: the machine, its fast paths, and what would be captured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ostinato import compat
from ostinato.config import EngineConfig
from ostinato.engine.explain_plan import explain_plan
from ostinato.environment import environment, fast_paths
from ostinato.errors import OstinatoError
from ostinato.quoting import said


def examine(config: EngineConfig) -> dict[str, Any]:
    """Everything that the command prints, as plain values; loads no model."""
    missing = [name for name in compat.private_names if name.find() is None]
    return {
        "environment": dict(environment()),
        "fast_paths": [asdict(path) for path in fast_paths()],
        "private_names": {
            "found": len(compat.private_names) - len(missing),
            "missing": [asdict(name) for name in missing],
        },
        "graphs": _plan(config),
    }


def _plan(config: EngineConfig) -> dict[str, Any]:
    """What would be captured, or why that cannot be said: a broken machine has a report too."""
    try:
        return explain_plan(config)
    except OstinatoError:
        raise  # an option that is wrong on any machine
    except Exception as error:
        return {"error": f"{type(error).__name__}: {said(error)}"}
