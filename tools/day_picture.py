"""Draw the seconds waited over a replayed day, a line per arm, for light and dark pages: docs/day-{light,dark}.svg.

python -m tools.day_picture day.jsonl replay.jsonl

`rekindle bench replay day.jsonl --out replay.jsonl` adds an arm to the second file; docs/replay.md has the commands.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path

from rich.terminal_theme import TerminalTheme

from rekindle.server.dayfile import Day, read_day
from rekindle_lab.bench.replay.report import FIRST, earlier
from rekindle_lab.bench.replay.run import lines_of
from rekindle_lab.record import Measurement
from tools.demo_picture import DOCS, THEMES

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 572, 84, 362  # of the plot; the arms' labels are to the right of it
LABEL = 44  # height of an arm's label
COLOURS = (4, 1, 5, 3)  # of the arms, in the theme: blue, red, magenta, yellow
STEPS = [factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5)]  # between ticks
FAINT = 'class="faint"'
STYLE = """text { font: 14px Helvetica, Arial, sans-serif; fill: %s }
.title { font-size: 16px; font-weight: bold } .sum { font-size: 18px; font-weight: bold } .faint { fill: %s }
line { stroke: %s; stroke-opacity: 0.3 } .event { stroke-opacity: 1; stroke-dasharray: 2 3 }
path { fill: none; stroke-width: 2.5; stroke-linejoin: round }"""


def ticks(end: float) -> list[float]:
    """Return the multiples, up to `end`, of the smallest step that has at most seven of them."""
    step = next(step for step in STEPS if end / step <= 7)
    return [number * step for number in range(int(end / step) + 1)]


def text(x: float, y: float, words: str, look: str = 'class="arm"', anchor: str = "start") -> str:
    """Return an SVG text; `look` are more attributes."""
    return f'<text {look} text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def spread(heights: Sequence[float]) -> list[float]:
    """Return the heights in their order, moved apart so that no two labels overlap and none is below the axis."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = list(heights)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + LABEL)
    limit = BOTTOM - LABEL / 2
    for number in reversed(order):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - LABEL
    return placed


@dataclass(frozen=True, slots=True)
class Plot:
    """A day and its arms, whose measurements are of first tokens, and the scales that fit them."""

    day: Day
    arms: Sequence[Measurement]

    @property
    def most_s(self) -> float:
        """The largest sum of seconds waited."""
        return max(sum(arm.values) for arm in self.arms)

    def x(self, num_requests: float) -> float:
        """Return the place after this many requests: by the clock the pauses of a day would take most of the plot."""
        return LEFT + (RIGHT - LEFT) * num_requests / len(self.day.requests)

    def y(self, waited_s: float) -> float:
        """Return the height of a sum of seconds waited."""
        return BOTTOM - (BOTTOM - TOP) * waited_s / self.most_s

    def num_before(self, at_s: float) -> int:
        """Return how many of the day's requests arrive before this second of it."""
        return sum(request.at_s < at_s for request in self.day.requests)

    def axes(self) -> Iterator[str]:
        """Yield grid, ticks, and the events of the day."""
        for waited_s in ticks(self.most_s):
            y = self.y(waited_s)
            yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield text(LEFT - 8, y + 5, f"{waited_s:g} s", FAINT, "end")
        for number in ticks(len(self.day.requests)):
            yield text(self.x(number), BOTTOM + 20, f"{number:g}", FAINT, "middle")
        yield text((LEFT + RIGHT) / 2, BOTTOM + 42, "requests of the day", FAINT, "middle")
        events = [(event.at_s, str(event.kind)) for event in self.day.events]
        if "midnight_s" in self.day.header.about:
            events.append((self.day.header.about["midnight_s"], "midnight"))
        for number, (at_s, name) in enumerate(sorted(events)):
            x, y = self.x(self.num_before(at_s)), TOP - 10 - 16 * (number % 2)  # neighbours not in one row
            yield f'<line class="event" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 10}" y2="{BOTTOM}"/>'
            yield text(x - 4, y, name, FAINT, "end")

    def line(self, arm: Measurement) -> str:
        """Return an SVG path: a step up at every answered request, to the right edge after the last."""
        waited = zip(arm.detail["at_s"], accumulate(arm.values), strict=True)
        steps = [f"H{self.x(self.num_before(at_s)):.1f}V{self.y(sum_s):.1f}" for at_s, sum_s in waited]
        return f"M{LEFT} {BOTTOM}{''.join(steps)}H{RIGHT}"

    def svg(self, theme: TerminalTheme) -> str:
        """Return the picture."""
        plain, faint = theme.foreground_color.hex, theme.ansi_colors[7].hex
        requests, agents = len(self.day.requests), len({request.agent for request in self.day.requests})
        title = f"Seconds waited for first tokens, summed over a day of {requests} requests by {agents} agents"
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img">',
            f"<style>{STYLE % (plain, faint, faint)}</style>",
            f'<rect fill="{theme.background_color.hex}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            text(16, 34, title, 'class="title"'),
            *self.axes(),
        ]
        heights = spread([self.y(sum(arm.values)) for arm in self.arms])
        for arm, y, number in zip(self.arms, heights, COLOURS, strict=False):
            colour = theme.ansi_colors[number].hex
            parts.append(f'<path stroke="{colour}" d="{self.line(arm)}"/>')
            parts.append(text(RIGHT + 10, y + 6, f"{sum(arm.values):.3g} s", f'class="sum" style="fill: {colour}"'))
            parts.append(text(RIGHT + 10, y + 24, arm.arm))
        return "\n".join([*parts, "</svg>", ""])


def read_plot(day: Path, replay: Path) -> Plot:
    """Return the plot of a day and of the JSON lines of its replays; of an arm's replays it has the last."""
    measured = earlier(lines_of(replay), hashlib.sha256(day.read_bytes()).hexdigest()[:16])
    return Plot(read_day(day), [*{item.arm: item for item in measured if item.measure == FIRST}.values()])


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("day", type=Path)
    parser.add_argument("replay", type=Path, help="the JSON lines of its replays")
    given = parser.parse_args()
    plot = read_plot(given.day, given.replay)
    if not 1 <= len(plot.arms) <= len(COLOURS):
        parser.error(f"{given.replay} has {len(plot.arms)} arms of this day, not 1 to {len(COLOURS)}")
    for name, theme in THEMES.items():
        (DOCS / f"day-{name}.svg").write_text(plot.svg(theme), "utf-8")


if __name__ == "__main__":
    main()
