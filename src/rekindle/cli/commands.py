"""The list of commands; each imports what it needs when it is called."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rekindle import __version__
from rekindle.cli.agents import agents
from rekindle.cli.caches import cache
from rekindle.cli.doctor import doctor
from rekindle.cli.families import models
from rekindle.cli.keys import keys
from rekindle.cli.receipt import receipt
from rekindle.cli.serving import chat, demo, serve
from rekindle.cli.settings import GroupedCommand
from rekindle.cli.why import why
from rekindle.errors import ConfigError
from rekindle.extensions import extensions, load

# Command -> its extra.
EXTRAS = dict.fromkeys(("analyze", "bench", "eval", "simulate"), "lab")
EXTRAS |= dict.fromkeys(("run", "ps", "list", "stop", "pull"), "serve")


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


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def rekindle(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """An inference server whose agents' KV memory lasts."""


for command in (serve, chat, demo, doctor, why, receipt, models):
    app.command(cls=GroupedCommand)(command)
for name, group in (("agents", agents), ("cache", cache), ("keys", keys)):
    app.add_typer(group, name=name)
add_commands(app)
