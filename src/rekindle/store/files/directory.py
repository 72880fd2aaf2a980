"""The store's directory on disk: who may use it.

    DIR/secret                its keys (`keys`), made once, shared by all models
    DIR/FINGERPRINT/lock      held by the one process that uses this model's blocks; contains its pid
    DIR/FINGERPRINT/          layout.json, index.db, blocks-PART-NNN.safetensors

Owns these names. Two processes may use one DIR with different models. The kernel holds the lock and releases it when
the process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, root_hash
from rekindle.errors import StoreError, StoreLocked
from rekindle.store.files.damage import refusal
from rekindle.store.files.keys import StoreKeys, make_directory, store_keys, unusable
from rekindle.store.files.sync import FileSystem, is_at

logger = logging.getLogger(__name__)


class StoreDirectory:
    """The locked subdirectory of one fingerprint."""

    def __init__(self, path: Path, keys: StoreKeys, lock: int, fs: FileSystem) -> None:
        self.path = path
        self.keys = keys
        self._lock: int | None = lock
        self._fs = fs

    @classmethod
    def claim(cls, directory: Path, fingerprint: bytes, fs: FileSystem, master: bytes | None = None) -> StoreDirectory:
        """Create what is missing and take the lock. `master`: the key of an encrypted store.

        StoreLocked if another process has it; StoreError if the directory cannot be used, or StoreRefused if it exists
        and the disk refuses.
        """
        try:
            directory = make_directory(directory, fs)
            keys = store_keys(directory, fs, master)
            path = directory / fingerprint.hex()
            fs.make_directory(path)
            for name in ("index.db", "index.db-wal", "index.db-shm"):
                if (path / name).is_symlink():
                    raise StoreError(f"{path / name} is a symbolic link; the store does not follow it: remove it")
            lock = _take_lock(path, fs)
            try:
                # SQLite would create it with the umask's permissions, and copies these to its other files
                fs.close_file(fs.open_file(path / "index.db", "create"))
            except OSError:
                fs.close_file(lock)
                raise
        except OSError as error:
            raise refusal(error, unusable(directory, error)) from error
        return cls(path, keys, lock, fs)

    @property
    def secret(self) -> bytes:
        """The key of the hashes."""
        return self.keys.secret

    @property
    def index_path(self) -> Path:
        """The index file."""
        return self.path / "index.db"

    def root(self, namespace: str) -> BlockHash:
        """Root hash of a namespace's chains, without a salt."""
        fingerprint = bytes.fromhex(self.path.name)
        return root_hash(fingerprint=fingerprint, namespace=namespace, cache_salt="", secret=self.secret)

    def has_shards(self) -> bool:
        """Whether records were ever written to this directory."""
        return any(self.path.glob("blocks-*.safetensors"))

    def note_damage(self) -> None:
        """Make the next open check the whole index; a failure to write the note is only logged."""
        try:
            self._fs.close_file(self._fs.open_file(self._damage_note, "create"))
        except OSError as error:
            logger.warning("a note that the index is damaged could not be written to %s: %s", self.path, error)

    def forget_damage(self) -> None:
        """Remove the damage note, once the index was checked and is sound."""
        if self._damage_note.exists():
            with contextlib.suppress(OSError):
                self._fs.remove(self._damage_note)

    def suspicion(self) -> Literal["damaged", "crashed"] | None:
        """What may be wrong with the index: damage was noted, or the last process ended without closing it."""
        log = self.path / "index.db-wal"
        if self._damage_note.exists():
            return "damaged"
        return "crashed" if log.exists() and log.stat().st_size > 0 else None

    @property
    def _damage_note(self) -> Path:
        return self.path / "index.db.suspect"

    def set_index_aside(self) -> Path:
        """Rename a damaged index so that a new one can be created; return its new path."""
        number = sum(1 for _ in self.path.glob("index.db.damaged-*"))
        kept = self.path / f"index.db.damaged-{number}"
        set_aside(self.index_path, kept, self._fs)
        self._fs.close_file(self._fs.open_file(self.index_path, "create"))
        return kept

    def last_set_aside(self) -> Path | None:
        """Path of the damaged index set aside last."""
        kept = [path for path in self.path.glob("index.db.damaged-*") if path.suffix[len(".damaged-") :].isdecimal()]
        return max(kept, key=lambda path: int(path.suffix[len(".damaged-") :]), default=None)

    def remove_set_aside(self) -> None:
        """Zero and remove the damaged indexes that were set aside: they hold agent ids and token ids."""
        remove_set_aside(self.index_path, self._fs)

    def release(self) -> None:
        """Release the lock so that another process can take it."""
        if self._lock is not None:
            self._fs.close_file(self._lock)
        self._lock = None


def set_aside(path: Path, kept: Path, fs: FileSystem) -> None:
    """Rename an SQLite file together with its log."""
    fs.rename(path, kept)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            fs.rename(Path(f"{path}{suffix}"), Path(f"{kept}{suffix}"))


def remove_set_aside(path: Path, fs: FileSystem) -> None:
    """Zero and remove what was set aside of the file at `path`, with its logs; OSError."""
    for kept in sorted(path.parent.glob(f"{path.name}.damaged*")):
        if not kept.is_symlink():
            fd = fs.open_file(kept, "existing")
            try:
                fs.punch(fd, 0, fs.size(fd))
            finally:
                fs.close_file(fd)
        fs.remove(kept)


def _take_lock(path: Path, fs: FileSystem) -> int:
    while True:
        fd = fs.open_file(path / "lock", "create")
        who = np.zeros(64, dtype=np.uint8)
        try:
            # `list_stores` takes each lock briefly to see whether it is free
            is_free = fs.lock(fd, "refuse") or fs.lock(fd, "soon")
            if is_free and is_at(fd, path / "lock"):
                fs.resize(fd, 0)
                fs.write(fd, 0, f"process {os.getpid()}\n".encode())
                return fd
            count = fs.read(fd, 0, who)
        except OSError:
            fs.close_file(fd)
            raise
        fs.close_file(fd)
        if not is_free:
            break
        fs.make_directory(path)  # another process removed the store between opening and locking
    raise StoreLocked(
        f"{path} is in use by {who[:count].tobytes().decode(errors='replace').strip() or 'another process'}; "
        "stop it, or choose another directory as store"
    )
