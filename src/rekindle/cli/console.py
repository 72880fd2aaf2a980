"""The console that tables are printed on: as wide as the terminal, or wide enough for a file or pipe."""

from __future__ import annotations

import os

from rich.console import Console

NOT_A_TERMINAL = 160  # columns, if the width is unknown


def console() -> Console:
    """A console on the current standard output."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=NOT_A_TERMINAL)
