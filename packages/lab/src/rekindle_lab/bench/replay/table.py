"""Measurements of several arms as a table: a row per measure, a column per arm. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from rekindle_lab.record import Measurement

UNKNOWN = "unknown"


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def arms_table(title: str, measured: Iterable[Measurement]) -> Table:
    """Build a table of medians, with their range if there are several values; "unknown" if an arm lacks a measure."""
    cells: dict[str, dict[str, str]] = {}
    arms: dict[str, None] = {}
    for item in measured:
        arms[item.arm] = None
        cells.setdefault(item.measure, {})[item.arm] = cell(item)
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("", no_wrap=True)
    for arm in arms:
        shown.add_column(arm, justify="right")
    for measure, row in cells.items():
        shown.add_row(measure, *(row.get(arm, UNKNOWN) for arm in arms))
    return shown


def cell(item: Measurement) -> str:
    """Format one cell: the median in its unit, its range, and parts of the detail (share, compared, kinds)."""
    middle, low, high, unit = _amounts(item.median, min(item.values), max(item.values), unit=item.unit)
    text = f"{middle}{unit}" if len(item.values) == 1 else f"{middle}{unit} ({low}-{high})"
    if "share" in item.detail:
        text += f" ({item.detail['share']:.0%})"
    if "compared" in item.detail:
        text += f" of {item.detail['compared']}"
    if item.detail.get("kinds"):
        text += f" ({', '.join(f'{count} {kind}' for kind, count in item.detail['kinds'].items())})"
    return text


def _amounts(middle: float, *others: float, unit: str) -> tuple[str, ...]:
    """Format numbers in the unit that suits the first, followed by that unit with a leading blank; counts have none."""
    if unit == "s":
        scale, unit = (1.0, " s") if middle >= 10 else (1e3, " ms")
        return *(f"{value * scale:,.{0 if scale > 1 else 1}f}" for value in (middle, *others)), unit
    digits, unit = (1, " tok/s") if unit == "tok/s" else (0, "")
    return *(f"{value:,.{digits}f}" for value in (middle, *others)), unit
