"""`rekindle analyze LOG`: open, go through it, say what was found.

    rekindle analyze requests.jsonl --plot burned.png

A log of requests is one kind of input; whatever else can be looked at without a server would be opened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rekindle.bench.analyze.analysis import Analyser
from rekindle.bench.analyze.logfile import open_log
from rekindle.bench.analyze.report import as_json, plot_analysis, print_report, write_json
from rekindle.bench.replay_plot import pyplot
from rekindle.model.checkpoint import Source


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """Whose tokenizer and template (None: the bundled model's), and where results go besides the console."""

    model: str | None = None
    revision: str | None = None
    rows: int = 10
    out: Path | None = None
    plot: Path | None = None


def run_analyze(path: Path, options: AnalyzeOptions, console: Console) -> int:
    """Analyse one log; 0, or 1 where no request of it could be rendered."""
    if options.plot is not None:
        pyplot()  # before minutes of work, not after
    source = Source.find(options.model, options.revision)
    directory = source.fetch_description()
    log = open_log(path)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{len(log):,} requests, as often as needed", total=None)
        analysis = Analyser(log, directory, progress=lambda: bar.advance(task)).run()
    print_report(console, analysis, log, model=source.name, rows=options.rows)
    if options.out is not None:
        write_json(options.out, as_json(analysis, log, path=path, model=source.name))
        console.print(f"written to {options.out}", soft_wrap=True)
    if options.plot is not None:
        plot_analysis(options.plot, analysis)
        console.print(f"drawn to {options.plot}", soft_wrap=True)
    return 0 if analysis.total.num_requests else 1
