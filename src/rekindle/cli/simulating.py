"""simulate: how much of a trace caches of many sizes would have held. Needs no server and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import exit_with
from rekindle.cli.units import parse_duration
from rekindle.config import SETTINGS

BLOCK_TOKENS = f"tokens of a block [found; {SETTINGS['block_tokens'].default_text} for logs]"


def simulate(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake's format, a recorded day or a request log")],
    policies: Annotated[str, typer.Option(help="eviction policies, e.g. lru,lfu [all]")] = "",
    capacities: Annotated[str, typer.Option(help="blocks, tokens (10M), shares (25%) or unlimited [six shares]")] = "",
    ttl: Annotated[str, typer.Option(help="also forget what was unused this long, e.g. 60s,5m [never]")] = "",
    disk: Annotated[str, typer.Option(help="a disk of this size below, as --capacities [none]")] = "",
    order: Annotated[Literal["leaves", "free"], typer.Option(help="free: parents may be evicted first")] = "leaves",
    block_tokens: Annotated[int | None, typer.Option(min=1, help=BLOCK_TOKENS)] = None,
    model: Annotated[str | None, typer.Option(help="whose tokenizer and template to use, for logs")] = None,
    revision: Annotated[str | None, typer.Option(help=SETTINGS["revision"].about.help)] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of what was found by capacity")] = None,
) -> None:
    """What share of a trace's prompts a cache of each size would have held, by policy, and the upper bound."""

    def run() -> int:
        from rekindle.simulate.capacities import DEFAULT
        from rekindle.simulate.run import SimulateOptions, run_simulate
        from rekindle.simulate.trace import TraceOptions

        options = SimulateOptions(
            policies=_listed(policies),
            capacities=_listed(capacities) or DEFAULT,
            ttls_s=[parse_duration(text) for text in _listed(ttl)],
            disks=_listed(disk),
            order=order,
            trace=TraceOptions(block_tokens, model, revision),
            out=out,
            plot=plot,
        )
        return run_simulate(path, options, console())

    exit_with(run)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
