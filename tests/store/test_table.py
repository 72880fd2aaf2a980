"""Tables: statements that follow from the row type; MACs equal for equal rows alone, whatever types and secrets."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.server.responses.tables import TABLES as RESPONSE_TABLES
from rekindle.store.files.damage import DamagedRow
from rekindle.store.files.sqlite_file import schema_of
from rekindle.store.files.table import MAC_BYTES, KeyedTable, RowMac, Table, row_key
from rekindle.store.rows.schema import TABLES as INDEX_TABLES
from rekindle_sessions.log.database import TABLES as SESSION_TABLES
from tests.data.written_by_0_1 import write as written

KEY = row_key(b"s" * 32, "index")
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False).map(lambda value: value + 0.0)


class Thing(NamedTuple):
    """A row with every kind of column."""

    name: bytes
    number: int
    text: str
    note: str | None
    share: float
    mac: bytes = b""


class Numbered(NamedTuple):
    """A row that SQLite numbers, of which the count is free to change."""

    number: Annotated[int, "INTEGER PRIMARY KEY"]
    count: int
    text: str
    mac: bytes = b""


THING = Table("agent", Thing, "PRIMARY KEY(name, number)")
THINGS = KeyedTable(THING, KEY)
COUNTED = Table("numbered", Numbered, options="", covered=("number", "text"))
NUMBERED = KeyedTable(COUNTED, KEY)
ROWS = st.tuples(st.binary(max_size=5), NUMBERS, st.text(max_size=5), st.none() | st.text(max_size=5), FLOATS)


def mac(table: str, kinds: str, key: bytes = KEY) -> RowMac:
    return RowMac(key, table, kinds, range(len(kinds)))


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(THING.create)
        connection.execute(COUNTED.create)
        yield connection


def test_what_is_written_is_read_and_verifies(db: sqlite3.Connection) -> None:
    rows = [Thing(b"a", 1, "x", None, 0.5), Thing(b"b", 2, "y", "z", 1.0)]
    THINGS.insert(db, *rows)
    assert [row[:-1] for row in THINGS.verified(db, "ORDER BY number")] == [row[:-1] for row in rows]
    assert THINGS.verified(db, "WHERE name = ?", b"b")[0].note == "z"
    with pytest.raises(sqlite3.IntegrityError):
        THINGS.insert(db, rows[0])
    THINGS.replace(db, Thing(b"a", 1, "new", None, 0.5))
    db.execute("UPDATE agent SET share = 2.0 WHERE number = 2")
    assert [(row.text, THINGS.holds(row)) for row in THINGS.rows(db)] == [("new", True), ("y", False)]
    with pytest.raises(DamagedRow, match="a row of agent"):
        THINGS.verified(db)


def test_a_mac_may_leave_out_what_changes(db: sqlite3.Connection) -> None:
    row = NUMBERED.add(db, Numbered(0, 5, "x"))
    assert row.number == 1
    db.execute("UPDATE numbered SET count = 6")
    (changed,) = NUMBERED.verified(db)
    assert changed[:3] == (1, 6, "x")
    db.execute("UPDATE numbered SET text = 'y'")
    assert not NUMBERED.holds(next(NUMBERED.rows(db)))


OLD_RESPONSES = [table for table in RESPONSE_TABLES if table.name != "receipt"]  # added to a file when it is opened
FILES = {"responses.db": OLD_RESPONSES, "sessions.db": SESSION_TABLES, "index.db": INDEX_TABLES}


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_tables_that_0_1_wrote(name: str) -> None:
    (path,) = Path(str(written.__file__)).parent.rglob(name)
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as unchanged:
        assert schema_of(unchanged) >= {table.described for table in FILES[name]}


@given(ROWS, ROWS)
def test_rows_have_one_mac_only_if_they_are_equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert len(THINGS.mac(a)) == MAC_BYTES
    assert (THINGS.mac(a) == THINGS.mac(b)) == (a == b)
    assert THINGS.holds(Thing(*a, THINGS.mac(a))) and THINGS.holds(Thing(*b, THINGS.mac(a))) == (a == b)


@given(st.lists(st.sampled_from([b"x", 1, 1.0, "x", None]), min_size=5, max_size=5))
def test_a_value_of_another_type_does_not_verify(row: list[Any]) -> None:
    right = (b"x", 1, "x", None, 1.0)
    typed = [type(value) for value in row] == [bytes, int, str, type(None), float]
    assert THINGS.holds(Thing(*row, THINGS.mac(right))) == typed


@pytest.mark.parametrize("mac", [b"", None, 5, "x", b"0" * MAC_BYTES])
def test_what_is_no_mac_does_not_verify(mac: Any) -> None:
    assert not THINGS.holds(Thing(b"x", 1, "x", None, 1.0, mac))


def test_bytes_that_move_between_columns_are_noticed() -> None:
    pair = mac("pair", "bb")
    assert len({pair.of(row) for row in ((b"", b"ab"), (b"a", b"b"), (b"ab", b""))}) == 3
    assert THINGS.mac((b"", 0, "", None, 0.0)) != THINGS.mac((b"", 0, "", "", 0.0))


def test_tables_files_secrets_and_kinds_have_macs_of_their_own() -> None:
    others = [
        mac("agents", "bi"),
        mac("agent", "ib"),
        mac("agent", "bi", row_key(b"s" * 32, "sessions")),
        mac("agent", "bi", row_key(b"t" * 32, "index")),
    ]
    right = mac("agent", "bi").of((b"x", 1))
    assert all(other.of((b"x", 1) if other is not others[1] else (1, b"x")) != right for other in others)


@pytest.mark.parametrize("row", [(b"x", 1 << 63), (b"x", 0.5), ("x", 1), (None, 1)])
def test_a_row_that_cannot_be_written_has_no_mac(row: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, struct.error)):
        mac("agent", "bi").of(row)
