"""The console of the command line; durations, times, ids and tables on it. `config` reads durations and has sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

NOT_A_TERMINAL = 160  # columns, if the width is unknown
_NAMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def console() -> Console:
    """A console on the current standard output: as wide as the terminal, or wide enough for a file or pipe."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=NOT_A_TERMINAL)


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
