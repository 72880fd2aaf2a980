"""What clients of other servers say of their sessions, over HTTP: names, priority, the next prompt, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from starlette.datastructures import Headers

from rekindle.config import ServerSettings
from rekindle.engine.api import Engine
from rekindle.server.answers.hints import MOST_PRIORITY, hinted
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.endings import Endings
from rekindle.text.omissions import MOST_NAMED
from tests.server import conftest
from tests.server.conftest import Answer, Served
from tests.server.scripted import serving, write_scripted_model

CHAT = "/v1/chat/completions"
TALK = "The harbour master keeps a brass lamp on the third shelf of the pantry, and the jar of nails beside it."
HINTS = "nvext.agent_hints"


def asked(served: Served, *, body: dict[str, Any] | None = None, text: str = TALK, **headers: str) -> Answer:
    messages = [{"role": "user", "content": text}]
    return served.send(
        "POST", CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0, **(body or {})}, **headers
    )


def reported(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json["rekindle"]
    return found


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


def names(served: Served) -> set[str]:
    return {each["id"] for each in served.send("GET", "/v1/agents").json["data"]}


@pytest.mark.parametrize(
    ("body", "headers", "agent"),
    [
        ({}, {"x_dynamo_session_id": "run%2042"}, "run 42"),
        ({"session_id": "s/body"}, {}, "s%2Fbody"),
        ({"nvext": {"session_control": {"session_id": "controlled", "timeout": 300}}}, {}, "controlled"),
        ({"nvext": {"session_control": {"session_id": "inner"}}, "session_id": "outer"}, {}, "inner"),
        ({"session_id": "unused"}, {"x_agent_id": "mine", "x_dynamo_session_id": "theirs"}, "mine"),
        ({"session_id": "unused"}, {"x_dynamo_session_id": "first", "x_claude_code_session_id": "second"}, "first"),
    ],
)
def test_sessions_name_agents(served: Served, body: dict[str, Any], headers: dict[str, str], agent: str) -> None:
    before = names(served)
    assert reported(asked(served, body=body, text=f"{agent} {TALK}", **headers))["source"] != "own"
    assert names(served) == before | {agent}
    report = reported(asked(served, body=body, text=f"{agent} {TALK} What is there?", **headers))
    assert report["source"] == "own" and report["reused_tokens"] >= 16
    assert "session_id" not in report["ignored"] and "nvext" not in report["ignored"]


DIALECTS: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 2}),
    ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 2}),
    ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
    (
        "/api/chat",
        lambda text: {
            "messages": [{"role": "user", "content": text}],
            "stream": False,
            "options": {"num_predict": 2},
        },
    ),
    ("/api/generate", lambda text: {"prompt": text, "stream": False, "options": {"num_predict": 2}}),
    (CHAT, lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_every_dialect_has_them(served: Served, path: str, body: Callable[[str], dict[str, Any]]) -> None:
    agent = path.removeprefix("/").replace("/", ".")
    answer = served.send("POST", path, {**body(TALK), "session_id": agent, "nvext": {"agent_hints": {"osl": 5}}})
    assert reported(answer)["ignored"] == [f"{HINTS}.osl"] and agent in names(served)


def test_a_child_continues_its_parent(served: Served) -> None:
    reported(asked(served, text=f"Parent. {TALK}", x_dynamo_session_id="dyn-parent"))
    child = {"x_dynamo_session_id": "dyn-child", "x_dynamo_parent_session_id": "dyn-parent"}
    assert reported(asked(served, text=f"Parent. {TALK} And?", **child))["source"] == "parent"


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_a_child_continues_its_parent_in_every_dialect(
    served: Served, path: str, body: Callable[[str], dict[str, Any]]
) -> None:
    parent, text = path.removeprefix("/").replace("/", "."), f"In {path}. {TALK}"
    reported(served.send("POST", path, body(text), x_agent_id=f"{parent}-main"))
    child = {"x_agent_id": f"{parent}-child", "x_parent_agent_id": f"{parent}-main"}
    assert reported(served.send("POST", path, body(f"{text} And?"), **child))["source"] == "parent"


@pytest.mark.parametrize(
    ("name", "body", "headers"),
    [
        ("1st", {"session_id": "kid-1"}, {"x_parent_agent_id": "of%252F1st", "x_dynamo_parent_session_id": "nobody"}),
        ("2nd", {"session_id": "kid-2"}, {"x_parent_session_id": "of%252F2nd"}),
        (
            "3rd",
            {"nvext": {"session_control": {"session_id": "kid-3"}}},
            {"x_dynamo_parent_session_id": "of%2F3rd", "x_claude_code_parent_agent_id": "half"},
        ),
    ],
)
def test_a_session_that_a_body_names_continues_the_parent_of_a_header(
    served: Served, name: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    reported(asked(served, text=f"{name} of all. {TALK}", x_dynamo_session_id=f"of%2F{name}"))
    report = reported(asked(served, body=body, text=f"{name} of all. {TALK} And?", **headers))
    assert (report["source"], report["ignored"]) == ("parent", [])


def test_the_caller_of_a_body_has_the_header_of_its_parent() -> None:
    headers = Headers({"x-parent-agent-id": "p", "x-request-id": "r"})
    caller, _ = hinted(Caller("acme"), headers, {"session_id": "kid"})
    assert (caller.namespace, caller.agent, caller.parent) == ("acme", "kid", "p")
    assert caller.headers == {"x-parent-agent-id": "p"}
    alone, _ = hinted(Caller(), headers, {"session_id": "p"})
    assert alone.parent is None


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"session_id": 7}, {}, "session_id"),
        ({"session_id": "a\nb"}, {}, "session_id"),
        ({"nvext": "fast"}, {}, "nvext"),
        ({"nvext": {"agent_hints": 5}}, {}, HINTS),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, {}, f"{HINTS}.priority"),
        ({"nvext": {"agent_hints": {"priority": 1 << 31}}}, {}, f"{HINTS}.priority"),
        ({"nvext": {"agent_hints": {"speculative_prefill": 1}}}, {}, f"{HINTS}.speculative_prefill"),
        ({"nvext": {"session_control": {"action": "purge"}}}, {}, "nvext.session_control.action"),
        ({"nvext": {"session_control": {"session_id": "x" * 257}}}, {}, "nvext.session_control.session_id"),
        ({"nvext": {"greed_sampling": True}}, {}, "nvext.greed_sampling"),
        ({"nvext": {"max_thinking_tokens": 0}}, {}, "nvext.max_thinking_tokens"),
        ({"nvext": {"max_thinking_tokens": 64}}, {}, "nvext.max_thinking_tokens"),
        ({"session_id": "kid"}, {"x_parent_agent_id": "a%0Ab"}, "x-parent-agent-id"),
        ({}, {"x_dynamo_session_final": "yes"}, "x-dynamo-session-final"),
    ],
)
def test_wrong_types_are_refused(served: Served, body: dict[str, Any], headers: dict[str, str], param: str) -> None:
    answer = asked(served, body=body, **headers)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["message"].startswith(param)


def test_a_priority_is_bounded() -> None:
    for given, kept in ((7, 7), (10_000, MOST_PRIORITY), (-10_000, -MOST_PRIORITY), (None, 0)):
        caller, rest = hinted(Caller(), Headers({}), {"n": 1, "nvext": {"agent_hints": {"priority": given}}})
        assert (caller.hints.priority, rest) == (kept, {"n": 1})


@pytest.mark.parametrize("part", ["agent_hints", "session_control"])
def test_of_unknown_hints_only_those_that_are_named_are_looked_at(part: str) -> None:
    class Unseen:
        """A value that nothing may copy."""

        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("looked at")

    unknown: dict[str, Any] = {f"k{at}": at for at in range(MOST_NAMED)}
    known = {"priority": 7} if part == "agent_hints" else {"session_id": "mine"}
    given = {**unknown, **{f"z{at}": Unseen() for at in range(2000)}, **known}
    caller, _ = hinted(Caller(), Headers({}), {"nvext": {part: given}})
    assert caller.hints.ignored == tuple(f"nvext.{part}.{name}" for name in unknown)
    assert (caller.hints.priority, caller.agent) == ((7, None) if "priority" in known else (0, "mine"))


@pytest.mark.parametrize("depth", [100, 400, 700, 900])
def test_extensions_may_be_nested_as_deeply_as_they_like(served: Served, depth: int) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 1, "nvext": {{"x": {"[" * depth}'
    answer = served.send("POST", CHAT, (body + "]" * depth + "}}").encode())
    assert answer.status == 200 or (answer.status == 400 and "nested" in answer.error["message"]), answer.body


def test_what_has_no_effect_is_named_or_refused(served: Served) -> None:
    hints = {"osl": 512, "strict_priority": 2, "speculative_prefill": False, "priority": 3}
    off = {"greed_sampling": False, "token_data": [], "max_thinking_tokens": None}
    nvext = {"agent_hints": hints, "extra_fields": ["timing"], **off}
    expected = [f"{HINTS}.osl", f"{HINTS}.strict_priority", "nvext.extra_fields", *(f"nvext.{name}" for name in off)]
    expected.sort()
    assert sorted(reported(asked(served, body={"nvext": nvext}))["ignored"]) == expected
    final = asked(served, x_dynamo_session_final="true")
    assert reported(final)["ignored"] == ["x-dynamo-session-final"], "nobody's session can end"
    with conftest.serving(served.engine, ServerSettings(strict=True)) as strict:
        refused = asked(strict, body={"nvext": {"agent_hints": {"osl": 512}}})
        assert (refused.status, refused.error["param"]) == (400, f"{HINTS}.osl")
        understood = {"session_id": "strict", "nvext": {"agent_hints": {"priority": 1}}}
        assert asked(strict, body=understood).status == 200
        counted = strict.send("POST", "/v1/responses/input_tokens", {"input": TALK, **understood})
        assert counted.status == 200, "what can be asked can be counted"
        counted = strict.send(
            "POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": TALK}], **understood}
        )
        assert counted.status == 200


@pytest.mark.parametrize("form", ["header", "body"])
def test_a_session_that_ends_leaves_memory_and_can_go_on(served: Served, form: str) -> None:
    agent, text = f"ending-{form}", f"{form} ends. {TALK}"
    closing = {"nvext": {"session_control": {"session_id": agent, "action": "close"}}}
    body, headers = (closing, {}) if form == "body" else ({}, {"x_dynamo_session_final": "true"})
    going: dict[str, Any] = {"body": {"nvext": {"session_control": {"session_id": agent, "action": "open"}}}}
    going = going if form == "body" else {"x_dynamo_session_id": agent}

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = served.send("GET", f"/v1/agents/{agent}").json
        return found

    def is_out() -> bool:
        return not any(branch["hot_tokens"] for branch in shown()["branch_infos"])

    reported(asked(served, text=text, **going))
    assert not is_out()
    last = asked(served, text=f"{text} Then?", **{**going, "body": body, **headers})
    assert reported(last)["ignored"] == []
    until(is_out)
    assert shown()["saved_tokens"] == shown()["num_tokens"] > 0
    several = {"n": 2} if body else {}  # it goes on, and ends once more
    answer = asked(served, text=f"{text} Then?", **{**going, "body": {**body, **several}, **headers})
    reports = [choice.get("rekindle") or reported(answer) for choice in answer.json["choices"]]
    assert all(each["source"] == "own" and each["reused_tokens"] for each in reports)
    assert any(each["warm_tokens"] for each in reports), "one of them reads what all reuse"
    until(is_out)


def test_a_failure_while_a_session_ends_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    endings = Endings(cast(Engine, None))  # as wrong as can be
    endings.end("acme", "ada")
    until(lambda: "agent ada of acme has ended and stays in memory" in caplog.text)
    endings.close()
    assert "AttributeError" in caplog.text


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that computes one request at a time."""
    model = write_scripted_model(tmp_path_factory.mktemp("hints") / "scripted")
    with serving(
        model=str(model), store="off", threads=1, hot_bytes="64MiB", max_running=1, min_reuse_tokens=1
    ) as running:
        yield running


def test_a_higher_priority_gets_ahead_in_the_queue(single: Served) -> None:
    stats, order = single.engine.stats, list[str]()
    long = {"max_tokens": 1_500, "ignore_eos": True, "stream": True}

    def ask(name: str, body: dict[str, Any]) -> threading.Thread:
        def run() -> None:
            assert asked(single, body=body, text=f"talk, {name}").status == 200
            order.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [ask("running", long)]
    until(lambda: stats().num_running == 1)
    for count, (name, priority) in enumerate([("late", -5), ("plain", 0), ("soon", 5), ("first", 10)], start=1):
        # As long as a thread may wait on a busy machine before it says that it has its reply.
        slow = {"max_tokens": 150, "ignore_eos": True}
        threads.append(ask(name, {"nvext": {"agent_hints": {"priority": priority}}, **slow}))
        until(lambda count=count: stats().num_waiting == count)
    assert stats().num_running == 1, "the first one has ended too early to show anything"
    for thread in threads:
        thread.join()
    assert order == ["running", "first", "soon", "plain", "late"]


def test_the_next_prompt_is_computed_ahead_unless_a_request_says_no(single: Served, scripted_off: Served) -> None:
    def ahead(wanted: bool | None, served: Served = single) -> tuple[int, list[str]]:
        before = served.engine.stats().num_anticipations
        hints = {} if wanted is None else {"speculative_prefill": wanted}
        body = {"max_tokens": 40, "nvext": {"agent_hints": hints}}
        report = reported(asked(served, body=body, text=f"muse, {wanted}"))
        served.until_idle()
        return served.engine.stats().num_anticipations - before, report["ignored"]

    assert ahead(None) == ahead(True) == (1, [])
    assert ahead(False) == (0, [])
    assert ahead(True, scripted_off) == (0, [f"{HINTS}.speculative_prefill"])


@pytest.fixture(scope="module")
def scripted_off(single: Served) -> Iterator[Served]:
    """A server that computes nothing ahead."""
    model = str(single.engine.settings.model.model)
    with serving(model=model, store="off", threads=1, hot_bytes="16MiB", anticipate="off") as running:
        yield running
