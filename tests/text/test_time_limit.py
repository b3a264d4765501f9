"""Code that does not end, and what a model brings along: chat templates, tokenizers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest
from tiny_models import save_talking

from ostinato import LLM, GraphConfig
from ostinato.errors import ModelLoadError, RequestError
from ostinato.text import chat
from ostinato.text.chat import render_chat
from ostinato.text.time_limit import within_seconds

MESSAGES = [{"role": "user", "content": "w1 w2"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_results_and_errors_are_those_of_the_call() -> None:
    assert within_seconds(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within_seconds(60, lambda: 1 // 0)


def test_a_call_that_does_not_end_is_stopped() -> None:
    def endless() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    before = threading.active_count()
    with pytest.raises(TimeoutError, match=r"no result after 0\.1 s"):
        within_seconds(0.1, endless)
    for _ in range(500):
        if threading.active_count() == before:
            return
        time.sleep(0.01)
    pytest.fail("its thread goes on")


@pytest.mark.parametrize("special_tokens", [{}, None], ids=["panics", "is damaged"])
def test_a_tokenizer_that_fails(tmp_path: Path, special_tokens: object) -> None:
    save_talking(tmp_path, None)
    file = tmp_path / "tokenizer.json"
    ends = [{"SpecialToken": {"id": "end", "type_id": 0}}]
    process = {"type": "TemplateProcessing", "single": ends, "pair": ends}
    content = json.loads(file.read_text())
    content["post_processor"] = process | {"special_tokens": special_tokens}
    file.write_text(json.dumps(content))
    with (
        pytest.raises((RequestError, ModelLoadError), match="tokenizer"),
        LLM(tmp_path, device="cpu", show_progress=False, graphs=GraphConfig(mode="NONE")) as llm,
    ):
        llm.generate("w1")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, r"chat template did not end within 0\.2 s for messages"),
        ("{{ raise_exception('x' * 9999) }}", "chat template cannot render messages: .*xxx"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("\n{{ 9 ** (9 ** 9) }}", r"computes a power \(\*\* in its line 2\)"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot render"),
    ],
    ids=["endless", "raises", "recursive", "divides", "long", "escapes", "syntax", "power", "deep"],
)
def test_bad_templates(
    tmp_path: Path, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TIME_LIMIT_S", 0.2 if template == ENDLESS else 60.0)
    save_talking(tmp_path, template)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(tokenizer, MESSAGES, 64)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
