"""An SQLite file: opening it, the meaning of open errors, and transactions one at a time.

    index.db                     opened by the store: a writer and readers; rebuilt from the records if damaged
    responses.db, sessions.db    `opened`: created with owner-only access, set aside if damaged; then a `SqliteFile`

Each file has its own tables, statements and row repair. All use the same pragmas, so that a committed transaction is
durable and deleted data is overwritten in its page. Copies that moved cells leave in other pages are erased with the
whole file; the one table known here says that this is due, also to the next process.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

from rekindle.errors import StoreError, StoreLocked
from rekindle.store.files.damage import is_damage_at_open, kind_of, refusal
from rekindle.store.files.directory import set_aside
from rekindle.store.files.keys import NOTHING_GIVEN, Given, StoreKeys, store_keys
from rekindle.store.files.sync import OsFileSystem

logger = logging.getLogger(__name__)
T = TypeVar("T")
Locking = Literal["shared", "exclusive"]
BUSY_S = 60
MEMORY = ":memory:"
_HEADERS = (b"\1\1", b"\2\2")  # write and read versions: with a rollback journal, with a write-ahead log
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "fullfsync = ON",
    "checkpoint_fullfsync = ON",
    "secure_delete = ON",
)


def connect(path: Path | str, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """Open a connection usable from any thread, in autocommit mode unless a transaction is begun."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_s)
    connection.text_factory = _any_text
    return connection


def opened_for_reading(path: Path) -> sqlite3.Connection:
    """A connection for querying the index of a store that others may have open."""
    # "rw" does not create a missing file, but may create the shared memory that reading a WAL needs.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=1)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _any_text(content: bytes) -> str:
    """Decode a text column; invalid UTF-8 is accepted, so that only its row fails to verify."""
    return content.decode(errors="surrogateescape")


def connect_writer(
    path: Path | str, *, busy_s: float = BUSY_S, locking: Locking = "shared", page_bytes: int | None = None
) -> sqlite3.Connection:
    """Open a connection with durable transactions; "exclusive" locks out all others until it is closed.

    `page_bytes`: the size of pages in a new file [SQLite's own, 4,096]; others keep theirs.
    sqlite3.DatabaseError if the file's header is damaged, where SQLite itself would open it read-only.
    """
    if path != MEMORY:
        with Path(path).open("rb") as file:
            header = file.read(20)
        if header and header[18:] not in _HEADERS:
            raise sqlite3.DatabaseError("its header is not one that SQLite writes")
    connection = connect(path, busy_s=busy_s)
    try:
        if locking == "exclusive":
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        if page_bytes is not None:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if locking == "exclusive":  # take the lock now, not at the first write
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def version_of(connection: sqlite3.Connection) -> tuple[int, set[str]]:
    """The format number of a file, 0 for a new one, and the names of its tables."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version, {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def schema_of(connection: sqlite3.Connection) -> set[tuple[str, str, str, str]]:
    """All tables and indexes in a file, as `Table.described` says them."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql NOT NULL")
    return {(kind, name, table, "".join(str(sql).split())) for kind, name, table, sql in found}


def create(connection: sqlite3.Connection, statements: Iterable[str], version: int) -> None:
    """Run these statements, which make the tables of a new file, and number its format, in one transaction."""
    with transaction(connection):
        for statement in (*statements, f"PRAGMA user_version = {version}"):
            connection.execute(statement)


def problem(connection: sqlite3.Connection, check: Literal["quick_check", "integrity_check"]) -> str | None:
    """The first thing that SQLite finds wrong with its B-trees; None if nothing. Reads the whole file.

    For 500 MB, "quick_check" takes one second and "integrity_check" ten: it compares rows with their indexes.
    """
    (found,) = connection.execute(f"PRAGMA {check}(1)").fetchone()
    return None if found == "ok" else str(found)


def checkpoint_at(connection: sqlite3.Connection, log_bytes: int) -> None:
    """Copy the write-ahead log into the file whenever it has this many bytes [SQLite's own: 1,000 pages]."""
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA wal_autocheckpoint = {log_bytes // page_bytes}")


def truncate_log(connection: sqlite3.Connection) -> bool:
    """Checkpoint the write-ahead log and truncate it to zero; False if a reader prevents that."""
    return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]


def note_traces(connection: sqlite3.Connection) -> None:
    """Note that traces of what is deleted may stay in the file; inside the transaction that deletes it."""
    connection.execute("CREATE TABLE IF NOT EXISTS traces(number INTEGER PRIMARY KEY)")
    connection.execute("INSERT INTO traces DEFAULT VALUES")


def last_trace(connection: sqlite3.Connection) -> int:
    """The number of the last note of traces that were not erased since; 0 if there are none."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'traces'").fetchone() is None:
        return 0
    (last,) = connection.execute("SELECT ifnull(max(number), 0) FROM traces").fetchone()
    return int(last)


def drop_traces(connection: sqlite3.Connection, last: int) -> None:
    """Note that what was deleted is erased, except for what was deleted after the note `last`."""
    connection.execute("DELETE FROM traces WHERE number <= ?", (last,))
    truncate_log(connection)


def erase_traces(connection: sqlite3.Connection) -> bool:
    """Rewrite the file and empty its log if traces are noted; False if a reader keeps the log from that."""
    last = last_trace(connection)
    if last:
        connection.execute("VACUUM")
        if not truncate_log(connection):
            return False
        drop_traces(connection, last)
    return True


def erase_traces_left(connection: sqlite3.Connection, path: Path | None) -> None:
    """Erase what a process that was killed meanwhile has left; a disk that refuses is logged and leaves it due."""
    try:
        if not erase_traces(connection):
            logger.warning("%s may still hold what was purged, as another process reads its log: purge again", path)
    except sqlite3.OperationalError as error:
        logger.warning("%s may still hold what was purged (%s): purge again, or restart", path, error)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the `with` block as one transaction: all of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has already rolled back
            connection.execute("ROLLBACK")
        raise


def opened(
    path: Path | None,
    make: Callable[[sqlite3.Connection, StoreKeys], T],
    *,
    busy_s: float,
    locking: Locking = "shared",
    given: Given = NOTHING_GIVEN,
) -> T:
    """Return `make(connection, keys)` for a file and the keys next to it, creating both with owner-only access.

    `given`: what the keys are made from or opened with. None: in memory. A damaged file, also one that `make`
    finds damaged, is set aside under a new name and logged. StoreLocked while another process has it; StoreError if it
    cannot be used, StoreRefused if the disk is the cause.
    """
    if path is None:
        return make(connect_writer(MEMORY), StoreKeys.new(None, None))
    try:
        return _made(path, make, busy_s, locking, given)
    except (OSError, sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite's message may quote damaged text
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            message = f"{path} is in use by another process: stop it first, or choose another directory as store"
            raise StoreLocked(message) from error
        if not isinstance(error, UnicodeDecodeError) and not is_damage_at_open(error):
            raise refusal(error, f"{path} cannot be opened: {error}") from error
        _set_aside(path, error)
    try:
        return _made(path, make, busy_s, locking, given)
    except (OSError, sqlite3.DatabaseError, UnicodeDecodeError) as again:
        raise StoreError(f"{path} was damaged, and a new one cannot be made: {again}. Check the disk.") from again


def _made(
    path: Path, make: Callable[[sqlite3.Connection, StoreKeys], T], busy_s: float, locking: Locking, given: Given
) -> T:
    keys = _claimed(path, given)
    connection = connect_writer(path, busy_s=busy_s, locking=locking)
    try:
        return make(connection, keys)
    except BaseException:
        connection.close()
        raise


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged file, with its log, to an unused name."""
    aside = path.with_name(f"{path.name}.damaged")
    for number in count(1):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.damaged{number}")
    logger.error("%s is damaged (%s): renamed to %s, a new one is created. Check the disk.", path, error, aside.name)
    try:
        set_aside(path, aside, OsFileSystem())
    except OSError as refused:
        raise refusal(refused, f"{path} is damaged ({error}) and cannot be set aside: {refused}") from error


def _claimed(path: Path, given: Given) -> StoreKeys:
    """Create the directory and file if missing; return the keys, made from what is given if there were none."""
    is_there, fs = path.parent.is_dir(), OsFileSystem()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = store_keys(path.parent, fs, given.master, given.new_secret)
        fs.close_file(fs.open_file(path, "create"))
        return keys
    except OSError as error:
        reason = f"{path} cannot be used: {error.strerror or error}"
        message = f"{reason}; check its permissions, or choose another directory as store"
        raise (refusal(error, message) if is_there else StoreError(message)) from error


class SqliteFile:
    """An open file with one connection, shared by all threads in turn.

    Failed reads and writes raise a StoreError that begins with `what`. `damage`: further exceptions that count as such
    a failure, raised when decoding rows. `file_error`: the file damage found since opening, logged once; None: none.
    """

    def __init__(self, connection: sqlite3.Connection, what: str, *, damage: tuple[type[Exception], ...] = ()) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._what = what
        self._damage: tuple[type[Exception], ...] = (sqlite3.Error, *damage)
        self.file_error: str | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for exclusive use inside the `with` block; each statement is its own transaction."""
        with self._lock:
            try:
                yield self._connection
            except self._damage as error:
                if kind_of(error) == "file" and self.file_error is None:
                    self.file_error = f"{self._what} cannot be used ({error}): restart, and a damaged file is set aside"
                    logger.error("%s. Check the disk.", self.file_error)
                raise StoreError(f"{self._what} cannot be used: {error}") from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection inside one transaction: all of it or nothing."""
        with self.reading() as connection, transaction(connection):
            yield connection

    def close(self) -> None:
        """Close the file; closing twice is safe."""
        with self._lock:
            self._connection.close()
