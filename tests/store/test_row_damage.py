"""Rows of the index vouch for themselves: whatever is changed in one, nobody gets what is not theirs; saving goes on.

Every column of every table is changed, and a bit of every page of the file is flipped. What must hold afterwards: each
agent is found in its own namespace with its own ids or not at all, what loads is what was saved, and turns are saved
again, at the latest by the next open. `HURTS` sets how many of each (`make torture`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rekindle.engine import gauges
from rekindle.store.commands import Delete, Pin, Purge
from rekindle.store.maintenance import opening
from rekindle.store.rows.index import PAGE_BYTES
from rekindle.store.values import StoreStats
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, Chain, fast_directory, open_store, warm_tokens

NUM_HURTS = int(os.environ.get("HURTS", "60"))
SHARD_BYTES = 1 << 15
NAMESPACES = ("team1", "team2")
NEW = {("team2", "new"): list(range(500, 570))}
Opened = Callable[..., WarmStore]
COLUMNS = {
    "block": ("id", "name", "part", "parent", "root", "slot", "num_tokens", "ids", "crc", "last_use", "mac"),
    "agent": ("agent", "namespace", "id", "pinned_until", "mac"),
    "sequence": (
        *("agent", "branch", "root", "head", "num_tokens", "canonical_tokens", "last_use", "turn_ends", "mac"),
    ),
    "free": ("part", "slot", "mac"),
    "meta": ("key", "value", "mac"),
}


@dataclass(frozen=True)
class Whole:
    """A closed store as its files, and the ids of (namespace, agent) in it."""

    files: dict[str, bytes]
    secret: bytes
    agents: dict[tuple[str, str], list[int]]


def opened_at(directory: Path) -> WarmStore:
    store = open_store(directory, shard_bytes=SHARD_BYTES, namespaces=NAMESPACES)
    store.start()
    return store


def save(store: WarmStore, ids: list[int], agent: str, namespace: str) -> None:
    chain = Chain.of(store, ids, namespace)
    for block in chain.blocks:
        assert store.stage(block)
    store.save_turn(chain.record(agent, namespace=namespace))
    assert store.flush(10)


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    directory = fast_directory()
    shared = list(range(40))
    agents = {
        (space, agent): shared + [1000 * number + i for i in range(20 + 13 * number)]
        for number, (space, agent) in enumerate((s, a) for s in NAMESPACES for a in ("ada", "bob"))
    }
    store = opened_at(directory)
    save(store, [7] * 90, "gone", "team1")
    for (space, agent), ids in agents.items():
        save(store, ids, agent, space)
    assert store.submit(Pin("team1", "ada", 1e9)).result(10)
    store.submit(Delete("team1", "gone")).result(10)
    store.check("records")
    store.close()
    place = directory / FINGERPRINT.hex()
    yield Whole({p.name: p.read_bytes() for p in place.iterdir()}, (directory / "secret").read_bytes(), agents)
    shutil.rmtree(directory)


@pytest.fixture
def directory(whole: Whole) -> Iterator[Path]:
    made = fast_directory()
    (made / "secret").write_bytes(whole.secret)
    yield made
    shutil.rmtree(made)


def lay_out(directory: Path, files: dict[str, bytes]) -> Path:
    place = directory / FINGERPRINT.hex()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place / "index.db"


def nobody_sees_what_is_not_theirs(store: WarmStore, whole: Whole) -> None:
    known = {**whole.agents, **NEW}
    for record in store.sequences():
        ids, key = store.sequence_ids(record).tolist(), (record.namespace, record.agent)
        if record.agent.startswith("\x01recovered-"):
            theirs = [held for (space, _), held in known.items() if space == record.namespace]
            assert not ids or any(ids == held[: len(ids)] for held in [*theirs, [7] * 90]), "a chain changed hands"
            continue
        assert key in known, f"{key} was never there"
        assert ids in ([], known[key]), f"{key} has other ids"
    for space, agent in store.pins():
        assert (space, agent) in whole.agents
    for (space, _), ids in whole.agents.items():
        warm_tokens(store, Chain.of(store, ids, space))  # asserts that each payload is that of its name
    store.stats()


def saves(store: WarmStore, whole: Whole) -> bool:
    """Whether all that was there, and something new, can be saved and is warm then."""
    everybody = {**whole.agents, **NEW}
    for _ in range(2):  # a record that was found damaged is written again
        for (space, agent), ids in everybody.items():
            save(store, ids, agent, space)
    found = {(record.namespace, record.agent) for record in store.sequences()}
    warm = all(warm_tokens(store, Chain.of(store, ids, space)) == len(ids) for (space, _), ids in everybody.items())
    return found >= set(everybody) and warm and store.stats().last_error is None


def survives(directory: Path, whole: Whole) -> bool:
    """Open a damaged store, look, save, open again: all must be well by then. Whether it was well at once."""
    store = opened_at(directory)
    try:
        nobody_sees_what_is_not_theirs(store, whole)
        at_once = saves(store, whole)
    finally:
        store.close()
    store = opened_at(directory)
    try:
        if not at_once:
            nobody_sees_what_is_not_theirs(
                store, Whole({}, b"", {**whole.agents, ("team2", "new"): [*range(500, 570)]})
            )
        assert saves(store, whole), store.stats().last_error
        store.check("records")
    finally:
        store.close()
    return at_once


def changed(value: object, random: np.random.Generator) -> object:
    """Another value for a column: a bit flipped, or something of another type or length."""
    kind = random.choice(["bit", "bit", "text", "bytes", "number"])
    if kind == "bit" and isinstance(value, bytes) and value:
        at = int(random.integers(len(value)))
        return value[:at] + bytes([value[at] ^ 1 << int(random.integers(8))]) + value[at + 1 :]
    if kind == "bit" and isinstance(value, str) and value:
        return value[:-1] + chr(ord(value[-1]) ^ 1 << int(random.integers(3)))
    if kind == "bit" and isinstance(value, int):
        return value ^ 1 << int(random.integers(40))
    others: dict[str, object] = {"text": "x\x7f", "bytes": random.bytes(int(random.choice([0, 5, 32])))}
    return others.get(str(kind), int(random.integers(-5, 10**9)))


def hurt_row(index: Path, table: str, column: str, random: np.random.Generator) -> str:
    """Change a column of some row; say what was done."""
    with contextlib.closing(sqlite3.connect(index, isolation_level=None)) as connection:
        key = "id" if table == "block" else COLUMNS[table][0]
        rows = connection.execute(f"SELECT {key}, {column} FROM {table} ORDER BY 1").fetchall()
        name, value = rows[int(random.integers(len(rows)))]
        new = changed(value, random)
        change = f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {key} = ? AND {column} = ?"
        with contextlib.suppress(sqlite3.IntegrityError):  # a key of a row is a number
            connection.execute(change, (new, name, value))
    return f"{table}.{column}: {value!r} became {new!r}"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("table", COLUMNS)
def test_a_changed_column_is_noticed_and_saving_goes_on(directory: Path, whole: Whole, table: str) -> None:
    random = np.random.default_rng(len(table))
    for column in COLUMNS[table]:
        for _ in range(max(1, NUM_HURTS // 60)):
            index = lay_out(directory, whole.files)
            what = hurt_row(index, table, column, random)
            try:
                at_once = survives(directory, whole)
            except Exception as error:
                raise AssertionError(what) from error
            assert at_once, f"{what}: nothing was saved until the next open"


@pytest.mark.usefixtures("quiet")
def test_a_flipped_bit_in_any_page_costs_no_more_than_a_restart(directory: Path, whole: Whole) -> None:
    random = np.random.default_rng(3)
    content = whole.files["index.db"]
    pages = range(len(content) // PAGE_BYTES)
    for number in range(max(len(pages), NUM_HURTS)):
        at = pages[number % len(pages)] * PAGE_BYTES + int(random.integers(PAGE_BYTES))
        hurt = bytearray(content)
        hurt[at] ^= 1 << int(random.integers(8))
        lay_out(directory, {**whole.files, "index.db": bytes(hurt)})
        try:
            survives(directory, whole)
        except Exception as error:
            raise AssertionError(f"byte {at} of {len(content)}") from error


@pytest.mark.usefixtures("quiet")
def test_a_schema_that_is_no_text_is_set_aside(directory: Path, whole: Whole) -> None:
    content = whole.files["index.db"]
    # SQLite names the broken entry in its message, which Python then cannot decode.
    hurt = content.replace(b"CREATE INDEX block_child", b"CREXTE INDEX block_child").replace(b"block_", b"bloc\xd5_")
    assert hurt != content
    lay_out(directory, {**whole.files, "index.db": hurt})
    assert survives(directory, whole)


def altered(directory: Path, whole: Whole, statement: str, *values: object) -> None:
    """Lay the store out with a statement carried out on its index."""
    index = lay_out(directory, whole.files)
    with contextlib.closing(sqlite3.connect(index, isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount > 0


def test_a_bit_of_the_namespace_gives_no_agent_to_another_tenant(
    directory: Path, whole: Whole, caplog: pytest.LogCaptureFixture
) -> None:
    altered(directory, whole, "UPDATE agent SET namespace = 'team3' WHERE namespace = 'team1' AND id = 'ada'")
    with caplog.at_level(logging.ERROR):
        store = opened_at(directory)
    try:
        assert {(record.namespace, record.agent) for record in store.sequences()} == set(whole.agents) - {
            ("team1", "ada")
        }
        assert not [key for key in store.pins() if key[0] == "team3"]
        assert sum("damaged rows" in record.message for record in caplog.records) == 1
        assert store.stats().damaged_rows == 1
        assert any("1 rows" in said and "check the disk" in said for said in problems(store.stats()))
        assert saves(store, whole)
    finally:
        store.close()


def problems(stats: StoreStats) -> tuple[str, ...]:
    return gauges.problems(stats, is_in_place=True, is_running=True)


def test_a_damaged_row_of_an_agent_that_still_names_it_loses_only_the_pin(directory: Path, whole: Whole) -> None:
    altered(directory, whole, "UPDATE agent SET pinned_until = 'x' WHERE namespace = 'team1' AND id = 'ada'")
    store = opened_at(directory)
    try:
        found = {(r.namespace, r.agent): store.sequence_ids(r).tolist() for r in store.sequences()}
        assert found == whole.agents
        assert store.pins() == {}
    finally:
        store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE block SET ids = x'02000001' || substr(ids, 5) WHERE id = (SELECT MAX(id) FROM block)",
        "UPDATE block SET slot = (SELECT slot FROM free LIMIT 1) WHERE id = (SELECT MAX(id) FROM block)",
        "UPDATE block SET slot = 100000000 WHERE id = (SELECT MAX(id) FROM block)",
        "UPDATE block SET name = x'00' WHERE id = (SELECT MAX(id) FROM block)",
        "UPDATE meta SET value = 3 WHERE key = 'num_slots.0'",
        "UPDATE meta SET value = 100000000 WHERE key = 'num_slots.1'",
        "DELETE FROM meta WHERE key = 'num_slots.1'",
        "INSERT INTO free(part, slot) SELECT part, slot FROM block LIMIT 1",
        "DELETE FROM free",
    ],
)
@pytest.mark.usefixtures("quiet")
def test_damage_of_a_large_index_is_repaired_where_it_is_met(
    directory: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """Opening checks small indexes whole; what is found later is repaired before the next save."""
    monkeypatch.setattr(opening, "QUICKLY_CHECKED_BYTES", 0)
    altered(directory, whole, statement)
    store = opened_at(directory)
    try:
        nobody_sees_what_is_not_theirs(store, whole)
        assert saves(store, whole), store.stats().last_error
        assert store.submit(Purge("team1", "bob")).result(10)
        nobody_sees_what_is_not_theirs(store, whole)
        store.check("records")
    finally:
        store.close()


def test_a_branch_whose_ids_were_changed_is_a_miss(
    directory: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "QUICKLY_CHECKED_BYTES", 0)
    altered(directory, whole, "UPDATE block SET ids = substr(ids, 1, 3) || x'01' || substr(ids, 5)")
    store = opened_at(directory)
    try:
        assert len(store.sequences()) == len(whole.agents)
        assert all(not len(store.sequence_ids(record)) for record in store.sequences())
    finally:
        store.close()


@pytest.mark.usefixtures("quiet")
def test_a_broken_page_met_while_running_is_said_and_cured_by_a_restart(
    directory: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "QUICKLY_CHECKED_BYTES", 0)
    index = lay_out(directory, whole.files)
    with contextlib.closing(sqlite3.connect(index)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'block'").fetchone()
    content = bytearray(whole.files["index.db"])
    content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    index.write_bytes(content)
    store = opened_at(directory)
    save(store, NEW["team2", "new"], "new", "team2")
    nobody_sees_what_is_not_theirs(store, whole)
    said = " ".join(problems(store.stats()))
    assert "index is damaged" in said and "restart" in said and "free space" not in said
    store.close()
    store = opened_at(directory)
    try:
        assert {
            (r.namespace, r.agent): store.sequence_ids(r).tolist() for r in store.sequences()
        }.items() >= whole.agents.items()
        assert saves(store, whole) and problems(store.stats()) == ()
        store.check("records")
    finally:
        store.close()
    assert not list(index.parent.glob("*suspect"))
