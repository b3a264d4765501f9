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
import torch
from tiny_models import save_talking

from ostinato import LLM, GraphConfig
from ostinato.errors import ClosedError, ModelLoadError, RequestError
from ostinato.text import template_process
from ostinato.text.chat import render_chat
from ostinato.text.chat_options import ChatOptions
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
        opened.tokenizer.bos_token = "w2"
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


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    opened = TemplateProcess()
    yield opened
    opened.close()


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


# As Qwen3's and Llama's: what is left out has a default.
VARIABLES = """\
{%- if date is not defined %}{% set date = 'w9' %}{% endif %}
{%- macro said(text) %}{{ style | default('w8') }} {{ text }}{% endmacro %}
{%- set fixed = 'w7' %}
{%- for m in messages %}{{ said(m.content) }} {{ date }} {{ fixed }}{% endfor %}
{%- if tools %} w6{% endif %}{% if documents %} {{ documents | tojson }}{% endif %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %} w5
{%- endif %}{{ eos_token }}"""
ASKED: list[Any] = [{"role": "user", "content": "w1"}]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "date": "w3", "style": None},
        {"style": {"a": [1, 2.5, None, "Ünïcode \U0001f600"]}},
        {"documents": [{"title": "w1"}]},
    ],
    ids=str,
)
def test_variables_are_those_of_transformers(
    llm: LLM, variables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.tokenizer
    tokenizer.chat_template = VARIABLES
    expected = tokenizer.apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=True, **variables
    )
    texts: list[str] = []
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **_: texts.append(text) or [])
    llm.render_chat(ASKED, chat_template_kwargs=variables)
    assert texts == [expected]


READ = {
    "set in a branch": ("{% if x %}{% set a = 1 %}{% endif %}{{ a }}", ["a", "x"]),
    "default": ("{% set a = a | default(1) %}{{ a }}", ["a"]),
    "set first": ("{% set a = 1 %}{{ a }}", []),
    "macro": (
        "{% macro f(b) %}{% if c is not defined %}{% set c = b %}{% endif %}{{ c }}"
        "{% endmacro %}{{ f(1) }}",
        ["c"],
    ),
    "loop": (
        "{% for a in b if a.c %}{{ loop.index }}{{ a }}{{ d[e] }}{% endfor %}",
        ["b", "d", "e"],
    ),
    "namespace": ("{% set ns = namespace(a=b) %}{% set ns.a = c %}{{ ns.a }}", ["b", "c"]),
    "block": (
        "{% block f %}{{ a }}{% endblock %}{% generation %}{{ b }}{% endgeneration %}",
        ["a", "b"],
    ),
    "never": ("{% if false %}{{ a }}{% endif %}{{ b if false else 1 }}", ["a", "b"]),
    "functions": ("{{ strftime_now('%Y') }}{{ range(a) }}{{ raise_exception(b) }}", ["a", "b"]),
}


@pytest.mark.parametrize(("template", "names"), READ.values(), ids=READ.keys())
def test_the_variables_that_a_template_reads(
    templates: TemplateProcess, template: str, names: list[str]
) -> None:
    assert sorted(templates.variables_read(template, "messages")) == names


def test_a_misspelt_variable_is_refused_and_the_others_are_listed(llm: LLM) -> None:
    llm.tokenizer.chat_template = VARIABLES
    for name in ("enable_thinkin", "fixed", "m", "namespace", "a b", "self", "x" * 9999):
        with pytest.raises(RequestError, match="template does not read") as caught:
            llm.render_chat(ASKED, chat_template_kwargs={"date": "w3", name: 1})
        message = str(caught.value)
        assert message.startswith(f"chat_template_kwargs has '{name[:20]}")
        assert ("did you mean enable_thinking?" in message) is (name == "enable_thinkin")
        assert (
            "(variables that it reads: date, documents, enable_thinking, eos_token, st" in message
        )
        assert len(message) < 600


def test_a_template_without_variables_lists_none(llm: LLM) -> None:
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    refused = r"\(variables that it reads: none that can be set\)"
    with pytest.raises(RequestError, match=refused):
        llm.render_chat(ASKED, chat_template_kwargs={"enable_thinking": 1})


def deep() -> Any:
    value: Any = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([], r"must be a dict of variables for the chat template, such as .*, got \[\]"),
        ("date", "must be a dict .*got 'date'"),
        ({3: 4}, "has the name 3; names are texts"),
        ({"date": {"a": {3: 4}}}, r"\['date'\]\['a'\] has the name 3"),
        ({"date": float("nan")}, r"\['date'\] must be text, a finite number, .*got nan"),
        ({"date": float("inf")}, "got inf"),
        ({"date": 10**5000}, "got an object of type int"),
        ({"date": [1, b"x"]}, r"\['date'\]\[1\] must be .*got b'x'"),
        ({"date": {1, 2}}, r"got {1, 2}"),
        ({"date": torch.ones(2)}, r"got tensor\(\[1., 1.\]\)"),
        ({"date": ["\ud800"]}, r"\['date'\]\[0\] has a lone surrogate"),
        ({"\ud800": 1}, ": a name has a lone surrogate"),
        ({"date": deep()}, "is nested too deeply, above 100 levels"),
        ({"messages": []}, "cannot set 'messages': pass the conversation as messages"),
        ({"tools": []}, "cannot set 'tools': pass them as tools"),
        ({"add_generation_prompt": False}, "conversations are always answered"),
        ({"continue_final_message": True}, r"render the messages yourself and use generate\(\)"),
        ({"chat_template": "w1"}, "put it into the checkpoint's chat_template.jinja"),
        ({"bos_token": "w1"}, "cannot set 'bos_token': it comes from the checkpoint's tokenizer"),
    ],
    ids=[
        *("list", "text", "name", "inner name", "nan", "inf", "digits", "bytes", "set", "tensor"),
        *(
            "surrogate",
            "name's surrogate",
            "deep",
            "messages",
            "tools",
            "prompt",
            "continue",
            "template",
            "token",
        ),
    ],
)
def test_bad_variables_are_refused_before_anything_is_rendered(
    llm: LLM, variables: Any, message: str
) -> None:
    llm.tokenizer.chat_template = "{{ raise_exception('rendered') }}{{ date }}{{ bos_token }}"
    with pytest.raises(RequestError, match=f"^chat_template_kwargs.*{message}"):
        llm.render_chat(ASKED, chat_template_kwargs=variables)


def test_the_template_for_tools_has_variables_of_its_own(
    llm: LLM, templates: TemplateProcess
) -> None:
    llm.tokenizer.chat_template = {"default": "{{ a }}", "tool_use": "{{ tools | length }} {{ b }}"}

    def rendered(variables: dict[str, str], tools: Any = None) -> list[int]:
        options = ChatOptions(tools=tools, chat_template_kwargs=variables)
        return render_chat(templates, llm.tokenizer, ASKED, 64, options=options)

    assert rendered({"a": "w3"}) == [3]
    assert rendered({"b": "w4"}, tools=[{}, {}]) == [0, 4]
    for wrong, tools in (("b", None), ("a", [{}])):
        with pytest.raises(RequestError, match="does not read"):
            rendered({wrong: "w3"}, tools)


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


@pytest.mark.parametrize(
    ("template", "role"), [("", "system"), ("{# developer #}", "developer")], ids=["old", "new"]
)
def test_developers_are_the_system_where_a_template_does_not_know_them(
    llm: LLM, template: str, role: str
) -> None:
    llm.tokenizer.chat_template = template + "{{ 'w1' if messages[0].role == 'system' else 'w2' }}"
    (token,) = llm.render_chat([{"role": "developer", "content": "w3"}])
    assert llm.tokenizer.decode([token]) == {"system": "w1", "developer": "w2"}[role]


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
from ostinato.text.chat import render_chat
from ostinato.text.chat_options import ChatOptions
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
