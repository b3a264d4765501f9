"""The dashboard in a real browser: Chromium, without a window."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving_models import listening

from ostinato import AsyncLLM
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

KEY = "a-long-secret"


@pytest.fixture(scope="module")
def browser(engine: AsyncLLM) -> Iterator[Any]:
    """After the engine: playwright leaves an event loop in this thread, until its end."""
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs rights that containers seldom have, and it only opens our own page.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a new profile. An error, or a breach of the page's own policy, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    yield page
    context.close()
    assert [each for each in errors if "Failed to load resource" not in each] == []


def test_a_prompt_by_keyboard(page: Any, url: str) -> None:
    page.goto(url)
    page.locator("#status[data-state=live]").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#prompt")
    page.keyboard.type("w1 w2")
    page.fill("#max-tokens", "5")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#answer-fine", has_text="5 tokens").wait_for()
    words = page.inner_text("#answer").split()
    assert len(words) == 5
    assert all(word.startswith("w") for word in words)
    page.locator("#graphs tbody tr:not(.unused)").first.wait_for()
    assert page.locator("#graphs tbody tr").count() > 3
    assert "FULL_AND_PIECEWISE" in page.inner_text("#plan")
    assert page.inner_text("#rate").isdecimal()
    assert page.inner_text("#ttft").endswith("s")


def test_graphs_are_sorted_by_any_column(page: Any, url: str) -> None:
    page.goto(url)
    page.locator("#graphs tbody tr").first.wait_for()
    page.focus("#graphs [data-sort=num_tokens]")
    page.keyboard.press("Enter")
    keys = page.locator("#graphs tbody th").all_inner_texts()
    sizes = [int(key.split()[1]) for key in keys]
    assert sizes == sorted(sizes, reverse=True)
    assert page.locator("#graphs th[aria-sort=descending]").count() == 1
    page.keyboard.press("Enter")
    assert page.locator("#graphs tbody th").first.inner_text().split()[1] == "1"


def test_what_a_model_writes_is_text(page: Any, url: str) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    event = json.dumps({"choices": [{"delta": {"content": evil}}]})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\n"),
    )
    page.on("dialog", lambda dialog: pytest.fail("a script of the model ran"))
    page.goto(url)
    page.locator("#status[data-state=live]").wait_for()
    page.click("#send")
    page.locator("#answer", has_text="script").wait_for()
    assert page.text_content("#answer") == evil
    assert page.locator("#answer *").count() == 0


def test_errors_are_shown(page: Any, url: str) -> None:
    page.goto(url)
    page.locator("#status[data-state=live]").wait_for()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("#send")
    page.locator("#answer.failed").wait_for()
    page.unroute("**/v1/chat/completions")
    page.fill("#prompt", "w1 " * 200)
    page.click("#send")
    page.locator("#answer.failed", has_text="has 202 tokens").wait_for()


def test_a_key_is_asked_for(page: Any, engine: AsyncLLM) -> None:
    with listening(create_app(engine, ServerConfig(api_key=KEY))) as url:
        page.goto(url)
        page.locator("#ask[open]").wait_for()
        page.keyboard.press("Escape")  # there is nothing to see without a key
        page.keyboard.press("Escape")
        page.locator("#key:focus").wait_for()  # a browser may close the dialog, which opens again
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("That key is wrong.").wait_for()
        assert not page.inner_text("#rate").isdecimal()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.locator("#status[data-state=live]").wait_for()
        page.fill("#max-tokens", "2")
        page.click("#send")
        page.locator("#answer-fine", has_text="2 tokens").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(page: Any, url: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(url)
    page.locator("#graphs tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 243, 239)", "dark": "rgb(21, 19, 17)"}[scheme]


def test_long_names_fit_on_a_phone(page: Any, url: str) -> None:
    """A model that is served by its path, with an adapter: both are in the list of models."""

    def with_long_names(route: Any) -> None:
        answer = route.fetch()
        names = {"model": "/models/" + "m" * 200, "adapters": ["a" * 200]}
        route.fulfill(response=answer, json={**answer.json(), **names})

    page.route("**/dashboard/data", with_long_names)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(url)
    page.locator("#which:visible").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.unroute_all(behavior="wait")
