"""analyze: how much of a request log could be reused, or what a batch of prompts shares. No server, no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import exit_with
from rekindle.config import SETTINGS


def analyze(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="LOG.jsonl|PROMPTS.txt", help="bodies sent to an API of OpenAI, Anthropic or Ollama, or prompts"
        ),
    ],
    model: Annotated[str | None, typer.Option(help="whose tokenizer and template: directory or hub name")] = None,
    revision: Annotated[str | None, typer.Option(help=SETTINGS["revision"].about.help)] = None,
    rows: Annotated[int, typer.Option(min=1, help="rows of the long tables")] = 10,
    out: Annotated[Path | None, typer.Option(help="write everything here as one JSON document")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of where the tokens went")] = None,
    separator: Annotated[str | None, typer.Option(help="separator of prompts, as '\\n\\n' [ends of lines]")] = None,
    min_length: Annotated[int, typer.Option(min=1, help="tokens that prompts must share for it to count")] = 1,
) -> None:
    """What share of a log's prompt tokens could be reused, and which lines prevent that; or what a batch shares."""

    def run() -> int:
        from rekindle_lab.analyze.run import AnalyzeOptions, run_analyze

        options = AnalyzeOptions(model, revision, rows, out, plot, separator, min_length)
        return run_analyze(path, options, console())

    exit_with(run)
