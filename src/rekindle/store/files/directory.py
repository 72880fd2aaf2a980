"""The store's directory on disk: who may use it, and its secret.

    DIR/secret                32 bytes, random or from the setting `secret`, made once, shared by all models
    DIR/FINGERPRINT/lock      held by the one process that uses this model's blocks; contains its pid
    DIR/FINGERPRINT/          layout.json, index.db, blocks-PART-NNN.safetensors

Owns these names. Two processes may use one DIR with different models. The kernel holds the lock and releases it when
the process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, root_hash
from rekindle.config import is_slot
from rekindle.errors import StoreError, StoreLocked
from rekindle.store.files.damage import refusal
from rekindle.store.files.sync import FileSystem

logger = logging.getLogger(__name__)

SECRET_BYTES = 32


class StoreDirectory:
    """The locked subdirectory of one fingerprint."""

    def __init__(self, path: Path, secret: bytes, lock: int, fs: FileSystem) -> None:
        self.path = path
        self.secret = secret
        self._lock: int | None = lock
        self._fs = fs

    @classmethod
    def claim(cls, directory: Path, fingerprint: bytes, fs: FileSystem) -> StoreDirectory:
        """Create what is missing and take the lock.

        StoreLocked if another process has it; StoreError if the directory cannot be used, or StoreRefused if it exists
        and the disk refuses.
        """
        try:
            directory = make_directory(directory, fs)
            secret = store_secret(directory, fs)
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
            raise refusal(error, _unusable(directory, error)) from error
        return cls(path, secret, lock, fs)

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


def make_directory(directory: Path, fs: FileSystem) -> Path:
    """Create the directory if missing and return it resolved; StoreError on failure."""
    try:
        directory = directory.resolve()
        fs.make_directory(directory)
    except OSError as error:
        raise StoreError(_unusable(directory, error)) from error
    return directory


def _unusable(directory: Path, error: OSError) -> str:
    why = "it is a file" if os.path.isfile(directory) else error.strerror or str(error)
    return f"the store's directory {directory} cannot be used: {why}; check its permissions, or choose another as store"


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


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that has this name: a lock on one that was removed keeps nobody out."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def directory_secret(directory: Path, fs: FileSystem, new: bytes | None = None) -> bytes:
    """Return the secret of a directory; creates both if missing, the secret as `new`, or a random one.

    StoreError if they cannot be used, StoreRefused if the disk refuses.
    """
    try:
        directory = make_directory(directory, fs)
        return store_secret(directory, fs, new)
    except OSError as error:
        raise refusal(error, _unusable(directory, error)) from error


def given_secret(directory: Path, given: str | None, fs: FileSystem) -> bytes:
    """Return the secret of a directory, as `directory_secret` does; a new one is derived from `given`, if that is.

    StoreError, with nothing changed, if the directory has another secret than `given` makes.
    """
    wanted = None if given is None else derived_secret(given)
    secret = directory_secret(directory, fs, wanted)
    if wanted is not None and not hmac.compare_digest(secret, wanted):
        raise StoreError(
            f"{directory} was made with another secret, by which what is stored there is found; nothing was changed: "
            "give the secret it was made with, leave `secret` (REKINDLE_SECRET) out to use the directory's own, or "
            "choose another directory as store"
        )
    return secret


def derived_secret(text: str) -> bytes:
    """Return the secret [32] that a text stands for: the same on every machine, and nothing else's hash."""
    content = text.encode("utf-8", "surrogateescape")  # an environment variable may hold any bytes
    return hashlib.blake2b(content, digest_size=SECRET_BYTES, person=b"rekindle-secret").digest()


def store_secret(directory: Path, fs: FileSystem, new: bytes | None = None) -> bytes:
    """Return the secret, creating it on first use: written aside and renamed, under a lock so that creators agree.

    The first one is `new`, or random; that of a slot is a copy of its directory's, so that a prompt's blocks have equal
    names in all slots. Raises OSError, or StoreError if it is damaged.
    """
    path, aside = directory / "secret", directory / "secret.new"
    if not path.exists():
        if is_slot(directory):
            new = store_secret(directory.parent, fs, new)
        fd = fs.open_file(aside, "create")
        try:
            fs.lock(fd, "wait")
            if not path.exists():
                fs.resize(fd, 0)
                fs.write(fd, 0, secrets.token_bytes(SECRET_BYTES) if new is None else new)
                fs.sync_data(fd)
                fs.rename(aside, path)
        finally:
            fs.close_file(fd)
    fd = fs.open_file(path, "existing")
    try:
        secret = np.zeros(SECRET_BYTES, dtype=np.uint8)
        if fs.size(fd) != SECRET_BYTES or fs.read(fd, 0, secret) != SECRET_BYTES:
            raise StoreError(
                f"{path} is damaged, so nothing stored in {directory} can be found; restore it or remove the directory"
            )
    finally:
        fs.close_file(fd)
    return secret.tobytes()
