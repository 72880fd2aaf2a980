"""cache: the stores in a directory and its slots: what they hold, whether they are sound, which to remove."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rekindle.cli.console import show_ago, show_duration, show_id, show_table
from rekindle.cli.disk_probes import nearest
from rekindle.cli.settings import GroupedCommand, with_settings
from rekindle.cli.why import JsonOption
from rekindle.config import Settings, parse_duration, show_bytes
from rekindle.config.access import master_key
from rekindle.errors import ConfigError, NotFound
from rekindle.store import admin
from rekindle.store.files.keys import add_key, keep_key
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.maintenance.room import budget
from rekindle.store.rows.written import day_of

cache = typer.Typer(no_args_is_help=True)
WhichArgument = Annotated[
    str | None,
    typer.Argument(metavar="[WHICH]", help="a model, the first digits of a fingerprint, or slot-N [all]"),
]
FINGERPRINT_DIGITS = 12
Report = admin.CheckReport | admin.RebuildReport


@cache.callback()
def group() -> None:
    """Inspect and repair the store (the server must be stopped, but for stats, gc and rekey)."""


@cache.command(cls=GroupedCommand)
@with_settings(only=("store", "disk_bytes"))
def stats(settings: Settings, as_json: JsonOption = False) -> int:
    """What each model's store holds, the budget that it shares, what it wrote today (UTC), which process uses it."""
    directory = settings.store.directory()
    stores = admin.list_stores(directory)
    free = OsFileSystem().free_bytes(nearest(directory))
    used = Counter[int | None]()
    for store in stores:
        used[store.slot] += store.bytes
    wanted = settings.store.disk_bytes
    budgets = [budget(wanted, free_bytes=free, used_bytes=used[store.slot]) for store in stores]
    now = time.time()
    today = day_of(now)
    if as_json:
        found = [
            {**asdict(store), "budget_bytes": budget, "written": store.written.on(today)}
            for store, budget in zip(stores, budgets, strict=True)
        ]
        typer.echo(json.dumps(found))
        return 0
    head = ("FINGERPRINT", "SLOT", "MODEL", "AGENTS", "BLOCKS", "BYTES", "BUDGET", "TODAY", "LAST USED", "IN USE BY")
    rows = [_row(store, budget, now) for store, budget in zip(stores, budgets, strict=True)]
    if rows:
        typer.echo(show_table(head, rows))
    for store in stores:
        if store.problem is not None:
            typer.echo(f"{_name(store)}: {store.problem}")
    typer.echo(f"{show_bytes(sum(store.bytes for store in stores))} in {directory}", err=True)
    return 0


def _row(store: admin.StoreInfo, budget: int, now: float) -> tuple[str, ...]:
    return (
        store.fingerprint[:FINGERPRINT_DIGITS],
        _slot(store),
        store.model or "-",
        f"{store.num_agents:,}",
        f"{store.num_blocks:,}",
        show_bytes(store.bytes),
        show_bytes(budget),
        show_bytes(store.written.on(day_of(now))),
        show_ago(store.last_use, now),
        store.in_use_by or "-",
    )


@cache.command(cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def check(settings: Settings, which: WhichArgument = None, as_json: JsonOption = False) -> int:
    """Verify every record; list what is damaged and what each agent loses by it; exit code 1 if anything is damaged."""
    directory = settings.store.directory()
    stores = _chosen(directory, which)
    master = settings.store.master_key()
    with _progress(as_json) as advance:
        reports = [
            admin.check_store(store.parent(directory), store.fingerprint, advance, master=master) for store in stores
        ]
    if as_json:
        typer.echo(json.dumps(_named(stores, reports)))
    else:
        for store, report in zip(stores, reports, strict=True):
            typer.echo("\n".join(_checked(store, report)))
        if not stores:
            typer.echo(f"no stores in {directory}")
    return 0 if all(report.is_sound for report in reports) else 1


def _checked(store: admin.StoreInfo, report: admin.CheckReport) -> Iterator[str]:
    name = _name(store)
    if report.index_problem:
        yield f"{name}: the index is damaged: {report.index_problem}"
        yield f"  what to do: rekindle cache rebuild {store.fingerprint[:FINGERPRINT_DIGITS]}"
    elif not report.damaged:
        yield f"{name}: {report.num_blocks:,} blocks, all sound"
        return
    yield f"{name}: {len(report.damaged):,} of {report.num_blocks:,} blocks are damaged"
    yield from (f"  {block[:FINGERPRINT_DIGITS]}: {reason}" for block, reason in report.damaged)
    for namespace, agent, branch, tokens_left in report.agents_affected:
        of = "" if namespace == "default" else f" of {namespace}"
        yield f"  {show_id(agent)}{of}, branch {branch}: {tokens_left:,} tokens are left, the rest is computed again"
    if report.damaged:
        yield "  nothing has to be done: damaged blocks count as missing and are saved again when they are needed"


@cache.command(cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def rebuild(settings: Settings, which: WhichArgument = None, as_json: JsonOption = False) -> int:
    """Rebuild the index from the records; agents keep their names as far as the old index still has them."""
    directory = settings.store.directory()
    stores = _chosen(directory, which)
    spaces, master = settings.server.namespaces(), settings.store.master_key()
    reports = [
        admin.rebuild_store(store.parent(directory), store.fingerprint, spaces, master=master) for store in stores
    ]
    if as_json:
        typer.echo(json.dumps(_named(stores, reports)))
        return 0
    for store, report in zip(stores, reports, strict=True):
        typer.echo(
            f"{_name(store)}: {report.num_blocks:,} blocks and {report.num_sequences:,} branches came back, "
            f"{report.num_lost:,} records were lost"
        )
    if not stores:
        typer.echo(f"no stores in {directory}")
    return 0


@cache.command(cls=GroupedCommand)
@with_settings(only=("store",))
def gc(
    settings: Settings,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="unused for this long: 90s, 8h, 30d [30d]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be removed, remove nothing")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove stores of models that were not served for a long time; never one in use."""
    directory = settings.store.directory()
    age_s = settings.store.stale_ttl_s if older_than is None else parse_duration(older_than)
    gone = (admin.stale_stores if dry_run else admin.collect_stale)(directory, None, age_s)
    if as_json:
        typer.echo(json.dumps([asdict(store) for store in gone]))
        return 0
    for store in gone:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {_name(store)}: {show_bytes(store.bytes)}")
    if not gone:
        typer.echo(f"nothing in {directory} was unused for {show_duration(age_s)}")
    return 0


@cache.command(cls=GroupedCommand)
@with_settings(only=("store", "store_key_file"))
def rekey(
    settings: Settings,
    to: Annotated[
        Path | None, typer.Option("--to", help="file that holds a new key, which opens the store, too")
    ] = None,
    finish: Annotated[bool, typer.Option("--finish", help="have no key but the given one open the store")] = False,
) -> int:
    """Change the key of an encrypted store while servers use it: add a new one, later drop the old one."""
    current, given = settings.store.master_key(), replace(settings.store, slot="off")
    if current is None:
        raise ConfigError("rekey needs the key that opens the store now, as store_key or store_key_file")
    if (to is None) != finish:
        raise ConfigError("rekey either adds a key, from a file, or finishes with the one that is given")
    directories = list(dict.fromkeys((given.directory(), given.text_files()[1].parent)))
    new = master_key(None, to)
    count = keep_key(directories, current) if new is None else add_key(directories, current, new)
    if not count:
        raise NotFound(f"there is no store in {given.directory()}")
    if new is None:
        typer.echo(f"only the given key opens {given.directory()} now")
    else:
        typer.echo(
            f"{given.directory()} opens with the new key as well: give it to every server and command in place of the "
            "other, then run `rekindle cache rekey --finish` with it"
        )
    return 0


def _named(stores: list[admin.StoreInfo], reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Reports as JSON, each with its store's names."""
    pairs = zip(stores, reports, strict=True)
    return [{"fingerprint": store.fingerprint, "slot": store.slot, **asdict(report)} for store, report in pairs]


def _name(store: admin.StoreInfo) -> str:
    slot = "" if store.slot is None else f", {_slot(store)}"
    return f"{store.model or 'unknown model'} ({store.fingerprint[:FINGERPRINT_DIGITS]}{slot})"


def _slot(store: admin.StoreInfo) -> str:
    return "-" if store.slot is None else f"slot-{store.slot}"


def _chosen(directory: Path, which: str | None) -> list[admin.StoreInfo]:
    stores = admin.list_stores(directory)
    if which is None:
        return stores
    chosen = [store for store in stores if which in (store.model, _slot(store)) or store.fingerprint.startswith(which)]
    if not chosen:
        names = ", ".join(map(_name, stores)) or "none"
        raise NotFound(f"no store in {directory} is called {which!r}; there are: {names}")
    return chosen


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, driven by (blocks done, blocks in total)."""
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
