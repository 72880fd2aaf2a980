"""bench: what is measured on this machine, or of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from rekindle.cli.settings import BENCH_UNUSED, FLAGS, with_settings
from rekindle.config import Settings
from rekindle.errors import ConfigError

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure on this machine."""


@bench.command("engine")
@with_settings(unused=BENCH_UNUSED)
def bench_engine(
    settings: Settings,
    context: Annotated[int, typer.Option(help="tokens of the measured prompt")] = 4096,
    repeats: Annotated[int, typer.Option(help="how often each measure is taken; the median counts")] = 3,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    baseline: Annotated[Literal["transformers", "none"], typer.Option(help="the other arm")] = "transformers",
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """First tokens cold, hot and warm, decoding, saving and memory, beside plain transformers."""
    from rekindle.bench.engine_bench import EngineBench, run_engine_bench

    _need_reuse(settings)
    options = EngineBench(context=context, repeats=repeats, seed=seed, baseline=baseline, out=out)
    return run_engine_bench(settings, options, Console())


@bench.command("match")
@with_settings(unused=set(FLAGS) - {"revision"} | {"open"})
def bench_match(
    settings: Settings,
    repeats: Annotated[int, typer.Option(help="how often each prompt is looked for; the median counts")] = 200,
    short: Annotated[int, typer.Option(help="stored sequences of 2,000 tokens")] = 9_990,
    long: Annotated[int, typer.Option(help="stored sequences of 100,000 tokens")] = 10,
    seed: Annotated[int, typer.Option(help="of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here instead of printing them")] = None,
) -> int:
    """Find the stored text that a prompt of 100,000 tokens continues, among ten thousand."""
    from rekindle.bench.match_bench import MatchBench, run_match_bench

    options = MatchBench(num_short=short, num_long=long, repeats=repeats, seed=seed, out=out)
    return run_match_bench(settings, options, Console())


@bench.command("recall")
@with_settings(unused=BENCH_UNUSED | {"kv"})
def bench_recall(
    settings: Settings,
    cases: Annotated[int, typer.Option(min=1, help="questions at each distance")] = 20,
    seed: Annotated[int, typer.Option(help="of the facts")] = 10_000,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here, too")] = None,
) -> int:
    """What the bundled model knows of facts it was told: with native KV, 4 bits in memory, 4 bits after a restart."""
    from rekindle.bench.recall import RecallBench, run_recall

    _need_reuse(settings)
    return run_recall(settings, RecallBench(cases=cases, seed=seed, out=out), Console())


def _need_reuse(settings: Settings) -> None:
    if settings.cache.reuse == "off":
        raise ConfigError("what is measured here is reuse: --reuse off leaves nothing to measure")
