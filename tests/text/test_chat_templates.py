"""Chat templates: what they make of messages, and the limits of those that do harm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_talking

from ostinato import LLM, GraphConfig
from ostinato.errors import ClosedError, ModelLoadError, RequestError
from ostinato.text import template_process
from ostinato.text.template_process import TemplateProcess

MESSAGES: list[Any] = [
    {"role": "system", "content": " Ünïcode \U0001f600\n"},
    {"role": "user", "content": "w1 w2", "names": ("a", "b"), "score": 1.5},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}BODY{% endfor %}"


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking(tmp_path_factory.mktemp("talking"), "{{ messages }}")


@pytest.fixture(scope="module")
def llm(talking: Path) -> Iterator[LLM]:
    with LLM(talking, device="cpu", show_progress=False, graphs=GraphConfig(mode="NONE")) as opened:
        yield opened


def failure(llm: LLM, template: str) -> str:
    """What ``llm`` says of a conversation with ``template``."""
    llm.tokenizer.chat_template = template
    with pytest.raises(RequestError) as caught:
        llm.render_chat([{"role": "user", "content": "w1 w2"}])
    message = str(caught.value)
    assert len(message) < 600
    assert "\n" not in message
    return message


FAITHFUL = {
    "loop": "{% for m in messages %}\n  <{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}\n",
    "prompt": "{% if add_generation_prompt %}\n{{ bos_token }}go\n{% endif %}{{ eos_token }}",
    "json": "{{ messages[2] | tojson }}{{ messages[2] | tojson(indent=2) }}",
    "names": "{{ messages[1].names | join(',') }} {{ messages[1].score }} {{ messages[1].no }}",
    "nothing": "{{ tools }} {{ documents }} {{ tools is none }} {{ custom is defined }}",
    "generation": "a{% generation %}{{ messages[0].content }}{% endgeneration %}b",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}",
    "namespace": "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}",
    "macro": "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages|length) }}{{ 2 ** 10 }}",
    "escapes": "{{ '<b>&' }}{{ messages[0].content | upper }}{{ '%5d' | format(3) }}",
    "date": "{{ strftime_now('%Y') }}",
    "slices": "{{ messages[1:] | length }}{{ messages | selectattr('role', 'equalto', 'user') "
    "| map(attribute='content') | list }}{{ messages[2].tool_calls[0].arguments.items() | list }}",
}


@pytest.mark.parametrize("template", FAITHFUL.values(), ids=FAITHFUL.keys())
def test_texts_are_those_of_transformers(
    llm: LLM, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.tokenizer
    tokenizer.chat_template = template
    plain = json.loads(json.dumps(MESSAGES))
    expected = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    texts: list[str] = []
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **_: texts.append(text) or [])
    llm.render_chat(MESSAGES)
    assert texts == [expected]


BAD = {
    "raises": ("{{ raise_exception('x' * 9999) }}", "cannot render messages: .*TemplateError: xxx"),
    "recursive": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "divides": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "long": ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError"),
    "escapes": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "syntax": ("{% if %}", "TemplateSyntaxError"),
    "deep": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat template"),
    "control": ("{{ raise_exception('a\\x1b[31mb\\n\\ud800') }}", r"\\x1b\[31mb \\ud800"),
}


@pytest.mark.parametrize(("template", "message"), BAD.values(), ids=BAD.keys())
def test_bad_templates(llm: LLM, template: str, message: str) -> None:
    assert re.search(message, failure(llm, template))


BOMBS = {
    "repeat": "{{ 'x' * 10000000000 }}",
    "repeat a list": "{{ ['x'] * 10000000000 }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '%2000000000d' | format(1) }}",
    "str.format": "{{ '{:>2000000000}'.format(1) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "tojson": "{{ [1] | tojson(indent=10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "replace": "{{ ('x' * 99999).replace('x', 'x' * 99999) }}",
    "join": "{{ (['x' * 99999] * 99999) | join }}",
    "lipsum": "{{ lipsum(n=10000000, min=9999, max=10000) }}",
    "doubling ~": DOUBLING.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubling +": DOUBLING.replace("BODY", "{% set ns.s = ns.s + ns.s %}"),
    "doubling block": DOUBLING.replace(
        "BODY", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"
    ),
    "doubling lists": DOUBLING.replace("BODY", "{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s }}",
    "appending": "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}"
    "{% set ns.s = ns.s + [range(999) | list] %}{% endfor %}",
    "text": "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "integers": "{% set ns = namespace(n=3) %}{% for i in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "long text": "{{ 'x' * 50000000 }}",
}
ENDED_BY_TIME = ["lipsum", "doubling lists", "integers", "power"]
PROCESS_BYTES = 64 * 2**20  # what Python and jinja take


# In a process of its own, whose memory and children nothing else has touched.
BOMBED = """
import json, resource, sys
from ostinato.errors import RequestError
from ostinato.text import template_process
templates, told = template_process.TemplateProcess(), {}
def peak(who):
    return resource.getrusage(who).ru_maxrss * 1024
before = peak(resource.RUSAGE_SELF)
bombs, ended_by_time = json.load(sys.stdin)
for name, template in bombs.items():
    # Long where a machine that is busy must not decide which limit comes first.
    long = 60.0 if name in ("repeat", "long text") else 2.0
    template_process.TIME_LIMIT_S = 0.5 if name in ended_by_time else long
    try:
        templates.render(template, {}, "messages")
    except RequestError as error:
        told[name] = str(error)
templates.close()
grown = peak(resource.RUSAGE_SELF) - before
print(json.dumps({"told": told, "grown": grown, "child": peak(resource.RUSAGE_CHILDREN)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_bombs_take_neither_memory_nor_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMBED],
        input=json.dumps([BOMBS, ENDED_BY_TIME]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    told: dict[str, str] = found["told"]
    assert found["grown"] < 100 * 2**20
    assert found["child"] < template_process.MOST_BYTES + PROCESS_BYTES  # which renders
    assert told.keys() == BOMBS.keys()
    for name, message in told.items():
        assert "chat template" in message, name
        assert len(message) < 600, name
        assert "\n" not in message, name
    assert "more than 200 MiB of memory for messages" in told["repeat"]
    either = "more than 200 MiB of memory|did not end within 2 s"  # whichever comes first
    assert re.search(either, told["doubling ~"])
    assert "did not end within 0.5 s for messages" in told["power"]
    assert "turns messages into 50,000,000 characters" in told["long text"]


def test_a_template_that_does_not_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(template_process, "TIME_LIMIT_S", 0.2)
        assert "did not end within 0.2 s for messages" in failure(llm, ENDLESS)
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    assert llm.render_chat([{"role": "user", "content": "w3"}]) == [3]


def test_messages_that_are_no_data(llm: LLM) -> None:
    llm.tokenizer.chat_template = "{{ messages }}"
    for value in (object(), b"x", {(1, 2): 3}, {1, 2}):
        with pytest.raises(RequestError, match="cannot be given to the model's chat template"):
            llm.render_chat([{"role": "user", "content": "w1", "more": value}])


def children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, path.read_text().split())) if path.exists() else set()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes")
def test_the_process_is_started_once_and_ends_with_its_owner() -> None:
    before = children()
    templates = TemplateProcess()
    assert children() == before  # started when it is needed
    for number in range(3):
        assert templates.render("{{ n }}", {"n": number}, "n") == str(number)
    (started,) = children() - before
    os.kill(started, signal.SIGKILL)
    while (children() - before) == {started} and _alive(started):
        pass
    assert templates.render("{{ n }}", {"n": 4}, "n") == "4"  # by another
    templates.close()
    templates.close()
    assert children() == before
    with pytest.raises(ClosedError, match="closed"):
        templates.render("", {}, "n")

    dropped = TemplateProcess()
    dropped.render("", {}, "n")
    assert children() != before
    del dropped
    assert children() == before


def _alive(pid: int) -> bool:
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_renders_by_a_process_of_its_own() -> None:
    templates = TemplateProcess()
    assert templates.render("{{ n }}", {"n": 1}, "n") == "1"
    child = os.fork()
    if child == 0:
        ok = templates.render("{{ n }}", {"n": 2}, "n") == "2"
        templates.close()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert templates.render("{{ n }}", {"n": 3}, "n") == "3"
    templates.close()


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
