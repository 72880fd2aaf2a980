"""`rekindle bench replay` from its options to its table; replay.py sends requests, report.py counts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rekindle.errors import ConfigError
from rekindle.server.dayfile import Day, read_day
from rekindle_lab.bench.replay.client import OpenAIServer
from rekindle_lab.bench.replay.cold import check_cold
from rekindle_lab.bench.replay.plot import plot_day
from rekindle_lab.bench.replay.replay import Pace, Replay, Replayed
from rekindle_lab.bench.replay.report import earlier, measurements, notes, table
from rekindle_lab.plot import check_plot
from rekindle_lab.record import Origin, deliver


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which server, how fast, what to compare, and outputs. `arm` None: the model's name at its URL.

    `api_key_env` names the variable that holds the key: keys do not belong on command lines.
    """

    against: str
    pace: Pace = field(default_factory=Pace)
    arm: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    cold_check: int = 0
    cold_url: str | None = None
    out: Path | None = None
    plot: Path | None = None

    def server(self, url: str) -> OpenAIServer:
        """Return the server at a URL, once it answers."""
        server = OpenAIServer(url, model=self.model, api_key=key_in(self.api_key_env))
        server.wait_answering()
        return server


def key_in(variable: str | None) -> str | None:
    """Return the API key in an environment variable; ConfigError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env: the variable {variable} is not set")
    return os.environ[variable]


def run_replay(path: Path, options: ReplayOptions, console: Console) -> int:
    """Replay a day, print its table, write lines and plot; return 0, or 1 if a reply differed from its cold one."""
    check_plot(options.plot)
    day = read_day(path)
    server = options.server(options.against)
    replayed = _replay(day, server, options, console)
    cold = None
    if options.cold_check:
        cold_server = options.server(options.cold_url) if options.cold_url else None
        with console.status("sending requests again, cold"):
            cold = check_cold(replayed.exchanges, server, cold_server, options.cold_check)
    arm = options.arm or f"{server.model} at {options.against}"
    measured = measurements(replayed, arm, cold)
    settings = _settings(path, day, options)
    others = earlier(lines_of(options.out), settings["day_sha256"])
    console.print(table([*others, *measured]))
    for note in notes(replayed, cold):
        console.print(f"- {note}", highlight=False, soft_wrap=True)
    origin = Origin.here("replay", settings)
    deliver(measured, origin, options.out, console)
    if options.plot is not None:
        plot_day(options.plot, [*others, *measured], [(event.kind, event.at_s) for event in day.events])
    return 1 if cold is not None and cold.differing else 0


def _replay(day: Day, server: OpenAIServer, options: ReplayOptions, console: Console) -> Replayed:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(options.against)
        replay = Replay(day, server, options.pace, on_answer=lambda: progress.advance(task))
        progress.update(task, total=len(replay.requests))
        return replay.run()


def lines_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; none if it does not exist. ConfigError if it holds anything else."""
    if path is None or not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ConfigError(f"{path} does not hold JSON lines: {error}") from None


def _settings(path: Path, day: Day, options: ReplayOptions) -> Mapping[str, Any]:
    pace = options.pace
    return {
        "day": path.name,
        "day_sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        "about": dict(day.header.about),
        "against": options.against,
        "model": options.model,
        "speed": str(pace.speed),
        "mode": pace.mode,
        "restart_cmd": pace.restart_cmd,
        "kill_cmd": pace.kill_cmd,
        "cold_check": options.cold_check,
    }
