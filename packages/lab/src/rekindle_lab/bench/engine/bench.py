"""`rekindle bench engine [MODEL]`: compare first tokens, decoding, saving and memory with `transformers`.

    rekindle bench engine MODEL --kv q4h --context 4096 --repeats 5 --out bench.jsonl
    rekindle bench engine MODEL --kv q4h --against openvino,llama.cpp    # pip install openvino-genai llama-cpp-python
    rekindle bench engine MODEL.gguf --against llama.cpp                 # both read the same file
    rekindle bench engine MODEL --context 32768 --rows hot,warm --cold-repeats 1     # of long prompts the quick part

First tokens are measured cold, hot and warm. Every arm is a separate process (`bench/engine/job.py`), on a store in a
temporary directory. Medians with range; one JSON line per measure with commit, machine, versions and settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import flags_of
from rekindle.model.checkpoint import Source
from rekindle.model.gguf import gguf_in
from rekindle_lab.bench.endless import endless_copy
from rekindle_lab.bench.engine.gguf_model import config_of, write_gguf
from rekindle_lab.bench.engine.job import ROWS, Job, run_job
from rekindle_lab.bench.engine.peers import Peer, need_packages, peers_of
from rekindle_lab.record import Measurement, Origin, deliver

DEFAULT_THREADS = 2
OURS = "rekindle"
MOST_STREAMS = 256
MORE_IS_BETTER = ("tok/s", "tokens")


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What to measure; `against` lists peers as further arms; `out` None prints the JSON lines after the table.

    `rows` lists groups of measures, "" is all of them; `cold_repeats` None: as many new prompts as `repeats`.
    """

    context: int = 4096
    repeats: int = 3
    seed: int = 0
    baseline: Literal["transformers", "none"] = "transformers"
    out: Path | None = None
    against: str = ""
    streams: str = "1,4,8"
    rows: str = ""
    cold_repeats: int | None = None

    def __post_init__(self) -> None:
        if self.context < 512 or self.repeats < 1:
            raise ConfigError(f"--context must be at least 512 and --repeats 1, not {self.context} and {self.repeats}")
        if self.cold_repeats is not None and self.cold_repeats < 1:
            raise ConfigError(f"--cold-repeats must be at least 1, not {self.cold_repeats}")
        if unknown := [name for name in self.row_names if name not in ROWS]:
            raise ConfigError(f"--rows takes {', '.join(ROWS)}, separated by commas, not {unknown[0]!r}")
        if self.baseline not in ("transformers", "none"):
            raise ConfigError(f"--baseline must be transformers or none, not {self.baseline!r}")
        if not self.num_streams or not all(0 < count <= MOST_STREAMS for count in self.num_streams):
            raise ConfigError(
                f"--streams takes numbers from 1 to {MOST_STREAMS}, separated by commas: {self.streams!r}"
            )
        need_packages(self.peers)

    @property
    def num_streams(self) -> list[int]:
        """The numbers of streams that decode at once; none if they cannot be read."""
        numbers = [each.strip() for each in self.streams.split(",")]
        return [int(each) for each in numbers] if all(each.isdecimal() for each in numbers) else []

    @property
    def row_names(self) -> list[str]:
        """The groups of measures."""
        return [each.strip() for each in self.rows.split(",")] if self.rows.strip() else list(ROWS)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The further arms."""
        return peers_of(self.against)


def run_engine_bench(settings: Settings, options: EngineBench, console: Console) -> int:
    """Measure everything, print the table, write the lines; return 0 if all arms ran.

    RekindleError from an arm that fails; what was measured before is printed and written.
    """
    flags = {"threads": DEFAULT_THREADS, **flags_of(settings)}
    found: list[Measurement] = []
    try:
        with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as name, console.status("starting") as status:
            directory = Source.find(settings.model.model, settings.model.revision).fetch()
            model = endless_copy(directory, Path(name) / directory.name)
            given = {**flags, "model": str(model), "store": str(Path(name) / "store")}
            check_peers(model, options.peers)  # not after our own arms
            job = _job(given, options)
            for measurement in _measure(job, options):
                found.append(measurement)
                status.update(f"{measurement.arm}: {measurement.measure} done")
    finally:
        if found:
            measured = merged(found)
            console.print(table(measured))
            origin = Origin.here("engine", {**flags, **asdict(options), "out": None})
            deliver(measured, origin, options.out, console)
    return 0


def _job(flags: Mapping[str, Any], options: EngineBench) -> Job:
    """The job of the first arm."""
    return Job(
        "hot",
        flags,
        options.context,
        options.repeats,
        options.seed,
        streams=options.num_streams,
        rows=options.row_names,
        num_cold=options.repeats if options.cold_repeats is None else options.cold_repeats,
    )


def _measure(job: Job, options: EngineBench) -> Iterator[Measurement]:
    """Run the arms of these rows, our hot one first: it reports the context the model allows and fills the store."""
    context = job.context
    for found in run_job(job):
        context = found.detail.get("context", context)
        yield found
    job = replace(job, context=context)
    for number in range(job.repeats if "warm" in job.rows else 0):
        for variant in ("cached", "evicted"):
            yield from run_job(replace(job, arm="warm", variant=variant, number=number))
    for variant in ("in chunks", "one piece") if "memory" in job.rows else ():
        yield from run_job(replace(job, arm="memory", variant=variant))
    for arm in (each for each in ("reuse", "capacity") if each in job.rows):
        yield from run_job(replace(job, arm=arm))
    if options.baseline == "transformers":
        for arm in _arms_of("transformers", job):
            yield from run_job(replace(job, arm=arm))
    yield from _measure_peers(job, options.peers)


def _arms_of(name: str, job: Job) -> list[str]:
    """The arms of the baseline or a peer: its speed, and its memory if that is among the rows."""
    return [name, f"{name} memory"] if "memory" in job.rows else [name]


def check_peers(directory: Path, peers: Sequence[Peer]) -> None:
    """ConfigError if a peer cannot have this model, or not with the weights that its name asks for."""
    if gguf_in(directory) is None:
        if peers:
            config_of(directory)
    elif odd := [peer.arm for peer in peers if peer.arm != peer.name]:
        raise ConfigError(f"peers read a GGUF file as it is: --against {peers[0].name} without weights, not {odd[0]}")


def _measure_peers(job: Job, peers: Sequence[Peer]) -> Iterator[Measurement]:
    """Run the peers' arms."""
    if not peers:
        return
    (first,) = run_job(replace(job, arm="transformers first tokens"))
    job = replace(job, expected=first.detail["tokens"])
    for peer in peers:
        with _file_for(peer, Path(job.flags["model"])) as file:
            for arm in _arms_of(peer.name, job):
                yield from run_job(replace(job, arm=arm, file=str(file), weights=peer.weights))


@contextmanager
def _file_for(peer: Peer, directory: Path) -> Iterator[Path]:
    """The GGUF file of the model itself, or one that is written for the peer and deleted afterwards."""
    own = gguf_in(directory)
    if own is not None:
        yield own
        return
    file = directory.with_name(f"{peer.weights}.gguf")
    write_gguf(directory, file, peer.weights)
    try:
        yield file
    finally:
        file.unlink()


def merged(found: Iterable[Measurement]) -> list[Measurement]:
    """Merge repeats that ran in separate processes into one measurement per measure and arm."""
    together: dict[tuple[str, str], Measurement] = {}
    for item in found:
        key = item.measure, item.arm
        before = together.get(key)
        together[key] = item if before is None else replace(item, values=(*before.values, *item.values))
    return list(together.values())


def table(measured: Sequence[Measurement]) -> Table:
    """Build a table with a row per measure: ours, then each other arm with how many times better ours is."""
    shown = Table(title="Medians (least to most); Nx: ours is N times better", title_justify="left", show_lines=True)
    others = [arm for arm in dict.fromkeys(item.arm for item in measured) if arm != OURS]
    for name in ("measure", OURS, *others, "tokens: prompt, hot, warm, computed"):
        shown.add_column(name, justify="left" if name == "measure" else "right")
    arms = {(item.measure, item.arm): item for item in measured}
    for measure in dict.fromkeys(item.measure for item in measured):
        ours = arms.get((measure, OURS))
        theirs = [arms.get((measure, arm)) for arm in others]
        cells = [f"{_cell(item)} {_ratio(ours, item)}".strip() for item in theirs]
        shown.add_row(measure, _cell(ours), *cells, _tokens(ours))
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
    """Format how many times better ours is: above 1 is faster, less memory, or more in it."""
    if ours is None or theirs is None or not ours.median or not theirs.median:
        return ""
    better = ours.median / theirs.median if ours.unit in MORE_IS_BETTER else theirs.median / ours.median
    return f"{better:.2f}x"


def _tokens(item: Measurement | None) -> str:
    if item is None or "hot_tokens" not in item.detail:
        return ""
    detail = item.detail
    counts = (detail[f"{name}_tokens"] for name in ("prompt", "hot", "warm", "computed"))
    return ", ".join(f"{count:,}" for count in counts) + f"  {'/'.join(detail['outcomes'])}"
