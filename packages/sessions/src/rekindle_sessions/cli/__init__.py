"""`rekindle run` and `rekindle sessions`, by the entry point group `rekindle.commands`."""

from __future__ import annotations

import typer

from rekindle.cli.settings import GroupedCommand
from rekindle_sessions.cli.run import run
from rekindle_sessions.cli.sessions import sessions


def add_commands(app: typer.Typer) -> None:
    """Add them to the command line."""
    app.command(cls=GroupedCommand)(run)
    app.add_typer(sessions, name="sessions")
