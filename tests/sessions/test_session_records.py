"""The file of sessions: what is written is there, and what is damaged is said."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from rekindle.errors import Conflict, NotFound, StoreError
from rekindle.store.files.keys import Given
from rekindle.store.files.sqlite_file import erase_traces_left, last_trace
from rekindle_sessions.log.codec import packed, packed_event, unpacked, unpacked_event
from rekindle_sessions.log.inventory import Card
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.types import (
    Entry,
    Event,
    Forked,
    Merged,
    MessagePosted,
    Participant,
    Plan,
    Prelude,
    Rewound,
    RoundBegun,
    RoundDropped,
    TurnEnded,
    TurnFailed,
    VoteBegun,
)
from tests.cut_off import die_before, files_with, killed_in

PLAN = Plan(
    (Participant("Ada", "Ä\u2028\n“x”", "first", "ada"), Participant("Ben")),
    moderator="Ada",
    sampling=(("max_tokens", 3), ("stop", ("a", "b")), ("temperature", 0.5), ("logit_bias", ((7, 1.5),))),
)
PRELUDE = Prelude("You are Ada.", (Entry("heard", "Hi.", "Ben", True, None, 3, 4), Entry("said", "Ho.", thought="Hm.")))
EVENTS: tuple[Event, ...] = (
    MessagePosted("Host", "Hello.", ("Ada",)),
    RoundBegun(("Ada", "Ben"), True, None, ("Ben", "Ada")),
    TurnEnded(1, "Said.", "Thought.", cut=True),
    TurnFailed(2, "no room"),
    RoundDropped(),
    Forked("Ada", "Cleo", "other"),
    Rewound("Ada", 2),
    Merged("Ada", "Ben"),
    VoteBegun(Question("Where?", ("here", "there"), "consensus", threshold=1), ("Ada", "Ben")),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


@pytest.fixture
def records(path: Path) -> Iterator[SessionRecords]:
    records = SessionRecords.open(path)
    yield records
    records.check()
    records.close()


def test_values_come_back_as_they_were() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    for event in EVENTS:
        assert unpacked_event(*packed_event(event)) == event
    assert unpacked(Plan, packed(PLAN)) == PLAN
    assert unpacked(Prelude, packed(PRELUDE)) == PRELUDE


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("Sung", "{}"),
        ("Told", "[]"),
        ("Told", '{"by": "Ada"}'),
        ("Told", '{"by": "Ada", "text": 1}'),
        ("Told", '{"by": "Ada", "text": "x", "to": "Ben"}'),
        ("Told", '{"by": "Ada", "text": "x", "louder": true}'),
        ("Rewound", '{"name": "Ada", "turns": true}'),
        ("TurnEnded", "not JSON"),
        ("TurnEnded", "[" * 100_000),
        ("VoteBegun", '{"question": {"text": "Where?", "options": ["here"]}, "voters": ["Ada"]}'),
    ],
)
def test_what_is_no_event_is_refused(kind: str, body: str) -> None:
    with pytest.raises(ValueError):
        unpacked_event(kind, body)


def test_sessions_are_there_when_the_file_is_opened_again(path: Path) -> None:
    records = SessionRecords.open(path)
    number = records.create("team", "s", PLAN, {"Ada": PRELUDE}, now=5.0)
    records.append(number, 0, EVENTS[:1], now=6.0)
    records.append(number, 1, EVENTS[1:], now=7.0)
    with pytest.raises(Conflict):
        records.create("team", "s", PLAN, {}, now=8.0)
    records.close()
    again = SessionRecords.open(path)
    (card,) = again.cards()
    assert card == Card(number, "team", "s", frozenset({"ada"}))
    kept = again.session(card.number)
    assert (kept.namespace, kept.id, kept.created, kept.last_use) == ("team", "s", 5.0, 7.0)
    assert (kept.plan, kept.preludes, kept.events) == (PLAN, {"Ada": PRELUDE}, EVENTS)
    again.check()
    again.delete(kept.number, "team", [])
    assert again.cards() == []
    again.close()


def test_an_encrypted_file_says_nothing_without_its_key(path: Path) -> None:
    given = Given(master=bytes(range(32)))
    with closing(SessionRecords.open(path, given=given)) as records:
        number = records.create("team-of-ours", "session-of-ours", PLAN, {"Ada": PRELUDE}, now=5.0)
        records.append(number, 0, EVENTS, now=6.0)
        gone = records.create("team-of-ours", "another", PLAN, {}, now=5.0)
        records.delete(gone, "team-of-ours", [Memory("ada-of-ours", 7.0, PRELUDE)])
        said = (b"of-ours", b"another", b"You are Ada.", b"Hello.", b"MessagePosted", b"participants", given.master)
        for file in path.parent.iterdir():
            assert not [piece for piece in said if piece and piece in file.read_bytes()], file
        records.check()
    with pytest.raises(StoreError, match="no key is given"):
        SessionRecords.open(path)
    with closing(SessionRecords.open(path, given=given)) as again:
        kept = again.session(number)
        assert (kept.id, kept.plan, kept.preludes, kept.events) == ("session-of-ours", PLAN, {"Ada": PRELUDE}, EVENTS)
        assert again.remembered("team-of-ours", "ada-of-ours") == Memory("ada-of-ours", 7.0, PRELUDE)
        assert again.forget("team-of-ours", "ada-of-ours") and again.remembered("team-of-ours", "ada-of-ours") is None
        again.check()


def test_file_is_its_owners(records: SessionRecords, path: Path) -> None:
    records.create("team", "s", PLAN, {}, now=5.0)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_event_is_written_once(records: SessionRecords) -> None:
    number = records.create("team", "s", PLAN, {}, now=5.0)
    records.append(number, 0, EVENTS[:2], now=6.0)
    with pytest.raises(StoreError):
        records.append(number, 1, EVENTS[2:], now=7.0)
    assert records.events(number) == EVENTS[:2]


def test_nothing_is_written_of_a_session_that_is_gone(records: SessionRecords) -> None:
    gone = records.create("team", "s", PLAN, {}, now=5.0)
    records.delete(gone, "team", [])
    again = records.create("team", "s", PLAN, {}, now=6.0)
    assert again > gone, "a number is never given twice"
    with pytest.raises(NotFound):
        records.append(gone, 0, EVENTS[:1], now=7.0)
    assert records.events(gone) == records.events(again) == ()


def test_the_latest_memory_stays(records: SessionRecords) -> None:
    assert records.remembered("team", "ada") is None
    for at, prelude in ((5.0, PRELUDE), (4.0, Prelude("Older.", ()))):
        number = records.create("team", "s", PLAN, {}, now=at)
        records.delete(number, "team", [Memory("ada", at, prelude)])
        assert records.remembered("team", "ada") == Memory("ada", 5.0, PRELUDE)
    assert records.remembered("other", "ada") is None
    assert records.forget("team", "ada") is True
    assert records.remembered("team", "ada") is None
    assert records.forget("team", "ada") is False, "there is nothing left of it"


def test_what_was_forgotten_is_not_brought_back_by_an_older_session(records: SessionRecords) -> None:
    old = records.create("team", "old", PLAN, {}, now=5.0)
    assert records.forget("other", "ada") is records.forget("team", "ad") is False, "these are nobody here"
    assert records.forget("team", "ada") is True
    new = records.create("team", "new", PLAN, {}, now=5.0)
    records.delete(old, "team", [Memory("ada", 9.0, PRELUDE)])
    assert records.remembered("team", "ada") == Memory("ada", 0.0, None, forgotten=old)
    records.delete(new, "team", [Memory("ada", 6.0, PRELUDE)])
    assert records.remembered("team", "ada") == Memory("ada", 6.0, PRELUDE, forgotten=old)


def test_nothing_of_what_was_forgotten_is_left_in_the_file(records: SessionRecords, path: Path) -> None:
    number = records.create("team", "s", PLAN, {"Ada": PRELUDE}, now=5.0)
    records.append(number, 0, [MessagePosted("Host", "under the old oak")], now=6.0)
    records.delete(number, "team", [Memory("ada", 6.0, Prelude("", (Entry("heard", "under the old oak"),)))])
    assert b"old oak" in path.read_bytes()
    records.forget("team", "ada")
    assert not any(b"old oak" in each.read_bytes() for each in path.parent.iterdir())


def test_what_could_not_be_rewritten_is_when_it_is_forgotten_again(records: SessionRecords, path: Path) -> None:
    numbers = [records.create("team", name, PLAN, {}, now=5.0) for name in ("a", "b", "c")]
    records.delete(numbers[0], "team", [Memory("ada", 6.0, Prelude("", (Entry("heard", "under the old oak"),)))])
    with records.reading() as connection:
        reading = connection.execute("SELECT number FROM session")
    with closing(reading):
        assert next(reading)
        with pytest.raises(StoreError, match="VACUUM"):
            records.forget("team", "ada")
        assert records.remembered("team", "ada") == Memory("ada", 0.0, None, forgotten=numbers[-1])
    assert any(b"old oak" in each.read_bytes() for each in path.parent.iterdir())
    records.forget("team", "ada")
    assert not any(b"old oak" in each.read_bytes() for each in path.parent.iterdir())


def forget_and_die(path: Path) -> None:
    """The process of the test below."""
    records = SessionRecords.open(path)
    with records.reading() as connection:
        die_before(connection, "VACUUM")
    records.forget("team", "ada")


@pytest.fixture
def killed(path: Path) -> Path:
    """A file with three sessions whose process was killed when it had deleted what an agent remembers."""
    with closing(SessionRecords.open(path)) as records:
        number, *_ = [records.create("team", name, PLAN, {}, now=5.0) for name in ("a", "b", "c", "d")]
        records.delete(number, "team", [Memory("ada", 6.0, Prelude("", (Entry("heard", "under the old oak"),)))])
    killed_in(forget_and_die, path)
    return path


def test_what_a_killed_process_left_is_erased_at_the_next_open(killed: Path) -> None:
    path = killed
    assert files_with(path.parent, b"old oak") == ["sessions.db"]
    with closing(SessionRecords.open(path)) as again:
        assert files_with(path.parent, b"old oak") == []
        remembered = again.remembered("team", "ada")
        assert remembered is not None and remembered.prelude is None and len(again.cards()) == 3
        again.check()


def test_what_cannot_be_erased_yet_stops_nobody(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = killed
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        reading = connection.execute("SELECT number FROM session")
        assert next(reading)
        erase_traces_left(connection, path)
        reading.close()
        assert last_trace(connection) == 1 and "may still hold what was purged" in caplog.text
        erase_traces_left(connection, path)
        assert last_trace(connection) == 0 and files_with(path.parent, b"old oak") == []


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("at", [0, 4096 + 8], ids=["header", "page"])
def test_damaged_file_is_set_aside(path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        records = SessionRecords.open(path)
        row = records.create("team", "s", PLAN, {}, now=5.0)
        records.append(row, 0, [MessagePosted("Host", "x" * 20_000)], now=6.0)
        records.close()
        _overwrite(path, at, b"\xff" * 4000)
        with caplog.at_level(logging.ERROR):
            again = SessionRecords.open(path)
        assert again.cards() == []
        again.close()
        aside = path.with_name(f"{path.name}.damaged{number or ''}")
        assert aside.exists() and f"renamed to {aside.name}" in caplog.text


UNREADABLE = (
    "UPDATE event SET kind = 'Sung' WHERE session = ?",
    "UPDATE event SET kind = CAST(x'ff' AS TEXT) WHERE session = ?",
    "UPDATE event SET body = CAST(x'7bff7d' AS TEXT) WHERE session = ?",
    "UPDATE event SET body = x'00' WHERE session = ?",
    "DELETE FROM event WHERE number = 1 AND session = ?",
    "UPDATE session SET plan = '{}' WHERE number = ?",
    "UPDATE session SET plan = CAST(x'ff' AS TEXT) WHERE number = ?",
    "UPDATE session SET preludes = '[]' WHERE number = ?",
    "UPDATE session SET preludes = '{\"Ada\": null}' WHERE number = ?",
    'UPDATE session SET preludes = \'{"Ada": {"system": "x"}}\' WHERE number = ?',
    "UPDATE session SET id = CAST(x'ff' AS TEXT) WHERE number = ?",
    "UPDATE session SET last_use = 'late' WHERE number = ?",
)


def readable(records: SessionRecords) -> list[str]:
    """The ids of the sessions that can be had."""
    found = []
    for card in records.cards():
        with contextlib.suppress(ValueError):
            found.append(records.session(card.number).id)
    return found


@pytest.mark.parametrize("statement", UNREADABLE)
def test_session_that_cannot_be_read_leaves_the_others(
    records: SessionRecords, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [records.create("team", name, PLAN, {}, now=5.0) for name in ("a", "b", "c")]
    for number in numbers:
        records.append(number, 0, EVENTS[:3], now=6.0)
    _change(records, statement, numbers[1])
    assert readable(records) == ["a", "c"]
    assert caplog.text.count("cannot be read") <= 1, "the others are read when they are asked for"
    assert records.forget("team", "ada") is True, "the others can be worked with"
    records.delete(numbers[1], "team", [])


def _change(records: SessionRecords, statement: str, *given: Any) -> None:
    with records.reading() as connection:
        connection.execute(statement, given)


def test_other_format_and_strange_places_are_refused(path: Path, tmp_path: Path) -> None:
    records = SessionRecords.open(path)
    _change(records, "PRAGMA user_version = 9")
    _change(records, "PRAGMA application_id = 9")
    records.close()
    with pytest.raises(StoreError, match="format 9"):
        SessionRecords.open(path)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with pytest.raises(StoreError, match="cannot be used"):
        SessionRecords.open(link)
