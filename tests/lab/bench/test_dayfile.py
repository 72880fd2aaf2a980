"""The file of a recorded day: what is written is read back, once, whatever happened to the file."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import ConfigError
from rekindle.server.dayfile import DayEvent, DayWriter, Header, RecordedRequest, read_day

HEADER = Header(1000.0, "pocket", {"seed": 1})
SYSTEM = {"role": "system", "content": "You are Nadia. " * 40}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds " * 30}}]


def said(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]


def request(at_s: float, *texts: str, **more: Any) -> RecordedRequest:
    body = {"messages": said(*texts), "max_tokens": 4, "tools": TOOLS}
    return RecordedRequest(at_s, body, {"role": "assistant", "content": "yes"}, **more)


def write(path: Path, *items: RecordedRequest | DayEvent) -> list[dict[str, Any]]:
    with DayWriter(path, HEADER) as writer:
        for item in items:
            if isinstance(item, DayEvent):
                writer.event(item)
            else:
                writer.request(item)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_day_is_read_back_in_order_of_time(tmp_path: Path) -> None:
    late = request(5.0, "a", agent="x", headers={"x-agent-id": "x"}, usage={"prompt_tokens": 3}, duration_s=2.0)
    early = request(1.0, "b", session="y", first_token_s=0.5, finish_reason="stop")
    failed = replace(request(7.0, "c", agent="z"), answer=None, status=503, error="no room")
    write(tmp_path / "day", late, DayEvent(6.0, "pause", 10.0), early, failed, DayEvent(8.0, "kill"))
    day = read_day(tmp_path / "day")
    assert day.header == HEADER
    assert day.events == (DayEvent(6.0, "pause", 10.0), DayEvent(8.0, "kill"))
    assert [replace(item, id="", session="") for item in day.requests] == [
        replace(item, session="") for item in (early, late, failed)
    ]
    assert [item.session for item in day.requests] == ["y", "x", "z"]


def test_what_an_earlier_line_holds_is_not_written_again(tmp_path: Path) -> None:
    lines = write(
        tmp_path / "day", request(0, "a"), request(1, "a", "yes", "b"), request(2, "a", "yes", "b", "no", "c")
    )
    assert [len(line["body"]["messages"]) for line in lines[1:]] == [2, 2, 2]
    assert lines[3]["messages_from"] == {"id": lines[2]["id"], "count": 4}
    assert "tools" not in lines[3]["body"] and lines[3]["tools_from"] == lines[2]["id"]
    assert (tmp_path / "day").read_text().count(SYSTEM["content"]) == 1
    assert read_day(tmp_path / "day").requests[2].body == request(2, "a", "yes", "b", "no", "c").body


@pytest.mark.parametrize(
    ("endpoint", "messages", "prompt"),
    [("/v1/messages", "messages", "system"), ("/v1/responses", "input", "instructions")],
)
def test_other_dialects_are_written_once_too(tmp_path: Path, endpoint: str, messages: str, prompt: str) -> None:
    def asked(at_s: float, *texts: str) -> RecordedRequest:
        items = [{"role": "user", "content": text} for text in texts]
        return replace(
            request(at_s), endpoint=endpoint, body={messages: items, prompt: SYSTEM["content"], "tools": TOOLS}
        )

    requests = [asked(0, "a"), asked(1, "a", "b"), asked(2, "x")]
    plain = replace(asked(3), body={messages: "all in one text"} if messages == "input" else {messages: []})
    lines = write(tmp_path / "day", *requests, plain)
    assert lines[2]["messages_from"] == {"id": lines[1]["id"], "count": 1}
    assert [line.get(f"{prompt}_from") for line in lines[1:4]] == [None, lines[1]["id"], lines[2]["id"]]
    assert [line.get("tools_from") for line in lines[1:4]] == [None, lines[1]["id"], lines[2]["id"]]
    assert [len(line["body"][messages]) for line in lines[1:4]] == [1, 1, 1]
    assert [item.body for item in read_day(tmp_path / "day").requests] == [item.body for item in (*requests, plain)]


def test_any_text_that_json_can_hold_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "day", request(0, "数字\u2028 \x85 half: \ud83d"))
    assert read_day(tmp_path / "day").requests[0].messages[1]["content"] == "数字\u2028 \x85 half: \ud83d"


def test_other_tools_and_no_tools_are_kept_apart(tmp_path: Path) -> None:
    plain = replace(request(1, "a"), body={"messages": said("a")})
    other = replace(request(2, "a"), body={"messages": said("a"), "tools": []})
    write(tmp_path / "day", request(0, "a"), plain, other)
    assert [item.body.get("tools") for item in read_day(tmp_path / "day").requests] == [TOOLS, None, []]


def test_unnamed_requests_that_continue_one_another_are_a_session(tmp_path: Path) -> None:
    write(tmp_path / "day", request(0, "a"), request(1, "b"), request(2, "a", "yes", "c"), request(3, "b", "yes", "d"))
    first, second, third, fourth = (item.session for item in read_day(tmp_path / "day").requests)
    assert first == third != second == fourth


texts = st.lists(st.sampled_from("abc"), min_size=1, max_size=5)


@given(days=st.lists(st.tuples(texts, st.booleans(), st.sampled_from([None, "x", "y"])), min_size=1, max_size=90))
def test_references_never_change_a_body(tmp_path_factory: pytest.TempPathFactory, days: list[Any]) -> None:
    path = tmp_path_factory.mktemp("day") / "day"
    asked = [request(float(at), *said, agent=agent) for at, (said, _, agent) in enumerate(days)]
    for index, (_, with_tools, _) in enumerate(days):
        if not with_tools:
            asked[index] = replace(asked[index], body={"messages": asked[index].messages})
    write(path, *asked)
    assert [item.body for item in read_day(path).requests] == [item.body for item in asked]


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_a_torn_line_is_passed_over_and_the_file_goes_on(tmp_path: Path, size: int) -> None:
    path = tmp_path / "day"
    write(path, request(0, "a"), request(1, "b" * size))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_day(path).requests) == 1
    with DayWriter(path, Header(5.0, "other"), at_s=9.0) as writer:
        assert writer.header == HEADER
        writer.request(request(10, "a"))
    day = read_day(path)
    assert [item.at_s for item in day.requests] == [0, 10]
    assert day.events == (DayEvent(9.0, "restart"),)
    assert len({item.id for item in day.requests}) == 2


OURS, FOREIGN = b"{", b'{"format":"rekindle-day","x"'


@pytest.mark.parametrize(
    "content", [b"a note without a line break", b"two\nlines", b'{"format":"other"}', OURS, FOREIGN]
)
def test_a_file_that_is_no_recording_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    if content == OURS:  # may be the beginning of a header that a crash cut off
        DayWriter(path, HEADER).close()
        assert read_day(path).requests == ()
        return
    with pytest.raises(ConfigError, match="header"):
        DayWriter(path, HEADER)
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="not a file"):
            DayWriter(path, HEADER)


def test_only_its_owner_may_read_what_people_wrote(tmp_path: Path) -> None:
    write(tmp_path / "day", request(0, "a"))
    assert stat.S_IMODE((tmp_path / "day").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("not json", "line 2"),
        ('{"event":"rest","at_s":1}', "no event is called 'rest'"),
        ('{"event":"request","at_s":1,"id":"9"}', "body"),
        ('{"event":"request","at_s":1,"id":"9","body":{},"answer":null,"messages_from":{"id":"7","count":1}}', "7"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "day"
    write(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=wanted):
        read_day(path)


@pytest.mark.parametrize("first", ["", "{}", '{"format":"rekindle-day","version":2,"began":0}', "[]"])
def test_another_file_is_refused(tmp_path: Path, first: str) -> None:
    (tmp_path / "day").write_text(first + "\n")
    with pytest.raises(ConfigError, match="header"):
        read_day(tmp_path / "day")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_day(tmp_path / "nothing")
