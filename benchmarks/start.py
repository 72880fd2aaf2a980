"""Start `rekindle serve` in a fresh process, and wait until it serves.

    python -m benchmarks start --repeats 7

In every repeat a server starts twice on one directory: first with nothing stored, so that the model is proved, then
again with what the first one stored. Measured in wall time from the start of the process: code imported, weights
loaded, store opened, agents known, serving (the first answer of `/health/ready`); and the CPU time and the memory it
took until then. Python finds compiled bytecode, as after an install: one start before the others is not counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.restart import table, wait_serving
from rekindle.bench.memory import resident_bytes
from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import ServerProcess
from rekindle.harness.flags import flags_of, variables
from rekindle.harness.record import Measurement, Origin, deliver

ARM = "rekindle"
KINDS = ("first", "again")
MARKS = {"code imported": "imports", "weights loaded": "weights", "store opened": "store", "agents known": "agents"}
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True, slots=True)
class StartBench:
    """How often a server starts first and again."""

    repeats: int = 7
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("give at least one repeat")


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds from process start to each phase, then CPU seconds and resident memory of the server."""

    seconds: Mapping[str, float]
    cpu_s: float
    rss_bytes: int


def run_start(settings: Settings, options: StartBench, console: Console) -> int:
    """Start servers, measure, print the table and JSON lines; return 0. RekindleError if one does not start."""
    runs: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    with Progress(console=console, transient=True) as progress:
        for repeat in progress.track(range(options.repeats + 1), description="starting servers"):
            with tempfile.TemporaryDirectory(prefix="rekindle-start-") as store:
                for kind in KINDS:
                    start = _start(settings, Path(store))
                    if repeat:  # before the first Python has no bytecode, the system not the model's files
                        runs[kind].append(start)
    measured = [each for kind in KINDS for each in _measurements(kind, runs[kind])]
    console.print(table(measured, title="Start, since the process began", prefix="start, "))
    origin = Origin.here("start", {**flags_of(settings), **asdict(options), "out": None})
    deliver(measured, origin, options.out, console)
    return 0


def _start(settings: Settings, store: Path) -> Start:
    """Start a server, stop it once it serves, so that it has written what later starts read."""
    os.environ.pop(NO_BYTECODE, None)
    began = time.time()
    with ServerProcess(log=store / "server.log", variables=variables(settings, store)) as server:
        client = wait_serving(server)
        serving, cpu_s = time.time() - began, _cpu_s(server.pid)
        rss_bytes = resident_bytes(server.pid)
        marks = client.json("GET", "/v1/stats")["started"]
        server.stop()
    seconds = {phase: marks[mark] - began for phase, mark in MARKS.items()}
    return Start({**seconds, "serving": serving}, cpu_s, rss_bytes)


def _cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have computed; see proc(5), fields 14 and 15 of `stat`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measurements(kind: str, starts: list[Start]) -> Iterator[Measurement]:
    for phase in starts[0].seconds:
        yield Measurement(f"start, {kind}: {phase}", ARM, "s", tuple(start.seconds[phase] for start in starts))
    yield Measurement(f"start, {kind}: CPU", ARM, "s", tuple(start.cpu_s for start in starts))
    yield Measurement(f"start, {kind}: memory", ARM, "bytes", tuple(float(start.rss_bytes) for start in starts))
