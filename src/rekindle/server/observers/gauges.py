"""Metrics that the engine and its store count themselves, read on each scrape.

Owns the mapping from their fields to Prometheus names. Fields that an engine without a store or an object tier
lacks are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.engine.api import Engine
from rekindle.engine.types import EngineStats
from rekindle.errors import Unavailable


@dataclass(frozen=True, slots=True)
class _Figure:
    """One metric: its field, name and help text; `label` (name, value) separates metrics that share a name."""

    field: str
    name: str
    kind: Literal["gauge", "counter"]
    what: str
    label: tuple[str, str] | None = None


ENGINE = (
    _Figure("num_running", "running_requests", "gauge", "Requests that are computed"),
    _Figure("num_waiting", "waiting_requests", "gauge", "Requests that have not begun"),
    _Figure("num_background", "background_requests", "gauge", "Pieces of idle work that wait or run"),
    _Figure("num_free_blocks", "pool_blocks", "gauge", "Blocks of hot memory", ("state", "free")),
    _Figure("num_cached_blocks", "pool_blocks", "gauge", "Blocks of hot memory", ("state", "cached")),
    _Figure("num_held_blocks", "pool_blocks", "gauge", "Blocks of hot memory", ("state", "held")),
    _Figure("hot_bytes", "hot_bytes", "gauge", "Hot memory, used or not"),
    _Figure("num_steps", "steps", "counter", "Steps of the engine"),
    _Figure("num_stall_misses", "stalls", "counter", "Steps that took longer than they may"),
    _Figure("num_preemptions", "preemptions", "counter", "Requests that gave their blocks up to others"),
    _Figure("num_draft_tokens", "draft_tokens", "counter", "Guessed tokens computed along with the next of a reply"),
    _Figure("num_accepted_tokens", "accepted_draft_tokens", "counter", "Guessed tokens that became part of a reply"),
    _Figure("num_evictions", "evictions", "counter", "Blocks evicted from a tier to make room", ("tier", "hot")),
    _Figure("num_checked", "restored_checked", "counter", "Restored blocks that were computed again and compared"),
    _Figure("num_differed", "restored_differed", "counter", "Restored blocks that had other bits and were dropped"),
    _Figure("num_anticipations", "anticipations", "counter", "Next prompts that were computed in idle time"),
    _Figure("anticipated_tokens", "anticipated_tokens", "counter", "Tokens that were computed in idle time"),
)
STORE = (
    _Figure("num_agents", "stored_agents", "gauge", "Agents on disk, unnamed ones too"),
    _Figure("num_sequences", "stored_branches", "gauge", "Branches on disk"),
    _Figure("num_blocks", "stored_blocks", "gauge", "Blocks on disk"),
    _Figure("pinned_blocks", "pinned_blocks", "gauge", "Blocks on disk that are pinned"),
    _Figure("used_bytes", "disk_used_bytes", "gauge", "Bytes of blocks on disk"),
    _Figure("disk_bytes", "disk_budget_bytes", "gauge", "Bytes that blocks may take on disk"),
    _Figure("index_bytes", "index_bytes", "gauge", "Bytes of the index on disk"),
    _Figure("queue_length", "save_queue", "gauge", "Saves that wait for the disk"),
    _Figure("saving_ok", "saving_ok", "gauge", "1 while saves succeed, 0 from one that failed to the next good one"),
    _Figure("turns_saved", "turns_saved", "counter", "Turns that are durable"),
    _Figure("turns_unsaved", "turns_unsaved", "counter", "Turns that are not durable as a whole"),
    _Figure(
        "unsaved_evicted", "unsaved_evicted", "counter", "Blocks not saved: evicted from memory before, or not copied"
    ),
    _Figure("blocks_evicted", "evictions", "counter", "Blocks evicted from a tier to make room", ("tier", "disk")),
    _Figure("blocks_refused", "blocks_refused", "counter", "Blocks the disk had no room for"),
    _Figure(
        "blocks_postponed", "blocks_postponed", "counter", "Blocks not saved as the day's budget of writes is used up"
    ),
    _Figure("bytes_written", "disk_written_bytes", "counter", "Bytes of blocks written to disk"),
    _Figure("index_bytes_written", "index_written_bytes", "counter", "Bytes written to disk for the index"),
    _Figure("written_today", "disk_written_today_bytes", "gauge", "Bytes of blocks and index written today (UTC)"),
    _Figure("writes_a_day", "disk_writes_budget_bytes", "gauge", "Bytes that may be written on a day, if limited"),
    _Figure("may_write", "disk_may_write", "gauge", "0 while the day's budget of writes is used up"),
    _Figure("bytes_read", "disk_read_bytes", "counter", "Bytes read from disk"),
    _Figure("bad_records", "bad_records", "counter", "Records on disk that were damaged"),
    _Figure("damaged_rows", "damaged_rows", "counter", "Rows of the store's index that were damaged"),
    _Figure("failed_saves", "failed_saves", "counter", "Saves that failed"),
)
TIER = (
    _Figure("is_answering", "object_tier_answering", "gauge", "1 while it is asked, 0 while its breaker is open"),
    _Figure("waiting_exports", "object_tier_waiting_exports", "gauge", "Branches that wait to be exported"),
    _Figure("dropped_exports", "object_tier_dropped_exports", "counter", "Branches that were never exported"),
    _Figure("exported_heads", "object_tier_heads_written", "counter", "Heads of agents that were written"),
    _Figure("head_conflicts", "object_tier_head_conflicts", "counter", "Heads that another replica wrote meanwhile"),
    _Figure("exported_objects", "object_tier_objects", "counter", "Objects of blocks", ("direction", "export")),
    _Figure("imported_objects", "object_tier_objects", "counter", "Objects of blocks", ("direction", "import")),
    _Figure("exported_bytes", "object_tier_bytes", "counter", "Bytes of blocks", ("direction", "export")),
    _Figure("imported_bytes", "object_tier_bytes", "counter", "Bytes of blocks", ("direction", "import")),
    _Figure("imported_tokens", "object_tier_imported_tokens", "counter", "Tokens whose KV was imported"),
    _Figure("waited_s", "object_tier_waited_seconds", "counter", "Seconds that requests waited for the object tier"),
    _Figure("slow_imports", "object_tier_slow_imports", "counter", "Imports given up as computing was faster"),
    _Figure("missing_objects", "object_tier_missing_objects", "counter", "Blocks that were looked for in vain"),
    _Figure("bad_objects", "object_tier_bad_objects", "counter", "Objects that were damaged or foreign"),
    _Figure("failures", "object_tier_failures", "counter", "Exports and imports that failed, or were given up"),
    _Figure("stored_bytes", "object_tier_stored_bytes", "gauge", "Bytes of blocks, when this replica last collected"),
)


class HealthCollector(Collector):
    """What the health routes say, as figures; `problems` adds those that the engine does not know of."""

    def __init__(self, engine: Engine, problems: Callable[[], Sequence[str]]) -> None:
        self._engine = engine
        self._problems = problems

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not query the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield how many problems there are, and whether replies can be computed."""
        health = self._engine.health()
        num_problems = len(health.problems) + len(self._problems())
        for name, what, value in (
            ("problems", "Problems that /health/ready names: with any, health is degraded or worse", num_problems),
            ("computes", "0 while a backend, which computes, cannot be used", health.computes),
        ):
            family = GaugeMetricFamily(f"rekindle_{name}", what)
            family.add_metric([], value)
            yield family


class EngineCollector(Collector):
    """A Prometheus collector that queries the engine for its figures. `collect` waits for the engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not query the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their current values."""
        dead = GaugeMetricFamily("rekindle_dead_threads", "Threads that have ended of an error: restart the server")
        dead.add_metric([], len(self._engine.deaths()))
        yield dead
        try:
            stats = self._engine.stats()
        except Unavailable:  # the engine's own thread has ended
            return
        families: dict[str, Metric] = {}
        given = {name: getattr(stats, name) for name in EngineStats.__dataclass_fields__}
        for figures, values in ((ENGINE, given), (STORE, stats.store or {}), (TIER, stats.tier or {})):
            _add(families, figures, values)
        yield from families.values()
        yield from self._for_vllm(stats)

    def _for_vllm(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.num_held_blocks / stats.num_blocks
        for name, what, value in (
            ("num_requests_running", "Requests that are computed", stats.num_running),
            ("num_requests_waiting", "Requests that have not begun", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of hot blocks that requests hold, 1 is all", used),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", what, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family


def _add(families: dict[str, Metric], figures: tuple[_Figure, ...], values: Mapping[str, Any]) -> None:
    for figure in figures:
        value = values.get(figure.field)
        if value is None:
            continue
        labels, label_values = ([figure.label[0]], [figure.label[1]]) if figure.label else ([], [])
        family = families.get(figure.name)
        if family is None:
            made = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
            family = families[figure.name] = made(f"rekindle_{figure.name}", figure.what, labels=labels)
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric(label_values, float(value))
