"""The folder through which slot files pass: on a RAM disk, for its owner alone, emptied when nobody uses it any more.

The files hold conversations. Each lives for as long as llama-server reads or writes it; a process that was killed
leaves its folder, which the next start removes.
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

from rekindle.errors import BackendFailed

logger = logging.getLogger(__name__)
PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # a RAM disk where there is one, as on Linux
PREFIX = "rekindle-slots-"
LEAST_FREE = 1 << 30  # bytes, of a place that is worth having: containers often have 64 MB of shared memory


class RamDisk:
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
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # of mode 0700
        self._lock = os.open(self.path, os.O_RDONLY)  # ends with the process: containers may share a place, not a PID
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._num_names = 0

    def new_name(self, num_bytes: int) -> str:
        """A name that no file had before, for one of about so many bytes; BackendFailed if there is no room for it."""
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise BackendFailed(f"{self.path.parent} has {free >> 20} MB free, a state takes {num_bytes >> 20} MB")
        self._num_names += 1
        return f"{self._num_names}.bin"

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left(place: Path) -> None:
    """Remove the folders of our own user whose processes have ended."""
    for folder in place.glob(f"{PREFIX}*") if place.is_dir() else ():
        with contextlib.suppress(OSError):  # another user's, or locked
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
