"""The dashboard without a browser: its files, what may load them, and the data they show."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import pytest
from serving_models import listening

from ostinato import AsyncLLM, SamplingParams
from ostinato.report.page import shared_file
from ostinato.serving.http.app import create_app
from ostinato.serving.http.page import PAGE_PATHS
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.overview import Overview

KEY = "a-long-secret"


@pytest.fixture(scope="module")
def locked(engine: AsyncLLM) -> Iterator[str]:
    """The address of a server that asks for a key."""
    with listening(create_app(engine, ServerConfig(api_key=KEY))) as url:
        yield url


def ask(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, trust_env=False, **options)


def text_of(name: str) -> str:
    return (files("ostinato.serving.http") / "dashboard" / name).read_text(encoding="utf-8")


def test_the_page_needs_no_key_but_its_data_does(locked: str) -> None:
    for path in sorted(PAGE_PATHS):
        answer = ask(locked + path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert KEY not in answer.text
    assert ask(locked + "/").headers["content-type"].startswith("text/html")
    assert ask(locked + "/dashboard/data").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert ask(locked + "/dashboard/data", headers=headers).status_code == 200
    assert ask(locked + "/dashboard/../../app.py").status_code in (401, 404)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = text_of("index.html")
    addresses = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert addresses
    assert set(addresses) <= PAGE_PATHS
    for name in ("index.html", "style.css", "app.js", "icon.svg"):
        text = text_of(name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//cdn|@import|url\(", text), name
    # What the policy would block: handlers, scripts and styles inside the page.
    assert not re.search(r"\son\w+=|<style|\sstyle=|<script(?![^>]*src=)", page)
    # What would turn text into markup.
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text_of("app.js")
    )


def luminance(color: str) -> float:
    def channel(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (channel(int(color[i : i + 2], 16)) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """At least 4.5 to 1 for every text on every ground, as WCAG AA has it."""
    blocks = re.findall(r":root \{([^}]*)\}", shared_file("shared.css"))
    assert len(blocks) == 2
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[theme]))
    for text in ("ink", "soft", "accent", "second", "warn", "bad"):
        for ground in ("ground", "card"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert contrast(colors["on-accent"], colors["accent"]) >= 4.5


def test_the_data(url: str, engine: AsyncLLM) -> None:
    before = ask(url + "/dashboard/data").json()
    body = {"prompt": "w1 w2 w3", "max_tokens": 6, "ignore_eos": True, "n": 3}
    httpx.post(url + "/v1/completions", json=body, trust_env=False).raise_for_status()
    data = ask(url + "/dashboard/data").json()
    assert data["model"] == "tiny"
    assert data["adapters"] == ["poet"]
    assert data["task"] == "generate"
    assert data["has_chat_template"] is True
    assert data["clock_s"] > before["clock_s"]
    assert data["stats"]["generation_tokens"] - before["stats"]["generation_tokens"] == 18
    assert data["latency"]["num_requests"] >= 1
    assert 0 < data["latency"]["ttft_ms"]["p50"] <= data["latency"]["e2e_ms"]["p99"]
    assert data["in_flight"] == []
    plan = data["plan"]
    assert plan["mode"] == "FULL_AND_PIECEWISE"
    assert plan["decode_sizes"] == plan["mixed_sizes"] == [1, 4, 8]
    assert plan["max_num_seqs"] == 8
    used = [graph for graph in data["graphs"] if graph["replays"]]
    replays = sum(graph["replays"] for graph in used)
    assert replays == sum(data["stats"]["replays"].values())
    padding = sum(graph["padding_tokens"] for graph in used)
    assert padding == data["stats"]["padding_tokens"] > 0
    decode = next(g for g in used if g["kind"] == "decode" and g["num_tokens"] == 4)
    assert decode["mode"] == "FULL"
    assert 0.2 <= decode["padding_fraction"] < 1  # three of four rows, at best
    assert decode["idle_s"] < 60
    unused = [graph for graph in data["graphs"] if not graph["replays"]]
    assert unused
    assert all(graph["idle_s"] is None for graph in unused)
    assert {each["steps"] for each in data["eager"]} == set(data["stats"]["eager"].values())


def test_requests_in_flight_are_named_without_their_text(engine: AsyncLLM) -> None:
    async def look() -> tuple[Overview, Overview]:
        params = SamplingParams(max_tokens=120, ignore_eos=True)
        async with engine.stream("w61 w62", params) as stream:
            await anext(stream)
            during = await engine.overview()
        return during, await engine.overview()

    during, after = asyncio.run(look())
    (request,) = during.in_flight
    assert request.state == "decode"
    assert request.num_prompt_tokens == 2
    assert 0 < request.num_generated_tokens < 120
    assert request.age_s > 0
    assert "w61" not in str(during)
    assert after.in_flight == []
