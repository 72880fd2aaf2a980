"""`rekindle simulate TRACE --replicas N`: run a trace through fleets and report what they found and how long it took.

    rekindle simulate mooncake_synthetic.jsonl --replicas 8 --route random,session --tier none,unlimited

One process on one core; a run costs some 20 us per block of the trace, `--saturate` about a dozen runs a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rekindle.errors import ConfigError
from rekindle_lab.record import Origin, append_lines
from rekindle_lab.simulate.capacities import parse_capacities, parse_capacity
from rekindle_lab.simulate.fleet.fleet import Death, Plan, run_fleet
from rekindle_lab.simulate.fleet.report import Arm, measurements, print_arms, print_curve
from rekindle_lab.simulate.fleet.routes import ROUTES, Route
from rekindle_lab.simulate.fleet.saturation import saturate
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.fleet.summary import summarise
from rekindle_lab.simulate.run import progress_bar, prove_writable, read_described, settings_of
from rekindle_lab.simulate.simulation import Memory, simulate
from rekindle_lab.simulate.trace import Trace, TraceOptions

NO_TIER = ("none", "0")
DEFAULT_HOT = ("25%",)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Which fleets to simulate: every capacity with every route and tier, and further outputs.

    Empty sequences: a quarter of the trace, the route by session, no tier.
    """

    replicas: int
    routes: Sequence[str] = ()
    tiers: Sequence[str] = ()
    capacities: Sequence[str] = ()
    arrivals: float = 1.0
    saturate_s: float | None = None
    death: Death | None = None
    seed: int = 0
    speeds: Speeds = field(default_factory=Speeds)
    trace: TraceOptions = field(default_factory=TraceOptions)
    out: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.routes if name not in ROUTES]
        if unknown:
            raise ConfigError(f"no route is called {unknown[0]!r}: choose of {', '.join(ROUTES)}")
        if self.replicas < 1:
            raise ConfigError(f"--replicas must be 1 at least, not {self.replicas}")
        if not (math.isfinite(self.arrivals) and self.arrivals > 0):
            raise ConfigError(f"--arrivals must be a number above 0, not {self.arrivals:g}")
        if self.saturate_s is not None and self.saturate_s <= 0:
            raise ConfigError("--saturate must be above 0: the seconds that 99 % of the requests may wait")
        if self.death is not None:
            self._check_death(self.death)

    def _check_death(self, death: Death) -> None:
        if not 0 <= death.after < 1:
            raise ConfigError(f"--kill is a share of the requests, from 0 up to but not 1, not {death.after:g}")
        if self.replicas == 1 and death.back_s is None:
            raise ConfigError("--kill leaves no replica: set --replicas 2 or more, or --back")


def run_fleets(path: Path, options: FleetOptions, console: Console) -> int:
    """Simulate the fleets and return 0. Raises ConfigError if the trace cannot be read or an option does not fit it."""
    if options.out is not None:
        prove_writable(options.out)
    tables: list[Sequence[Arm]] = []
    with progress_bar() as bar:
        trace = read_described(path, options.trace, console, bar)
        _check_trace(trace, options)
        for group in _plans(trace, options):
            tables.append([_arm(trace, plan, options, bar) for plan in group])
    for arms in tables:
        plans = [arm.run.plan for arm in arms]
        memories = dict.fromkeys(Memory(plan.hot_blocks, plan.tier_blocks) for plan in plans)
        print_arms(console, arms, [simulate(trace, memory) for memory in memories], options.speeds)
        if options.saturate_s is not None:
            print_curve(console, arms, options.saturate_s)
    if options.out is not None:
        lines = [line for arms in tables for line in measurements(arms, options.speeds)]
        settings = settings_of(path, trace) | {"speeds": asdict(options.speeds), "saturate_s": options.saturate_s}
        append_lines(options.out, Origin.here("simulate fleet", settings), lines)
        console.print(f"{len(lines)} lines added to {options.out}", soft_wrap=True)
    return 0


def _check_trace(trace: Trace, options: FleetOptions) -> None:
    if not trace.is_timed:
        raise ConfigError(f"{trace.name} does not say when its requests came: the waits of a fleet depend on it")
    if not trace.blocks:
        raise ConfigError(f"{trace.name} has no blocks of {trace.block_tokens} tokens: there is nothing to hold")
    if options.saturate_s is not None and not trace.seconds:
        raise ConfigError(f"all requests of {trace.name} come at once: --saturate has no meaning for it")


def _plans(trace: Trace, options: FleetOptions) -> list[list[Plan]]:
    """Return the plans of each table."""
    tiers = sorted({0 if text.lower() in NO_TIER else parse_capacity(text, trace) for text in options.tiers or NO_TIER})
    routes: list[Route] = [route for route in ROUTES if route in (options.routes or ("session",))]
    tables = []
    for hot in parse_capacities(options.capacities or DEFAULT_HOT, trace):
        if hot < options.replicas:
            raise ConfigError(f"{hot:,} blocks are less than one for each of {options.replicas:,} replicas")
        base = Plan(options.replicas, "session", hot, 0, options.arrivals, options.death, options.seed)
        tables.append([replace(base, tier_blocks=tier, route=route) for tier, route in product(tiers, routes)])
    return tables


def _arm(trace: Trace, plan: Plan, options: FleetOptions, bar: Progress) -> Arm:
    """Run one plan, or search for the arrivals it bears; if it bears none, the fewest tried stand for it."""
    task = bar.add_task(plan.route, total=len(trace.requests) if options.saturate_s is None else None)

    def advance(done: int) -> None:
        bar.advance(task, done)

    if options.saturate_s is None:
        run = run_fleet(trace, plan, options.speeds, advance)
        arm = Arm(run, summarise(run), None)
    else:
        search = saturate(trace, plan, options.speeds, options.saturate_s, advance)
        point = search.borne or search.points[0]
        arm = Arm(point.run, point.summary, search)
    bar.remove_task(task)
    return arm
