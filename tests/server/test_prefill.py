"""Agents made ready before they are asked, over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest

from tests.server.conftest import Served

SYSTEM = "You keep the harbour master's books and answer in one line. " * 8
TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "A pewter jug stands on the fourth shelf of the larder. Where?"},
]


def prefill(served: Served, agent: str, messages: Any, **more: Any) -> dict[str, Any]:
    answer = served.send("POST", f"/v1/agents/{quote(agent, safe='')}/prefill", {"messages": messages, **more})
    assert answer.status == 200, answer.body
    assert answer.json["id"] == agent
    report: dict[str, Any] = answer.json["rekindle"]
    assert report["completion_tokens"] == 0
    return report


def ask(served: Served, agent: str, messages: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = served.send("POST", "/v1/chat/completions", body, x_agent_id=quote(agent, safe=""))
    report: dict[str, Any] = answer.json["rekindle"]
    return report


def test_a_prompt_that_was_prefilled_is_there_when_it_is_asked(served: Served) -> None:
    talk = [{"role": "system", "content": f"ready/1 {SYSTEM}"}, TALK[1]]
    first = prefill(served, "ready/1", talk)
    assert first["computed_tokens"] > 0
    assert served.send("GET", "/v1/agents/ready%2F1").json["num_tokens"] > 0
    report = ask(served, "ready/1", talk)
    assert (report["outcome"], report["source"]) == ("exact", "own")
    assert report["reused_tokens"] == report["prompt_tokens"] - 1
    again = prefill(served, "ready/1", talk)
    assert again["reused_tokens"] >= again["prompt_tokens"] - 1


def test_of_a_beginning_what_all_that_continues_it_has_in_common_is_computed(served: Served) -> None:
    talk = [{"role": "system", "content": f"Beginnings. {SYSTEM}"}, TALK[1]]
    computed = prefill(served, "ready-system", talk[:1])["computed_tokens"]
    report = ask(served, "ready-system", talk)
    assert report["source"] == "own"
    assert report["reused_tokens"] >= computed - 8


def test_why_and_figures_report_a_prefill(served: Served) -> None:
    prefill(served, "ready-why", TALK)
    (entry,) = served.send("GET", "/v1/agents/ready-why/why").json["data"]
    assert (entry["endpoint"], entry["completion_tokens"]) == ("/v1/agents/{id}/prefill", 0)
    assert b'endpoint="/v1/agents/{id}/prefill"' in served.send("GET", "/metrics").body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"messages": TALK, "model": "gpt-9"}, "model"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ],
)
def test_what_cannot_be_prefilled_is_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.send("POST", "/v1/agents/never-prefilled/prefill", body)
    assert (answer.status in (400, 404), answer.error["param"]) == (True, param)
    assert served.send("GET", "/v1/agents/never-prefilled").status == 404


def test_a_prompt_that_is_too_long_is_a_400(served: Served) -> None:
    said = [{"role": "user", "content": "word " * 20_000}]
    answer = served.send("POST", "/v1/agents/never-prefilled/prefill", {"messages": said})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


def test_who_leaves_ends_the_prefill(served: Served) -> None:
    said = [{"role": "user", "content": "A tall clock ticks in the hall of the mill. " * 250}]
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request("POST", "/v1/agents/leaving/prefill", json.dumps({"messages": said}))
        while not served.engine.stats().num_running:
            threading.Event().wait(0.001)
    while served.engine.stats().num_running:
        threading.Event().wait(0.001)
    entries = served.send("GET", "/v1/agents/leaving/why").json["data"]
    assert [entry["finish_reason"] for entry in entries] in (["cancelled"], [])


def test_what_is_on_disk_can_be_loaded_before_it_is_asked_for(served: Served) -> None:
    talk = [{"role": "system", "content": f"Loaded. {SYSTEM}"}, TALK[1]]
    ask(served, "loaded", talk)
    offloaded = served.send("POST", "/v1/agents/loaded/offload").json
    assert offloaded["hot_tokens"] < offloaded["num_tokens"]
    answer = served.send("POST", "/v1/agents/loaded/load")
    assert answer.status == 200, answer.body
    assert answer.json["id"] == "loaded"
    report = answer.json["rekindle"]
    assert report["warm_tokens"] > 0
    shown = served.send("GET", "/v1/agents/loaded").json
    assert shown["hot_tokens"] == shown["num_tokens"]
    assert ask(served, "loaded", talk)["warm_tokens"] == 0
    assert served.send("POST", "/v1/agents/nobody/load").status == 404


def test_an_agent_is_shown_branch_by_branch(served: Served) -> None:
    talk = [{"role": "system", "content": f"Branches. {SYSTEM}"}, TALK[1]]
    ask(served, "tree", talk)
    ask(served, "tree", [talk[0], {"role": "user", "content": "Something else altogether, please."}])
    ask(served, "tree/leaf", talk)
    shown = served.send("GET", "/v1/agents/tree").json
    assert shown["branches"] == len(shown["branch_infos"]) == 2
    for branch in shown["branch_infos"]:
        assert branch["hot_tokens"] + branch["warm_tokens"] >= branch["num_tokens"] - 1 >= 0
        assert branch["shared_tokens"] <= branch["num_tokens"]
    shared = [branch for branch in shown["branch_infos"] if branch["shared_with"] == ["tree/leaf"]]
    assert shared
    assert max(branch["shared_tokens"] for branch in shared) > 0
    listed = {entry["id"]: entry for entry in served.send("GET", "/v1/agents").json["data"]}
    assert "branch_infos" not in listed["tree"]
