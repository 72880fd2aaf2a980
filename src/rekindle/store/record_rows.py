"""Blocks recovered from their records on disk, for an index that has lost their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rekindle.cache.blocks.hashing import block_hash, tail_hash
from rekindle.store.records import PAGE, BadRecord
from rekindle.store.shards import Shards
from rekindle.store.values import Place, StoredBlock


def whole_rows(shards: Shards, slots: Sequence[Iterable[int]]) -> tuple[int, list[StoredBlock]]:
    """Count the non-empty ones of these slots (per part) and return the intact blocks in them, unordered.

    A block needs its first part, and has those of windows that are there. If it is stored twice, the later slot wins.
    """
    num_found, by_part = [], []
    for part, of_part in enumerate(slots):
        found = list(_records(shards, part, of_part))
        num_found.append(len(found))
        by_part.append({row.identity.hash: row for row in found if row is not None})
    rows = []
    for digest, row in by_part[0].items():
        places = tuple(place for found in by_part if digest in found for place in found[digest].places)
        rows.append(StoredBlock(row.identity, places))
    return max(num_found), rows


def with_parents(rows: Iterable[StoredBlock], known: Iterable[tuple[bytes, bytes]] = ()) -> list[StoredBlock]:
    """The rows whose ancestors up to the root are among them or in `known` (hash, root); parents first."""
    children: dict[bytes, list[StoredBlock]] = {}
    for row in rows:
        children.setdefault(row.identity.parent, []).append(row)
    reached = [row for found in children.values() for row in found if row.identity.parent == row.identity.root]
    reached += [row for digest, root in known for row in children.get(digest, ()) if row.identity.root == root]
    whole: list[StoredBlock] = []
    while reached:
        row = reached.pop()
        whole.append(row)
        own = row.identity
        reached += [child for child in children.get(own.hash, ()) if child.identity.root == own.root]
    return whole


def _records(shards: Shards, part: int, slots: Iterable[int]) -> Iterator[StoredBlock | None]:
    """Yield the records of a part as single-part rows, None for each that does not verify."""
    record_format = shards.formats[part]
    buffer = np.empty(record_format.record_bytes, dtype=np.uint8)
    for slot in slots:
        try:
            shards.read(part, slot, buffer[:PAGE])
            if not buffer[:PAGE].any():
                continue
            shards.read(part, slot, buffer)
            stated = record_format.decode(buffer).identity
        except BadRecord:
            yield None
            continue
        hash_fn = block_hash if stated.num_tokens == record_format.block_tokens else tail_hash
        if hash_fn(stated.parent, stated.ids) == stated.hash:
            yield StoredBlock(stated, (Place(part, slot, record_format.payload_crc(buffer)),))
        else:
            yield None
