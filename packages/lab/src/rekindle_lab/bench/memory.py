"""Memory and processor time of a process, and the kernel's file cache: on Linux, elsewhere as far as supported."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Reset the peak to current usage where the system supports it (Linux); otherwise do nothing."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return


def peak_bytes(pid: int | None = None) -> int:
    """Return the peak resident memory since start, or since `forget_peak`; this process's if not known."""
    try:
        return _status("VmHWM", STATUS if pid is None else Path(f"/proc/{pid}/status"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes(pid: int | None = None) -> int:
    """Return resident memory of this process or another; this one's peak if the system does not report it."""
    try:
        return _status("VmRSS", STATUS if pid is None else Path(f"/proc/{pid}/status"))
    except OSError:
        return peak_bytes()


def processor_seconds(pid: int) -> float | None:
    """Return the processor time of all threads of a process since its start, in steps of 10 ms; None if not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured_peak(work: Callable[[], object]) -> tuple[int, int]:
    """Return resident bytes before some work and their peak while it ran, never less.

    A kernel counts pages in batches and may show a peak that is below what was resident before by some of them.
    """
    forget_peak()
    before = resident_bytes()
    work()
    return before, max(before, peak_bytes())


def _status(name: str, status: Path) -> int:
    for line in status.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{status} has no {name}")


def drop_file_cache(directory: Path) -> int:
    """Flush every file below `directory` and drop its pages from the kernel's cache; return the number of files.

    Only these files: the file cache as a whole is shared by the machine.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return len(files)
