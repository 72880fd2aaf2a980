"""The stores of all models in one directory and in its replica slots: list them, and remove stale ones.

Listing opens files only to read. A store is removed only under its lock, and only files that Rekindle creates; a
directory with anything else in it stays. The time since the last use comes from file times, not file contents.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES
from rekindle.config import slot_directory, slot_numbers
from rekindle.errors import StoreError
from rekindle.store.files.description import FILE, read_description
from rekindle.store.files.shards import SHARD_NAME
from rekindle.store.files.sqlite_file import opened_for_reading
from rekindle.store.files.sync import FileSystem, OsFileSystem, is_at
from rekindle.store.rows.written import NOTHING_WRITTEN, Written, read_written

logger = logging.getLogger(__name__)
Clock = Callable[[], float]
_OS = OsFileSystem()
_OURS = ("index.db*", "blocks-*.safetensors", f"{FILE}*", "lock")  # the lock last, as it is held during removal


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One model's store: bytes on disk, time of the last open or write, the process using it, any read problem.

    `slot`: the replica slot it is in; None: in the directory itself. `written`: bytes on the last day with a save.
    """

    fingerprint: str
    model: str
    bytes: int
    num_agents: int
    num_blocks: int
    last_use: float
    in_use_by: str | None
    problem: str | None = None
    slot: int | None = None
    written: Written = NOTHING_WRITTEN

    def parent(self, directory: Path) -> Path:
        """The directory that it is in: the given one, or its slot there."""
        return directory if self.slot is None else slot_directory(directory, self.slot)


def list_stores(directory: Path, fs: FileSystem = _OS) -> list[StoreInfo]:
    """Every store below `directory`, most recently used first; changes nothing, even for one in use."""
    found = [inspect(path, fs, slot) for path, slot in _stores(directory)]
    return sorted(found, key=lambda info: -info.last_use)


def holders(directory: Path, fs: FileSystem = _OS) -> set[str]:
    """The processes that have a store below `directory` open, as `holder` names each; OSError."""
    found = (holder(path, fs) for path, _ in _stores(directory))
    return {each for each in found if each is not None}


def stale_stores(
    directory: Path, keep: str | None, older_than_s: float, *, clock: Clock = time.time, fs: FileSystem = _OS
) -> list[StoreInfo]:
    """The stores, except `keep` (a fingerprint in hex), that are not open and have been unused for `older_than_s`."""
    now = clock()
    stores = [(path, slot) for path, slot in _stores(directory) if path.name != keep]
    old = [(path, slot) for path, slot in stores if now - last_use(path) > older_than_s]
    return [info for info in (inspect(path, fs, slot) for path, slot in old) if info.in_use_by is None]


def collect_stale(
    directory: Path, keep: str | None, older_than_s: float, *, clock: Clock = time.time, fs: FileSystem = _OS
) -> list[StoreInfo]:
    """Remove the stale stores; return those removed.

    A store opened in the meantime is skipped; one that cannot be removed is logged.
    """
    removed = []
    for info in stale_stores(directory, keep, older_than_s, clock=clock, fs=fs):
        path = info.parent(directory) / info.fingerprint
        try:
            if remove(path, fs):
                logger.warning("removed the store of %s (%s): unused for too long", info.model or "a model", path)
                removed.append(info)
        except OSError as error:
            logger.warning("the stale store %s could not be removed: %s", path, error)
    return removed


def _stores(directory: Path) -> list[tuple[Path, int | None]]:
    """The stores of a directory and of its slots, each with its slot."""
    places = [(directory, None), *((slot_directory(directory, number), number) for number in slot_numbers(directory))]
    return [(path, slot) for place, slot in places for path in stores_in(place)]


def stores_in(directory: Path) -> list[Path]:
    """The stores in a directory itself; empty if it does not exist."""
    if not directory.is_dir():
        return []
    return [
        path
        for path in sorted(directory.iterdir())
        if len(path.name) == 2 * HASH_BYTES
        and set(path.name) <= set(string.hexdigits)
        and path.is_dir()
        and not path.is_symlink()
    ]


def last_use(path: Path) -> float:
    """When the store was last opened (its lock's time) or its index changed; listing does not count as a use."""
    times = []
    for name in ("lock", "index.db"):
        with contextlib.suppress(FileNotFoundError):
            times.append((path / name).stat().st_mtime)
    return max(times, default=path.stat().st_mtime)


def store_bytes(path: Path) -> int:
    """Bytes that our files of a store take on disk."""
    sizes = []
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.lstat().st_blocks * 512)
    return sum(sizes)


def inspect(path: Path, fs: FileSystem, slot: int | None = None) -> StoreInfo:
    """What a store holds, and which process has it open."""
    num_agents, num_blocks, model, problem, written = 0, 0, "", None, NOTHING_WRITTEN
    used, held_by = last_use(path), holder(path, fs)  # before anything is opened
    num_bytes = store_bytes(path)
    try:
        model = read_description(path, fs).model
    except StoreError as error:
        problem = str(error)
    try:
        with contextlib.closing(opened_for_reading(path / "index.db")) as connection:
            num_agents = connection.execute("SELECT COUNT(*) FROM agent").fetchone()[0]
            num_blocks = connection.execute("SELECT COUNT(*) FROM block WHERE part = 0").fetchone()[0]
            written = read_written(connection)
    except sqlite3.Error as error:
        problem = f"its index cannot be read: {error}"
    return StoreInfo(path.name, model, num_bytes, num_agents, num_blocks, used, held_by, problem, slot, written)


def holder(path: Path, fs: FileSystem) -> str | None:
    """The process that has the store open; None if there is none. Takes its lock for a moment; OSError."""
    try:
        fd = fs.open_file(path / "lock", "existing")
    except FileNotFoundError:
        return None
    try:
        if fs.lock(fd, "refuse"):
            return None
        content = np.zeros(64, dtype=np.uint8)
        return content[: fs.read(fd, 0, content)].tobytes().decode(errors="replace").strip() or "another process"
    finally:
        fs.close_file(fd)


def remove(path: Path, fs: FileSystem) -> bool:
    """Remove our files under the lock, then the directory if it is empty; False if the lock is taken."""
    fd = fs.open_file(path / "lock", "create")
    try:
        if not (fs.lock(fd, "refuse") and is_at(fd, path / "lock")):
            return False
        for file in _files(path):
            fs.remove(file)
    finally:
        fs.close_file(fd)
    with contextlib.suppress(OSError):
        path.rmdir()  # fails if it contains foreign files
    return True


def _files(path: Path) -> Iterator[Path]:
    """Our files of a store, the lock last."""
    for pattern in _OURS:
        for file in sorted(path.glob(pattern)):
            if not file.name.startswith("blocks-") or SHARD_NAME.fullmatch(file.name):
                yield file
