"""`python -m benchmarks encryption`: what an encrypted store costs a conversation that is loaded from disk.

    python -m benchmarks encryption --context 2048 --repeats 15

Two engines in one process, one with a key, take turns: a conversation whose KV is on disk alone (`offload`, its files
in the kernel's cache) is continued by new words, to the first token. Measured are the time to it and the CPU time of
the process until then; which engine is first changes. `benchmarks loads` has the reading alone.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError, RekindleError
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.requests import clamped, first_token, warm_up, workload_of
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Measurement, Origin, deliver

KEY = "5e" * 32
ARMS = {"clear": None, "encrypted": KEY}


@dataclass(frozen=True, slots=True)
class EncryptionBench:
    """Tokens of the conversation and of what is new in a turn; `out` None prints the JSON lines after the table."""

    context: int = 2048
    extension: int = 16
    repeats: int = 15
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("give at least one repeat")


def measure(settings: Settings, options: EncryptionBench) -> list[Measurement]:
    """Load the conversation by both engines in turn."""
    taken: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="rekindle-encryption-") as directory, ExitStack() as stack:
        engines = {}
        for arm, key in ARMS.items():
            given: dict[str, Any] = {"store": str(Path(directory) / arm), "store_key": key}
            given |= {"model": settings.model.model, "threads": settings.model.threads}
            given |= {"speculate": "off", "anticipate": "off"}
            flags = {name: value for name, value in given.items() if value is not None}
            job = Job("hot", flags, options.context, options.repeats, options.seed, options.extension)
            engines[arm] = stack.enter_context(Engine(job.settings()))
        job = clamped(job, engines["clear"].max_context)
        workload = workload_of(job)
        for engine in engines.values():
            warm_up(engine, workload)
            first_token(engine, workload.base(0), "base")
        for number in range(-1, options.repeats):  # the first does not count
            order = sorted(engines, reverse=number % 2 == 0)
            replies = {arm: turn(engines[arm], workload, options.extension, number) for arm in order}
            if number >= 0:
                for arm, (seconds, cpu, _) in replies.items():
                    taken[arm].append((seconds, cpu))
        num_tokens, num_bytes = replies["clear"][2], engines["clear"].spec.layout.parts[0].payload_bytes
    detail = {"warm_tokens": num_tokens, "block_bytes": num_bytes}
    return [
        Measurement(name, arm, "ms", tuple(1e3 * each[at] for each in taken[arm]), detail)
        for at, name in enumerate(("first token", "CPU until then"))
        for arm in ARMS
    ]


def turn(engine: Engine, workload: Workload, extension: int, number: int) -> tuple[float, float, int]:
    """Continue the conversation from disk; return seconds and CPU seconds to the first token, and tokens loaded."""
    name = f"turn-{number}"
    engine.agent("base").fork(name)
    engine.flush()
    for agent in ("base", name):
        engine.agent(agent).offload()
    cpu = time.process_time()
    sample = first_token(engine, workload.extended(workload.base(0), extension, number), name)
    used, report = time.process_time() - cpu, sample.report
    if report.warm_tokens < report.prompt_tokens // 2:
        raise RekindleError(f"only {report.warm_tokens} of {report.prompt_tokens} tokens came from disk")
    engine.agent(name).delete()
    engine.flush()
    return sample.seconds, used, report.warm_tokens


def run_encryption(settings: Settings, options: EncryptionBench, console: Console) -> int:
    """Measure, print table and lines; return 0."""
    measured = measure(settings, options)
    shown = Table(title=f"{measured[0].detail['warm_tokens']:,} tokens from disk", title_justify="left")
    for name in ("", *ARMS, "cost"):
        shown.add_column(name, justify="right" if name else "left")
    for name in dict.fromkeys(item.measure for item in measured):
        clear, encrypted = (item for item in measured if item.measure == name)
        cells = (f"{item.median:.4g} ({min(item.values):.4g}-{max(item.values):.4g})" for item in (clear, encrypted))
        shown.add_row(f"{name}, {clear.unit}", *cells, f"{100 * (encrypted.median / clear.median - 1):+.1f} %")
    console.print(shown)
    deliver(measured, Origin.here("encryption", {**asdict(options), "out": None}), options.out, console)
    return 0
