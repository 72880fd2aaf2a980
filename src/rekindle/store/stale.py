"""The stores of all models in one directory: what lies there, and the removal of those nobody uses any more.

Owns no file while it looks. A store is removed only under its lock, and only files with names of ours are; a directory
with anything else in it stays. How long it was not used is told by the times of its files, not by what stands in them.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES
from rekindle.errors import StoreError
from rekindle.store.description import FILE, read_description
from rekindle.store.shards import SHARD_NAME
from rekindle.store.siblings import opened_for_reading
from rekindle.store.sync import FileSystem

logger = logging.getLogger(__name__)

_OURS = ("index.db*", "blocks-*.safetensors", f"{FILE}*", "lock")  # the lock last: it is held meanwhile


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One model's store: bytes taken on disk, when it was last opened or written, who has it, what cannot be read."""

    fingerprint: str
    model: str
    bytes: int
    num_agents: int
    num_blocks: int
    last_use: float
    in_use_by: str | None
    problem: str | None = None


def list_stores(directory: Path, fs: FileSystem) -> list[StoreInfo]:
    """Every store below `directory`, most recently used first; nothing is changed, also not of one in use."""
    found = [_info(path, fs) for path in _stores(directory)]
    return sorted(found, key=lambda info: -info.last_use)


def stale_stores(
    directory: Path, keep: str | None, older_than_s: float, *, now: float, fs: FileSystem
) -> list[StoreInfo]:
    """The stores, but for `keep`, that nobody has open and nobody used for so long."""
    old = [path for path in _stores(directory) if path.name != keep and now - _last_use(path) > older_than_s]
    return [info for info in (_info(path, fs) for path in old) if info.in_use_by is None]


def collect_stale(
    directory: Path, keep: str | None, older_than_s: float, *, now: float, fs: FileSystem
) -> list[StoreInfo]:
    """Remove the stale stores; return what was removed.

    One that somebody has opened meanwhile, or that cannot be removed, stays; the latter is logged.
    """
    removed = []
    for info in stale_stores(directory, keep, older_than_s, now=now, fs=fs):
        path = directory / info.fingerprint
        try:
            if _remove(path, fs):
                logger.warning("removed the store of %s (%s): not used for long", info.model or "a model", path)
                removed.append(info)
        except OSError as error:
            logger.warning("the stale store %s could not be removed: %s", path, error)
    return removed


def _stores(directory: Path) -> list[Path]:
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


def _last_use(path: Path) -> float:
    """When the store was last opened (its lock says so) or its index changed; looking at it is no use of it."""
    times = []
    for name in ("lock", "index.db"):
        with contextlib.suppress(FileNotFoundError):
            times.append((path / name).stat().st_mtime)
    return max(times, default=path.stat().st_mtime)


def _info(path: Path, fs: FileSystem) -> StoreInfo:
    num_bytes, num_agents, num_blocks, model, problem = 0, 0, 0, "", None
    last_use, holder = _last_use(path), _holder(path, fs)  # before anything is opened
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_bytes += file.lstat().st_blocks * 512
    try:
        model = read_description(path, fs).model
    except StoreError as error:
        problem = str(error)
    try:
        with contextlib.closing(opened_for_reading(path / "index.db")) as connection:
            num_agents = connection.execute("SELECT COUNT(*) FROM agent").fetchone()[0]
            num_blocks = connection.execute("SELECT COUNT(*) FROM block WHERE part = 0").fetchone()[0]
    except sqlite3.Error as error:
        problem = f"its index cannot be read: {error}"
    return StoreInfo(path.name, model, num_bytes, num_agents, num_blocks, last_use, holder, problem)


def _holder(path: Path, fs: FileSystem) -> str | None:
    """Who has the store, None if nobody."""
    try:
        fd = fs.open_file(path / "lock", "existing")
    except FileNotFoundError:
        return None
    try:
        if fs.lock(fd, "refuse"):
            return None
        said = np.zeros(64, dtype=np.uint8)
        return said[: fs.read(fd, 0, said)].tobytes().decode(errors="replace").strip() or "another process"
    finally:
        fs.close_file(fd)


def _remove(path: Path, fs: FileSystem) -> bool:
    """Remove our files under the lock, then the directory if it is empty; False where somebody holds it."""
    fd = fs.open_file(path / "lock", "create")
    try:
        if not fs.lock(fd, "refuse"):
            return False
        for pattern in _OURS:
            for file in sorted(path.glob(pattern)):
                if not file.name.startswith("blocks-") or SHARD_NAME.fullmatch(file.name):
                    fs.remove(file)
    finally:
        fs.close_file(fd)
    with contextlib.suppress(OSError):
        path.rmdir()  # stays where foreign files lie in it
    return True
