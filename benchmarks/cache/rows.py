"""Rows of `python -m benchmarks cache`: a measure, the target it is held to, and the table of all.

Owns what a target is and how it is shown. Knows nothing of what is measured.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rekindle.harness.record import Measurement

ARM = "rekindle.cache"
Track = Callable[[Iterable[int], str], Iterable[int]]  # passes numbers through and shows how far they are


@dataclass(frozen=True, slots=True)
class Target:
    """`most` or `least` of the row's unit."""

    bound: Literal["most", "least"]
    value: float

    def is_met(self, measured: float) -> bool:
        """Whether a median is good enough."""
        return measured <= self.value if self.bound == "most" else measured >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.bound == 'most' else '≥'} {self.value:g}"


def most(value: float) -> Target:
    """A target that is met by this and anything below."""
    return Target("most", value)


def least(value: float) -> Target:
    """A target that is met by this and anything above."""
    return Target("least", value)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of which part, and what it is held to; None: measured for its own sake."""

    part: str
    what: str
    measured: Measurement
    target: Target | None

    @property
    def verdict(self) -> str:
        """Met or missed by the median; empty without a target."""
        if self.target is None:
            return ""
        return "met" if self.target.is_met(self.measured.median) else "missed"


@dataclass(frozen=True, slots=True)
class Part:
    """A structure in one state, to which rows belong."""

    name: str

    def row(self, what: str, unit: str, values: Iterable[float], target: Target | None = None, **detail: Any) -> Row:
        """One row; the target goes into the measurement's detail, too."""
        aim = {} if target is None else {"target": str(target)}
        measured = Measurement(f"{self.name}: {what}", ARM, unit, tuple(values), aim | detail)
        return Row(self.name, what, measured, target)


def mean_us(operation: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> float:
    """Microseconds a call, over one call after the other; the loop around them is counted in."""
    began = time.perf_counter()
    for arguments in calls:
        operation(*arguments)
    return (time.perf_counter() - began) / len(calls) * 1e6


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Trace allocations inside; the function it gives tells how many of the traced bytes are still held."""
    gc.collect()
    tracemalloc.start()

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield held
    finally:
        tracemalloc.stop()


def table(rows: Sequence[Row]) -> Table:
    """A line per row under the name of its part: target, median, worst of the repeats, verdict."""
    shown = Table(title="The cache as a library", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("measure", "target", "median", "worst", ""):
        shown.add_column(name, justify="right" if name in ("target", "median", "worst") else "left", no_wrap=True)
    for part, items in groupby(rows, key=lambda item: item.part):
        shown.add_row(part)
        for item in items:
            values, target = item.measured.values, item.target
            worst = min(values) if target is not None and target.bound == "least" else max(values)
            aim = "" if target is None else str(target)
            median = f"{_figure(item.measured.median)} {item.measured.unit}"
            shown.add_row(f"  {item.what}", aim, median, _figure(worst), item.verdict)
        shown.add_section()
    return shown


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
