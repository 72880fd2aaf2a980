"""Decode while other processes keep the processors busy: `python -m benchmarks neighbours MODEL`.

    python -m benchmarks neighbours MODEL --neighbours 2 --repeats 5 --peer http://127.0.0.1:8080

A server for each arm: one thread; as many as there are cores; and as many again that wait for each other by spinning as
long as OpenMP does when nobody says how (libgomp: 300,000 rounds). All are loaded on a quiet machine. In each repeat
every arm writes one reply without neighbours and one with them, in turns, so that drifts of the machine meet all of
them. `--peer`: the base URL of another server that speaks OpenAI's completions, for a row of its own, such as
llama-server's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.restart import wait_serving
from rekindle.config import Settings
from rekindle.errors import ConfigError, RequestFailed
from rekindle.harness.client import ServerProcess, flags_of, variables
from rekindle_lab.record import Measurement, Origin, deliver

STATES = ("alone", "neighbours")
PROMPT = "Count the stairs of the tower, one after the other, and say their names: "
OPENMPS_SPINS = {"GOMP_SPINCOUNT": "300000"}
BUSY = "while True: pass"
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class NeighbourBench:
    """How many busy processes, how often, how many tokens a reply has; `peer` is another server's base URL."""

    neighbours: int = 2
    repeats: int = 5
    tokens: int = 40
    peer: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if min(self.neighbours, self.repeats, self.tokens - 1) < 1:
            raise ConfigError("give at least one neighbour, one repeat, and two tokens")


def run_neighbours(settings: Settings, options: NeighbourBench, console: Console) -> int:
    """Start the servers, measure, print the table and JSON lines; return 0. RekindleError if one does not serve."""
    cores = len(os.sched_getaffinity(0))
    arms: dict[str, Mapping[str, str]] = {"1 thread": {"threads": "1"}}
    if cores > 1:
        arms |= {f"{cores} threads": {"threads": str(cores)}, f"{cores} threads, OpenMP's spinning": {}}
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        urls = {}
        for name, given in progress.track(arms.items(), description="starting servers"):
            urls[name] = stack.enter_context(_served(settings, given, cores))
        urls |= {"peer": options.peer.rstrip("/")} if options.peer else {}
        for _ in progress.track(range(options.repeats), description="measuring"):
            for state in STATES:
                with _neighbours(options.neighbours if state == "neighbours" else 0):
                    for name, url in urls.items():
                        rates.setdefault((name, state), []).append(_rate(url, options.tokens))
    measured = [Measurement(f"decode, {state}", name, "tok/s", tuple(found)) for (name, state), found in rates.items()]
    console.print(_table(measured, options.neighbours))
    origin = Origin.here("neighbours", {**flags_of(settings), **asdict(options), "out": None})
    deliver(measured, origin, options.out, console)
    return 0


@contextmanager
def _served(settings: Settings, given: Mapping[str, str], cores: int) -> Iterator[str]:
    """Serve, and yield the base URL. Without settings of its own an arm has all cores and OpenMP's own spinning."""
    environment = {} if given else OPENMPS_SPINS
    with tempfile.TemporaryDirectory(prefix="rekindle-neighbours-") as folder, _environment(environment):
        named = {**variables(settings, Path(folder)), **(given or {"threads": str(cores)}), "reuse": "off"}
        with ServerProcess(log=Path(folder) / "server.log", variables=named) as server:
            wait_serving(server)
            yield f"http://127.0.0.1:{server.port}"


@contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the environment of processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Keep so many processors busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _rate(url: str, tokens: int) -> float:
    """Stream a reply; return tokens per second from its first token to its last."""
    body = {"model": "default", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    arrived = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=TIMEOUT_S) as reply:
        if reply.status_code != 200:
            raise RequestFailed(f"{url}: {reply.status_code} {reply.read().decode(errors='replace')[:200]}")
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: ")).get("choices"):
                arrived.append(time.perf_counter())
    if len(arrived) < 2:
        raise RequestFailed(f"{url}: the reply came in one piece")
    return (tokens - 1) / (arrived[-1] - arrived[0])


def _table(measured: list[Measurement], neighbours: int) -> Table:
    shown = Table(title=f"Decoding alone and with {neighbours} busy processes, tokens/s", title_justify="left")
    for name in ("arm", *STATES):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for arm in dict.fromkeys(each.arm for each in measured):
        found = {each.measure: each for each in measured if each.arm == arm}
        cells = (found[f"decode, {state}"] for state in STATES)
        shown.add_row(arm, *(f"{each.median:.1f} ({min(each.values):.1f}-{max(each.values):.1f})" for each in cells))
    return shown
