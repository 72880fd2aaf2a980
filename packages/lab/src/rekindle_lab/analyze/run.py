"""`rekindle analyze FILE`: open and analyse it, and report what was found.

    rekindle analyze requests.jsonl --plot recomputed.png
    rekindle analyze prompts.txt --separator '\\n---\\n'

The content decides how a file is read: JSON of any form is a log of requests, other text a batch of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rekindle.model.checkpoint import Source
from rekindle_lab.analyze.analysis import Analyser
from rekindle_lab.analyze.batch_report import Batch, batch_json, plot_batch, print_batch
from rekindle_lab.analyze.logfile import open_log
from rekindle_lab.analyze.promptfile import holds_prompts, read_prompts
from rekindle_lab.analyze.report import as_json, plot_analysis, print_report, write_json
from rekindle_lab.plot import check_plot


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """The model whose tokenizer and template are used (None: the bundled one), and outputs in addition to the console.

    For batches of prompts: their separator (None: line ends, if the file is not a log), and the shortest prefix that
    counts as shared.
    """

    model: str | None = None
    revision: str | None = None
    rows: int = 10
    out: Path | None = None
    plot: Path | None = None
    separator: str | None = None
    min_length: int = 1


def run_analyze(path: Path, options: AnalyzeOptions, console: Console) -> int:
    """Analyse a log or a batch of prompts; return 0, or 1 if no request of a log could be rendered."""
    check_plot(options.plot)
    if options.separator is not None or holds_prompts(path):
        return _run_batch(path, options, console)
    return _run_log(path, options, console)


def _run_batch(path: Path, options: AnalyzeOptions, console: Console) -> int:
    prompts = read_prompts(path, options.separator)
    parted = "one a line" if options.separator is None else f"parted by {options.separator}"
    console.print(f"{path}: read as a batch of prompts, {parted}", highlight=False, soft_wrap=True)
    source = Source.find(options.model, options.revision)
    directory = source.fetch_description()
    batch = Batch.encode(prompts, directory, min_length=options.min_length, console=Console(stderr=True))
    print_batch(console, batch, model=source.name, rows=options.rows)
    if options.out is not None:
        write_json(options.out, batch_json(batch, path=path, model=source.name))
        console.print(f"written to {options.out}", soft_wrap=True)
    if options.plot is not None:
        plot_batch(options.plot, batch, rows=options.rows)
        console.print(f"drawn to {options.plot}", soft_wrap=True)
    return 0


def _run_log(path: Path, options: AnalyzeOptions, console: Console) -> int:
    source = Source.find(options.model, options.revision)
    directory = source.fetch_description()
    log = open_log(path)
    console.print(f"{path}: read as a log of requests", highlight=False, soft_wrap=True)
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
