"""Results of a simulation as tables and as JSON lines. Owns the wording; counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from rekindle_lab.record import Measurement
from rekindle_lab.simulate.capacities import show_capacity, show_tokens
from rekindle_lab.simulate.simulation import OPTIMUM, Found, Memory
from rekindle_lab.simulate.trace import Trace

Unit = Literal["blocks", "tokens"]
MAX_WIDTH = 1000
UNITS: tuple[Unit, ...] = ("blocks", "tokens")


def describe(trace: Trace) -> str:
    """Describe the trace in one line."""
    lasting = f" in {trace.seconds:,.0f} s" if trace.is_timed else ""
    return (
        f"{trace.name} ({trace.kind}): {len(trace.requests):,} requests{lasting} ask for "
        f"{show_tokens(trace.num_tokens)} tokens in {trace.num_asked:,} blocks of {trace.block_tokens}, "
        f"{len(trace.blocks):,} of them different"
    )


def print_table(console: Console, found: Sequence[Found], trace: Trace, unit: Unit) -> None:
    """Print a row per memory and a column per capacity; with a disk, the hot share and what the disk adds."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("", no_wrap=True)
    for size in dict.fromkeys(each.memory.num_blocks for each in found):
        held = min(size, len(trace.blocks)) * trace.block_tokens
        shown.add_column(f"{show_capacity(size, trace)}\n{show_tokens(held)}", justify="right", no_wrap=True)
    for arm, row in by_arm(found, trace, unit).items():
        shown.add_row(arm, *(_cell(each, unit) for each in row))
    tiers = "; hot + further on disk" if any(each.memory.disk_blocks for each in found) else ""
    print_whole(console, f"Share of {unit} found, by capacity in blocks and in tokens{tiers}", shown)


def print_whole(console: Console, title: str, table: Table) -> None:
    """Print a table after its title, whole even if it is wider than the terminal or the assumed width of a file."""
    needed = console.measure(table, options=console.options.update_width(MAX_WIDTH)).maximum
    console.width = max(console.width, needed)
    console.print(f"\n{title}", highlight=False, soft_wrap=True)
    console.print(table)


def by_arm(found: Sequence[Found], trace: Trace, unit: Unit) -> dict[str, list[Found]]:
    """Group results that differ only in capacity, in ascending order of it.

    The optimum is optimal in blocks; where tokens are shown, its label says so.
    """
    arms: dict[str, list[Found]] = {}
    for each in found:
        arm = arm_of(each.memory, trace)
        if unit == "tokens":
            arm = arm.replace(OPTIMUM, f"{OPTIMUM} of blocks")
        arms.setdefault(arm, []).append(each)
    return {arm: sorted(row, key=lambda each: each.memory.num_blocks) for arm, row in arms.items()}


def arm_of(memory: Memory, trace: Trace) -> str:
    """Label a memory, as in `lru, ttl 300 s, disk 30,000`."""
    ttl = "" if memory.ttl_s is None else f", ttl {memory.ttl_s:g} s"
    disk = f", disk {show_capacity(memory.disk_blocks, trace)}" if memory.disk_blocks else ""
    return memory.policy + ttl + disk


def measurements(found: Sequence[Found], trace: Trace) -> Iterator[Measurement]:
    """Yield a line for each memory and unit: the share found in any tier, with all its parts as detail."""
    for each in found:
        memory = each.memory
        for unit in UNITS:
            hot, disk = each.shares(unit)
            asked, hot_count, disk_count = each.counts(unit)
            detail = {
                "policy": memory.policy,
                "capacity_blocks": memory.num_blocks,
                "capacity_tokens": memory.num_blocks * trace.block_tokens,
                "disk_blocks": memory.disk_blocks,
                "ttl_s": memory.ttl_s,
                "asked": asked,
                "found_hot": hot_count,
                "found_on_disk": disk_count,
                "evictions": each.num_evictions,
            }
            yield Measurement(f"share of {unit} found", arm_of(memory, trace), "share", (hot + disk,), detail)


def _cell(found: Found, unit: Unit) -> str:
    hot, disk = found.shares(unit)
    return f"{hot:.3f} + {disk:.3f}" if found.memory.disk_blocks else f"{hot:.3f}"
