"""The page of a report, opened as a file in a real browser: Chromium, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato import report_page
from ostinato.report.records import PictureNode, RunReport

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def test_nothing_in_a_report_ends_the_element_that_holds_it(report: RunReport) -> None:
    page = report_page(replace(report, model=HOSTILE))
    assert HOSTILE not in page
    assert page.count("</script>") == 2
    assert "{{" not in page


def test_a_page_needs_nothing_from_elsewhere(report: RunReport) -> None:
    page = report_page(report)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "default-src 'none'" in page


sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser(report: RunReport) -> Iterator[Any]:
    """After the engine: playwright leaves an event loop in this thread, until its end."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a report without a network. An error, or a breach of its policy, fails the test."""
    contexts, errors = [], []

    def open_report(report: RunReport, *, width: int = 1280, scheme: str = "light") -> Any:
        (tmp_path / "report.html").write_text(report_page(report), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto((tmp_path / "report.html").as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert errors == []


class TestInBrowser:
    pytestmark = in_browser

    def test_the_numbers_are_those_of_the_report(self, opened: Any, report: RunReport) -> None:
        page = opened(report)
        assert page.locator("#graphs tbody tr").count() == len(report.graphs)
        row = page.locator("#graphs tbody tr", has_text="decode, 4 tokens").inner_text().split("\t")
        assert row[1].strip() == "19"
        assert row[2].strip() == "25.0%"
        assert "TOO_LARGE" in page.inner_text("#eager")
        assert page.inner_text("#replayed-fine").endswith("of 40 steps")
        assert "FULL_AND_PIECEWISE" in page.inner_text("#plan")
        assert report.environment["torch"] in page.inner_text("#environment")
        for chart in ("chart-kv", "chart-graphs", "chart-free"):
            assert page.locator(f"#{chart} path").count() == 3

    def test_a_chosen_key_is_drawn(self, opened: Any, report: RunReport) -> None:
        page = opened(report)
        page.select_option("#which", "PIECEWISE, 8 tokens")
        (picture,) = (each for each in report.pictures.graphs if each.name == "PIECEWISE, 8 tokens")
        drawn = sum(len(group.nodes) for group in picture.groups)
        assert page.locator("#picture .node").count() == drawn
        assert page.locator("#picture .break").count() == len(picture.groups) - 1
        page.locator("#picture .node", has_text="mm").first.click()
        assert "layers.0.qkv_proj.weight" in page.inner_text("#node")
        page.locator("#graphs tbody button", has_text="decode, 8 tokens").click()
        assert page.input_value("#which") == "FULL, 8 tokens of 8 requests, decode"
        assert "layer 1" in page.inner_text("#picture")

    def test_graphs_are_sorted_by_keyboard(self, opened: Any, report: RunReport) -> None:
        page = opened(report)
        page.focus("#graphs [data-sort=num_tokens]")
        page.keyboard.press("Enter")
        keys = page.locator("#graphs tbody th").all_inner_texts()
        sizes = [int(key.split()[1]) for key in keys]
        assert sizes == sorted(sizes, reverse=True)

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_it_fits_a_phone(self, opened: Any, report: RunReport, scheme: str) -> None:
        page = opened(report, width=360, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        style = "getComputedStyle(document.body)"
        ground, ink = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
        assert (brightness(ground) > brightness(ink)) == (scheme == "light")
        boxes = page.locator("#picture .node rect").all()
        right = page.locator("#picture svg").bounding_box()
        assert all(
            each.bounding_box()["x"] + each.bounding_box()["width"] <= right["x"] + right["width"]
            for each in boxes
        )

    def test_names_are_shown_as_text(self, opened: Any, report: RunReport) -> None:
        nodes = [
            PictureNode(
                kind=HOSTILE,
                name=HOSTILE,
                label=HOSTILE,
                operator=HOSTILE,
                role="other",
                owners=[HOSTILE],
            )
            for _ in report.pictures.nodes
        ]
        hostile = replace(
            report,
            model=HOSTILE,
            mismatches=[HOSTILE],
            pictures=replace(report.pictures, nodes=nodes),
        )
        page = opened(hostile)
        page.locator("#picture .node").first.click()
        assert HOSTILE in page.inner_text("#model")
        assert HOSTILE in page.inner_text("#node")
        assert page.title() == "Ostinato: a run"
        assert page.locator("img").count() == 0


def brightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
