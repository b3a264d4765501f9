"""The page at ``/`` that shows what the engine and its graphs are doing, and its data.

Static files of this package: no build step, nothing from elsewhere. They contain no data, so they
need no key; ``/dashboard/data`` does.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ostinato import __version__
from ostinato.report.page import shared_file
from ostinato.serving.http.openapi import document
from ostinato.serving.http.openapi.answer_schemas import DashboardAnswer
from ostinato.serving.http.state import Served
from ostinato.serving.overview import Overview
from ostinato.serving.recent_requests import RecentRequests

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
    "/dashboard/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/dashboard/shared.js": ("shared.js", "text/javascript; charset=utf-8"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)

# Nothing but these files and this server; no script or style inside the page, no frame around it.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_page_router(served: Served) -> APIRouter:
    """The page, its files, and ``/dashboard/data``."""
    router = APIRouter()
    recent = RecentRequests()
    served.llm.observe(recent.observe)
    for path, (name, media_type) in _FILES.items():
        response = Response(_content(name), media_type=media_type, headers=_HEADERS)
        router.add_api_route(path, _always(response), include_in_schema=False)

    @router.get("/dashboard/data", responses=document.read(DashboardAnswer))
    async def data() -> Response:
        """What the dashboard shows; waits for the end of the engine's current step."""
        overview = await served.llm.overview()
        return JSONResponse(
            {**_server(served), "latency": recent.summary(), **_engine(overview)},
            headers={"Cache-Control": "no-store"},
        )

    return router


def _content(name: str) -> str:
    """A file of the dashboard, with what it shares with run reports."""
    if name == "shared.js":
        return shared_file(name)
    own = (files("ostinato.serving.http") / "dashboard" / name).read_text(encoding="utf-8")
    return shared_file("shared.css") + own if name == "style.css" else own


def _always(response: Response) -> Any:
    async def answer() -> Response:
        return response

    return answer


def _server(served: Served) -> dict[str, Any]:
    llm = served.llm
    return {
        "version": __version__,
        "clock_s": time.monotonic(),
        "uptime_s": time.time() - served.started,
        "model": served.name,
        "adapters": llm.adapters,
        "task": llm.task,
        "max_model_len": llm.max_model_len,
        "has_chat_template": bool(getattr(llm.tokenizer, "chat_template", None)),
    }


def _engine(overview: Overview) -> dict[str, Any]:
    stats = overview.stats
    graphs = [{**asdict(row), "padding_fraction": row.padding_fraction} for row in overview.graphs]
    return {
        "stats": {**asdict(stats), "acceptance_length": stats.acceptance_length},
        "plan": asdict(overview.plan),
        "graphs": graphs,
        "eager": [asdict(each) for each in overview.eager],
        "in_flight": [asdict(each) for each in overview.in_flight],
    }
