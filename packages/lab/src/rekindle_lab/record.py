"""Measurements of a benchmark and their origin: values with median and range, as JSON lines.

Owns the format of a line. Knows nothing about how values are measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from rekindle import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measure of one arm: a value per repeat, in `unit`; `detail` describes the work (tokens, outcome)."""

    measure: str
    arm: str
    unit: str
    values: tuple[float, ...]
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.values, f"{self.measure} of {self.arm} has no values"

    @property
    def median(self) -> float:
        """The median value."""
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Return the line without its origin; `from_dict` reads it back."""
        return {
            "measure": self.measure,
            "arm": self.arm,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
            "detail": dict(self.detail),
        }

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Measurement:
        """Restore a measurement from the result of `as_dict`, also after a trip through JSON."""
        return cls(line["measure"], line["arm"], line["unit"], tuple(line["values"]), line["detail"])


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a line: command, code, machine, versions, settings, date."""

    bench: str
    settings: Mapping[str, Any]
    commit: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str

    @classmethod
    def here(cls, bench: str, settings: Mapping[str, Any]) -> Origin:
        """Return the origin of a measurement taken now, by this code on this machine."""
        return cls(bench, settings, commit(), machine(), versions(), time.strftime("%Y-%m-%d"))

    def line(self, measurement: Measurement) -> str:
        """Format a measurement as one line of JSON."""
        origin = {
            "commit": self.commit,
            "date": self.date,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
        }
        return json.dumps({"bench": self.bench, **measurement.as_dict(), **origin})


def commit() -> str:
    """Return the commit of this package's checkout, with "+changes" if there are any; else the version."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        changes = _git(here, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"
    return head + ("+changes" if changes else "")


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores this process may use, memory in bytes, system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, of rekindle, and of the packages that determine the speed."""
    found = {"python": platform.python_version(), "rekindle": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def append_lines(path: Path, origin: Origin, measurements: Iterable[Measurement]) -> None:
    """Append one line per measurement to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for measurement in measurements:
            file.write(origin.line(measurement) + "\n")


def deliver(measurements: Sequence[Measurement], origin: Origin, out: Path | None, console: Console) -> None:
    """Append the lines to `out` and report it; None: print them to standard output."""
    if out is None:
        for measurement in measurements:
            print(origin.line(measurement))
        return
    append_lines(out, origin, measurements)
    console.print(f"{len(measurements)} lines added to {out}", soft_wrap=True)
