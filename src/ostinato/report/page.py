"""A run report as one HTML page that stands alone: no server, no network, no script from elsewhere.

The page contains the report as JSON and draws it. What comes from the report is set as text, never
as markup, and the page's own policy allows only the script and the style that are in it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from ostinato.report.records import RunReport
from ostinato.report.run_file import report_text


def report_page(report: RunReport) -> str:
    """The page of one report; open it in a browser, from anywhere."""
    style = shared_file("shared.css") + _file("report.css")
    script = shared_file("shared.js") + _file("report.js")
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "style": style,
        "script": script,
        "data": report_text(report).replace("<", "\\u003c"),  # nothing in it ends the element
    }
    page = _file("report.html")
    before, *rest = page.split("{{")
    return before + "".join(
        parts[name] + after for name, after in (part.split("}}", 1) for part in rest)
    )


def shared_file(name: str) -> str:
    """A file that the dashboard of the server uses too: ``shared.css`` or ``shared.js``."""
    return _file(name)


def _file(name: str) -> str:
    return (files("ostinato.report") / "files" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
