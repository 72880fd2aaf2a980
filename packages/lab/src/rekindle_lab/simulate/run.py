"""`rekindle simulate TRACE`: run every memory over a trace and report what each would have held.

    rekindle simulate mooncake_synthetic.jsonl --capacities 1000,10000,30000,unlimited --plot simulated.png

One process on one core: a run costs about 10 us per block of the trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rekindle.errors import ConfigError
from rekindle_lab.plot import check_plot
from rekindle_lab.record import Origin, append_lines
from rekindle_lab.simulate.capacities import DEFAULT, parse_capacities
from rekindle_lab.simulate.plot import plot_simulation
from rekindle_lab.simulate.reading import read_trace
from rekindle_lab.simulate.report import UNITS, describe, measurements, print_table
from rekindle_lab.simulate.simulation import Found, sweep
from rekindle_lab.simulate.trace import Trace, TraceOptions

Order = Literal["leaves", "free"]  # whether a block is evicted only after all its descendants


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to simulate, and further outputs. Empty sequences: the most informative sizes."""

    capacities: Sequence[str] = DEFAULT
    ttls_s: Sequence[float] = ()
    disks: Sequence[str] = ()
    order: Order = "leaves"
    trace: TraceOptions = field(default_factory=TraceOptions)
    out: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if any(ttl <= 0 for ttl in self.ttls_s):
            raise ConfigError("a time to live must be above 0")


def run_simulate(path: Path, options: SimulateOptions, console: Console) -> int:
    """Simulate one trace and return 0. Raises ConfigError if it cannot be read or an option does not fit it."""
    check_plot(options.plot)
    for written in (options.out, options.plot):
        if written is not None:
            prove_writable(written)
    with progress_bar() as bar:
        trace = read_described(path, options.trace, console, bar)
        found = _sweep(trace if options.order == "leaves" else trace.unlinked(), options, bar)
    for unit in UNITS:
        print_table(console, found, trace, unit)
    _deliver(path, trace, found, options, console)
    return 0


def progress_bar() -> Progress:
    """Return a bar on standard error that disappears."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def read_described(path: Path, options: TraceOptions, console: Console, bar: Progress) -> Trace:
    """Return the trace in a file, and print what it is."""
    reading = bar.add_task("requests read", total=None)
    trace = read_trace(path, options, lambda: bar.advance(reading))
    bar.remove_task(reading)
    for line in (describe(trace), *trace.notes):
        console.print(Text(line), soft_wrap=True)
    return trace


def settings_of(path: Path, trace: Trace) -> dict[str, Any]:
    """Return what lines of results say of their trace."""
    return {
        "trace": trace.name,
        "trace_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "kind": trace.kind,
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "unlimited_blocks": len(trace.blocks),
    }


def prove_writable(path: Path) -> None:
    """Raise ConfigError if a file cannot be written; creates no file that did not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _sweep(trace: Trace, options: SimulateOptions, bar: Progress) -> list[Found]:
    if options.ttls_s and not trace.is_timed:
        raise ConfigError(f"{trace.name} does not say when its requests came: --ttl has no meaning for it")
    if not trace.blocks:
        raise ConfigError(f"{trace.name} has no blocks of {trace.block_tokens} tokens: there is nothing to hold")
    capacities = parse_capacities(options.capacities, trace)
    disks = parse_capacities(options.disks, trace) or [0]
    ttls: Sequence[float | None] = options.ttls_s or (None,)
    num_runs = (len(ttls) + 1) * len(disks) * len(capacities)
    task = bar.add_task(f"{num_runs} memories, requests", total=num_runs * len(trace.requests))
    return sweep(trace, capacities, ttls=ttls, disks=disks, progress=lambda done: bar.advance(task, done))


def _deliver(path: Path, trace: Trace, found: Sequence[Found], options: SimulateOptions, console: Console) -> None:
    if options.out is not None:
        lines = list(measurements(found, trace))
        append_lines(options.out, Origin.here("simulate", settings_of(path, trace) | {"order": options.order}), lines)
        console.print(f"{len(lines)} lines added to {options.out}", soft_wrap=True)
    if options.plot is not None:
        plot_simulation(options.plot, found, trace)
        console.print(f"drawn to {options.plot}", soft_wrap=True)
