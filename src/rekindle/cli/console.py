"""The console of the command line; durations, times, ids and tables on it. Sizes are those of `config`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from rich.console import Console

from rekindle.errors import ConfigError

NOT_A_TERMINAL = 160  # columns, if the width is unknown
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NAMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def console() -> Console:
    """A console on the current standard output: as wide as the terminal, or wide enough for a file or pipe."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=NOT_A_TERMINAL)


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `8h`, `1.5d` or `2w`; ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration: write 90s, 15m, 8h or 30d")
    return float(match[1]) * SECONDS[match[2] or "s"]


def show_duration(seconds: float) -> str:
    """`8 h`, `30 d`: in the largest unit that fits at least once, rounded down."""
    for size, name in _NAMES:
        if seconds >= size:
            return f"{int(seconds / size)} {name}"
    return f"{max(0.0, seconds):.0f} s"


def show_ago(moment: float, now: float) -> str:
    """How long ago a wall-clock moment was; one in the future (the clock went back) is `just now`."""
    passed = now - moment
    return "just now" if passed < 1 else f"{show_duration(passed)} ago"


def show_id(agent: str) -> str:
    """An id with control characters escaped."""
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in agent)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their heads, the first column left-aligned, the others right-aligned; nothing is truncated."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip())
    return "\n".join(lines)
