"""simulate: how much of a trace caches of many sizes, or a fleet, would have held. Needs no server and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rekindle.cli.console import console
from rekindle.cli.settings import exit_with
from rekindle.config import SETTINGS, parse_duration
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle_lab.simulate.fleet.run import FleetOptions

BLOCK_TOKENS = f"tokens of a block [found; {SETTINGS['block_tokens'].default_text} for logs]"
FLEET = "Fleet"
TIER_SPEEDS = ("token_bytes", "tier_bandwidth", "tier_latency")


def _of_fleet(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=FLEET)


def simulate(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake's format, a recorded day or a request log")],
    capacities: Annotated[
        str, typer.Option(help="blocks, tokens (10M), shares (25%) or unlimited [six shares; of a fleet 25%]")
    ] = "",
    ttl: Annotated[str, typer.Option(help="also forget what was unused this long, e.g. 60s,5m [never]")] = "",
    disk: Annotated[str, typer.Option(help="a disk of this size below, as --capacities [none]")] = "",
    order: Annotated[Literal["leaves", "free"], typer.Option(help="free: parents may be evicted first")] = "leaves",
    block_tokens: Annotated[int | None, typer.Option(min=1, help=BLOCK_TOKENS)] = None,
    model: Annotated[str | None, typer.Option(help="whose tokenizer and template to use, for logs")] = None,
    revision: Annotated[str | None, typer.Option(help=SETTINGS["revision"].about.help)] = None,
    out: Annotated[Path | None, typer.Option(help="append JSON lines here")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of what was found by capacity")] = None,
    replicas: Annotated[int | None, _of_fleet("machines that share the capacity evenly, each with a queue")] = None,
    route: Annotated[str | None, _of_fleet("random, queue, session, prefix, or several [session]")] = None,
    tier: Annotated[str | None, _of_fleet("shared by all, of sizes as --capacities, or none [none]")] = None,
    arrivals: Annotated[float | None, _of_fleet("requests come this many times as fast [1]")] = None,
    saturate: Annotated[str | None, _of_fleet("raise arrivals while 99 % wait no longer, e.g. 10s [off]")] = None,
    kill: Annotated[float | None, _of_fleet("a replica dies after this share of the requests, e.g. 0.5")] = None,
    back: Annotated[str | None, _of_fleet("restarts empty after this long, e.g. 60s [never]")] = None,
    seed: Annotated[int | None, _of_fleet("of all that is drawn by lot [0]")] = None,
    prefill: Annotated[float | None, _of_fleet("tokens a second that a replica computes [20000]")] = None,
    token_bytes: Annotated[float | None, _of_fleet("bytes of a token's KV in the tier [35840]")] = None,
    tier_bandwidth: Annotated[float | None, _of_fleet("GB/s from the tier to a replica [9.3]")] = None,
    tier_latency: Annotated[float | None, _of_fleet("seconds from a request to its first byte [0.03]")] = None,
) -> None:
    """What share of a trace's prompts a cache of each size, or a fleet, would have held, and the upper bound."""
    given = {name: value for name, value in locals().items() if value is not None}
    exit_with(lambda: _run_fleet(given) if replicas is not None else _run(given))


def _run(given: dict[str, Any]) -> int:
    from rekindle_lab.simulate.capacities import DEFAULT
    from rekindle_lab.simulate.run import SimulateOptions, run_simulate

    names = ("route", "tier", "arrivals", "saturate", "kill", "back", "seed", "prefill", *TIER_SPEEDS)
    _refuse(given, names, "needs --replicas")
    options = SimulateOptions(
        capacities=_listed(given["capacities"]) or DEFAULT,
        ttls_s=[parse_duration(text) for text in _listed(given["ttl"])],
        disks=_listed(given["disk"]),
        order=given["order"],
        trace=_trace_options(given),
        out=given.get("out"),
        plot=given.get("plot"),
    )
    return run_simulate(given["path"], options, console())


def _run_fleet(given: dict[str, Any]) -> int:
    from rekindle_lab.simulate.fleet.run import NO_TIER, run_fleets

    given = {name: value for name, value in given.items() if value not in ("", "leaves")}
    _refuse(given, ("ttl", "disk", "order", "plot"), "cannot be combined with --replicas")
    if set(_listed(given.get("tier", ""))) <= set(NO_TIER):
        _refuse(given, TIER_SPEEDS, "needs --tier")
    if "kill" not in given:
        _refuse(given, ("back",), "needs --kill")
    return run_fleets(given["path"], _fleet_options(given), console())


def _fleet_options(given: dict[str, Any]) -> FleetOptions:
    from rekindle_lab.simulate.fleet.fleet import Death
    from rekindle_lab.simulate.fleet.run import FleetOptions
    from rekindle_lab.simulate.fleet.speeds import Speeds

    back_s = parse_duration(given["back"]) if "back" in given else None
    return FleetOptions(
        replicas=given["replicas"],
        routes=_listed(given.get("route", "")),
        tiers=_listed(given.get("tier", "")),
        capacities=_listed(given.get("capacities", "")),
        saturate_s=parse_duration(given["saturate"]) if "saturate" in given else None,
        death=Death(given["kill"], back_s) if "kill" in given else None,
        speeds=Speeds(**{name: given[name] for name in ("prefill", *TIER_SPEEDS) if name in given}),
        trace=_trace_options(given),
        out=given.get("out"),
        **{name: given[name] for name in ("arrivals", "seed") if name in given},
    )


def _trace_options(given: dict[str, Any]) -> Any:
    from rekindle_lab.simulate.trace import TraceOptions

    return TraceOptions(given.get("block_tokens"), given.get("model"), given.get("revision"))


def _refuse(given: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """Raise ConfigError if one of the options was given."""
    for name in names:
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
