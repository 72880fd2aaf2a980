"""The folder through which slot files pass: on a RAM disk, for its owner alone, or that of a server which runs already.

The files hold conversations. Each lives for as long as llama-server reads or writes it; what a process that was killed
leaves is removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rekindle.errors import BackendFailed, ConfigError

logger = logging.getLogger(__name__)
PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # a RAM disk where there is one, as on Linux
PREFIX = "rekindle-slots-"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opens nothing else, and at once
LEAST_FREE = 1 << 30  # bytes, of a place that is worth having: containers often have 64 MB of shared memory


class SlotFolder:
    """The files of one process in a folder, of which it alone has the lock, an open file."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock  # ends with the process: containers may share a place, not a PID
        self._num_names = 0

    def new_name(self, num_bytes: int) -> str:
        """A name that no file had before, for one of about so many bytes; BackendFailed if there is no room for it."""
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise BackendFailed(f"{self.path.parent} has {free >> 20} MB free, a state takes {num_bytes >> 20} MB")
        self._num_names += 1
        return f"{PREFIX}{self._num_names}.bin"

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._lock)


class GivenFolder(SlotFolder):
    """The folder of a llama-server that runs already; ConfigError if it cannot be used, or another front uses it."""

    def __init__(self, path: Path) -> None:
        path = path.expanduser().absolute()
        try:
            lock = os.open(path / f"{PREFIX}lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"backend_slots: {path} cannot be used: {why}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"backend_slots: another server uses {path}: a llama-server has one front") from error
        if path.stat().st_mode & 0o077:
            logger.warning("other users may read conversations in %s: chmod 700", path)
        super().__init__(path, lock)
        self._remove_all()

    def close(self) -> None:
        """Remove what is left of our files."""
        self._remove_all()
        super().close()

    def _remove_all(self) -> None:
        for left in self.path.glob(f"{PREFIX}*.bin"):
            left.unlink(missing_ok=True)


class RamDisk(SlotFolder):
    """A fresh folder in the first of these places that has room, else in the last."""

    def __init__(self, places: Sequence[Path] = PLACES, *, least_free: int = LEAST_FREE) -> None:
        for place in places:
            _remove_left(place)
        fitting = [place for place in places if place.is_dir() and shutil.disk_usage(place).free >= least_free]
        base = fitting[0] if fitting else places[-1]
        if base != places[0]:
            logger.warning(
                "%s is no RAM disk with %d MB free: states of slots pass through %s", places[0], least_free >> 20, base
            )
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # of mode 0700
        super().__init__(path, os.open(path, os.O_RDONLY))
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        super().close()


def _remove_left(place: Path) -> None:
    """Remove the folders of our own user whose processes have ended.

    Any user may write there: what has our prefix and is a link, or a pipe that nobody writes to, is passed over.
    """
    for folder in place.glob(f"{PREFIX}*") if place.is_dir() else ():
        with contextlib.suppress(OSError):  # another user's, locked, or no folder
            lock = os.open(folder, FOLDER)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
