"""The program of the process that renders chat templates; ``template_process.py`` starts it.

It reads a JSON object per line and answers each with a line, ``[kind, detail]``: a template is
rendered with its variables, or where these are null, the names that it reads are listed. The kernel
limits what a template may use. The environment is a copy of transformers' for chat templates,
because importing theirs would import torch. Nothing else of this package is imported here.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

_LONGEST_ERROR = 1000
_BYTES_PER_BYTE = 16  # of a request, once it is read: small objects take far more than their text


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer

    def reply(kind: str, detail: object) -> None:
        replies.write(json.dumps([kind, detail]).encode() + b"\n")
        replies.flush()

    settings = json.loads(requests.readline())
    sys.path[:] = settings["path"]
    from jinja2 import meta, sandbox  # noqa: F401  before memory is counted

    used = _address_space()
    reply("ready", None)
    for line in requests:
        asked = json.loads(line)
        _limit_memory(used + settings["most_bytes"] + _BYTES_PER_BYTE * len(line))
        # This process does not outlive its limit, even if the one that waits has died.
        signal.alarm(int(settings["most_seconds"]) + 2)
        try:
            kind, detail = _answer(asked["template"], asked["variables"])
        except MemoryError:
            kind, detail = "memory", ""
        signal.alarm(0)
        _limit_memory(None)
        if kind == "text" and len(detail) > settings["longest_text"]:
            kind, detail = "too long", str(len(detail))
        reply(kind, detail)


def _answer(template: str, variables: dict[str, Any] | None) -> tuple[str, Any]:
    try:
        if variables is None:
            return "names", _names_read(template)
        return "text", _compiled(template).render(variables)
    except MemoryError:
        raise
    except Exception as error:  # templates are programs, and may raise anything
        return "error", f"{type(error).__name__}: {str(error)[:_LONGEST_ERROR]}"


@lru_cache(maxsize=1)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _names_read(template: str) -> list[str]:
    """Templates name the variables they read, so jinja's compiler sees all of them. There is no
    loader, and so no other template that could read more."""
    from jinja2 import meta

    return sorted(meta.find_undeclared_variables(_environment().parse(template)))


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's own words for training; they are just text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_text", [])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: Any) -> None:
        raise TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _address_space() -> int:
    """Bytes that this process uses; 0 if that cannot be measured or limited."""
    if sys.platform != "linux":
        return 0
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _limit_memory(most_bytes: int | None) -> None:
    if sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if most_bytes is None else most_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
