"""A replay against a server that is not ours: what is sent, in which order, and what counts as which failure."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import free_port
from rekindle.server.dayfile import Day, DayEvent, DayWriter, Header, RecordedRequest
from rekindle_lab.bench.replay.client import OpenAIServer
from rekindle_lab.bench.replay.replay import Pace, Replay, Replayed
from rekindle_lab.bench.replay.run import ReplayOptions, lines_of, run_replay
from tests.lab.bench.foreign import Foreign, foreign_server, text

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens": 2}


def request(at_s: float, session: str, *said: str, answer: str = "recorded", **more: Any) -> RecordedRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(said)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "top_k": 3, "rekindle": {"reuse": "off"}}
    headers = {"x-agent-id": session}
    reply = {"role": "assistant", "content": answer}
    return RecordedRequest(at_s, body, reply, session=session, agent=session, headers=headers, id=str(at_s), **more)


def day_of(*requests: RecordedRequest, events: tuple[DayEvent, ...] = ()) -> Day:
    return Day(Header(0.0), requests, events)


def replayed(foreign: Foreign, day: Day, pace: Pace | None = None, **more: Any) -> Replayed:
    server = OpenAIServer(foreign.url)
    server.wait_answering()
    return Replay(day, server, pace or Pace(speed=float("inf")), **more).run()


def test_a_foreign_server_is_sent_what_openai_knows() -> None:
    with foreign_server(lambda _: text("fine")) as foreign:
        found = replayed(foreign, day_of(request(0, "a b", "hi")))
    (body,), (headers,) = foreign.bodies, foreign.headers
    assert set(body) == {"messages", "temperature", "max_tokens", "model", "stream", "stream_options"}
    assert (body["model"], body["stream"]) == ("other-model", True)
    assert headers["x-agent-id"] == "a b"
    assert found.exchanges[0].answer.text == "fine"


def test_live_replies_go_back_and_recorded_ones_do_not() -> None:
    day = day_of(request(0, "a", "hi"), request(1, "a", "hi", "recorded", "who?"))
    for pace, wanted in ((Pace(1e9), "live one"), (Pace(1e9, mode="recorded"), "recorded")):
        with foreign_server(lambda _: text("live one")) as foreign:
            replayed(foreign, day, pace)
        assert foreign.bodies[1]["messages"][1]["content"] == wanted


@pytest.mark.parametrize(
    ("reply", "kind", "problem"),
    [
        ({"status": 503, "error": "no room"}, "http 503", "no room"),
        ({"content": "half", "breaks_off": True}, "stream", "broke off"),
        ({"content": "half", "says": "out of memory"}, "stream", "out of memory"),
    ],
)
def test_failures_have_kinds_and_the_day_goes_on(reply: dict[str, Any], kind: str, problem: str) -> None:
    day = day_of(request(0, "a", "fail"), request(1, "a", "fail", "recorded", "who?"))

    def answer(body: dict[str, Any]) -> Any:
        return reply if len(body["messages"]) == 1 else text("fine")

    with foreign_server(answer) as foreign:
        first, second = replayed(foreign, day).exchanges
    assert first.answer.error == kind and problem in first.answer.problem
    assert second.answer.error is None
    assert second.sent["messages"][1]["content"] == "recorded", "a failed request has no reply to take over"


def test_a_server_that_is_gone_is_a_failure_of_a_request() -> None:
    server = OpenAIServer(f"http://127.0.0.1:{free_port()}")
    assert server.chat({"messages": []}).error == "connection"
    with pytest.raises(RekindleError, match="does not answer"):
        server.wait_answering(within_s=0.01)


def test_calls_are_put_together() -> None:
    def calls(_: Any) -> Any:
        return {"calls": [("add", '{"a": 1}'), ("report", '{"number": 2}')], "usage": USAGE}

    with foreign_server(calls) as foreign:
        (found,) = replayed(foreign, day_of(request(0, "a", "add"))).exchanges
    assert [(call["id"], call["function"]) for call in found.answer.message["tool_calls"]] == [
        ("own-0", {"name": "add", "arguments": '{"a": 1}'}),
        ("own-1", {"name": "report", "arguments": '{"number": 2}'}),
    ]
    assert (found.answer.prompt_tokens, found.answer.cached_tokens) == (10, 4)


def test_sessions_run_beside_one_another_and_wait_within() -> None:
    together = threading.Barrier(3)
    order: list[str] = []

    def answer(body: dict[str, Any]) -> Any:
        order.append(body["messages"][-1]["content"])
        together.wait(timeout=60)
        return text("fine")

    said = [request(at, session, f"{session}{at}") for at in (0, 1, 2) for session in "abc"]
    with foreign_server(answer) as foreign:
        replayed(foreign, day_of(*said))
    assert foreign.most_running == 3
    for session in "abc":
        assert [item for item in order if item[0] == session] == [f"{session}{at}" for at in (0, 1, 2)]


def test_people_think_as_long_as_recorded_divided_by_speed() -> None:
    slept: list[float] = []
    day = day_of(
        request(20, "a", "1", duration_s=5.0),
        request(30, "a", "2", duration_s=50.0),
        request(60, "a", "3"),  # recorded before the answer to 2 had come
        request(4100, "a", "4"),
        events=(DayEvent(100.0, "pause", 3000.0),),
    )
    with foreign_server(lambda _: text("fine")) as foreign:
        replayed(foreign, day, Pace(speed=10.0), sleep=slept.append)
    assert slept == [2.0, 0.5, 0.0, 300.0, 100.0]


def test_everybody_waits_for_a_restart(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def answer(body: dict[str, Any]) -> Any:
        with log.open("a") as file:
            file.write(body["messages"][-1]["content"] + "\n")
        return text("fine")

    said = [request(at, session, str(at)) for at in (1.0, 12.0, 22.0) for session in "ab"]
    events = (DayEvent(10.0, "kill"), DayEvent(20.0, "restart"))
    pace = Pace(speed=float("inf"), kill_cmd=f"echo kill >> {log}", restart_cmd=f"echo restart >> {log}")
    with foreign_server(answer) as foreign:
        found = replayed(foreign, day_of(*said, events=events), pace)
    assert log.read_text().split() == ["1.0", "1.0", "kill", "12.0", "12.0", "restart", "22.0", "22.0"]
    after = [(item.after, item.since_s) for item in found.exchanges[::2]]
    assert after == [(None, 0.0), ("kill", 2.0), ("restart", 2.0)]
    assert all(item.seconds is not None for item in found.events)


def test_without_a_command_a_restart_is_skipped() -> None:
    day = day_of(request(1, "a", "1"), request(3, "a", "2"), events=(DayEvent(2.0, "kill"),))
    with foreign_server(lambda _: text("fine")) as foreign:
        found = replayed(foreign, day)
    assert found.events[0].seconds is None
    assert [item.after for item in found.exchanges] == [None, None]


def test_a_kill_without_a_command_of_its_own_takes_that_of_restarts() -> None:
    kill = DayEvent(0.0, "kill")
    assert Pace(restart_cmd="again").command(kill) == "again"
    assert Pace(restart_cmd="again", kill_cmd="kill").command(kill) == "kill"
    assert Pace(kill_cmd="kill").command(DayEvent(0.0, "restart")) is None


def test_a_command_that_fails_ends_the_replay() -> None:
    day = day_of(request(1, "a", "1"), events=(DayEvent(2.0, "restart"),))
    with foreign_server(lambda _: text("fine")) as foreign, pytest.raises(RekindleError, match="exit code 3"):
        replayed(foreign, day, Pace(restart_cmd="exit 3"))


def ollamas(at_s: float, body: dict[str, Any], answer: dict[str, Any], path: str = "/api/chat") -> RecordedRequest:
    return RecordedRequest(at_s, body, answer, session="a", agent="a", endpoint=path, id=str(at_s))


def test_ollamas_requests_are_sent_as_chat_completions() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked, options = {"role": "user", "content": "hi"}, {"temperature": 0, "num_predict": 9, "seed": -1, "stop": ["x"]}
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    recorded = {"role": "assistant", "content": "", "tool_calls": [called]}
    sent_back = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "tool_name": "add", "content": "2"}
    words = {"role": "assistant", "content": "recorded"}
    schema = {"type": "object"}
    day = day_of(
        ollamas(0, {"messages": [asked], "tools": [tool], "options": options}, recorded),
        ollamas(1, {"messages": [asked, sent_back, result], "tools": [tool], "think": False}, words),
        ollamas(2, {"prompt": "hi", "system": "be kind", "format": schema}, words, "/api/generate"),
        ollamas(3, {"prompt": "<|im_start|>", "raw": True}, words, "/api/generate"),
    )
    live = {"calls": [("add", '{"a": 7}')]}
    with foreign_server(lambda body: live if len(body["messages"]) == 1 else text("two")) as foreign:
        found = replayed(foreign, day)
    assert (len(found.exchanges), found.num_skipped, found.num_replaced) == (3, 1, 1)
    first, second, third = foreign.bodies
    assert (first["messages"], first["tools"], first["max_tokens"]) == ([asked], [tool], 9)
    assert (first["temperature"], first["stop"], "seed" in first) == (0, ["x"], False)
    back, answered = second["messages"][1:]
    assert back["tool_calls"][0]["function"]["arguments"] == '{"a": 7}', "the live call went back"
    assert answered["tool_call_id"] == back["tool_calls"][0]["id"]
    assert [message["content"] for message in third["messages"]] == ["be kind", "hi"]
    assert third["response_format"]["json_schema"]["schema"] == schema


def test_other_endpoints_are_left_out_and_counted() -> None:
    other = replace(request(0, "a", "1"), endpoint="/v1/completions")
    with foreign_server(lambda _: text("fine")) as foreign:
        found = replayed(foreign, day_of(other, request(1, "a", "2")))
    assert (len(found.exchanges), found.num_skipped) == (1, 1)


def write(path: Path, day: Day) -> Path:
    with DayWriter(path, day.header) as writer:
        for item in day.requests:
            writer.request(item)
    return path


def test_the_whole_command_with_a_cold_server(tmp_path: Path) -> None:
    path = write(tmp_path / "day.jsonl", day_of(request(0, "a", "1"), request(1, "b", "2"), request(2, "c", "3")))
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"

    def answer(body: dict[str, Any]) -> Any:
        return text("warm" if body["messages"][-1]["content"] == "2" else "same", usage=USAGE)

    with foreign_server(answer) as warm, foreign_server(lambda _: text("same")) as cold:
        options = ReplayOptions(
            warm.url, Pace(float("inf")), arm="theirs", cold_check=9, cold_url=cold.url, out=out, plot=plot
        )
        assert run_replay(path, options, Console(quiet=True)) == 1
        assert run_replay(path, replace(options, cold_url=None, arm="again"), Console(quiet=True)) == 0
    lines = {(line["arm"], line["measure"]): line for line in lines_of(out)}
    assert lines["theirs", "replies unlike cold"]["detail"]["differing"] == ["1"]
    assert ("again", "replies unlike cold") not in lines
    assert lines["theirs", "prompt tokens computed"]["values"] == [18.0]
    assert lines["theirs", "first token"]["settings"]["day"] == "day.jsonl"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with foreign_server(lambda _: text("fine"), key="secret") as foreign:
        with pytest.raises(ConfigError, match="--api-key-env"):
            ReplayOptions(foreign.url).server(foreign.url)
        with pytest.raises(ConfigError, match="THE_KEY is not set"):
            ReplayOptions(foreign.url, api_key_env="THE_KEY").server(foreign.url)
        monkeypatch.setenv("THE_KEY", "secret")
        assert ReplayOptions(foreign.url, api_key_env="THE_KEY").server(foreign.url).model == "other-model"


@pytest.mark.parametrize("url", ["localhost:80", "ftp://a/b", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        OpenAIServer(url)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_speed_is_above_nothing(speed: float) -> None:
    with pytest.raises(ConfigError):
        Pace(speed=speed)
