"""Plots of a replayed day and of a server's measurements, as PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rekindle_lab.plot import pyplot
from rekindle_lab.record import Measurement


def plot_day(path: Path, measured: Iterable[Measurement], events: Sequence[tuple[str, float]]) -> None:
    """Plot cumulative seconds waited for first tokens over the recorded day, per arm; `events` are (kind, second)."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(9, 5), layout="constrained")
    arms = {item.arm: item for item in measured if item.measure == "first token"}
    for arm, item in arms.items():
        waited, hours, sums = 0.0, [], []
        for at_s, seconds in zip(item.detail["at_s"], item.values, strict=True):
            waited += seconds
            hours.append(at_s / 3600)
            sums.append(waited)
        axes.step(hours, sums, where="post", label=f"{arm}: {waited:.1f} s")
    for kind, at_s in events:
        axes.axvline(at_s / 3600, color="grey", linestyle=":")
        axes.annotate(kind, (at_s / 3600, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right")
    axes.set_xlabel("hours of the recorded day")
    axes.set_ylabel("seconds waited for first tokens")
    axes.set_ylim(bottom=0)
    if arms:
        axes.legend()
    figure.savefig(path)
    plots.close(figure)


def plot_bars(path: Path, measured: Sequence[Measurement], title: str) -> None:
    """Plot medians of the measures in seconds, with their range, as a bar per measure and arm."""
    plots = pyplot()
    timed = [item for item in measured if item.unit == "s"]
    measures, arms = list(dict.fromkeys(item.measure for item in timed)), list(dict.fromkeys(i.arm for i in timed))
    figure, axes = plots.subplots(figsize=(9, 1 + 0.4 * len(measures) * len(arms)), layout="constrained")
    thickness = 0.8 / max(len(arms), 1)
    for number, arm in enumerate(arms):
        own = {item.measure: item for item in timed if item.arm == arm}
        rows = [(row + number * thickness, own[measure]) for row, measure in enumerate(measures) if measure in own]
        middle = [item.median * 1e3 for _, item in rows]
        below = [(item.median - min(item.values)) * 1e3 for _, item in rows]
        above = [(max(item.values) - item.median) * 1e3 for _, item in rows]
        axes.barh([y for y, _ in rows], middle, height=thickness, xerr=(below, above), label=arm)
    axes.set_yticks([row + 0.4 - thickness / 2 for row in range(len(measures))], measures)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    if arms:
        axes.legend()
    figure.savefig(path)
    plots.close(figure)
