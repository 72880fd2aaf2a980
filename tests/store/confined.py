"""Functions run in processes of their own, confined by the system: a small disk, a file size limit, another user.

Which confinement a machine allows differs; each function says which one it got, and none needs special rights.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import forking

NOBODY = 65534
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_PRIVATE_RECURSIVE = 0x40000 | 0x4000


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result from a process of its own; AssertionError with its traceback if it raised."""
    context = forking()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        went_well, answer = ours.recv()
    except EOFError:
        went_well, answer = False, "the process died"
    process.join()
    assert went_well, answer
    return answer


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def become_nobody(directory: Path) -> str:
    """Be a user without rights, to whom `directory` belongs; whoever is one already stays it."""
    if os.getuid() != 0:
        return "itself"
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return "nobody"


def mount_small(directory: Path, num_bytes: int) -> bool:
    """Mount a disk of that size there, seen by this process alone; False where that is not allowed."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWNS if uid == 0 else _NEWNS | _NEWUSER) != 0:
        return False
    try:
        if uid != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    if libc.mount(b"none", b"/", None, _PRIVATE_RECURSIVE, None) != 0:
        return False
    return bool(libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) == 0)


def limit_files(num_bytes: int | None) -> None:
    """Let no file of this process grow beyond so many bytes (None: any size)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
