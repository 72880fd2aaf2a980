"""Kept responses: found at once, durable when that is said, gone when their time has come, whatever the disk does."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rekindle.config import RESPONSES_FILE
from rekindle.errors import StoreError
from rekindle.server.border import HttpError
from rekindle.server.responses.items import message_item
from rekindle.server.responses.records import Entry, open_records
from rekindle.server.responses.stored import MAX_UNSAVED_BYTES, StoredResponse, StoredResponses
from tests.cut_off import die_before, files_with, killed_in
from tests.engine.dying import Panic, Unspeakable

DAY_S = 86400.0
BOUNDS: dict[str, Any] = {"max_responses": 100, "max_bytes": 1 << 20, "retention_s": 30 * DAY_S}


class Clock:
    """Wall clock of a test."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def response(id: str, previous: str | None = None, *, text: str = "Hello.") -> dict[str, Any]:
    return {"id": id, "previous_response_id": previous, "output": [message_item(f"msg_{id}", text)]}


def kept(
    id: str, previous: str | None = None, *, agent: str | None = "ada", namespace: str = "default", **more: Any
) -> StoredResponse:
    return StoredResponse(namespace, agent, response(id, previous, **more), [message_item(f"in_{id}", "Asked.")])


@pytest.fixture(params=["disk", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., StoredResponses]]:
    """Opens kept responses, on disk again and again the same."""
    made: list[StoredResponses] = []

    def open_(**options: Any) -> StoredResponses:
        responses = StoredResponses(tmp_path / RESPONSES_FILE if request.param == "disk" else None, **options)
        made.append(responses)
        responses.start()
        return responses

    yield open_
    for responses in made:
        responses.close()


def test_a_response_is_found_before_and_after_it_is_written(opened: Callable[..., StoredResponses]) -> None:
    responses = opened()
    one = kept("a")
    responses.keep(one)
    for _ in range(2):
        assert responses.find("default", "a") == one
        assert responses.item("default", "in_a") == one.items[0]
        assert responses.item("default", "msg_a") == one.response["output"][0]
        assert responses.find("other", "a") is None
        assert responses.item("other", "in_a") is None
        assert responses.flush()
    responses.check()


def test_what_is_said_to_be_durable_is_in_the_file(tmp_path: Path) -> None:
    """A commit that another process holds up is waited for; what came meanwhile is one transaction."""
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    with closing(sqlite3.connect(tmp_path / RESPONSES_FILE, isolation_level=None)) as other:
        assert other.execute("PRAGMA synchronous").fetchone() == (2,)
        other.execute("BEGIN IMMEDIATE")
        durable = [responses.keep(kept(f"a{number}")) for number in range(5)]
        assert [responses.find("default", f"a{number}") is not None for number in range(5)] == [True] * 5
        assert not any(each.done() for each in durable)
        other.execute("COMMIT")
        for each in durable:
            assert each.result(60) is None
        assert other.execute("SELECT count(*) FROM response").fetchone() == (5,)
    responses.close()
    with pytest.raises(StoreError, match="stopping"):
        responses.keep(kept("late")).result(60)


def test_an_id_that_is_no_unicode_is_nobodys(opened: Callable[..., StoredResponses]) -> None:
    responses = opened()
    assert responses.find("default", "\ud800") is None
    assert responses.item("default", "\ud800") is None


def test_a_conversation_is_a_chain(opened: Callable[..., StoredResponses]) -> None:
    responses = opened()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        responses.keep(kept(name, previous))
    assert [each.id for each in responses.chain("default", "c")] == ["a", "b", "c"]
    assert responses.flush()
    assert [each.id for each in responses.chain("default", "c")] == ["a", "b", "c"]
    assert responses.delete("default", "b")
    assert not responses.delete("default", "b")
    assert not responses.delete("other", "a")
    with pytest.raises(HttpError, match="'b', which it continues") as caught:
        responses.chain("default", "c")
    assert caught.value.problem.status == 400
    assert [each.id for each in responses.chain("default", "other")] == ["a", "other"]


def test_what_waits_is_deleted_too(opened: Callable[..., StoredResponses]) -> None:
    responses = opened()
    for number in range(50):
        responses.keep(kept(f"a{number}"))
        assert responses.delete("default", f"a{number}")
        responses.keep(kept(f"b{number}", agent="bo"))
        assert responses.forget("default", "bo") == 1
        assert responses.find("default", f"b{number}") is None
    assert responses.flush()
    assert responses.find("default", "a0") is None
    responses.check()


def test_what_is_being_written_is_deleted_too(opened: Callable[..., StoredResponses]) -> None:
    """A large response is packed for a while: whenever it is deleted meanwhile, it does not come back."""
    responses = opened()
    text = "".join(chr(0x4E00 + at * 7919 % 20_000) for at in range(100_000))
    for number in range(30):
        name = f"r{number}"
        responses.keep(kept(name, text=text))
        for _ in range(number * 1_000):
            assert responses.problems() == ()
        assert responses.delete("default", name)
        responses.keep(kept(f"after-{name}"))
        assert responses.flush()
        assert responses.find("default", name) is None


def test_an_agents_responses_are_forgotten_and_nobody_elses(opened: Callable[..., StoredResponses]) -> None:
    responses = opened()
    for name, agent, namespace in (
        ("a", "ada", "default"),
        ("b", "bo", "default"),
        ("c", None, "default"),
        ("d", "ada", "x"),
    ):
        responses.keep(kept(name, agent=agent, namespace=namespace))
    assert responses.flush()
    assert responses.forget("default", "ada") == 1
    found = [
        responses.find(space, name) is not None
        for space, name in (("default", "a"), ("default", "b"), ("default", "c"), ("x", "d"))
    ]
    assert found == [False, True, True, True]


def test_the_oldest_go_and_a_chain_that_is_used_stays_whole(opened: Callable[..., StoredResponses]) -> None:
    clock = Clock()
    responses = opened(clock=clock, max_responses=4)
    for name, previous in (("a", None), ("b", "a"), ("x", None), ("c", "b"), ("d", "c")):
        clock.now += 1
        responses.keep(kept(name, previous))
        assert responses.flush()
        responses.check()
    assert responses.find("default", "x") is None, "the only one that nobody went on from"
    assert len(responses.chain("default", "d")) == 4
    clock.now += 1
    responses.keep(kept("y"))
    assert responses.flush()
    assert responses.find("default", "d") is None, "of a chain the last one goes first"
    assert len(responses.chain("default", "c")) == 3


def test_bytes_are_bounded(opened: Callable[..., StoredResponses]) -> None:
    responses = opened(max_bytes=4_000)
    for number in range(30):
        responses.keep(
            kept(f"r{number}", text="".join(chr(0x4E00 + (number * 997 + at * 31) % 20_000) for at in range(500)))
        )
        assert responses.flush()
    found = [number for number in range(30) if responses.find("default", f"r{number}")]
    assert 1 <= len(found) < 6
    assert found[-1] == 29


def test_one_tenants_responses_take_no_room_from_anothers(opened: Callable[..., StoredResponses]) -> None:
    clock = Clock()
    responses = opened(clock=clock, max_responses=3, max_bytes=4_000)
    responses.keep(kept("mine", namespace="b"))
    for number in range(12):
        clock.now += 1
        text = "".join(chr(0x4E00 + (number * 997 + at * 31) % 20_000) for at in range(500 if number > 5 else 5))
        responses.keep(kept(f"r{number}", namespace="a", text=text))
        assert responses.flush()
        responses.check()
    assert responses.find("b", "mine") is not None
    assert responses.find("a", "r11") is not None and responses.find("a", "r8") is None


def test_they_are_kept_for_thirty_days_from_their_last_use(opened: Callable[..., StoredResponses]) -> None:
    clock = Clock()
    responses = opened(clock=clock)
    responses.keep(kept("a"))
    responses.keep(kept("lone"))
    assert responses.flush()
    clock.now += 29 * DAY_S
    responses.keep(kept("b", "a"))
    assert responses.flush()
    clock.now += 2 * DAY_S
    assert responses.find("default", "lone") is None
    assert len(responses.chain("default", "b")) == 2
    clock.now -= 365 * DAY_S
    for name, previous in (("sibling", "a"), ("c", "b")):
        responses.keep(kept(name, previous))
        assert responses.flush()
        responses.check()
    assert len(responses.chain("default", "c")) == 3, "a clock that goes back harms nobody"


def test_the_file_is_private_and_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / RESPONSES_FILE
    responses = StoredResponses(path)
    responses.start()
    responses.keep(kept("a"))
    responses.close()
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
    again = StoredResponses(path)
    again.start()
    assert again.find("default", "a") == kept("a")
    again.close()
    again.close()
    with pytest.raises(StoreError):
        again.find("default", "a")


def test_two_servers_may_share_one(tmp_path: Path) -> None:
    both = [StoredResponses(tmp_path / RESPONSES_FILE) for _ in range(2)]
    for responses in both:
        responses.start()
    threads = [
        threading.Thread(target=lambda r=responses, n=name: [r.keep(kept(f"{n}{at}")).result(60) for at in range(40)])
        for name, responses in zip("ab", both, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for responses in both:
        assert all(responses.find("default", f"{name}{at}") for name in "ab" for at in range(40))
        responses.close()


def test_a_purge_leaves_no_trace(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    for number in range(60):
        responses.keep(kept(f"secret-{number}", agent="ada"))
        responses.keep(kept(f"public-{number}", agent="bo"))
    assert responses.flush()
    assert responses.forget("default", "ada") == 60
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    responses.close()
    assert b"secret-" not in data
    assert b"public-7" in data


def test_a_purge_leaves_no_trace_of_what_was_deleted_before(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    assert responses.forget("default", "nobody") == 0
    for number in range(20):
        responses.keep(kept(f"secret-{number}", agent="ada")).result(60)
        assert responses.delete("default", f"secret-{number}")
    assert responses.forget("default", "ada") == 0
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    responses.close()
    assert b"secret-" not in data


def forget_and_die(path: Path) -> None:
    """The process of the test below."""
    records = open_records(path, **BOUNDS)
    with records.reading() as connection:
        die_before(connection, "VACUUM")
    records.forget("default", "ada")


def test_a_purge_that_was_killed_is_finished_at_the_next_open(tmp_path: Path) -> None:
    path = tmp_path / RESPONSES_FILE
    with closing(open_records(path, **BOUNDS)) as records:
        items = [message_item("in", "Asked.")]
        for agent in ("ada", "bo"):
            records.save([Entry.packed("default", agent, response(f"of-{agent}"), items)], [], 1e9)
    killed_in(forget_and_die, path)
    assert files_with(tmp_path, b"of-ada") == [RESPONSES_FILE]
    with closing(open_records(path, **BOUNDS)) as again:
        assert files_with(tmp_path, b"of-ada") == []
        assert again.find("default", "of-bo", now=1e9) is not None
        again.check()


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / RESPONSES_FILE
    path.write_bytes(b"This is no database. " * 500)
    responses = StoredResponses(path)
    with caplog.at_level(logging.WARNING):
        responses.start()
    assert "damaged" in caplog.text
    responses.keep(kept("a"))
    assert responses.flush()
    assert (tmp_path / f"{RESPONSES_FILE}.damaged").read_bytes().startswith(b"This is no")
    responses.close()


def test_the_directory_is_made_where_nobody_else_does(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / "new" / "store" / RESPONSES_FILE)
    responses.start()
    responses.close()
    assert stat.S_IMODE((tmp_path / "new" / "store").stat().st_mode) == 0o700


def test_a_file_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / RESPONSES_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="another directory as store"):
        StoredResponses(tmp_path / RESPONSES_FILE).start()
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreError, match="format 7"):
        StoredResponses(newer).start()


def test_a_disk_that_refuses_costs_nothing_but_what_does_not_fit_in_memory(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON response BEGIN SELECT RAISE(FAIL, 'disk full'); END")
    with pytest.raises(StoreError, match="disk full"):
        responses.keep(kept("a")).result(60)
    assert not responses.flush(0.3)
    assert "disk full" in responses.problems()[0] and "1 wait in memory" in responses.problems()[0]
    assert responses.find("default", "a") is not None
    refused = [responses.keep(kept(f"b{number}")) for number in range(300)]
    assert all(isinstance(each.exception(60), StoreError) for each in refused)
    assert responses.find("default", "a") is None
    assert "256 wait in memory and end with the server, 45 are lost" in responses.problems()[0]
    assert responses.find("default", "b299") is not None
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as other:
        other.execute("DROP TRIGGER full")
    responses.close()
    again = StoredResponses(tmp_path / RESPONSES_FILE)
    again.start()
    assert again.find("default", "b299") == kept("b299")
    assert again.problems() == ()
    again.close()


def test_large_responses_that_a_disk_refuses_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON response BEGIN SELECT RAISE(FAIL, 'disk full'); END")
    noise = os.urandom(3 << 20).hex()  # 3 MiB packed
    for number in range(14):
        assert responses.keep(kept(f"r{number}", text=f"{number} {noise}")).exception(60) is not None
    held = [number for number in range(14) if responses.find("default", f"r{number}") is not None]
    assert held == list(range(held[0], 14)) and 1 < len(held) <= MAX_UNSAVED_BYTES // len(noise) * 2
    responses.close()


def test_a_response_that_comes_after_its_agent_was_forgotten_is_not_kept(
    opened: Callable[..., StoredResponses],
) -> None:
    responses = opened()
    before = responses.ticket()
    assert responses.forget("default", "ada") == 0
    for name, agent, ticket in (("late", "ada", before), ("other", "bo", before), ("new", "ada", responses.ticket())):
        responses.keep(kept(name, agent=agent), ticket=ticket)
    assert responses.flush()
    assert [responses.find("default", name) is not None for name in ("late", "other", "new")] == [False, True, True]
    with pytest.raises(StoreError, match="agent was deleted"):
        responses.keep(kept("later", agent="ada"), ticket=before).result(60)


def test_a_disk_that_refuses_to_forget_forgets_nothing(tmp_path: Path) -> None:
    responses = StoredResponses(tmp_path / RESPONSES_FILE)
    responses.start()
    responses.keep(kept("a", agent="ada"))
    assert responses.flush()
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as other:
        for event in ("INSERT", "DELETE"):
            other.execute(f"CREATE TRIGGER no_{event} BEFORE {event} ON response BEGIN SELECT RAISE(FAIL, 'full'); END")
    responses.keep(kept("b", agent="ada"))
    with pytest.raises(StoreError, match="full"):
        responses.forget("default", "ada")
    assert all(responses.find("default", name) is not None for name in "ab")
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as other:
        for event in ("INSERT", "DELETE"):
            other.execute(f"DROP TRIGGER no_{event}")
    assert responses.forget("default", "ada") == 2
    responses.close()


class Machine(RuleBasedStateMachine):
    """Against a dictionary: what was kept and not deleted is found, while there is room for all of it."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.responses = StoredResponses(None, clock=self.clock)
        self.responses.start()
        self.model: dict[str, StoredResponse] = {}
        self.count = 0

    @rule(target=ids, previous=st.none() | ids, agent=st.sampled_from([None, "ada", "bo"]))
    def keep(self, previous: str | None, agent: str | None) -> str:
        self.count += 1
        one = kept(f"r{self.count}", previous, agent=agent)
        self.responses.keep(one)
        self.model[one.id] = one
        return one.id

    @rule(id=consumes(ids))
    def delete(self, id: str) -> None:
        assert self.responses.delete("default", id) == (self.model.pop(id, None) is not None)

    @rule(agent=st.sampled_from(["ada", "bo"]))
    def forget(self, agent: str) -> None:
        gone = [name for name, one in self.model.items() if one.agent == agent]
        assert self.responses.forget("default", agent) == len(gone)
        for name in gone:
            del self.model[name]

    @rule()
    def flush(self) -> None:
        assert self.responses.flush()

    @rule(seconds=st.integers(-100, 100))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(id=ids)
    def chain(self, id: str) -> None:
        wanted: list[str] = []
        at: str | None = id
        while at is not None and at in self.model:
            wanted.append(at)
            at = self.model[at].previous
        try:
            assert [one.id for one in self.responses.chain("default", id)] == wanted[::-1]
            assert at is None
        except HttpError:
            assert at is not None

    @invariant()
    def agrees(self) -> None:
        for name in list(self.model)[-5:]:
            assert self.responses.find("default", name) == self.model[name]
        self.responses.check()

    def teardown(self) -> None:
        self.responses.close()


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=40, stateful_step_count=25)


def test_a_panic_while_writing_costs_those_responses(opened: Callable[..., StoredResponses]) -> None:
    times: list[BaseException | None] = [Panic("no time"), SystemExit("no time")]

    def clock() -> float:
        if times and (error := times.pop()) is not None:
            raise error
        return 1000.0

    responses = opened(clock=clock)
    for _ in range(2):
        with pytest.raises(StoreError, match="no time"):
            responses.keep(kept("a")).result(60)
    assert responses.problems()
    responses.keep(kept("b")).result(60)
    assert responses.worker.death is None and not responses.problems()


def test_a_writing_thread_that_died_keeps_nobody_waiting(opened: Callable[..., StoredResponses]) -> None:
    unspeakable: list[BaseException] = []

    def clock() -> float:
        if unspeakable:
            raise unspeakable.pop()
        return 1000.0

    responses = opened(clock=clock)
    responses.keep(kept("a")).result(60)
    unspeakable.append(Unspeakable("no time"))
    with pytest.raises(StoreError, match="the responses thread has ended; restart the server"):
        responses.keep(kept("c")).result(60)
    responses.worker.join(60)
    with pytest.raises(StoreError, match="the responses thread has ended; restart the server"):
        responses.keep(kept("b")).result(60)
    (problem,) = responses.problems()
    assert "the responses thread has ended: Panic" in problem
    assert responses.find("default", "a") == kept("a")
    responses.close()
