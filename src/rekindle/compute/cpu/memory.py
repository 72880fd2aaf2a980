"""The memory of this machine, and of the other devices that torch computes on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rekindle.model.device import Memory

# The memory limit of a container; `max`, or a number larger than any machine's memory, is no limit.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_of(device: str) -> Memory:
    """Read the memory of the device; if it has none, that of the machine or the limit of this process's container."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # what loading a model took is free for what serves it
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free, on_card=True)
    page = os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in LIMITS if path.is_file()]
    total = min([os.sysconf("SC_PHYS_PAGES") * page, *(int(limit) for limit in limits if limit.isdecimal())])
    return Memory(total, os.sysconf("SC_AVPHYS_PAGES") * page)
