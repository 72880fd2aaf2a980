"""Plot of a simulation: the share of tokens each memory held, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rekindle_lab.plot import pyplot
from rekindle_lab.simulate.capacities import show_tokens
from rekindle_lab.simulate.report import by_arm
from rekindle_lab.simulate.simulation import OPTIMUM, Found
from rekindle_lab.simulate.trace import Trace

MARKERS = "osD^vPX*"
COLOURS = ("#1d3557", "#d62828", "#f77f00", "#2a9d8f", "#8d5fd3", "#7f4f24", "#e377c2", "#5c677d")


def plot_simulation(path: Path, found: Sequence[Found], trace: Trace) -> None:
    """Write a PNG: shares of tokens over hot capacity, and next to it the details too small to see there.

    The details are each arm's gain over the first or, with a disk, what is found hot. The offline optimum of
    blocks, in tokens, is dashed. Capacities larger than the trace are drawn at its size.
    """
    plots = pyplot()
    arms = by_arm(found, trace, "tokens")
    figure, (whole, details) = plots.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    _draw_shares(whole, arms, trace, "found")
    if any(each.memory.disk_blocks for each in found):
        _draw_shares(details, arms, trace, "found hot")
    else:
        _draw_differences(details, arms, trace)
    sizes = _sizes(next(iter(arms.values())), trace)
    for axes in (whole, details):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [show_tokens(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("capacity of hot memory in tokens")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{trace.name}: {len(trace.requests):,} requests, {show_tokens(trace.num_tokens)} prompt tokens")
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(arms), 4), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)


def _draw_shares(
    axes: Any, arms: Mapping[str, Sequence[Found]], trace: Trace, which: Literal["found", "found hot"]
) -> None:
    most = 0.0
    for number, (arm, row) in enumerate(arms.items()):
        shares = [100 * share for share in _shares(row, which)]
        axes.plot(_sizes(row, trace), shares, label=arm, **_style(number, row))
        most = max(most, *shares)
    axes.set_ylabel(f"% of prompt tokens {which}")
    axes.set_ylim(0, 1.05 * most or 1)


def _draw_differences(axes: Any, arms: Mapping[str, Sequence[Found]], trace: Trace) -> None:
    """Draw each arm's gain over the first; the optimum only next to a single arm, because it dwarfs differences."""
    first, *_ = arms.values()
    for number, row in enumerate(arms.values()):
        if row[0].memory.policy == OPTIMUM and len(arms) > 2:
            continue
        more = [100 * (share - base) for share, base in zip(_shares(row), _shares(first), strict=True)]
        axes.plot(_sizes(row, trace), more, **_style(number, row))
    axes.set_ylabel(f"percentage points more than {next(iter(arms))}")


def _sizes(row: Sequence[Found], trace: Trace) -> list[int]:
    """Return capacities in tokens."""
    return [min(each.memory.num_blocks, len(trace.blocks)) * trace.block_tokens for each in row]


def _shares(row: Sequence[Found], which: Literal["found", "found hot"] = "found") -> list[float]:
    """Return the shares of requested tokens found hot, or in any tier."""
    return [each.shares("tokens")[0] if which == "found hot" else sum(each.shares("tokens")) for each in row]


def _style(number: int, row: Sequence[Found]) -> dict[str, Any]:
    if row[0].memory.policy == OPTIMUM:
        return {"color": "black", "linestyle": "--", "linewidth": 1.2}
    turn, again = number % len(COLOURS), number // len(COLOURS)
    marker = {
        "marker": MARKERS[turn],
        "markersize": 10 - turn,
        "markerfacecolor": "none",
    }  # equal points are drawn inside each other
    return {"color": COLOURS[turn], "linestyle": ("-", ":", "-.")[again % 3], "linewidth": 1.3, **marker}
