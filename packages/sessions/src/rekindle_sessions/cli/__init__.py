"""`rekindle run`, by the entry point group `rekindle.commands`."""

from __future__ import annotations

import typer

from rekindle.cli.settings import GroupedCommand
from rekindle_sessions.cli.run import run


def add_commands(app: typer.Typer) -> None:
    """Add `run` to the command line."""
    app.command(cls=GroupedCommand)(run)
