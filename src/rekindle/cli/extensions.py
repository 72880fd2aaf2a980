"""Commands of other distributions. One that is not installed has its extra named."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rekindle.errors import ConfigError
from rekindle.extensions import extensions, load

EXTRAS = {"analyze": "lab", "bench": "lab", "eval": "lab", "simulate": "lab", "run": "serve"}  # command -> its extra


class Commands(TyperGroup):
    """The commands of `rekindle`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None; the UsageError for a missing one names the extra that brings it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in EXTRAS:
            ctx.fail(f"`rekindle {cmd_name}` is not installed: pip install 'rekindle[{EXTRAS[cmd_name]}]'")
        return found


def add_commands(app: typer.Typer) -> None:
    """Add the commands of every installed distribution; one that does not fit is named on stderr and left out."""
    for point in extensions("rekindle.commands"):
        try:
            add = load(point)
        except ConfigError as error:
            sys.stderr.write(f"rekindle: {error}; its commands are left out\n")
        else:
            add(app)
