"""The list of commands; each imports what it needs when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from rekindle import __version__
from rekindle.cli.agents import agents
from rekindle.cli.caches import cache
from rekindle.cli.doctor import doctor
from rekindle.cli.extensions import Commands, add_commands
from rekindle.cli.families import models
from rekindle.cli.serving import chat, demo, serve
from rekindle.cli.settings import GroupedCommand
from rekindle.cli.why import why

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


for command in (serve, chat, demo, doctor, why, models):
    app.command(cls=GroupedCommand)(command)
for name, group in (("agents", agents), ("cache", cache)):
    app.add_typer(group, name=name)
add_commands(app)
