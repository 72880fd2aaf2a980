"""analyze: what of a request log could have been reused. Needs no server and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rekindle.cli.settings import exit_with


def analyze(
    path: Annotated[Path, typer.Argument(metavar="LOG.jsonl", help="bodies sent to OpenAI's or Anthropic's API")],
    model: Annotated[str | None, typer.Option(help="whose tokenizer and template count: directory or hub name")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub model")] = None,
    rows: Annotated[int, typer.Option(min=1, help="rows of the long tables")] = 10,
    out: Annotated[Path | None, typer.Option(help="write everything here as one JSON document")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of where the tokens went")] = None,
) -> None:
    """What share of a log's prompt tokens could be reused, by whom, and which lines burn the rest."""

    def run() -> int:
        from rekindle.bench.analyze.run import AnalyzeOptions, run_analyze

        return run_analyze(path, AnalyzeOptions(model, revision, rows, out, plot), Console())

    exit_with(run)
