"""eval: the loss of quality that KV formats cost a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import BENCH_UNUSED, with_settings
from rekindle.config import Settings


@with_settings(unused=BENCH_UNUSED | {"kv", "reuse"})
def evaluate(
    settings: Settings,
    text: Annotated[list[Path] | None, typer.Option(help="your text, UTF-8; may be repeated [generated talk]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens read in all")] = 8192,
    context: Annotated[int, typer.Option(min=1, help="tokens of one window")] = 1024,
    cases: Annotated[int, typer.Option(min=0, help="recall questions at each distance; 0: none")] = 10,
    seed: Annotated[int, typer.Option(help="of generated talk and questions")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of both tables")] = None,
) -> int:
    """Perplexity, KL and agreement of every KV format against native KV on your text, and recall over distance."""
    from rekindle_lab.bench.eval.bench import EvalBench, run_eval

    bench = EvalBench(tuple(text or ()), tokens, context, cases, seed, out, plot)
    return run_eval(settings, bench, console())
