"""Costs of the prefix cache as a library: trie, pool and hashes, compared with their targets.

    python -m benchmarks cache --sequences 100000 --tokens 2000 --blocks 1000000
    python -m benchmarks cache --only trie

Needs no model. Speeds are means over many consecutive calls, a value per repeat; the garbage collector runs as usual.
Bytes are counted by tracemalloc while the structure is filled, not estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cache.pool import hashing_rows, pool_rows
from benchmarks.cache.rows import Row, Track, table
from benchmarks.cache.trie import trie_rows
from rekindle.errors import ConfigError
from rekindle_lab.record import Origin, deliver

PARTS = ("trie", "pool", "hashing")
MIN_SEQUENCES, MIN_TOKENS, MIN_BLOCKS = 100, 20, 100


@dataclass(frozen=True, slots=True)
class CacheBench:
    """How much to store, which parts to measure, how often; `out` None prints the JSON lines after the table."""

    sequences: int = 100_000
    tokens: int = 2_000
    blocks: int = 1_000_000
    repeats: int = 3
    seed: int = 0
    only: tuple[str, ...] = PARTS
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.sequences < MIN_SEQUENCES or self.tokens < MIN_TOKENS or self.blocks < MIN_BLOCKS:
            least = f"{MIN_SEQUENCES} sequences of {MIN_TOKENS} tokens and {MIN_BLOCKS} blocks"
            raise ConfigError(f"give at least {least}")
        if self.repeats < 1:
            raise ConfigError("give at least one repeat")
        if unknown := set(self.only) - set(PARTS):
            raise ConfigError(f"there is no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")


def measure(options: CacheBench, track: Track) -> Iterator[Row]:
    """Yield the rows of the chosen parts as they are measured."""
    often = {"repeats": options.repeats, "seed": options.seed}
    if "hashing" in options.only:
        yield from hashing_rows(**often)
    if "pool" in options.only:
        yield from pool_rows(options.blocks, **often, track=track)
    if "trie" in options.only:
        yield from trie_rows(options.sequences, options.tokens, **often, track=track)


def run_cache_bench(options: CacheBench, console: Console) -> int:
    """Measure, print table and lines; return 0 whatever the figures are."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        rows = list(measure(options, lambda numbers, doing: progress.track(numbers, description=doing)))
    console.print(table(rows))
    num_missed = sum(row.verdict == "missed" for row in rows)
    num_held = sum(row.target is not None for row in rows)
    console.print(f"{num_held - num_missed} of {num_held} targets met")
    origin = Origin.here("cache", {**asdict(options), "out": None})
    deliver([row.measured for row in rows], origin, options.out, console)
    return 0
