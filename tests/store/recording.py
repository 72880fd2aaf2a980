"""A file system that remembers every operation, and can build what a crash might have left of them.

The operations go to the real files as well; `before` is called ahead of each, so that the index (which SQLite writes
itself) can be copied as it was then. A crash is replayed from the log: files get everything that was made durable
before, and of the rest what the kind of crash says. A name, new or changed, is durable once its directory was synced.

The index is not in the log. SQLite syncs its WAL in every COMMIT and the main file before it empties the WAL; what a
crash inside such a step may leave is mixed from what was there before and after it (`torn_indexes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.store.files.sync import Access, OsFileSystem

Crash = Literal["kept", "dropped", "torn", "reordered"]
CRASHES: tuple[Crash, ...] = ("kept", "dropped", "torn", "reordered")
SECTOR = 512
DB, WAL = "index.db", "index.db-wal"
Index = dict[str, bytes]  # the index's files, by name


@dataclass(frozen=True)
class Operation:
    """One change of a file ("rename": to `target`), or of a directory's names."""

    kind: Literal["create", "resize", "write", "sync", "punch", "rename", "remove", "names"]
    path: Path
    offset: int = 0
    num_bytes: int = 0
    data: bytes = b""
    target: Path | None = None


@dataclass
class FileState:
    """What is certainly there, and what was done since."""

    durable: bytearray = field(default_factory=bytearray)
    waiting: list[Operation] = field(default_factory=list)
    named: bool = False


class RecordingFileSystem(OsFileSystem):
    """Records what happens below `directory`; `before` is called ahead of each operation."""

    def __init__(self, directory: Path, before: Callable[[], None]) -> None:
        self.log: list[Operation] = []
        self._directory = directory
        self._before = before
        self._paths: dict[int, Path] = {}

    def adopt(self) -> None:
        """Take in what lies in the directory already as durable."""
        for path in sorted(path for path in self._directory.rglob("*") if path.is_file()):
            if not path.name.startswith("index.db"):
                data = path.read_bytes()
                self.log += [Operation("create", path), Operation("write", path, 0, len(data), data)]
                self.log += [Operation("sync", path), Operation("names", path.parent)]

    def open_file(self, path: Path, access: Access) -> int:
        if access == "create" and not path.exists():
            self._record(Operation("create", path))
        fd = super().open_file(path, access)
        self._paths[fd] = path
        return fd

    def close_file(self, fd: int) -> None:
        del self._paths[fd]
        super().close_file(fd)

    def resize(self, fd: int, num_bytes: int) -> None:
        self._record(Operation("resize", self._paths[fd], num_bytes=num_bytes))
        super().resize(fd, num_bytes)

    def write(self, fd: int, offset: int, data: np.ndarray | bytes) -> None:
        content = data if isinstance(data, bytes) else data.tobytes()
        self._record(Operation("write", self._paths[fd], offset, len(content), content))
        super().write(fd, offset, data)

    def sync_data(self, fd: int) -> None:
        super().sync_data(fd)
        self._record(Operation("sync", self._paths[fd]))

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        self._record(Operation("punch", self._paths[fd], offset, num_bytes))
        super().punch(fd, offset, num_bytes)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._record(Operation("names", path))

    def rename(self, old: Path, new: Path) -> None:
        self._record(Operation("rename", old, target=new))
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._record(Operation("remove", path))
        super().remove(path)

    def _record(self, operation: Operation) -> None:
        if operation.path.is_relative_to(self._directory) and not operation.path.name.startswith("index.db"):
            self._before()
            self.log.append(operation)


def replay(log: list[Operation], crash: Crash, random: np.random.Generator) -> dict[Path, bytes]:
    """The files as a crash after the last operation of `log` may leave them."""
    files: dict[Path, FileState] = {}
    moved: list[Operation] = []
    for operation in log:
        if operation.kind in ("rename", "remove"):
            moved.append(operation)
        elif operation.kind == "names":
            for done in [m for m in moved if m.path.parent == operation.path]:
                _move(files, done)
                moved.remove(done)
            for path, state in files.items():
                state.named = state.named or path.parent == operation.path
        else:
            _change(files.setdefault(operation.path, FileState()), operation)
    for done in moved if crash != "dropped" else []:
        _move(files, done)
    return {
        path: bytes(_after(state, crash, random)) for path, state in files.items() if state.named or crash != "dropped"
    }


def _move(files: dict[Path, FileState], operation: Operation) -> None:
    state = files.pop(operation.path)
    if operation.target is not None:
        files[operation.target] = state


def _change(state: FileState, operation: Operation) -> None:
    if operation.kind == "sync":
        for done in state.waiting:
            _apply(state.durable, done, len(done.data))
        state.waiting.clear()
    elif operation.kind != "create":
        state.waiting.append(operation)


def _after(state: FileState, crash: Crash, random: np.random.Generator) -> bytearray:
    content = bytearray(state.durable)
    waiting = [op for op in state.waiting if crash != "reordered" or random.random() < 0.5]
    for operation in waiting if crash != "dropped" else []:
        size = len(operation.data)
        if crash == "torn":
            size = int(random.integers(0, size // SECTOR + 1)) * SECTOR
        _apply(content, operation, size)
    return content


def _apply(content: bytearray, operation: Operation, size: int) -> None:
    if operation.kind == "resize":
        del content[operation.num_bytes :]
        content.extend(bytes(operation.num_bytes - len(content)))
        return
    end = operation.offset + (operation.num_bytes if operation.kind == "punch" else size)
    content.extend(bytes(max(0, end - len(content))))
    if operation.kind == "punch":
        content[operation.offset : end] = bytes(operation.num_bytes)
    else:
        content[operation.offset : end] = operation.data[:size]


def read_index(directory: Path) -> Index:
    """The index of a live store as its files are now; its shared memory does not outlive a crash."""
    paths = [path for path in directory.glob("index.db*") if not path.name.endswith("-shm")]
    return {path.name: path.read_bytes() for path in paths}


def torn_indexes(before: Index, after: Index, random: np.random.Generator, count: int) -> Iterator[Index]:
    """What a crash between two states of the index may leave: `count` mixtures for each file that differs.

    Of a WAL any sectors of what was appended or overwritten; its header goes first, as SQLite syncs it by itself. Of
    the main file any pages, beside the whole WAL, which is emptied after them.
    """
    old_wal, new_wal = before.get(WAL, b""), after.get(WAL, b"")
    whole = new_wal if len(new_wal) else old_wal
    for _ in range(count if DB in after else 0):
        if before.get(DB) != after.get(DB):
            yield {**before, DB: _mixed(before.get(DB, b""), after[DB], 4096, random), WAL: whole}
        elif new_wal and old_wal != new_wal:
            first = new_wal[:SECTOR] if old_wal[:32] != new_wal[:32] else old_wal[:SECTOR]
            yield {**before, WAL: _mixed(first + old_wal[len(first) :], new_wal, SECTOR, random)}


def _mixed(old: bytes, new: bytes, unit: int, random: np.random.Generator) -> bytes:
    """`old` with some units of `new`: all up to a random one (a prefix), or each by chance."""
    num_units = -(-len(new) // unit)
    taken = random.random(num_units) < random.random()
    if random.random() < 0.5:
        taken = np.arange(num_units) < random.integers(0, num_units + 1)
    content = bytearray(old)
    for number in np.flatnonzero(taken):
        start = int(number) * unit
        content.extend(bytes(max(0, start - len(content))))
        content[start : start + unit] = new[start : start + unit]
    return bytes(content)
