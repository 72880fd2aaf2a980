"""The memory of this machine, and of the other devices that torch computes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from rekindle.model.device import Memory

# Control groups of Linux, which limit what containers and systemd's services may use: where they are mounted, and which
# ones this process is in.
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_of(device: str) -> Memory:
    """Read the memory of the device; if it has none, the machine's, of which the process's control groups may use less.

    Free is what can be had without swapping, the page cache included.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what loading a model took is free for what serves it
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free, on_card=True)
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def _limits() -> Iterator[tuple[int, int]]:
    """Bytes that each control group may use, and those it uses; of both versions of control groups.

    A group is in all groups above it. A container may see its own group as the topmost one.
    """
    for line in MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else ():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, files = GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder, files = GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for part in ("", *name.strip("/").split("/")):
            folder /= part
            limit = _read(folder / files[0])
            if limit.isdecimal():  # else there is no such group here, or it has no limit: `max`
                used = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                # Pages of files that nobody read lately are dropped first; `docker stats` leaves them out, too.
                yield int(limit), int(_read(folder / files[1]) or 0) - int(used.get(files[2], 0))


def _read(file: Path) -> str:
    """The text of a file, empty if there is none."""
    return file.read_text().strip() if file.is_file() else ""
