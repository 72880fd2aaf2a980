"""Results of fleets as tables and as JSON lines. Owns the wording; counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from rekindle_lab.record import Measurement
from rekindle_lab.simulate.capacities import show_capacity, show_tokens
from rekindle_lab.simulate.fleet.fleet import FleetRun, Plan
from rekindle_lab.simulate.fleet.saturation import Saturation
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.fleet.summary import Summary
from rekindle_lab.simulate.report import print_whole
from rekindle_lab.simulate.simulation import Found
from rekindle_lab.simulate.trace import Trace

COLUMNS = (
    "",
    "hot",
    "tier",
    "found",
    "left",
    "wait, mean",
    "p99",
    "queued",
    "busy",
    "busiest",
    "moved",
    "put",
    "bytes",
    "got",
    "bytes",
)
CURVE = ("", "arrivals", "requests/s", "busy", "wait, mean", "p99", "queued", "found")
ONE_MACHINE = "one machine"


@dataclass(frozen=True, slots=True)
class Arm:
    """A fleet to compare: its run, with --saturate the one with the most arrivals it bears, and the search for it."""

    run: FleetRun
    summary: Summary
    search: Saturation | None


def describe_fleet(plan: Plan, trace: Trace) -> str:
    """Describe in one line what all arms of a table have in common."""
    each = plan.hot_blocks // plan.num_replicas
    death = plan.death
    back = "" if death is None or death.back_s is None else f" and is back, empty, {death.back_s:g} s later"
    dying = "" if death is None else f"; one dies after {100 * death.after:g} % of the requests{back}"
    return (
        f"{plan.num_replicas} replica{'s' if plan.num_replicas > 1 else ''}, hot memory of {plan.hot_blocks:,} blocks "
        f"({show_tokens(plan.hot_blocks * trace.block_tokens)} tokens) in all, {each:,} each{dying}"
    )


def print_arms(console: Console, arms: Sequence[Arm], machines: Sequence[Found], speeds: Speeds) -> None:
    """Print a row per arm, and one per machine that has all the hot memory and no queue."""
    trace = arms[0].run.trace
    shown = _table(COLUMNS)
    for arm in arms:
        shown.add_row(label(arm.run, trace), *_cells(arm, speeds))
    for found in machines:
        hot, tier = found.shares("blocks")
        below = f", tier {show_capacity(found.memory.disk_blocks, trace)}" if found.memory.disk_blocks else ""
        shown.add_row(ONE_MACHINE + below, f"{hot:.3f}", f"{tier:.3f}", f"{hot + tier:.3f}")
    title = (
        f"{describe_fleet(arms[0].run.plan, trace)}\n"
        "Shares of blocks found, and left in the tier because computing was faster; seconds from arrival to first "
        "token, and of these before service; share of time in use, and the busiest replica over the mean; sessions "
        "that moved; objects and bytes put into the tier and got from it"
    )
    print_whole(console, title, shown)


def print_curve(console: Console, arms: Sequence[Arm], bound_s: float) -> None:
    """Print every run of the searches, and what each arm bears."""
    trace = arms[0].run.trace
    shown = _table(CURVE)
    for arm in arms:
        assert arm.search is not None
        for point in arm.search.points:
            summary, plan = point.summary, point.run.plan
            cells = (f"{plan.arrivals:.3g}", f"{rate(point.run):.3g}", f"{summary.busy:.2f}")
            mark = " ◀" if point is arm.search.borne else ""
            waits = (f"{summary.mean_wait_s:.2f}", f"{summary.p99_wait_s:.2f}{mark}", f"{summary.mean_queued_s:.2f}")
            shown.add_row(label(point.run, trace, with_arrivals=False), *cells, *waits, f"{summary.found:.3f}")
        shown.add_section()
    title = f"Waits by arrivals; ◀ the most arrivals with which 99 % of the requests wait {bound_s:g} s at most"
    print_whole(console, title, shown)
    for arm in arms:
        assert arm.search is not None
        name = label(arm.run, trace, with_arrivals=False)
        if arm.search.borne is None:
            console.print(f"{name}: waits are above the bound with the fewest arrivals tried", soft_wrap=True)
        elif not arm.search.is_bounded:
            console.print(f"{name}: waits keep within the bound with the most arrivals tried", soft_wrap=True)


def label(run: FleetRun, trace: Trace, *, with_arrivals: bool = True) -> str:
    """Label an arm, as in `session, tier unlimited, arrivals × 4`."""
    tier = f", tier {show_capacity(run.plan.tier_blocks, trace)}" if run.plan.tier_blocks else ""
    arrivals = f", arrivals × {run.plan.arrivals:.3g}" if with_arrivals and run.plan.arrivals != 1 else ""
    return run.plan.route + tier + arrivals


def rate(run: FleetRun) -> float:
    """Return the requests a second that arrive; infinite if all come at once."""
    seconds = run.trace.seconds / run.plan.arrivals
    return len(run.trace.requests) / seconds if seconds else float("inf")


def measurements(arms: Sequence[Arm], speeds: Speeds) -> Iterator[Measurement]:
    """Yield three lines for each run: the share found, the mean wait and its 99th percentile, the rest as detail."""
    for arm in arms:
        points = [(each.run, each.summary) for each in arm.search.points] if arm.search else [(arm.run, arm.summary)]
        for run, summary in points:
            name = label(run, run.trace)
            detail = asdict(run.plan) | asdict(summary) | _traffic(run, speeds)
            detail |= {"requests_per_s": rate(run), "busy_s": list(run.busy_s)}
            if arm.search is not None:
                detail["is_most_borne"] = arm.search.borne is not None and run is arm.search.borne.run
            yield Measurement("share of blocks found", name, "share", (summary.found,), detail)
            yield Measurement("first token, mean", name, "s", (summary.mean_wait_s,), detail)
            yield Measurement("first token, p99", name, "s", (summary.p99_wait_s,), detail)


def show_bytes(count: float) -> str:
    """Format bytes with three digits in powers of a thousand: `18.3 MB`, `0 B`."""
    for scale, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _cells(arm: Arm, speeds: Speeds) -> tuple[str, ...]:
    summary, traffic = arm.summary, arm.run.traffic
    shares = (f"{summary.hot:.3f}", f"{summary.tier:.3f}", f"{summary.found:.3f}", f"{summary.left:.4f}")
    waits = (f"{summary.mean_wait_s:.2f}", f"{summary.p99_wait_s:.2f}", f"{summary.mean_queued_s:.2f}")
    load = (f"{summary.busy:.2f}", f"{summary.busiest:.2f}", f"{summary.moved_sessions:,} of {summary.sessions:,}")
    if not arm.run.plan.tier_blocks:
        return (*shares, *waits, *load)
    put = (f"{traffic.objects_put:,}", show_bytes(traffic.tokens_put * speeds.token_bytes))
    return (
        *shares,
        *waits,
        *load,
        *put,
        f"{traffic.objects_got:,}",
        show_bytes(traffic.tokens_got * speeds.token_bytes),
    )


def _traffic(run: FleetRun, speeds: Speeds) -> dict[str, float]:
    traffic = asdict(run.traffic)
    put, got = (traffic.pop(f"tokens_{way}") * speeds.token_bytes for way in ("put", "got"))
    return traffic | {"bytes_put": put, "bytes_got": got, "tier_evictions": run.tier_evictions}


def _table(columns: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left", no_wrap=True)
    return shown
