"""A SQLite file: how it is opened, what errors of opening it mean, one transaction at a time.

    index.db                     opened by the store: a writer and readers; made anew from the records where damaged
    responses.db, sessions.db    `opened`: made for their owner alone, set aside where damaged; then a `SqliteFile`

Knows no tables: each file has its own statements, and the repair of its rows. All are written with the same pragmas, so
that what a transaction returned is durable, and what was deleted leaves its page.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

from rekindle.errors import StoreError, StoreLocked
from rekindle.store.damage import kind_of
from rekindle.store.directory import SECRET_BYTES, set_aside, store_secret
from rekindle.store.refusal import refusal
from rekindle.store.sync import OsFileSystem

logger = logging.getLogger(__name__)
T = TypeVar("T")
Locking = Literal["shared", "exclusive"]
BUSY_S = 60
MEMORY = ":memory:"
_HEADERS = (b"\1\1", b"\2\2")  # which SQLite may write and read: with a rollback journal, with a write-ahead log
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "fullfsync = ON",
    "checkpoint_fullfsync = ON",
    "secure_delete = ON",
)


def connect(path: Path | str, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """A connection for any thread, every statement a transaction of its own unless one is begun."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_s)
    connection.text_factory = _any_text
    return connection


def _any_text(content: bytes) -> str:
    """A text column; one that is no UTF-8 is read all the same, so that it is its row alone that does not verify."""
    return content.decode(errors="surrogateescape")


def connect_writer(path: Path | str, *, busy_s: float = BUSY_S, locking: Locking = "shared") -> sqlite3.Connection:
    """A connection whose transactions are durable; "exclusive" keeps all others away until it is closed.

    sqlite3.DatabaseError where the file's header is damaged, though SQLite would only not write it.
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
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if locking == "exclusive":  # taken now and kept, not when something is written first
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            connection.execute("ROLLBACK")
        raise


def is_damage(error: OSError | sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    """Whether an error of opening a file says that it is damaged; else a disk, a lock or permissions are to blame.

    What is asked there has no mistakes, so one that SQLite finds is of the schema: a table or column is gone.
    """
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return not isinstance(error, OSError)


def opened(
    path: Path | None, make: Callable[[sqlite3.Connection, bytes], T], *, busy_s: float, locking: Locking = "shared"
) -> T:
    """What `make` makes of a file and the secret beside it; both are made where there are none, for their owner alone.

    None: in memory. A damaged file is set aside over no other one, loudly, also where `make` finds it so. StoreLocked
    while another process has it, StoreError if it cannot be used, StoreRefused where that is the disk's doing.
    """
    if path is None:
        return make(connect_writer(MEMORY), secrets.token_bytes(SECRET_BYTES))
    try:
        return _made(path, make, busy_s, locking)
    except (OSError, sqlite3.DatabaseError, UnicodeDecodeError) as error:  # what SQLite says may quote what is damaged
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            message = f"{path} is in use by another process: stop it first, or choose another directory as store"
            raise StoreLocked(message) from error
        if isinstance(error, OSError | sqlite3.OperationalError) and not is_damage(error):
            raise refusal(error, f"{path} cannot be opened: {error}") from error
        _set_aside(path, error)
    try:
        return _made(path, make, busy_s, locking)
    except (OSError, sqlite3.DatabaseError, UnicodeDecodeError) as again:
        raise StoreError(f"{path} was damaged, and a new one cannot be made: {again}. Check the disk.") from again


def _made(path: Path, make: Callable[[sqlite3.Connection, bytes], T], busy_s: float, locking: Locking) -> T:
    secret = _claimed(path)
    connection = connect_writer(path, busy_s=busy_s, locking=locking)
    try:
        return make(connection, secret)
    except BaseException:
        connection.close()
        raise


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged file, with its log, to a name that nothing has yet."""
    aside = path.with_name(f"{path.name}.damaged")
    for number in count(1):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.damaged{number}")
    logger.error("%s is damaged (%s): it is now %s, and a new one begins. Check the disk.", path, error, aside.name)
    try:
        set_aside(path, aside, OsFileSystem())
    except OSError as refused:
        raise refusal(refused, f"{path} is damaged ({error}) and cannot be set aside: {refused}") from error


def _claimed(path: Path) -> bytes:
    """Make what is missing; the secret."""
    is_there, fs = path.parent.is_dir(), OsFileSystem()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fs.close_file(fs.open_file(path, "create"))
        return store_secret(path.parent, fs)
    except OSError as error:
        reason = f"{path} cannot be used: {error.strerror or error}"
        message = f"{reason}; check its permissions, or choose another directory as store"
        raise (refusal(error, message) if is_there else StoreError(message)) from error


class SqliteFile:
    """An open file; any thread may use its one connection, one after the other.

    What cannot be read or written is a StoreError that begins with `what`. `damage`: errors other than SQLite's own
    that mean the same, of reading what a row holds. `file_error`: how the file itself was found damaged since it was
    opened, logged once; None: it was not.
    """

    def __init__(self, connection: sqlite3.Connection, what: str, *, damage: tuple[type[Exception], ...] = ()) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._what = what
        self._damage: tuple[type[Exception], ...] = (sqlite3.Error, *damage)
        self.file_error: str | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for nobody else meanwhile; each statement is a transaction of its own."""
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
        """One transaction: all of it or nothing."""
        with self.reading() as connection, transaction(connection):
            yield connection

    def close(self) -> None:
        """Close the file; closing twice is safe."""
        with self._lock:
            self._connection.close()
