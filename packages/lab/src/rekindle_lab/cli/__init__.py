"""The laboratory's commands of `rekindle`, by the entry point group `rekindle.commands`."""

from __future__ import annotations

import typer

from rekindle.cli.settings import GroupedCommand
from rekindle_lab.cli.analyzing import analyze
from rekindle_lab.cli.benches import bench
from rekindle_lab.cli.evaluating import evaluate
from rekindle_lab.cli.simulating import simulate


def add_commands(app: typer.Typer) -> None:
    """Add `analyze`, `simulate`, `eval` and `bench` to the command line."""
    for command in (analyze, simulate):
        app.command(cls=GroupedCommand)(command)
    app.command("eval", cls=GroupedCommand)(evaluate)
    app.add_typer(bench, name="bench")
