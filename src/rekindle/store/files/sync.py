"""The only module that touches files: open, write, sync, punch holes, rename, lock. Kernels read records, too.

Owns how bytes become durable on each system; follows no symlink below the store's directory and gives access to its
owner only (0700/0600). Does not know what the bytes mean. Files are plain descriptors, so that the recording file
system of the crash tests can replace it. SQLite writes its own files and is not routed through here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import sys
import time
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Access = Literal["existing", "create"]

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL)
_ZEROS = bytes(1 << 16)


class FileSystem(Protocol):
    """The file system operations the store needs. All methods raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Create it (0700) and its missing parents, durably; an existing one is left unchanged."""

    def open_file(self, path: Path, access: Access) -> int:
        """Open for reading and writing; "create" creates a missing file (0600)."""

    def close_file(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def resize(self, fd: int, num_bytes: int) -> None:
        """Truncate or extend; the extension reads as zeros and takes no space."""

    def read(self, fd: int, offset: int, out: Bytes) -> int:
        """Fill `out` from `offset`; return the bytes read, fewer only at the end of the file."""

    def write(self, fd: int, offset: int, data: Bytes | bytes) -> None:
        """Write all of `data`."""

    def sync_data(self, fd: int) -> None:
        """Return when everything written to the file is durable."""

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Make the range read as zeros, and free its space where the system can."""

    def sync_directory(self, path: Path) -> None:
        """Make names created or renamed in the directory durable."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename within one directory, durably."""

    def remove(self, path: Path) -> None:
        """Remove a file, durably."""

    def lock(self, fd: int, wait: Literal["wait", "soon", "refuse"]) -> bool:
        """Lock the open file until it is closed; False if another holder has it.

        "refuse" tries once, "soon" for a tenth of a second, "wait" blocks until it is free.
        """

    def free_bytes(self, path: Path) -> int: ...


class OsFileSystem:
    """The operating system's file system."""

    def make_directory(self, path: Path) -> None:
        if path.is_dir():
            if path.is_symlink():
                raise OSError(errno.ELOOP, "is a symbolic link", str(path))
            return
        if not path.parent.exists():
            self.make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        self.sync_directory(path.parent)

    def open_file(self, path: Path, access: Access) -> int:
        flags = os.O_RDWR | _NOFOLLOW | (os.O_CREAT if access == "create" else 0)
        return os.open(path, flags, 0o600)

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def resize(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def read(self, fd: int, offset: int, out: Bytes) -> int:
        done = 0
        while done < out.nbytes:
            count = os.preadv(fd, [out.data[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, fd: int, offset: int, data: Bytes | bytes) -> None:
        view, done = (memoryview(data) if isinstance(data, bytes) else data.data), 0
        while done < view.nbytes:
            done += os.pwrite(fd, view[done:], offset + done)

    def sync_data(self, fd: int) -> None:
        if sys.platform == "darwin":
            # fsync only reaches the drive's own buffer on macOS
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        try:
            _punch_hole(fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.write_zeros(fd, offset, num_bytes)

    def write_zeros(self, fd: int, offset: int, num_bytes: int) -> None:
        """Fallback of `punch` where holes are unsupported: the range reads as zeros but keeps its space."""
        for start in range(0, num_bytes, len(_ZEROS)):
            self.write(fd, offset + start, _ZEROS[: num_bytes - start])

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        self.sync_directory(new.parent)

    def remove(self, path: Path) -> None:
        path.unlink()
        self.sync_directory(path.parent)

    def lock(self, fd: int, wait: Literal["wait", "soon", "refuse"]) -> bool:
        for _ in range(10 if wait == "soon" else 1):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait == "wait" else fcntl.LOCK_NB))
                return True
            except BlockingIOError:
                if wait == "soon":
                    time.sleep(0.01)
        return False

    def free_bytes(self, path: Path) -> int:
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that has this name: a lock on one that was removed keeps nobody out."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Punch a hole; raises OSError with one of `_UNSUPPORTED` if holes are unsupported."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, 99, struct.pack("=IIqq", 0, 0, offset, num_bytes))  # F_PUNCHHOLE of <sys/fcntl.h>
        return
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, "no fallocate")
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
