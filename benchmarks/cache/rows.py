"""Rows of `python -m benchmarks cache`: measures with their targets, and the table of all.

Owns what a target is and how it is shown. Knows nothing about what is measured.
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

from rekindle_lab.record import Measurement

ARM = "rekindle.cache"
Track = Callable[[Iterable[int], str], Iterable[int]]  # passes numbers through and shows progress


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
    """Return a target met by this value and anything below."""
    return Target("most", value)


def least(value: float) -> Target:
    """Return a target met by this value and anything above."""
    return Target("least", value)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of a part, and its target; None: no target."""

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
    """A structure in one state, which rows belong to."""

    name: str

    def row(self, what: str, unit: str, values: Iterable[float], target: Target | None = None, **detail: Any) -> Row:
        """Build a row; the target is also part of the measurement's detail."""
        aim = {} if target is None else {"target": str(target)}
        measured = Measurement(f"{self.name}: {what}", ARM, unit, tuple(values), aim | detail)
        return Row(self.name, what, measured, target)


def mean_us(operation: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> float:
    """Return microseconds per call over consecutive calls, loop overhead included."""
    began = time.perf_counter()
    for arguments in calls:
        operation(*arguments)
    return (time.perf_counter() - began) / len(calls) * 1e6


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Trace allocations inside; yield a function that returns how many of the traced bytes are still held."""
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
    """Build a table with a line per row under its part: target, median, worst of the repeats, verdict."""
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
