"""Purge an agent with proof: afterwards no slot holds a block that only it used.

Owns the sequence of steps: rows and log first, then the bytes, then every unused slot is read back. Runs on the writer
thread, after everything queued before it. Anything it cannot prove raises PurgeUnproved; nothing is skipped silently.

    rows deleted  →  index rewritten, its log emptied  →  set-aside indexes removed
    →  slots punched, synced  →  every unused slot read: zeros, or overwritten with zeros and read again
    →  index read: no row of the agent, no free page, in its file neither the agent's key nor the hash of a block, nor
       what an encrypted store had of the keys of their records

The index notes with the deleted rows that the rest is due. `finish` does it at the next start, after a kill.

Blocks that others use stay: `blocks_shared`.
"""

from __future__ import annotations

import logging
import mmap
import sqlite3
from collections.abc import Sequence

import numpy as np

from rekindle.errors import PurgeUnproved, StoreError
from rekindle.store.maintenance.opening import OpenedStore
from rekindle.store.rows.ledger import Forgotten
from rekindle.store.rows.slots import Slot
from rekindle.store.values import PurgeProof

logger = logging.getLogger(__name__)
MAX_HASHES = 256  # hashes of an agent's blocks searched for in the files' bytes; rows are checked for all of them


def prove(parts: OpenedStore, forgotten: Forgotten, freed: Sequence[Slot]) -> PurgeProof:
    """Erase what a purge has freed from disk and verify that it is gone; reads the index and every unused slot."""
    try:
        last = parts.index.last_trace()
        left = _erase(parts, freed)
        found = parts.ledger.has_left(forgotten) or _in_files(parts, forgotten)
    except (OSError, sqlite3.Error) as error:
        raise PurgeUnproved(
            f"the agent is deleted, but its bytes may still be on disk: {error}; repair the disk and purge again"
        ) from error
    if left:
        raise PurgeUnproved(
            f"the agent is deleted, but {len(left)} slots do not read as zeros, the first is {left[0][1]} of part "
            f"{left[0][0]}; repair the disk and purge again"
        )
    if found is not None:
        raise PurgeUnproved(f"the agent is deleted, but the index still holds {found}: purge again")
    parts.index.drop_traces(last)
    num_bytes = sum(parts.shards.formats[part].record_bytes for part, _ in freed)
    return PurgeProof(slots_freed=len(freed), bytes_zeroed=num_bytes, blocks_shared=forgotten.num_shared)


def finish(parts: OpenedStore) -> None:
    """Erase what a purge has freed whose process was killed before it was proven; what remains is logged."""
    last = parts.index.last_trace()
    if not last:
        return
    try:
        left = _erase(parts, _unused(parts))
        if not left:
            parts.index.drop_traces(last)
            return
        why = f"{len(left)} slots do not read as zeros"
    except (OSError, sqlite3.Error, StoreError) as error:
        why = str(error)
    logger.warning("bytes of a purged agent may still be on disk, as its purge was cut off: %s; purge it again", why)


def _erase(parts: OpenedStore, freed: Sequence[Slot]) -> list[Slot]:
    """Overwrite what was deleted in the index and in these slots; return the unused slots that are not zeros."""
    parts.index.rewrite()
    parts.index.truncate_wal()
    parts.place.remove_set_aside()
    parts.shards.punch(freed)
    parts.shards.sync_all(freed)
    left = [slot for slot in _unused(parts) if not _reads_as_zeros(parts, slot)]
    for slot in left:
        parts.shards.erase(*slot)
    parts.shards.sync()
    return [slot for slot in left if not _reads_as_zeros(parts, slot)]


def _in_files(parts: OpenedStore, forgotten: Forgotten) -> str | None:
    """Describe the bytes of a purged agent still in the index files; None if none. One pass per pattern."""
    patterns = {forgotten.key: "the agent's key", **dict.fromkeys(forgotten.hashes[:MAX_HASHES], "a block's hash")}
    patterns |= dict.fromkeys(forgotten.seals[:MAX_HASHES], "the key of a record")
    for path in parts.place.path.glob("index.db*"):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = next((what for pattern, what in patterns.items() if content.find(pattern) >= 0), None)
            if found is not None:
                return f"{found} in {path.name}"
    return None


def _unused(parts: OpenedStore) -> list[Slot]:
    """Every slot inside a file that holds no block of the index."""
    unused: list[Slot] = []
    for part in range(len(parts.shards.formats)):
        used = parts.ledger.slots.used(part)
        unused += [(part, slot) for slot in parts.shards.slots(part) if slot not in used]
    return unused


def _reads_as_zeros(parts: OpenedStore, slot: Slot) -> bool:
    buffer = np.empty(parts.shards.formats[slot[0]].record_bytes, dtype=np.uint8)
    return parts.shards.is_zero(*slot, buffer)
