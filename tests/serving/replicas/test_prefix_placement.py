"""Which replica gets a request: where its prefix is cached, unless there is too much to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.serving.replicas.prefix_placement import PrefixPlacement
from ostinato.serving.replicas.prompt_prefix import PromptPrefix


def prefix_of(prompt: Any, **more: Any) -> PromptPrefix:
    return PromptPrefix.of("/v1/completions", json.dumps({"prompt": prompt, **more}).encode())


def test_a_request_goes_where_its_prefix_is() -> None:
    placement: PrefixPlacement[str] = PrefixPlacement()
    first, other = prefix_of("a" * 1000), prefix_of("b" * 1000)
    placement.begin("y", first)
    placement.end("y", first)
    assert placement.ranked(["x", "y"], first) == ["y", "x"]
    assert placement.ranked(["x", "y"], prefix_of("a" * 1000 + "c" * 1000)) == ["y", "x"]
    assert placement.ranked(["x", "y"], other) == ["x", "y"]
    assert placement.ranked(["x", "y"], prefix_of("a" * 1000, model="poet")) == ["x", "y"]


def test_load_outweighs_a_short_prefix() -> None:
    placement: PrefixPlacement[str] = PrefixPlacement()
    prefix = prefix_of("a" * 600)
    for _ in range(3):
        placement.begin("y", prefix)
    assert placement.ranked(["x", "y"], prefix) == ["x", "y"]
    for _ in range(3):
        placement.end("y", prefix)
    assert placement.ranked(["x", "y"], prefix) == ["y", "x"]


def test_requests_without_a_prefix_go_round() -> None:
    placement: PrefixPlacement[int] = PrefixPlacement()
    counts = [0, 0, 0]
    for number in range(30):
        prefix = prefix_of(f"{number}")
        replica = placement.ranked([0, 1, 2], prefix)[0]
        placement.begin(replica, prefix)
        counts[replica] += 1
    assert counts == [10, 10, 10]


def test_replicas_that_are_gone_are_forgotten() -> None:
    placement: PrefixPlacement[str] = PrefixPlacement()
    prefix = prefix_of("a" * 1000)
    placement.begin("y", prefix)
    placement.keep(["x"])
    placement.end("y", prefix)  # its request ends later
    assert placement.ranked(["x", "y"], prefix) == ["x", "y"]
    placement.begin("x", prefix)
    placement.end("x", prefix)
    assert placement.ranked(["y", "x"], prefix) == ["x", "y"]


def test_the_oldest_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.serving.replicas.prefix_placement._MOST_KEYS", 3)
    placement: PrefixPlacement[str] = PrefixPlacement()
    first, second = prefix_of("a" * 600), prefix_of("b" * 600)
    for prefix in (first, second):
        placement.begin("y", prefix)
        placement.end("y", prefix)
    assert placement.ranked(["x", "y"], second) == ["y", "x"]
    assert placement.ranked(["x", "y"], first) == ["x", "y"]


CHAT = {"messages": [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "a"}]}


def test_conversations_that_begin_alike_share_keys() -> None:
    def of(last: str) -> PromptPrefix:
        messages = [CHAT["messages"][0], {"role": "user", "content": last}]
        return PromptPrefix.of("/v1/chat/completions", json.dumps({"messages": messages}).encode())

    one, two = of("x" * 600), of("y" * 600)
    assert one.keys[:2] == two.keys[:2]
    assert one.keys[-1] != two.keys[-1]


def test_variables_of_the_template_tell_conversations_apart() -> None:
    def of(**more: Any) -> PromptPrefix:
        return PromptPrefix.of("/v1/chat/completions", json.dumps({**CHAT, **more}).encode())

    plain, quick = of(), of(chat_template_kwargs={"enable_thinking": False})
    slow = of(chat_template_kwargs={"enable_thinking": True})
    assert len({each.keys[0] for each in (plain, quick, slow)}) == 3
    assert of(chat_template_kwargs=None) == plain


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", b"[1]"),
        ("/v1/completions", b"[" * 100_000),
        ("/v1/completions", b"\xff"),
        ("/v1/models", b""),
    ],
)
def test_what_has_no_prompt_has_no_prefix(path: str, body: bytes) -> None:
    assert PromptPrefix.of(path, body) == PromptPrefix()


@pytest.mark.parametrize("prompt", ["\ud800" * 600, list(range(600)), ["a" * 600, "b"], None, 5])
def test_any_prompt_has_a_prefix(prompt: Any) -> None:
    assert prefix_of(prompt) == prefix_of(prompt)


def test_long_prompts_have_few_keys() -> None:
    assert len(prefix_of("a" * 10**6).keys) == 64
