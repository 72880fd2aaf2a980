"""What damage means is the same for the index, for kept responses and for sessions."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.errors import StoreError, StoreLocked, StoreRefused
from rekindle.server.responses.records import open_records
from rekindle.store.files.sqlite_file import SqliteFile, connect_writer, opened
from rekindle.store.warm import WarmStore
from rekindle_sessions.log.records import SessionRecords
from tests.store.chains import FINGERPRINT, Chain, fast_directory, save, warm_tokens
from tests.store.confined import become_nobody, run_apart

IDS = list(range(40))
FILES: dict[str, Callable[[Path], SqliteFile]] = {
    "responses": lambda path: open_records(path, max_responses=9, max_bytes=1 << 20, retention_s=9.0),
    "sessions": SessionRecords.open,
}
TABLES = {"responses": "content", "sessions": "event"}


@pytest.fixture(params=FILES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path, kind: str) -> Path:
    FILES[kind](tmp_path / "kept.db").close()
    return tmp_path / "kept.db"


def refuse_writes(path: Path) -> None:
    """Have the header say that it takes a later SQLite to write the file."""
    content = bytearray(path.read_bytes())
    content[18] |= 4
    path.write_bytes(content)


def is_new(path: Path, kind: str) -> bool:
    """Whether the file was set aside, and the new one works."""
    with closing(FILES[kind](path)) as file, file.writing() as connection:
        connection.execute(f"DELETE FROM {TABLES[kind]}")
    return path.with_name("kept.db.damaged").exists()


def test_a_header_that_forbids_writing_is_damage(path: Path, kind: str) -> None:
    refuse_writes(path)
    assert is_new(path, kind)


def in_a_directory_that_takes_no_names(path: Path, kind: str) -> None:
    path.parent.chmod(0o500)
    become_nobody(path.parent)
    with pytest.raises(StoreRefused, match="cannot be set aside"):
        FILES[kind](path)


def test_what_cannot_be_set_aside_is_refused(kind: str) -> None:
    path = fast_directory() / "kept.db"
    FILES[kind](path).close()
    refuse_writes(path)
    try:
        run_apart(in_a_directory_that_takes_no_names, path, kind)
    finally:
        path.parent.chmod(0o700)
        shutil.rmtree(path.parent)


def test_a_log_goes_with_its_file(path: Path, kind: str) -> None:
    refuse_writes(path)
    path.with_name("kept.db-wal").write_bytes(b"what was said last")
    assert is_new(path, kind)
    assert path.with_name("kept.db.damaged-wal").read_bytes() == b"what was said last"


def test_no_file_is_set_aside_over_another(path: Path, kind: str) -> None:
    for name in ("kept.db.damaged", "kept.db.damaged1"):
        content = path.read_bytes()
        refuse_writes(path)
        assert is_new(path, kind)
        assert path.with_name(name).stat().st_size == len(content)


def test_a_table_that_is_gone_is_damage(path: Path, kind: str) -> None:
    with closing(FILES[kind](path)) as file:
        with file.reading() as connection:
            connection.execute(f"DROP TABLE {TABLES[kind]}")
        with pytest.raises(StoreError), file.reading() as connection:
            connection.execute(f"DELETE FROM {TABLES[kind]}")
        assert file.file_error is not None and "no such table" in file.file_error
    assert is_new(path, kind)


def test_a_column_that_an_older_format_has_not_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    FILES["responses"](path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE content DROP COLUMN mac")
        connection.execute("PRAGMA user_version = 1")
    assert is_new(path, "responses")


def test_a_file_that_another_process_holds_is_no_damage(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle_sessions.log.database.BUSY_S", 0.1)
    monkeypatch.setattr("rekindle.server.responses.records.BUSY_S", 0.1)
    with closing(connect_writer(path, locking="exclusive")), pytest.raises(StoreLocked, match="in use by another"):
        FILES[kind](path)
    assert not list(path.parent.glob("*damaged*"))


def test_an_index_whose_header_forbids_writing_is_made_anew(opened: Callable[..., WarmStore], tmp_path: Path) -> None:
    with closing(opened()) as store:
        save(store, Chain.of(store, IDS))
    refuse_writes(tmp_path / "store" / FINGERPRINT.hex() / "index.db")
    store = opened()
    assert warm_tokens(store, Chain.of(store, IDS)) == len(IDS)
    assert [record.agent for record in store.sequences()] == ["ann"]
    save(store, Chain.of(store, [9, *IDS]))
    assert store.stats().last_error is None


def test_an_index_without_a_table_is_made_anew(opened: Callable[..., WarmStore]) -> None:
    with closing(opened()) as store:
        save(store, Chain.of(store, IDS))
        store.writer.call(lambda _: store.index.writer.execute("DROP TABLE sequence")).result(10)
        assert store.sequences() == []
        assert "no such table" in (store.stats().index_error or "")
    store = opened()
    assert warm_tokens(store, Chain.of(store, IDS)) == len(IDS)


def test_a_new_file_that_is_damaged_at_once_ends_it(tmp_path: Path) -> None:
    def never(connection: sqlite3.Connection, secret: bytes) -> None:
        connection.close()
        raise sqlite3.DatabaseError("what was written is not what is read")

    with pytest.raises(StoreError, match="a new one cannot be made"):
        opened(tmp_path / "x.db", never, busy_s=0.0)
    assert len(list(tmp_path.glob("x.db.damaged*"))) == 1
