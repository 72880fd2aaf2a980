"""Where tables are printed: as wide as the terminal, and into a file or a pipe as wide as they are."""

from __future__ import annotations

import os

from rich.console import Console

NOT_A_TERMINAL = 160  # columns, where nothing says how many there are


def console() -> Console:
    """A console on the standard output, at the time of the call."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=NOT_A_TERMINAL)
