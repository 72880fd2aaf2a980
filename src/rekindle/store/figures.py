"""Collects the figures of an open store from its parts. Owns none."""

from __future__ import annotations

from rekindle.store.damage import IndexDamage
from rekindle.store.readers import Readers
from rekindle.store.values import StoreStats
from rekindle.store.writer import Writer

# Counters of the writer that appear in the figures under the same name.
_COUNTERS = (
    "bytes_written",
    "blocks_written",
    "blocks_evicted",
    "sequences_evicted",
    "turns_saved",
    "turns_unsaved",
    "blocks_refused",
    "blocks_orphaned",
    "failed_saves",
)


def figures(
    writer: Writer,
    readers: Readers,
    *,
    num_known: tuple[int, int],
    num_pinned: int,
    index_bytes: int,
    unsaved_evicted: int,
    bad_records: int,
    damage: IndexDamage,
) -> StoreStats:
    """Build the result of `WarmStore.stats`; `num_known` counts agents and sequences in the index."""
    return StoreStats(
        num_agents=num_known[0],
        num_sequences=num_known[1],
        num_blocks=writer.num_blocks,
        used_bytes=writer.room.used_bytes,
        disk_bytes=writer.room.disk_bytes,
        index_bytes=index_bytes,
        pinned_blocks=num_pinned,
        bytes_read=readers.bytes_read,
        blocks_read=readers.blocks_read,
        unsaved_evicted=unsaved_evicted,
        bad_records=bad_records,
        damaged_rows=damage.num_rows,
        index_error=damage.file_error,
        queue_length=writer.queue_length,
        last_error=writer.trouble.last_error,
        first_error=writer.trouble.first_error,
        first_error_at=writer.trouble.first_error_at,
        saving_ok=writer.trouble.last_error is None,
        has_room=not writer.room.is_full,
        **{name: writer.counts[name] for name in _COUNTERS},
    )
