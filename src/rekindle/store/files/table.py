"""Tables of SQLite files: a row type gives the CREATE statement, the columns of queries and the keyed hash of each row.

SQLite has no checksums: a flipped bit reads like valid data. So each row carries a MAC in its last column, over all
columns before it or those that are named: it can be moved but not changed without detection. Owns how columns are laid
out for hashing, so that no two different rows give the same bytes, whatever their types.

    key = BLAKE2b-256(person "rekindle.rowkey"; store's secret as key; name of the file)
    mac = BLAKE2b-128(person "rekindle.row", key; table and kinds; lengths of text and blobs, numbers; text and blobs)

Tables and kinds are part of the hash input, so a row does not verify in another table or file. MACs are on disk: a
changed layout needs a new version of the file. Knows no file: a connection comes with every call.

In an encrypted store the columns that say something are under a `Veil`: what is written and queried there is its
ciphertext, and rows come back opened. MACs are over what rows say; one whose columns do not open does not verify.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

from rekindle.store.files.ciphers import OVERHEAD, Changed
from rekindle.store.files.damage import DamagedRow
from rekindle.store.files.veil import Veil

R = TypeVar("R", bound=NamedTuple)
Mac = Annotated[bytes, "BLOB NOT NULL DEFAULT x''"]
MAC_BYTES = 16
_KEY_BYTES = 32
_NULL = -1  # the length of a text that is NULL
_KINDS: dict[Any, tuple[str, str]] = {
    bytes: ("b", "BLOB NOT NULL"),
    int: ("i", "INTEGER NOT NULL"),
    float: ("f", "REAL NOT NULL"),
    str: ("t", "TEXT NOT NULL"),
    str | None: ("n", "TEXT"),
}


def row_key(secret: bytes, file: str) -> bytes:
    """The key of all MACs of one kind of file."""
    return blake2b(file.encode(), digest_size=_KEY_BYTES, key=secret, person=b"rekindle.rowkey").digest()


class Table(Generic[R]):
    """A table, or some columns of it, as rows of type `row`: its fields are the columns, the last one the MAC.

    An annotation gives a column's type; `Annotated[int, "INTEGER PRIMARY KEY"]` defines it otherwise. `hidden`: the
    definition of a column that no row has. The MAC is over the columns `covered` (all before it), under the name
    `mac_name` (`name`). `sealed` columns are encrypted in an encrypted store, and `matched` ones so that they can be
    queried there by what `KeyedTable.match` returns.
    """

    def __init__(
        self,
        name: str,
        row: type[R],
        constraints: str = "",
        *,
        options: str = " WITHOUT ROWID",
        hidden: str = "",
        covered: Collection[str] = (),
        mac_name: str = "",
        sealed: Collection[str] = (),
        matched: Collection[str] = (),
    ) -> None:
        self.name, self.row, self.mac_name = name, row, mac_name or name
        self.sealed, self.matched = (tuple(map(row._fields.index, named)) for named in (sealed, matched))
        self.columns = ", ".join(row._fields)
        columns = {field: _column(hint) for field, hint in get_type_hints(row, include_extras=True).items()}
        under_mac = tuple(covered) or row._fields[:-1]
        self.covered = [row._fields.index(field) for field in under_mac]
        self.texts = frozenset(row._fields.index(field) for field, (kind, _) in columns.items() if kind in "tn")
        self.kinds = "".join(columns[field][0] for field in under_mac)
        definitions = [hidden, *(f"{field} {sql}" for field, (_, sql) in columns.items()), constraints]
        self.create = f"CREATE TABLE {name}({', '.join(filter(None, definitions))}){options}"
        self.described = "table", name, name, "".join(self.create.split())  # white space says nothing

    def rows(self, db: sqlite3.Connection, rest: str = "", *values: Any) -> Iterator[R]:
        """Query rows as they are, verified or not; `rest` follows the name of the table."""
        return map(self.row._make, db.execute(f"SELECT {self.columns} FROM {self.name} {rest}", values))


def _column(hint: Any) -> tuple[str, str]:
    """The letter of a column's kind, and its definition."""
    given = getattr(hint, "__metadata__", ())
    plain = hint.__origin__ if given else hint
    kind, sql = _KINDS[getattr(plain, "__supertype__", plain)]
    return kind, given[0] if given else sql


class KeyedTable(Generic[R]):
    """A table of one file, whose key seals its rows. `veil`: that of an encrypted store."""

    def __init__(self, table: Table[R], key: bytes, veil: Veil | None = None) -> None:
        self.name = table.name
        self.mac = RowMac(key, table.mac_name, table.kinds, table.covered).of
        self._table, self._veil = table, veil if table.sealed or table.matched else None
        self._into = f"INTO {table.name}({table.columns}) VALUES ({', '.join('?' * len(table.row._fields))})"

    def rows(self, db: sqlite3.Connection, rest: str = "", *values: Any) -> Iterator[R]:
        """Query rows as they are, verified or not; `rest` follows the name of the table."""
        found = self._table.rows(db, rest, *values)
        return found if self._veil is None else map(self.opened, found)

    def opened(self, row: Sequence[Any]) -> R:
        """Return a row as it was before it was written; a column that does not open stays as it is in the file."""
        values = list(row)
        if self._veil is not None:
            for at in (*self._table.sealed, *self._table.matched):
                values[at] = self._open(self._veil, at, values[at])
        return self._table.row._make(values)

    def _open(self, veil: Veil, at: int, value: Any) -> Any:
        if not isinstance(value, bytes):
            return value  # NULL; or what no key was used for, and so no row that verifies
        try:
            plain = veil.open(value, self._bound(at)) if at in self._table.sealed else veil.open_matched(value)
            return plain.decode("utf-8", "surrogateescape") if at in self._table.texts else plain
        except Changed:
            return value

    def _stored(self, row: Sequence[Any]) -> list[Any]:
        """A row's columns as they are written."""
        values = list(row)
        for at in self._table.sealed if self._veil is not None else ():
            if values[at] is not None and self._veil is not None:
                values[at] = self._veil.seal(_as_bytes(values[at]), self._bound(at))
        for at in self._table.matched:
            values[at] = self.match(values[at])
        return values

    def match(self, value: Any) -> Any:
        """Return what a matched column has for this value."""
        return value if self._veil is None or value is None else self._veil.match(_as_bytes(value))

    def says(self, column: str, value: Any) -> Any:
        """Return what this value of a column stands for; the value itself if it does not open."""
        at = self._table.row._fields.index(column)
        return value if self._veil is None else self._open(self._veil, at, value)

    def _bound(self, at: int) -> bytes:
        return f"{self.name}.{self._table.row._fields[at]}".encode()

    @property
    def overhead(self) -> int:
        """How many bytes a sealed value is longer than what it says."""
        return 0 if self._veil is None else OVERHEAD

    def holds(self, row: R) -> bool:
        """Whether the last column is the row's MAC; False if a column is of another kind."""
        try:
            return bool(self.mac(row) == row[-1])
        except (TypeError, ValueError, struct.error):
            return False

    def verified(self, db: sqlite3.Connection, rest: str = "", *values: Any) -> list[R]:
        """Query rows; DamagedRow if one does not verify."""
        rows = list(self.rows(db, rest, *values))
        if not all(map(self.holds, rows)):
            raise DamagedRow(f"a row of {self.name}")
        return rows

    def insert(self, db: sqlite3.Connection, *rows: R, instead: str = "INSERT") -> None:
        """Write rows with their MACs; those that they have are ignored."""
        db.executemany(f"{instead} {self._into}", [(*self._stored(row[:-1]), self.mac(row)) for row in rows])

    def replace(self, db: sqlite3.Connection, *rows: R) -> None:
        """Write rows with their MACs in the place of those with the same keys."""
        self.insert(db, *rows, instead="INSERT OR REPLACE")

    def add(self, db: sqlite3.Connection, row: R) -> R:
        """Write a row whose first column SQLite numbers; return it with its number."""
        number = db.execute(f"INSERT {self._into}", (None, *self._stored(row)[1:])).lastrowid
        row = row._replace(**{row._fields[0]: number})
        db.execute(f"UPDATE {self.name} SET {row._fields[-1]} = ? WHERE {row._fields[0]} = ?", (self.mac(row), number))
        return row


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


class RowMac:
    """MACs over these columns of rows. `kinds`: a letter each, b(lob), i(nteger), f(loat), t(ext), n: text or NULL."""

    def __init__(self, key: bytes, table: str, kinds: str, covered: Sequence[int]) -> None:
        self._base = blake2b(digest_size=MAC_BYTES, key=key, person=b"rekindle.row")
        self._base.update(len(table).to_bytes(8, "little") + table.encode())
        self._base.update(len(kinds).to_bytes(8, "little") + kinds.encode())
        columns = list(zip(covered, kinds, strict=True))
        sized = [(at, kind) for at, kind in columns if kind in "btn"]
        numbers = [(at, kind) for at, kind in columns if kind in "if"]
        self._texts = [(place, kind) for place, (_, kind) in enumerate(sized) if kind != "b"]
        self._sized, self._numbers = _picked([at for at, _ in sized]), _picked([at for at, _ in numbers])
        head = "<" + "q" * len(sized) + "".join("d" if kind == "f" else "q" for _, kind in numbers)
        self._pack = struct.Struct(head).pack

    def of(self, row: Sequence[Any]) -> bytes:
        """The MAC of a row's covered columns [16]. About 2 µs.

        TypeError, ValueError or struct.error if a column is not of its kind.
        """
        blobs: Sequence[bytes] = self._sized(row)
        lengths: Iterable[int] = map(len, blobs)
        if self._texts:
            blobs, lengths = self._encoded(list(blobs))
        digest = self._base.copy()
        digest.update(self._pack(*lengths, *self._numbers(row)))
        digest.update(b"".join(blobs))
        return digest.digest()

    def _encoded(self, blobs: list[Any]) -> tuple[list[bytes], list[int]]:
        nulls = []
        for place, kind in self._texts:
            if blobs[place] is None and kind == "n":
                blobs[place] = b""
                nulls.append(place)
            elif isinstance(blobs[place], str):
                blobs[place] = blobs[place].encode()
            else:
                raise TypeError(f"{blobs[place]!r} is no text")
        lengths = list(map(len, blobs))
        for place in nulls:
            lengths[place] = _NULL
        return blobs, lengths


def _picked(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks these columns of a row."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())
