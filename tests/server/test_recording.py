"""serve --record: the day as it happened, and a disk that does not want to hold it."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import ServerSettings
from rekindle.engine.types import Delta
from rekindle.errors import BadRequest, ConfigError
from rekindle.server import dayfile, recording
from rekindle.server.dayfile import DayWriter, Header, RecordedRequest, read_day
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.replies import message_of
from rekindle.server.recording import MAX_QUEUED, RETRY_S, Recorder
from rekindle.text.messages import Message, ToolCall
from tests.engine.dying import Panic
from tests.server.conftest import Served, serving
from tests.server.scripted import serving as scripted_serving
from tests.server.scripted import write_scripted_model
from tests.server.test_log import report

SAID = "A brass lamp stands on the third shelf of the pantry."
BODY = {"messages": [{"role": "user", "content": "Hello!"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def recorder(path: Path, *, clock: Clock | None = None, max_bytes: int = 1 << 20) -> Recorder:
    clock = clock or Clock()
    made = Recorder(path, model="toy", max_bytes=max_bytes, clock=clock, monotonic=clock)
    made.start()
    return made


def tell(to: Recorder, text: str = "Hi.", *, caller: Caller | None = None, body: dict[str, Any] | None = None) -> None:
    watch = to.began(caller or Caller(agent="ada", headers={"x-agent-id": "ada"}), "/v1/chat/completions", body or BODY)
    watch.delta(0, Delta(text, (1,), "stop", report(10, 0, 0, 1.0)))
    watch.finished(1, report(10, 0, 0, 1.0), "stop", reply=Message("assistant", text))


def test_a_served_day_is_written_down(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "day.jsonl"
    with serving(served.engine, ServerSettings(record=path, api_key="a-secret-key")) as running:
        first = running.chat(SAID, key="a-secret-key", agent="bo").json
        said = [
            {"role": "user", "content": SAID},
            first["choices"][0]["message"],
            {"role": "user", "content": "Where?"},
        ]
        for stream in (False, True):
            running.send(
                "POST",
                "/v1/chat/completions",
                {"messages": said, "stream": stream, "max_tokens": 4, "temperature": 0},
                key="a-secret-key",
                x_agent_id="bo",
            )
        running.chat(SAID, key="a-secret-key", best_of=3)
        running.send("POST", "/v1/chat/completions", b"{", key="a-secret-key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "a-secret-key" not in path.read_text()
    day = read_day(path)
    assert len(day.requests) == 4
    asked, whole, streamed, refused = day.requests
    assert asked.answer == {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    assert asked.usage is not None
    assert asked.usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert (asked.agent, asked.headers) == ("bo", {"x-agent-id": "bo"})
    assert 0 < (asked.first_token_s or 0) <= asked.duration_s
    assert whole.answer == streamed.answer
    assert whole.messages == streamed.messages
    assert whole.messages[2] == said[2]
    assert (refused.status, refused.answer, refused.agent) == (400, None, None)
    assert "best_of" in (refused.error or "")


def test_every_dialect_is_written_down_and_its_replies_as_messages(tmp_path: Path) -> None:
    """Two clients that send everything again, and one that prefills: what they share is written once."""
    path, schema = tmp_path / "day.jsonl", {"type": "object"}
    model = write_scripted_model(tmp_path / "model")
    flags = {"model": model, "store": tmp_path / "store", "threads": 1, "hot_bytes": "64MiB", "record": path}
    said = [{"role": "user", "content": "ponder this"}]
    with scripted_serving(**flags) as running:
        tools: list[Any] = [{"name": "add", "input_schema": schema}]
        asked = {"model": "claude-x", "max_tokens": 64, "system": "Keep the house. " * 9, "tools": tools}
        first = running.send("POST", "/v1/messages", {**asked, "messages": said})
        assert first.status == 200, first.body
        used = next(block for block in first.json["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": "talk of it"}
        turn = [{"role": "assistant", "content": first.json["content"]}, {"role": "user", "content": [result]}]
        assert running.send("POST", "/v1/messages", {**asked, "messages": [*said, *turn]}).status == 200
        functions = [{"type": "function", "name": "add", "parameters": schema}]
        body = {"input": said, "instructions": "Keep it. " * 9, "tools": functions, "stream": True}
        assert running.send("POST", "/v1/responses", body).status == 200
        assert running.send("POST", "/v1/agents/ada/prefill", {"messages": said}).status == 200
        described = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
        assert running.send("POST", "/api/chat", {"messages": said, "tools": described}).status == 200
    messages, more, responses, prefilled, ollamas = read_day(path).requests
    assert [each.endpoint for each in (messages, more, responses, prefilled, ollamas)] == [
        "/v1/messages",
        "/v1/messages",
        "/v1/responses",
        "/v1/agents/{id}/prefill",
        "/api/chat",
    ]
    call = {"name": "add", "arguments": '{"a": 4}'}
    for answer in (messages.answer, responses.answer, ollamas.answer):
        assert answer is not None
        assert (answer["reasoning_content"], answer["content"]) == ("Sums need add.", "")
        assert [each["function"] for each in answer["tool_calls"]] == [call]
    assert (more.answer or {})["content"] == "It is in the attic of the house."
    assert (more.body["system"], more.messages) == (asked["system"], [*said, *turn])
    assert path.read_text().count(asked["system"]) == 1
    assert responses.body == body
    assert (prefilled.agent, prefilled.usage and prefilled.usage["completion_tokens"]) == ("ada", 0)


def test_a_restart_continues_the_file_and_says_so(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        made = recorder(tmp_path, clock=clock)
        tell(made)
        made.close()
        clock.now += 50
    day = read_day(tmp_path / "day.jsonl")
    assert [request.at_s for request in day.requests] == [0, 50]
    assert [(event.kind, event.at_s) for event in day.events] == [("restart", 50)]


def test_a_file_that_is_too_large_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    made = recorder(path, max_bytes=1500)
    for number in range(40):
        tell(made, f"{number} " + "x" * 100)
    made.close()
    kept = [request.answer for name in ("day.jsonl.1", "day.jsonl") for request in read_day(tmp_path / name).requests]
    assert [str((answer or {})["content"]).split()[0] for answer in kept] == [str(n) for n in range(40 - len(kept), 40)]
    assert len(list(tmp_path.iterdir())) == 2
    assert path.stat().st_size < 2500


def test_a_disk_that_refuses_costs_lines_not_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "there" / "day.jsonl", Clock()
    made = recorder(path, clock=clock)
    tell(made, "one")
    settle(made)
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the directory was")
    for _ in range(3):
        tell(made, "lost")
    settle(made)
    assert made.problems()
    assert "3 requests" in made.problems()[0]
    path.parent.unlink()
    tell(made, "too early")
    settle(made)
    clock.now += RETRY_S
    tell(made, "again")
    made.close()
    assert made.problems() == ()
    assert [(request.answer or {})["content"] for request in read_day(path).requests] == ["again"]
    assert len([record for record in caplog.records if "failed" in record.getMessage()]) == 1


def settle(made: Recorder) -> None:
    """Wait until all that was told is written or lost."""
    while made.num_pending:
        os.sched_yield()


def test_what_cannot_be_recorded_at_all_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text("this is no day\n")
    for path in (tmp_path / "no.jsonl", tmp_path / "no.jsonl" / "below"):
        with pytest.raises(ConfigError):
            recorder(path)


def test_what_cannot_be_written_down_costs_its_own_line(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    tell(made, body={"messages": [], "tools": object()})
    tell(made, "fine")
    made.close()
    assert [(request.answer or {})["content"] for request in read_day(tmp_path / "day.jsonl").requests] == ["fine"]


def test_choice_0_is_told_once_and_failures_too(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    watch = made.began(Caller("left", "ada"), "/v1/chat/completions", {**BODY, "n": 2})
    watch.delta(1, Delta("second", (1,), "stop"))
    watch.finished(2, report(10, 0, 0, 1.0), "stop", reply=Message("assistant", "second"))
    watch.delta(0, Delta("first", (1,), "length"))
    watch.finished(1, report(10, 0, 0, 1.0), "length", reply=Message("assistant", "first"))
    watch.failed(1, BadRequest("late"))
    made.began(Caller(), "/v1/chat/completions", {}).failed(None, BadRequest("unreadable"))
    made.close()
    (only,) = read_day(tmp_path / "day.jsonl").requests
    assert (only.answer, only.finish_reason) == ({"role": "assistant", "content": "first"}, "length")
    assert (only.session, only.agent) == ("left/ada", "ada")


def test_a_reply_is_written_as_the_message_of_a_chat() -> None:
    said = Message("assistant", "Let me see.", tool_calls=(ToolCall("call_1", "add", '{"a": 1}'),), reasoning="Add?")
    assert message_of(said) == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Add?",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    assert message_of(Message("assistant", "Plain.")) == {"role": "assistant", "content": "Plain."}


def test_what_waits_for_a_slow_disk_is_bounded_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "day.jsonl", Clock()
    made = Recorder(path, model="toy", max_bytes=1 << 20, clock=clock, monotonic=clock)  # writes nothing yet
    monkeypatch.setattr(recording, "MAX_QUEUED_BYTES", 1000)
    for text, num_bytes in (("too large alone", 5000), ("lost", 1), ("lost", 5000)):
        watch = made.began(Caller(), "/v1/chat/completions", BODY, num_bytes=num_bytes)
        watch.delta(0, Delta(text, (1,), "stop"))
        watch.finished(1, report(10, 0, 0, 1.0), "stop", reply=Message("assistant", text))
    assert made.num_pending == 1
    assert "2 requests" in made.problems()[0]
    made.start()
    settle(made)
    for _ in range(2):
        tell(made, "x" * 400)
    made.close()
    assert made.problems() == ()
    first, *more = read_day(path).requests
    assert (first.answer or {})["content"] == "too large alone"
    assert len(more) == 2, "what was written makes room"


def test_messages_to_refer_to_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dayfile, "MAX_BASE_BYTES", 1000)
    path = tmp_path / "day.jsonl"

    def said(name: str, *sizes: int) -> RecordedRequest:
        messages = [{"role": "user", "content": name * size} for size in sizes]
        return RecordedRequest(0.0, {"messages": messages, "tools": [{"type": "function"}]}, None, session=name)

    asked = [said("a", 300), said("b", 300), said("a", 300, 100), said("b", 300, 1), said("c", 2000), said("b", 300, 2)]
    with DayWriter(path, Header(0.0)) as writer:
        for each in asked:
            writer.request(each)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line.get("messages_from", {}).get("id") for line in lines] == [None, None, "1", "2", None, None]
    assert [request.messages for request in read_day(path).requests] == [each.messages for each in asked]


def test_a_line_that_was_not_written_is_not_referred_to(tmp_path: Path) -> None:
    with DayWriter(tmp_path / "day.jsonl", Header(0.0)) as writer:
        with pytest.raises(TypeError):
            writer.request(RecordedRequest(0.0, {**BODY, "stop": object()}, None))
        writer.request(RecordedRequest(0.0, BODY, None))
    assert [request.messages for request in read_day(tmp_path / "day.jsonl").requests] == [BODY["messages"]]


def test_a_file_that_everybody_could_read_is_for_its_owner_again(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    recorder(path).close()
    path.chmod(0o644)
    recorder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


class BrokenClock(Clock):
    """Tells the time to everybody but the recorder's own thread, once it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: type[BaseException] | None = None

    def __call__(self) -> float:
        if self.kind is not None and threading.current_thread().name == "rekindle-recorder":
            raise self.kind("no time")
        return super().__call__()


@pytest.mark.parametrize("kind", [Panic, SystemExit])
def test_a_panic_costs_one_line(tmp_path: Path, kind: type[BaseException]) -> None:
    path, clock = tmp_path / "day.jsonl", BrokenClock()
    made = recorder(path, clock=clock, max_bytes=1)  # each line begins a file, whose head has the time
    tell(made, "One.")
    while made.num_pending:
        pass
    clock.kind = kind
    tell(made, "Two.")
    while made.num_pending:
        pass
    clock.kind = None
    tell(made, "Three.")
    made.close()
    assert made.worker.death is None and "Three." in path.read_text()


def test_a_recorder_that_died_says_so_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    path, clock = tmp_path / "there" / "day.jsonl", BrokenClock()
    made = recorder(path, clock=clock)
    tell(made, "One.")
    while made.num_pending:
        pass
    path.unlink()
    clock.kind = Panic
    tell(made, "Two.")  # fails, and then there is no time to say when it is tried again
    made.worker.join(60)
    assert made.worker.death is not None
    for _ in range(MAX_QUEUED + 1):
        tell(made, "Three.")
    assert made.num_pending == 0
    (problem,) = made.problems()
    assert "the recorder thread has ended: Panic: no time; restart the server" in problem
    made.close()
