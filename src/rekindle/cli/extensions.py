"""Commands of other distributions: each names a function in the entry point group `rekindle.commands`.

The function takes the `typer.Typer` and adds its commands. One that is not installed has its extra named.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "rekindle.commands"
EXTRAS = {"analyze": "lab", "bench": "lab", "eval": "lab", "simulate": "lab"}  # command -> the extra that brings it


class Commands(TyperGroup):
    """The commands of `rekindle`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None; the UsageError for a missing one names the extra that brings it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in EXTRAS:
            ctx.fail(f"`rekindle {cmd_name}` is not installed: pip install 'rekindle[{EXTRAS[cmd_name]}]'")
        return found


def add_commands(app: typer.Typer) -> None:
    """Add the commands of every installed distribution; one that does not load is named on stderr and left out."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            add = point.load()
        except (ImportError, AttributeError) as error:
            found = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            sys.stderr.write(f"rekindle: {found} does not fit this version, its commands are left out: {error}\n")
        else:
            add(app)
