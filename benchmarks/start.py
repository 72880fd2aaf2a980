"""Start `rekindle serve` in a fresh process, and wait until it serves.

    python -m benchmarks start --repeats 7
    python -m benchmarks start --real smollm2 --real gemma --against llama.cpp

`--real`: a model with real weights instead (`tools.real_models`); `--against`: the same file in llama-cpp-python, which
is ready when it has computed a token. In every repeat a server starts twice on one directory: first with nothing
stored, so that the model is proved, then again with what the first one stored. Measured in wall time from the start of
the process: code imported, weights loaded, store opened, agents known, serving (the first answer of `/health/ready`);
and the CPU time and memory it took until then, and the most it took. Python finds compiled bytecode, as after an
install: one start before the others is not counted.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.restart import table, wait_serving
from rekindle.config import Settings
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import ServerProcess, flags_of, variables
from rekindle_lab.bench.memory import peak_bytes, resident_bytes
from rekindle_lab.record import Measurement, Origin, deliver
from tools.real_models import REAL_MODELS

ARM = "rekindle"
KINDS = ("first", "again")
MARKS = {"code imported": "imports", "weights loaded": "weights", "store opened": "store", "agents known": "agents"}
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
PEER, PEER_PACKAGE = "llama.cpp", "llama_cpp"
PEER_STARTS = """
import sys
from llama_cpp import Llama

threads = int(sys.argv[2]) or None
model = Llama(sys.argv[1], n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
model.eval([1])
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class StartBench:
    """How often a server starts first and again; of which real models (none: the settings' own), next to which peer."""

    repeats: int = 7
    real: tuple[str, ...] = ()
    against: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("give at least one repeat")
        unknown = set(self.real) - REAL_MODELS.keys()
        if unknown:
            raise ConfigError(f"--real must be one of {', '.join(REAL_MODELS)}, not {min(unknown)}")
        if self.against not in (None, PEER):
            raise ConfigError(f"--against must be {PEER}, not {self.against}")
        if self.against is not None and not self.real:
            raise ConfigError("--against needs --real: a model that both can read")
        if self.against is not None and importlib.util.find_spec(PEER_PACKAGE) is None:
            raise ConfigError(f"--against {PEER} needs llama-cpp-python: pip install llama-cpp-python")


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds from process start to each phase, then CPU seconds and memory of the process."""

    seconds: Mapping[str, float]
    cpu_s: float
    rss_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, pid: int, seconds: Mapping[str, float]) -> Start:
        """Read what a process that is ready has taken."""
        return cls(seconds, _cpu_s(pid), resident_bytes(pid), peak_bytes(pid))


def run_start(settings: Settings, options: StartBench, console: Console) -> int:
    """Start servers, measure, print the table and JSON lines; return 0. RekindleError if one does not start."""
    measured = list[Measurement]()
    for name in options.real or (None,):
        file = None if name is None else REAL_MODELS[name].path()
        chosen = settings if file is None else replace(settings, model=replace(settings.model, model=str(file)))
        prefix = "start, " if name is None else f"start, {name}, "
        measured += _of_ours(chosen, options.repeats, prefix, console)
        if file is not None and options.against is not None:
            starts = [_start_peer(file, settings.model.threads) for _ in range(options.repeats + 1)]
            measured += _measurements(f"{prefix}{PEER}", PEER, starts[1:])
    console.print(table(measured, title="Start, since the process began", prefix="start, "))
    origin = Origin.here("start", {**flags_of(settings), **asdict(options), "out": None})
    deliver(measured, origin, options.out, console)
    return 0


def _of_ours(settings: Settings, repeats: int, prefix: str, console: Console) -> Iterator[Measurement]:
    """Start a server first and again, so many times."""
    runs: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    with Progress(console=console, transient=True) as progress:
        for repeat in progress.track(range(repeats + 1), description="starting servers"):
            with tempfile.TemporaryDirectory(prefix="rekindle-start-") as store:
                for kind in KINDS:
                    start = _start(settings, Path(store))
                    if repeat:  # before the first Python has no bytecode, the system not the model's files
                        runs[kind].append(start)
    for kind in KINDS:
        yield from _measurements(f"{prefix}{kind}", ARM, runs[kind])


def _start(settings: Settings, store: Path) -> Start:
    """Start a server, stop it once it serves, so that it has written what later starts read."""
    os.environ.pop(NO_BYTECODE, None)
    began = time.time()
    with ServerProcess(log=store / "server.log", variables=variables(settings, store)) as server:
        client = wait_serving(server)
        found = Start.of(server.pid, {"serving": time.time() - began})
        marks = client.json("GET", "/v1/stats")["started"]
        server.stop()
    return replace(found, seconds={**{phase: marks[mark] - began for phase, mark in MARKS.items()}, **found.seconds})


def _start_peer(file: Path, threads: int | None) -> Start:
    """Load a file by the peer, compute a token, and end."""
    began = time.time()
    command = [sys.executable, "-c", PEER_STARTS, str(file), str(threads or 0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None  # pipes
        if process.stdout.readline().strip() != b"ready":
            raise RekindleError(f"{PEER} does not load {file}: {' '.join(command)}")
        found = Start.of(process.pid, {"serving": time.time() - began})
        process.stdin.close()
    return found


def _cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have computed; see proc(5), fields 14 and 15 of `stat`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measurements(prefix: str, arm: str, starts: list[Start]) -> Iterator[Measurement]:
    for phase in starts[0].seconds:
        yield Measurement(f"{prefix}: {phase}", arm, "s", tuple(start.seconds[phase] for start in starts))
    yield Measurement(f"{prefix}: CPU", arm, "s", tuple(start.cpu_s for start in starts))
    yield Measurement(f"{prefix}: memory", arm, "bytes", tuple(float(start.rss_bytes) for start in starts))
    yield Measurement(f"{prefix}: peak memory", arm, "bytes", tuple(float(start.peak_bytes) for start in starts))
