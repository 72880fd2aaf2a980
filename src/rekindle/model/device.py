"""The device of a model: whether torch can use it, and how much memory it has. Reads no model."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from rekindle.errors import ConfigError

DEVICE_NAME = re.compile(r"cpu|mps|cuda(:\d+)?")
# The memory limit of a container; `max`, or a number larger than any machine's memory, is no limit.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_device(name: str) -> None:
    """Raise ConfigError unless torch can put a tensor on the device."""
    refused = f"device={name} cannot be used: "
    if DEVICE_NAME.fullmatch(name) is None:
        raise ConfigError(f"{refused}write cpu, cuda, or cuda:1 for the second of several")
    kind, _, index = name.partition(":")
    if kind != "cpu" and not (torch.cuda if kind == "cuda" else torch.backends.mps).is_available():
        built = torch.backends.cuda.is_built() if kind == "cuda" else torch.backends.mps.is_built()
        why = "finds no such device" if built else "was built without it"
        raise ConfigError(f"{refused}torch {torch.__version__} {why}; device=cpu works everywhere")
    if index and int(index) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"{refused}there are {count} of them, and cuda:{count - 1} is the last")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{refused}{lines[0][:300]}; device=cpu works everywhere") from error


def total_bytes(device: str) -> int:
    """Memory of the device; if it has none, that of the machine or the limit of this process's container."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in LIMITS if path.is_file()]
    return min([machine, *(int(limit) for limit in limits if limit.isdecimal())])
