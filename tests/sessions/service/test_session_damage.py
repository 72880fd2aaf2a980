"""Whatever is changed in the file of sessions, nobody is shown what is not theirs, and sessions are kept again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Engine
from rekindle.errors import Conflict, NotFound, RekindleError, StoreError
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.log.usage import Used
from rekindle_sessions.machine.types import Entry, MessagePosted, Participant, Plan, Prelude, Utterance
from rekindle_sessions.service.coordinator import Coordinator
from tests.sessions.service.held import held

NUM_HURTS = int(os.environ.get("HURTS", "60"))
COLUMNS = {
    "session": "number namespace id created last_use num_events progress plan preludes mac",
    "event": "session number at kind body mac",
    "memory": "namespace agent at prelude forgotten mac",
    "sqlite_sequence": "name seq",
}
SPACES = ("team1", "team2")
IDS = ("a", "b")
STRANGERS = ("team0", "team3", "text", "")
PLAN = Plan((Participant("Ada", "Short.", agent="ada"), Participant("Ben")), opening="", listen="later")


def words(space: str, name: str) -> list[str]:
    """What is said in a session; one of it fills pages of its own."""
    return [
        f"{space} {id} meets by the oak.",
        f"{space} {id} " + "and again " * 500 + "and out.",
        f"{space} {id} parts.",
    ]


async def fill(coordinator: Coordinator) -> None:
    for space in SPACES:
        for name in (*IDS, "gone"):
            await coordinator.create(space, PLAN, id=name)
            for text in words(space, name):
                await coordinator.post_message(space, name, text)
        await coordinator.delete(space, "gone")


Pictures = dict[tuple[str, str], Any]


async def picture(coordinator: Coordinator, space: str, name: str) -> tuple[Any, list[Utterance]]:
    """All that a caller is shown of a session, and what its permanent agent has of it."""
    await coordinator.fetch(space, name)
    info = coordinator.show(space, name)
    heard = coordinator.registry.found(space, name).machine.context("Ada")
    return (info.plan, info.created, info.last_use, info.num_messages, heard), coordinator.messages(space, name)


@pytest.fixture(scope="module")
def whole(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pictures]:
    """A file of sessions that were written, and what is in it."""
    path = tmp_path_factory.mktemp("whole") / "sessions.db"

    async def run() -> Pictures:
        async with held(engine, path) as coordinator:
            await fill(coordinator)
        async with held(engine, path) as coordinator:
            return {key: await picture(coordinator, *key) for key in product(SPACES, IDS)}

    return path, asyncio.run(run())


@pytest.fixture
def path(whole: tuple[Path, Pictures], tmp_path: Path) -> Path:
    """A copy to be damaged, with the secret that it was written with."""
    for each in whole[0].parent.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    return tmp_path / "sessions.db"


async def check_shown(coordinator: Coordinator, known: Pictures) -> None:
    """Nobody is shown anything but what was written for them; a session that cannot be had is there for nobody."""
    for space in (*SPACES, *STRANGERS):
        listed = [info.id for info in await coordinator.listed(space)]
        assert set(product([space], listed)) <= known.keys(), f"{space} sees {listed}"
        for name in sorted({name for _, name in known}):
            try:
                found = await picture(coordinator, space, name)
            except NotFound:
                continue
            assert found == known[space, name], f"{space} reads something else in {name}"


def check_brought(heard: tuple[Entry, ...], space: str) -> None:
    """What an agent brings into a session was said in its namespace."""
    texts = {text for name in (*IDS, "gone", "new", "anew") for text in words(space, name)}
    brought = [entry.text for entry in heard if "team" in entry.text]
    assert set(brought) <= texts, f"{space} has other words"


async def use(coordinator: Coordinator, known: Pictures, name: str) -> None:
    """Sessions begin and grow."""
    for space in SPACES:
        await coordinator.create(space, PLAN, id=name)
        check_brought(coordinator.registry.found(space, name).machine.context("Ada"), space)
        for text in words(space, name):
            await coordinator.post_message(space, name, text)
        known[space, name] = await picture(coordinator, space, name)


async def end(coordinator: Coordinator, names: set[str]) -> None:
    """What was saved is found, goes on, and ends."""
    for space in SPACES:
        found = await coordinator.listed(space)
        assert names <= {info.id for info in found}, "what was saved after the restart is lost"
        for info in found:
            await coordinator.post_message(space, info.id, "Farewell.")
            await coordinator.delete(space, info.id)
        await coordinator.forget(space, "ada")
        await coordinator.create(space, PLAN, id="again")


@contextlib.asynccontextmanager
async def opened(engine: Engine, path: Path) -> Any:
    with closing(SessionRecords.open(path)) as records:
        coordinator = Coordinator(engine, records)
        try:
            await coordinator.start()
            yield coordinator
        finally:
            await coordinator.close()


def survives(engine: Engine, path: Path, pictures: Pictures) -> None:
    """Open a damaged file, use it, and open it again."""

    async def run() -> None:
        known, saved = dict(pictures), set()
        for name in ("new", "anew"):
            with contextlib.suppress(RekindleError) if name == "new" else contextlib.nullcontext():
                async with opened(engine, path) as coordinator:
                    await check_shown(coordinator, known)
                    await use(coordinator, known, name)
                    saved.add(name)
            if saved:
                break
        async with opened(engine, path) as coordinator:
            await check_shown(coordinator, known)
            await end(coordinator, saved)

    asyncio.run(run())


def changed(value: Any, random: np.random.Generator) -> Any:
    """A flipped bit, something of another type, or far too much."""
    if random.integers(3) == 0:
        return [b"\xff", "text", 7, -1.5, None, (1 << 63) - 1, b""][int(random.integers(7))]
    if isinstance(value, str) and value:
        at = int(random.integers(len(value)))
        return value[:at] + chr(ord(value[at]) ^ 1 << int(random.integers(3))) + value[at + 1 :]
    if isinstance(value, bytes) and value:
        at = int(random.integers(len(value)))
        return value[:at] + bytes([value[at] ^ 1 << int(random.integers(8))]) + value[at + 1 :]
    return value + 1 if isinstance(value, int | float) else "text"


def change(connection: sqlite3.Connection, table: str, column: str, random: np.random.Generator) -> str:
    """Change one column of one row, by hand or to what another row has; return what was done."""
    rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    names = COLUMNS[table].split()
    at = names.index(column)
    row = rows[int(random.integers(len(rows)))]
    others = [each[at] for each in rows if each[at] != row[at]]
    is_swapped = others and random.integers(3) == 0
    new = others[int(random.integers(len(others)))] if is_swapped else changed(row[at], random)
    where = " AND ".join(f"{name} IS ?" for name in names)
    with contextlib.suppress(sqlite3.IntegrityError):  # a key of a row is a number
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (new, *row))
    return f"{table}.{column}: {str(row[at])[:80]!r} became {str(new)[:80]!r}"


@pytest.mark.parametrize("table", COLUMNS)
def test_a_changed_column_shows_nobody_what_is_not_theirs(
    engine: Engine, whole: tuple[Path, Pictures], path: Path, table: str
) -> None:
    random, pristine = np.random.default_rng(1), path.read_bytes()
    for column in COLUMNS[table].split():
        for _ in range(max(1, NUM_HURTS // 60)):
            path.write_bytes(pristine)
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                done = change(connection, table, column, random)
            try:
                survives(engine, path, whole[1])
            except Exception as error:
                raise AssertionError(done) from error


def flip(path: Path, pristine: bytes, at: int, bit: int) -> None:
    path.write_bytes(pristine[:at] + bytes([pristine[at] ^ 1 << bit]) + pristine[at + 1 :])


def test_a_flipped_bit_in_any_page_is_survived(engine: Engine, whole: tuple[Path, Pictures], path: Path) -> None:
    random, pristine = np.random.default_rng(2), path.read_bytes()
    pages = np.frombuffer(pristine, dtype=np.uint8).reshape(-1, 4096)
    used = [np.flatnonzero(page) for page in pages]
    for number in range(max(len(pages), NUM_HURTS // 3)):
        page = number % len(pages)
        place = random.choice(used[page]) if number % 3 and len(used[page]) else random.integers(4096)
        at, bit = page * 4096 + int(place), int(random.integers(8))
        flip(path, pristine, at, bit)
        try:
            survives(engine, path, whole[1])
        except Exception as error:
            raise AssertionError(f"bit {bit} of byte {at} of {len(pristine)}") from error


def test_a_flipped_bit_of_the_header_is_survived(engine: Engine, whole: tuple[Path, Pictures], path: Path) -> None:
    """Which holds the format, and says whether the file may be written."""
    pristine = path.read_bytes()
    bits = [(at, bit) for at in range(100) for bit in range(8)]
    chosen = {(18, 2), (19, 3), (59, 1), (60, 7), (63, 0), (63, 3), (71, 0), *bits[:: max(1, 4800 // NUM_HURTS)]}
    for at, bit in sorted(chosen):
        flip(path, pristine, at, bit)
        try:
            survives(engine, path, whole[1])
        except Exception as error:
            raise AssertionError(f"bit {bit} of byte {at} of the header") from error


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SessionRecords]:
    with closing(SessionRecords.open(tmp_path / "sessions.db")) as records:
        yield records


def damage(records: SessionRecords, statement: str, *given: Any) -> None:
    with records.reading() as connection:
        assert connection.execute(statement, given).rowcount == 1


def test_an_end_that_is_cut_off_is_noticed(records: SessionRecords) -> None:
    number = records.create("team1", "a", PLAN, {}, 1.0)
    records.append(number, 0, [MessagePosted("Host", "Hi."), MessagePosted("Host", "Ho.")], 2.0)
    damage(records, "DELETE FROM event WHERE session = ? AND number = 1", number)
    with pytest.raises(ValueError, match="missing"):
        records.session(number)
    damage(records, "UPDATE session SET num_events = 1 WHERE number = ?", number)
    with pytest.raises(ValueError, match="damaged"):
        records.session(number)
    with pytest.raises(StoreError, match="damaged"):
        records.append(number, 1, [MessagePosted("Host", "Ho.")], 3.0)


def test_a_damaged_session_stays_in_the_file_and_takes_no_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionRecords.open(path)) as records:
        numbers = [records.create("team1", name, PLAN, {}, 1.0) for name in ("a", "b", "c")]
        records.append(numbers[1], 0, [MessagePosted("Host", "Hi.")], 2.0)
        damage(records, "UPDATE session SET namespace = 'team2' WHERE number = ?", numbers[0])
        damage(records, "UPDATE event SET body = replace(body, 'Hi', 'Ho') WHERE session = ?", numbers[1])
        with pytest.raises(Conflict, match=r"'b' is in the file, but cannot be read \(events are damaged.*another id"):
            records.create("team1", "b", PLAN, {}, 1.0)
    with closing(SessionRecords.open(path)) as records:
        assert [card.id for card in records.cards()] == ["b", "c"]
        assert records.usage.of("team2") == Used(0, 0), "what is damaged is nobody's"
        again = records.create("team2", "a", PLAN, {}, 1.0), records.create("team1", "a", PLAN, {}, 1.0)
        assert records.session(again[1]).events == ()
        with records.reading() as connection:
            rows = connection.execute("SELECT number FROM session").fetchall()
        assert [number for (number,) in rows] == [*numbers, *again]
    assert caplog.text.count("damaged: they stay in the file") == 1 and f"session {numbers[0]}" in caplog.text


@pytest.mark.parametrize("column", ["at = at + 1", "prelude = replace(prelude, 'oak', 'elm')", "forgotten = 9"])
def test_a_damaged_memory_is_not_there_and_is_replaced(
    records: SessionRecords, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [records.create("team1", name, PLAN, {}, 1.0) for name in ("a", "b")]
    memories = [Memory("ada", at, Prelude("", (Entry("heard", f"oak {at}"),))) for at in (5.0, 4.0)]
    records.delete(numbers[0], "team1", memories[:1])
    damage(records, f"UPDATE memory SET {column}")
    assert records.remembered("team1", "ada") is records.remembered("team1", "ada") is None
    assert caplog.text.count("is damaged and is ignored") == 1
    records.delete(numbers[1], "team1", memories[1:])
    assert records.remembered("team1", "ada") == memories[1], "older, but the only one"
    records.check()


def test_who_is_forgotten_leaves_no_damaged_memory(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionRecords.open(path)) as records:
        number = records.create("team1", "a", PLAN, {}, 1.0)
        records.delete(number, "team1", [Memory("ada", 5.0, Prelude("", (Entry("heard", "under the oak"),)))])
        damage(records, "UPDATE memory SET agent = CAST(x'61ff' AS TEXT)")
    with closing(SessionRecords.open(path)) as records:
        assert records.forget("team1", "ada") is True
        assert records.forget("team1", "ada") is False
    assert b"under the oak" not in path.read_bytes()


def test_without_its_secret_a_file_shows_nothing_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, secret = tmp_path / "sessions.db", tmp_path / "secret"
    with closing(SessionRecords.open(path)) as records:
        records.create("team1", "a", PLAN, {}, 1.0)
    written_with = secret.read_bytes()
    secret.unlink()
    with closing(SessionRecords.open(path)) as records:
        assert records.cards() == [] and "`secret` next to the file" in caplog.text
        records.create("team1", "a", PLAN, {}, 1.0)
    secret.write_bytes(written_with)
    with closing(SessionRecords.open(path)) as records:
        assert [card.number for card in records.cards()] == [1], "it is there again with its secret"


def test_a_page_that_breaks_while_the_file_is_open_is_reported_and_cured_by_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"
    with closing(SessionRecords.open(path)) as records:
        for number in range(20):
            records.create("team1", f"s{number}", PLAN, {"Ada": Prelude("x" * 2_000, ())}, 1.0)
    with closing(SessionRecords.open(path)) as records:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))
        with records.reading() as connection:
            connection.execute("PRAGMA shrink_memory")
        for _ in range(2):
            with pytest.raises(StoreError, match="malformed"):
                records.session(1)
            with pytest.raises(StoreError, match="malformed"):
                records.create("team1", "new", PLAN, {}, 1.0)
        assert records.file_error is not None and "a damaged file is set aside" in records.file_error
        assert caplog.text.count("Check the disk") == 1
    with closing(SessionRecords.open(path)) as records:
        assert path.with_name("sessions.db.damaged").exists() and records.cards() == []
        records.create("team1", "new", PLAN, {}, 1.0)
    with closing(SessionRecords.open(path)) as records:
        assert [card.id for card in records.cards()] == ["new"] and records.file_error is None


def test_keys_out_of_order_cost_no_other_session(tmp_path: Path) -> None:
    """Lookups go astray where a key is not in its place, and what is written there is not found again."""
    path = tmp_path / "sessions.db"
    with closing(SessionRecords.open(path)) as records:
        numbers = [records.create("team1", f"s{at}", PLAN, {}, 1.0) for at in range(9)]
        for number in numbers:
            records.append(number, 0, [MessagePosted("Host", f"Hi {number}.")], 2.0)
    content = path.read_bytes()
    place = content.index(b"Told" + b'{"by":"Host","text":"Hi 5."')  # after its key: session, number 0, time
    key = content.rindex(b"\x05", 0, place)
    path.write_bytes(content[:key] + b"\x45" + content[key + 1 :])
    for _ in range(2):
        with closing(SessionRecords.open(path)) as records:
            readable = []
            for card in records.cards():
                with contextlib.suppress(ValueError):
                    readable.append(records.session(card.number).id)
            assert readable[:8] == [f"s{at}" for at in range(9) if at != 4]
            for at in range(len(readable), len(readable) + 20):
                number = records.create("team1", f"n{at}", PLAN, {}, 1.0)
                records.append(number, 0, [MessagePosted("Host", "Ho.")], 2.0)
    with closing(SessionRecords.open(path)) as records:
        assert all(records.session(card.number) for card in records.cards() if card.id != "s4")
