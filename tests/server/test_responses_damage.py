"""Whatever is changed in the file of kept responses, nobody reads what is not theirs, and responses are kept again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.config import RESPONSES_FILE
from rekindle.server.responses.items import message_item
from rekindle.server.responses.stored import StoredResponse, StoredResponses

NUM_HURTS = int(os.environ.get("HURTS", "60"))
COLUMNS = {
    "response": ("number", "namespace", "id", "agent", "previous", "depth", "last_use", "num_bytes", "mac"),
    "content": ("number", "packed", "mac"),
    "item": ("namespace", "id", "number"),
}
SPACES = ("team1", "team2")


def kept(id: str, namespace: str) -> StoredResponse:
    said = {"id": id, "previous_response_id": None, "output": [message_item(f"msg_{id}", "Hello.")]}
    return StoredResponse(namespace, "ada", said, [message_item(f"in_{id}", "Asked.")])


WHOLE = {(space, f"{space}-{at}"): kept(f"{space}-{at}", space) for space in SPACES for at in range(3)}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[StoredResponses]:
    responses = StoredResponses(path)
    responses.start()
    try:
        yield responses
    finally:
        responses.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with opened(tmp_path / RESPONSES_FILE) as responses:
        for each in WHOLE.values():
            responses.keep(each)
        assert responses.flush()
    return tmp_path / RESPONSES_FILE


def changed(value: Any, random: np.random.Generator) -> Any:
    """A flipped bit, or something of another type."""
    if random.integers(3) == 0:
        return [b"\xff", "text", 7, -1.5][int(random.integers(4))]
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1 << int(random.integers(2)))
    if isinstance(value, bytes):
        at = int(random.integers(len(value)))
        return value[:at] + bytes([value[at] ^ 1 << int(random.integers(8))]) + value[at + 1 :]
    return "text" if value is None else value + 1


def is_sound(path: Path) -> None:
    with opened(path) as responses:
        for space in (*SPACES, "team0", "team3", "text"):
            for _, name in WHOLE:
                found = responses.find(space, name)
                assert found is None or found == WHOLE.get((space, name)), f"{space} reads {name}"
                assert responses.item(space, f"msg_{name}") is None or (space, name) in WHOLE, (
                    f"{space} reads of {name}"
                )
        new = kept("new", "team1")
        responses.keep(new).result(60)
        assert responses.find("team1", "new") == new
        responses.forget("team1", "ada")
        files = [each for each in path.parent.glob(f"{RESPONSES_FILE}*") if "damaged" not in each.name]
        assert b"team1-" not in b"".join(each.read_bytes() for each in files)


@pytest.mark.parametrize("table", COLUMNS)
def test_a_changed_column_gives_nobody_what_is_not_theirs(path: Path, table: str) -> None:
    random, pristine = np.random.default_rng(1), path.read_bytes()
    key = "id" if table == "item" else "number"
    for column in COLUMNS[table]:
        for _ in range(max(2, NUM_HURTS // 30)):
            path.write_bytes(pristine)
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                query = f"SELECT {column} FROM {table} WHERE {key} = (SELECT MIN({key}) FROM {table})"
                (value,) = connection.execute(query).fetchone()
                new = changed(value, random)
                change = query.replace(f"SELECT {column} FROM {table}", f"UPDATE OR IGNORE {table} SET {column} = ?", 1)
                with contextlib.suppress(sqlite3.IntegrityError):  # a key of a row is a number
                    connection.execute(change, (new,))
            try:
                is_sound(path)
            except Exception as error:
                raise AssertionError(f"{table}.{column}: {value!r} became {new!r}") from error


def test_a_content_under_the_number_of_the_next_response_keeps_nothing_from_being_kept(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE content SET number = ? WHERE number = 1", (len(WHOLE) + 1,))
    is_sound(path)


def test_items_that_are_out_of_order_go_with_their_agent(path: Path) -> None:
    """SQLite looks for a row that it deletes by its key, and does not find it where it should be."""
    written = path.read_bytes()
    row = b"team1msg_team1-1\x02"  # namespace, id, number
    assert written.count(row) == 1
    path.write_bytes(written.replace(row, row[:-2] + b"9\x02"))
    is_sound(path)


def test_an_index_that_misses_rows_is_made_anew_where_it_is_met(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite notices when it deletes a row whose entry is not there."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (definition,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'response_agent'").fetchone()
        connection.execute("PRAGMA writable_schema = ON")
        empty = "UPDATE sqlite_master SET sql = sql || ' WHERE number < 0' WHERE name = 'response_agent'"
        connection.execute(empty)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("REINDEX response_agent")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'response_agent'", (definition,))
    is_sound(path)
    assert "is repaired" in caplog.text


def test_a_flipped_bit_in_any_page_is_survived(path: Path) -> None:
    random, pristine = np.random.default_rng(2), path.read_bytes()
    pages = len(pristine) // 4096
    for number in range(max(pages, NUM_HURTS // 3)):
        at = number % pages * 4096 + int(random.integers(4096))
        path.write_bytes(pristine[:at] + bytes([pristine[at] ^ 1 << int(random.integers(8))]) + pristine[at + 1 :])
        try:
            is_sound(path)
        except Exception as error:
            raise AssertionError(f"byte {at} of {len(pristine)}") from error


def altered(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(statement).rowcount == 1


def test_content_under_a_number_to_come_keeps_nothing_from_being_saved(path: Path) -> None:
    altered(path, "UPDATE content SET number = 1 + (SELECT max(number) FROM response) WHERE number = 1")
    is_sound(path)


def test_an_item_that_leads_to_another_namespace_is_forgotten_with_its_agent(path: Path) -> None:
    altered(
        path,
        "UPDATE item SET number = (SELECT number FROM response WHERE id = 'team2-0') "
        "WHERE namespace = 'team1' AND id = 'msg_team1-0'",
    )
    is_sound(path)


@pytest.mark.parametrize(
    "place",
    [b"\x04\x17!\x01team1in_team1-1", b"team1ada\x02", b"team2team2-1\x05"],
    ids=["a row of item", "an index", "a unique index"],
)
def test_an_index_that_does_not_fit_its_rows_is_made_anew(path: Path, place: bytes) -> None:
    """SQLite deletes no row whose entry it does not find, and finds none in a table out of order."""
    pristine = path.read_bytes()
    at = pristine.index(place) + len(place) - 1
    path.write_bytes(pristine[:at] + bytes([pristine[at] ^ 64]) + pristine[at + 1 :])
    is_sound(path)
    assert not list(path.parent.glob("*damaged*"))
    with opened(path) as responses:
        assert responses.find("team2", "team2-0") == WHOLE["team2", "team2-0"]


def test_a_schema_without_a_column_is_set_aside(path: Path) -> None:
    pristine = path.read_bytes()
    path.write_bytes(pristine.replace(b"packed BLOB", b"qacked BLOB"))
    is_sound(path)
    assert path.with_name(f"{RESPONSES_FILE}.damaged").exists()
