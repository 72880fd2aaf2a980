"""A new index from the records alone, where the old one was lost or damaged.

Blocks come back, so equal prompts are warm again. Which agent stood where was known to the index only and is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rekindle.cache.hashing import BlockHash, block_hash, tail_name
from rekindle.store.ledger import BlockRow, Ledger
from rekindle.store.records import MAGIC, PAGE, BadRecord
from rekindle.store.shards import Shards


def rebuild(ledger: Ledger, shards: Shards, now: float) -> int:
    """Enter every whole block whose parents are whole, too; return how many. Reads all records once."""
    by_part = [dict(_records(shards, part)) for part in range(len(shards.formats))]
    children: dict[BlockHash, list[BlockRow]] = {}
    whole = {name: row for name, row in by_part[0].items() if all(name in found for found in by_part)}
    for name, row in whole.items():
        parts = [found[name] for found in by_part]
        merged = BlockRow(
            name, row.parent, row.root, row.ids, tuple(p.slots[0] for p in parts), tuple(p.crcs[0] for p in parts)
        )
        children.setdefault(row.parent, []).append(merged)
    rows: list[BlockRow] = []
    reached = [row for found in children.values() for row in found if row.parent == row.root]
    while reached:
        row = reached.pop()
        rows.append(row)
        reached += [child for child in children.get(row.name, ()) if child.root == row.root]
    with ledger.transaction():
        for part in range(len(shards.formats)):
            ledger.extend(part, max((row.slots[part] + 1 for row in rows), default=0))
        ledger.add(rows, now)
    return len(rows)


def _records(shards: Shards, part: int) -> Iterator[tuple[BlockHash, BlockRow]]:
    """The verified records of a part, by name."""
    record_format = shards.formats[part]
    buffer = np.empty(record_format.record_bytes, dtype=np.uint8)
    for slot in shards.slots(part):
        try:
            shards.read(part, slot, buffer[:PAGE])
            if buffer[: len(MAGIC)].tobytes() != MAGIC:
                continue
            shards.read(part, slot, buffer)
            block = record_format.decode(buffer)
        except BadRecord:
            continue
        parent = BlockHash(block.parent)
        name = (block_hash if block.num_tokens == record_format.block_tokens else tail_name)(parent, block.ids)
        if name == block.name:
            crc = record_format.payload_crc(buffer)
            yield name, BlockRow(name, parent, BlockHash(block.root), block.ids, (slot,), (crc,))
