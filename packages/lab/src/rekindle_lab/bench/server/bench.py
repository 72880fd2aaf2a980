"""`rekindle bench server URL`: first tokens, streams and rounds of any OpenAI-compatible server, from outside.

    rekindle bench server http://127.0.0.1:7354 --context 3000 --repeats 5 --out server.jsonl
    rekindle bench server URL --restart-cmd './tools/again.sh TERM server.pid rekindle serve ...'

Sizes are tokens as the server counts them. Greedy replies, medians with range, one JSON line per measure; the table
also shows arms that --out already holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from rekindle.errors import ConfigError
from rekindle_lab.bench.replay.client import OpenAIServer
from rekindle_lab.bench.replay.plot import plot_bars
from rekindle_lab.bench.replay.run import key_in, lines_of
from rekindle_lab.bench.replay.table import arms_table
from rekindle_lab.bench.server.arms import Bench, after_restart, first_tokens
from rekindle_lab.bench.server.streams import batches, rounds, staggered
from rekindle_lab.bench.server.texts import ServerTexts
from rekindle_lab.plot import check_plot
from rekindle_lab.record import Measurement, Origin, deliver

MIN_CONTEXT, MIN_EXTENSION = 256, 8


@dataclass(frozen=True, slots=True)
class ServerBench:
    """Which server, sizes in its tokens, and outputs. `end_token` is banned while decoding is measured."""

    url: str
    context: int = 2048
    extension: int = 64
    repeats: int = 3
    seed: int = 0
    restart_cmd: str | None = None
    drop_cache: Path | None = None
    end_token: int | None = None
    arm: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    out: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.context < MIN_CONTEXT or self.extension < MIN_EXTENSION or self.repeats < 1:
            message = f"--context is at least {MIN_CONTEXT}, --extension {MIN_EXTENSION}, --repeats 1"
            raise ConfigError(f"{message}, not {self.context}, {self.extension} and {self.repeats}")
        if self.drop_cache is not None and self.restart_cmd is None:
            raise ConfigError("--drop-cache belongs to a restart: give --restart-cmd, too")


def run_server_bench(options: ServerBench, console: Console) -> int:
    """Measure everything, print the table, write lines and plot; return 0. RequestFailed if a request fails."""
    check_plot(options.plot)
    server = OpenAIServer(options.url, model=options.model, api_key=key_in(options.api_key_env))
    server.wait_answering()
    arm = options.arm or f"{server.model} at {options.url}"
    measured = []
    with console.status("measuring tokens per word") as status:
        texts = ServerTexts(server, seed=options.seed)
        bench = Bench(server, texts, arm, options.context, options.extension, options.repeats)
        for item in measure(bench, options):
            measured.append(item)
            status.update(f"{item.measure}: done")
    together = [*earlier(options), *measured]
    console.print(arms_table("Medians (least - most)", together))
    if options.restart_cmd is None:
        console.print("- nothing after a restart: no --restart-cmd was given")
    origin = Origin.here("server", {**asdict(options), **dict.fromkeys(("out", "plot", "drop_cache"))})
    deliver(measured, origin, options.out, console)
    if options.plot is not None:
        plot_bars(options.plot, together, f"first tokens and stalls, context {options.context}")
    return 0


def earlier(options: ServerBench) -> list[Measurement]:
    """Return measurements of other arms with the same sizes from --out."""
    ours = [line for line in lines_of(options.out) if line.get("bench") == "server"]
    sizes = ("context", "extension", "seed")
    same = [line for line in ours if all(line["settings"].get(name) == getattr(options, name) for name in sizes)]
    return [Measurement.from_dict(line) for line in same]


def measure(bench: Bench, options: ServerBench) -> Iterator[Measurement]:
    """Yield every measure as it is taken; the restart last."""
    yield from first_tokens(bench)
    yield from batches(bench, options.end_token)
    yield from staggered(bench, options.end_token)
    yield from rounds(bench)
    if options.restart_cmd is not None:
        yield from after_restart(bench, options.restart_cmd, options.drop_cache)
