"""The command line. Owns which commands there are; each knows the rest itself and imports it when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from rekindle import __version__
from rekindle.cli.benches import bench
from rekindle.cli.serving import chat, demo, serve

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def rekindle(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """An inference server whose agents' KV memory lasts."""


for command in (serve, chat, demo):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `rekindle` command."""
    app()
