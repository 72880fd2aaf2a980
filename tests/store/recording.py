"""A file system that remembers every operation, and can build what a crash might have left of them.

The operations go to the real files as well. Before each of them the index (which SQLite is trusted to keep) is copied
aside, so that a crash between any two operations can be replayed: files get everything that was made durable before,
and of the rest what the kind of crash says. Names of files count as durable only once their directory was synced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.store.sync import Access, OsFileSystem

Crash = Literal["kept", "dropped", "torn", "reordered"]
SECTOR = 512


@dataclass(frozen=True)
class Operation:
    """One change of a file (or, with `kind` "names", of a directory)."""

    kind: Literal["resize", "write", "sync", "punch", "names"]
    path: Path
    offset: int = 0
    num_bytes: int = 0
    data: bytes = b""


@dataclass
class FileState:
    """What is certainly there, and what was done since."""

    durable: bytearray = field(default_factory=bytearray)
    waiting: list[Operation] = field(default_factory=list)
    named: bool = False


class RecordingFileSystem(OsFileSystem):
    """Records below `directory`; `before` is called ahead of each operation with its number."""

    def __init__(self, directory: Path, before: Callable[[int], None]) -> None:
        self.log: list[Operation] = []
        self._directory = directory
        self._before = before
        self._paths: dict[int, Path] = {}

    def open_file(self, path: Path, access: Access) -> int:
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

    def _record(self, operation: Operation) -> None:
        if operation.path.is_relative_to(self._directory):
            self._before(len(self.log))
            self.log.append(operation)


def replay(log: list[Operation], crash: Crash, random: np.random.Generator) -> dict[Path, bytes]:
    """The files as a crash after the last operation of `log` may leave them."""
    files: dict[Path, FileState] = {}
    for operation in log:
        if operation.kind == "names":
            for path, state in files.items():
                state.named = state.named or path.parent == operation.path
            continue
        state = files.setdefault(operation.path, FileState())
        if operation.kind == "sync":
            for done in state.waiting:
                _apply(state.durable, done, len(done.data))
            state.waiting.clear()
        else:
            state.waiting.append(operation)
    return {
        path: bytes(_after(state, crash, random)) for path, state in files.items() if state.named or crash != "dropped"
    }


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


def copy_index(source: Path, target: Path) -> None:
    """Copy the index of a live store: its file and its WAL as they are now."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("index.db", "index.db-wal"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
