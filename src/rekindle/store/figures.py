"""The figures of an open store, from those of its parts; what each means is in `StoreStats`."""

from __future__ import annotations

from rekindle.store.files.damage import IndexDamage
from rekindle.store.threads.readers import Readers
from rekindle.store.threads.writer import Writer
from rekindle.store.values import StoreStats

# Counters of the writer that appear in the figures under the same name.
_COUNTERS = (
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
    num_postponed: int,
    bad_records: int,
    damage: IndexDamage,
) -> StoreStats:
    """Build the result of `WarmStore.stats`; `num_known` counts agents and sequences in the index, `num_postponed`
    blocks that never came to the writer."""
    writes = writer.writes
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
        bytes_written=writes.record_bytes,
        index_bytes_written=writes.index_bytes,
        written_today=writes.today,
        writes_a_day=writes.most,
        may_write=writes.may_write,
        blocks_postponed=writer.counts["blocks_postponed"] + num_postponed,
        saving_ok=writer.trouble.last_error is None,
        has_room=not writer.room.is_full,
        **{name: writer.counts[name] for name in _COUNTERS},
    )
