"""`rekindle bench engine [MODEL]`: compare first tokens, decoding, saving and memory with `transformers`.

    rekindle bench engine MODEL --kv q4h --context 4096 --repeats 5 --out bench.jsonl

First tokens are measured cold, hot and warm. Every arm is a separate process (`bench/engine/job.py`), on a store in a
temporary directory. Medians with range; one JSON line per measure with commit, machine, versions and settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from rekindle.bench.endless import endless_copy
from rekindle.bench.engine.job import Job, run_job
from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.flags import flags_of
from rekindle.harness.record import Measurement, Origin, deliver
from rekindle.model.checkpoint import Source

DEFAULT_THREADS = 2
OURS, THEIRS = "rekindle", "transformers"
FASTER_IS_MORE = ("tok/s",)


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What to measure; `out` None prints the JSON lines after the table."""

    context: int = 4096
    repeats: int = 3
    seed: int = 0
    baseline: Literal["transformers", "none"] = "transformers"
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.context < 512 or self.repeats < 1:
            raise ConfigError(f"--context must be at least 512 and --repeats 1, not {self.context} and {self.repeats}")
        if self.baseline not in ("transformers", "none"):
            raise ConfigError(f"--baseline must be transformers or none, not {self.baseline!r}")


def run_engine_bench(settings: Settings, options: EngineBench, console: Console) -> int:
    """Measure everything, print the table, write the lines; return 0 if all arms ran."""
    flags = {"threads": DEFAULT_THREADS, **flags_of(settings)}
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name, console.status("starting") as status:
        directory = Source.find(settings.model.model, settings.model.revision).fetch()
        model = endless_copy(directory, Path(name) / directory.name)
        given = {**flags, "model": str(model), "store": str(Path(name) / "store")}
        job = Job("hot", given, options.context, options.repeats, options.seed)
        found: list[Measurement] = []
        for measurement in _measure(job, options):
            found.append(measurement)
            status.update(f"{measurement.arm}: {measurement.measure} done")
    measured = merged(found)
    console.print(table(measured))
    described = {**flags, **asdict(options), "out": None}
    origin = Origin.here("engine", described)
    deliver(measured, origin, options.out, console)
    return 0


def _measure(job: Job, options: EngineBench) -> Iterator[Measurement]:
    """Run all arms, our hot one first: it reports the context the model allows and fills the store for restarts."""
    context = job.context
    for found in run_job(job):
        context = found.detail.get("context", context)
        yield found
    job = replace(job, context=context)
    for number in range(job.repeats):
        for variant in ("cached", "evicted"):
            yield from run_job(replace(job, arm="warm", variant=variant, number=number))
    for variant in ("in chunks", "one piece"):
        yield from run_job(replace(job, arm="memory", variant=variant))
    if options.baseline == "transformers":
        yield from run_job(replace(job, arm="transformers"))
        yield from run_job(replace(job, arm="transformers memory"))


def merged(found: Iterable[Measurement]) -> list[Measurement]:
    """Merge repeats that ran in separate processes into one measurement per measure and arm."""
    together: dict[tuple[str, str], Measurement] = {}
    for item in found:
        key = item.measure, item.arm
        before = together.get(key)
        together[key] = item if before is None else replace(item, values=(*before.values, *item.values))
    return list(together.values())


def table(measured: Sequence[Measurement]) -> Table:
    """Build a table with a row per measure: ours with its range, theirs, and how many times better ours is."""
    shown = Table(title="Medians (least to most)", title_justify="left")
    for name in ("measure", THEIRS, OURS, "ratio", "tokens: prompt, hot, warm, computed"):
        shown.add_column(name, justify="left" if name == "measure" else "right")
    arms = {(item.measure, item.arm): item for item in measured}
    for measure in dict.fromkeys(item.measure for item in measured):
        ours, theirs = arms.get((measure, OURS)), arms.get((measure, THEIRS))
        shown.add_row(measure, _cell(theirs), _cell(ours), _ratio(ours, theirs), _tokens(ours))
    return shown


def _cell(item: Measurement | None) -> str:
    if item is None:
        return ""
    unit, scale = ("ms", 1e3) if item.unit == "s" and item.median < 1 else (item.unit, 1.0)
    low, high = min(item.values) * scale, max(item.values) * scale
    spread = f" ({_number(low)}-{_number(high)})" if len(item.values) > 1 else ""
    return f"{_number(item.median * scale)} {unit}{spread}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(ours: Measurement | None, theirs: Measurement | None) -> str:
    """Format how many times better ours is: above 1 is faster, or less memory."""
    if ours is None or theirs is None or not ours.median or not theirs.median:
        return ""
    better = ours.median / theirs.median if ours.unit in FASTER_IS_MORE else theirs.median / ours.median
    return f"{better:.2f}x"


def _tokens(item: Measurement | None) -> str:
    if item is None or "hot_tokens" not in item.detail:
        return ""
    detail = item.detail
    counts = (detail[f"{name}_tokens"] for name in ("prompt", "hot", "warm", "computed"))
    return ", ".join(f"{count:,}" for count in counts) + f"  {'/'.join(detail['outcomes'])}"
