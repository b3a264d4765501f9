"""``ostinato verify``: compares a model's graphs with eager runs, or tests that comparison."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ostinato.cli import options
from ostinato.cli.console import console
from ostinato.config import EngineConfig

if TYPE_CHECKING:
    from ostinato.graphs.trust.shadow.report import Mismatch


@options.takes_model()
def verify(
    *,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Plant faults in a small model: is each found and named?"),
    ] = False,
    config: EngineConfig,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Capture a model's graphs and compare each with eager; exit with 1 if one differs."""
    if self_test:
        _self_test(config, as_json=as_json)
        return
    from ostinato.llm import LLM

    policy = config.verify if config.verify_policy.at_capture else "capture"
    config = replace(config, verify=policy, show_progress=not (quiet or as_json))
    with LLM.from_config(config) as llm:
        report = llm.verification
    mismatches = [_as_values(each) for each in report.mismatches]
    if as_json:
        found = {
            "compared": report.num_compared,
            "inexact": report.inexact,
            "mismatches": mismatches,
        }
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        out = console()
        out.print(
            f"{report.num_compared} comparisons with eager, {len(mismatches)} mismatches, "
            f"{report.num_inexact} with eager runs that do not repeat themselves."
        )
        for each in report.mismatches:
            out.print(str(each), soft_wrap=True, highlight=False)
    if mismatches:
        raise typer.Exit(1)


def _self_test(config: EngineConfig, *, as_json: bool) -> None:
    from ostinato.self_test import self_test

    results = self_test(config.device, dtype=str(config.dtype).removeprefix("torch."))
    if as_json:
        rows = [
            {
                "fault": each.fault,
                "mode": each.mode,
                "passed": each.passed,
                "mismatches": [_as_values(mismatch) for mismatch in each.mismatches],
            }
            for each in results
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        out = console()
        for each in results:
            found = str(each.mismatches[0]) if each.mismatches else "nothing was found"
            passed = ("named", "green") if each.passed else ("missed", "red")
            line = Text.assemble(passed, f"  {each.fault}, {each.mode}")
            out.print(line, highlight=False)
            out.print(Text(f"       {found}"), soft_wrap=True, highlight=False)
    if not all(each.passed for each in results):
        raise typer.Exit(1)


def _as_values(mismatch: Mismatch) -> dict[str, Any]:
    values = asdict(mismatch)
    values["finding"]["cause"] = mismatch.finding.cause.name
    return {**values, "text": str(mismatch)}
