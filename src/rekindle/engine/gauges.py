"""State of a running engine: counters and gauges, and health problems.

Read-only. The figures of the engine thread are read on it, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.interface import Core
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch
from rekindle.engine.types import EngineStats
from rekindle.store.maintenance.wear import used_up
from rekindle.store.values import StoreStats
from rekindle.worker import Death


def engine_stats(
    core: Core, book: BranchBook, started: Mapping[str, float], store: Mapping[str, Any] | None
) -> EngineStats:
    """Return the current figures; called on the engine thread."""
    pool, scheduler, counts = core.cache.pool, core.scheduler, core.counts
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.loading),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_held_blocks=pool.num_held,
        hot_bytes=core.cache.arena.num_bytes,
        used_hot_bytes=_used_bytes(core.cache),
        block_bytes=core.cache.arena.layout.kv_block_bytes,
        num_steps=counts.num_steps,
        num_stall_misses=scheduler.num_stall_misses,
        num_preemptions=counts.num_preemptions,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        prompt_tokens=counts.prompt_tokens,
        reused_tokens=counts.reused_tokens,
        step_overhead_ms=counts.step_overhead_ms,
        num_background=len(core.background) + counts.num_checking,
        num_anticipations=core.background.num_begun,
        anticipated_tokens=core.background.num_tokens,
        num_evictions=pool.num_evictions,
        num_checked=counts.num_checked,
        num_differed=counts.num_differed,
        num_agents=len(book),
        num_pinned_agents=book.num_pinned(time.time()),
        started=started,
        store=store,
    )


def _used_bytes(cache: PrefixCache) -> int:
    num_blocks, found = cache.pool.num_blocks - cache.pool.num_free, 0
    for part in cache.arena.layout.parts:
        slots = cache.arena.slots.get(part.kind)
        found += part.payload_bytes * (num_blocks if slots is None else slots.num_used)
    return found


def hot_tokens(cache: PrefixCache, branches: Sequence[Branch]) -> list[int]:
    """Return how many leading tokens of each branch are in memory; called on the engine thread.

    A branch without ids counts as a whole if its head is in memory, else as 0.
    """
    return [_hot_tokens(cache, branch) for branch in branches]


def _hot_tokens(cache: PrefixCache, branch: Branch) -> int:
    if not isinstance(branch, KnownBranch):
        return branch.num_tokens if cache.pool.block_of(branch.head) is not None else 0
    return cache.num_hot_tokens(branch.root, branch.ids, branch.hashes)


def problems(
    stats: StoreStats | None, *, is_in_place: bool, is_running: bool, deaths: Sequence[Death] = ()
) -> tuple[str, ...]:
    """Return what does not work, a sentence each; empty if all is well. `stats` None: there is no store."""
    found = [str(death) for death in deaths]
    if not is_running and not found:
        found.append("the engine has stopped: start it again")
    if stats is None:
        return tuple(found)
    if not is_in_place:
        found.append("the store's directory was removed or replaced under the server: nothing is saved; restart it")
    elif stats.index_error is not None:
        found.append(
            f"the store's index is damaged ({stats.index_error}): requests are served, but nothing is saved until a "
            "restart, which rebuilds it from the records; check the disk of the store's directory"
        )
    elif not stats.saving_ok:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stats.first_error_at))
        found.append(
            f"saving has failed since {since}: {stats.first_error}; new turns will not survive a restart: "
            "check free space, permissions and the disk of the store's directory"
        )
    if stats.damaged_rows:
        found.append(
            f"{stats.damaged_rows} rows of the store's index were damaged and are ignored; what they listed is "
            "computed again: check the disk of the store's directory"
        )
    if not stats.has_room:
        found.append(
            f"the last turns did not fit into the disk budget of {stats.disk_bytes} bytes next to what is pinned and "
            "are not saved: unpin or delete agents, or give the store more disk_bytes"
        )
    if not stats.may_write and stats.writes_a_day is not None:
        found.append(used_up(stats.written_today, stats.writes_a_day))
    return tuple(found)


class StorePlace:
    """The directory in which a store was opened, to detect whether it was removed or replaced since.

    Open files keep working then, but nothing written to them is ever found again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def is_there(self) -> bool:
        """Whether the same directory is still in its place; takes a few microseconds."""
        return self._identity is not None and self._found() == self._identity
