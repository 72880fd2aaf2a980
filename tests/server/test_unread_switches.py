"""Switches that the template does not read are named in every dialect; one that it reads under another name is not."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.text.omissions import NOTHING_OMITTED, Omitted, with_unread_variables
from rekindle.text.template import ChatTemplate
from tests.server.conftest import Served

SAID = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
ASKED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {**SAID, "reasoning_effort": "none"}, ["reasoning_effort"]),
    ("/v1/chat/completions", {**SAID, "reasoning_effort": "high", "colour": 1}, ["colour", "reasoning_effort"]),
    (
        "/v1/chat/completions",
        {**SAID, "chat_template_kwargs": {"enable_thinking": False, "messages_too": 1}},
        ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.messages_too"],
    ),
    (
        "/v1/messages",
        {**SAID, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        ["thinking", "output_config.effort"],
    ),
    (
        "/v1/responses",
        {"input": "Hello!", "max_output_tokens": 1, "store": False, "reasoning": {"effort": "low"}},
        ["reasoning.effort"],
    ),
    ("/api/chat", {"messages": SAID["messages"], "model": "pocket", "stream": False, "think": False}, ["think"]),
]


@pytest.mark.parametrize(("path", "body", "names"), ASKED, ids=[f"{path} {names[-1]}" for path, _, names in ASKED])
def test_what_the_template_does_not_read_is_named(
    served: Served, path: str, body: dict[str, Any], names: list[str]
) -> None:
    answer = served.send("POST", path, body, x_agent_id="switches")
    assert answer.status == 200, answer.body
    assert answer.json["rekindle"]["ignored"] == names
    (newest, *_) = served.send("GET", "/v1/agents/switches/why").json["data"]
    assert newest["ignored"] == names


def test_prefills_name_it_too(served: Served) -> None:
    body = {"messages": SAID["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    answer = served.send("POST", "/v1/agents/switches/prefill", body)
    assert answer.json["rekindle"]["ignored"] == ["chat_template_kwargs.enable_thinking"], answer.body


def test_a_request_without_switches_names_none(served: Served) -> None:
    assert served.send("POST", "/v1/chat/completions", SAID).json["rekindle"]["ignored"] == []


def test_a_template_says_what_it_reads() -> None:
    source = (
        "{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{%- macro line(m) %}{{ m.content }}{% endmacro %}"
        "{%- for m in messages %}{{ line(m) }}{% endfor %}{% generation %}{{ bos_token }}{% endgeneration %}"
    )
    assert ChatTemplate({"default": source, "tool_use": "{{ tools }}"}, {}).variables == {
        "enable_thinking",
        "messages",
        "bos_token",
        "tools",
    }
    assert ChatTemplate({}, {}).variables == frozenset()


def test_a_parameter_is_of_use_if_one_of_its_variables_is_read() -> None:
    given = {"enable_thinking": "reasoning_effort", "reasoning_effort": "reasoning_effort", "x": "y"}
    known = Omitted(ignored=("z",))
    assert with_unread_variables(known, given, {"enable_thinking"}).ignored == ("z", "y")
    assert with_unread_variables(known, given, {"x"}).ignored == ("z", "reasoning_effort")
    assert with_unread_variables(NOTHING_OMITTED, given, {*given}) == NOTHING_OMITTED
