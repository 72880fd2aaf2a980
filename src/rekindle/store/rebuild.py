"""A new index from the records alone, where the old one was lost or damaged.

Blocks come back, so equal prompts are warm again. Which agent stood where, the index alone knew: branches that can
still be read from the damaged one come back under their names if their last block does; every other chain, if the
namespace of its root is known, becomes the branch of an agent of its own, "recovered", so that it is found by its text
and leaves the disk like others.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rekindle.cache.hashing import BlockHash, block_hash, tail_name
from rekindle.store.index import INDEX_DAMAGE, agent_key, unpacked
from rekindle.store.ledger import BlockRow, Ledger
from rekindle.store.records import PAGE, BadRecord
from rekindle.store.shards import Shards
from rekindle.store.values import RECOVERED_PREFIX, SequenceRecord


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Blocks that came back, records that did not (damaged, or without their parents), and branches by name or not."""

    num_blocks: int
    num_lost: int
    num_sequences: int

    def summary(self) -> str:
        """One sentence for a person."""
        back = f"{self.num_blocks} blocks and {self.num_sequences} branches came back"
        return f"{back}, {self.num_lost} records were lost"


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A branch as a damaged index still tells it, and until when its agent is pinned."""

    record: SequenceRecord
    pinned_until: float


def salvage(path: Path, secret: bytes) -> list[Salvaged]:
    """The branches that can be read from an index that was set aside, of agents that stand under their keyed hash."""
    agents: dict[bytes, tuple[str, str, float]] = {}
    found: list[Salvaged] = []
    with contextlib.suppress(*INDEX_DAMAGE), contextlib.closing(sqlite3.connect(path, timeout=1)) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(agent)")}
        until = "pinned_until" if "pinned_until" in columns else "0.0"
        for key, namespace, agent, pinned in connection.execute(f"SELECT agent, namespace, id, {until} FROM agent"):
            if key == agent_key(namespace, agent, secret):
                agents[key] = (namespace, agent, pinned)
        query = "SELECT agent, branch, root, head, num_tokens, canonical_tokens, last_use, turn_ends FROM sequence"
        for key, branch, root, head, num_tokens, canonical, last_use, ends in connection.execute(query):
            with contextlib.suppress(TypeError, ValueError):
                if key in agents and 0 <= canonical <= num_tokens and math.isfinite(last_use):
                    namespace, agent, pinned = agents[key]
                    record = SequenceRecord(
                        namespace, agent, branch, root, head, num_tokens, canonical, last_use, unpacked(ends)
                    )
                    found.append(Salvaged(record, float(pinned)))
    return found


def rebuild(
    ledger: Ledger,
    shards: Shards,
    now: float,
    *,
    namespaces: Mapping[BlockHash, str],
    salvaged: Sequence[Salvaged],
    settings: Mapping[str, int],
) -> RebuildReport:
    """Enter every whole block whose parents are whole, then the branches. Reads all records once.

    `namespaces` gives the namespace of each root that is known. `settings` are written with the rows: an index without
    them is not made yet, so a crash before the end has it all done again.
    """
    num_found, rows = _whole_rows(shards)
    with ledger.transaction():
        ledger.slots.set_meta(settings)
        for part in range(len(shards.formats)):
            ledger.slots.extend(part, max((row.slots[part] + 1 for row in rows), default=0))
        ledger.add(rows, now)
        named = _named(rows, salvaged, shards.formats[0].block_tokens)
        recovered = _recovered(rows, {known.record.head for known in named}, namespaces, now)
        ledger.move([known.record for known in named] + recovered)
        for known in named:
            if known.pinned_until > 0:
                ledger.pin(known.record.namespace, known.record.agent, known.pinned_until)
    return RebuildReport(len(rows), max(0, num_found - len(rows)), len(named) + len(recovered))


def _whole_rows(shards: Shards) -> tuple[int, list[BlockRow]]:
    """How many slots of a part hold something, and the blocks that are whole with all their parents, parents first."""
    num_found, by_part = [], []
    for part in range(len(shards.formats)):
        found = list(_records(shards, part))
        num_found.append(len(found))
        by_part.append({row.name: row for row in found if row is not None})
    children: dict[BlockHash, list[BlockRow]] = {}
    for name, row in by_part[0].items():
        if all(name in found for found in by_part):
            parts = [found[name] for found in by_part]
            slots, crcs = tuple(p.slots[0] for p in parts), tuple(p.crcs[0] for p in parts)
            merged = BlockRow(name, row.parent, row.root, row.ids, slots, crcs)
            children.setdefault(row.parent, []).append(merged)
    rows: list[BlockRow] = []
    reached = [row for found in children.values() for row in found if row.parent == row.root]
    while reached:
        row = reached.pop()
        rows.append(row)
        reached += [child for child in children.get(row.name, ()) if child.root == row.root]
    return max(num_found), rows


def _totals(rows: Sequence[BlockRow]) -> dict[BlockHash, int]:
    """Block name -> tokens of its chain; parents come first."""
    totals: dict[BlockHash, int] = {}
    for row in rows:
        totals[row.name] = totals.get(row.parent, 0) + len(row.ids)
    return totals


def _named(rows: Sequence[BlockRow], salvaged: Sequence[Salvaged], block_tokens: int) -> list[Salvaged]:
    """The salvaged branches that still end in a block, inside that block."""
    totals, roots = _totals(rows), {row.name: row.root for row in rows}
    return [
        known
        for known in salvaged
        if roots.get(known.record.head) == known.record.root
        and 0 <= totals[known.record.head] - known.record.num_tokens < block_tokens
    ]


def _recovered(
    rows: Sequence[BlockRow], heads: set[BlockHash], namespaces: Mapping[BlockHash, str], now: float
) -> list[SequenceRecord]:
    """A branch for each chain of a known root that no named branch ends."""
    totals, parents = _totals(rows), {row.parent for row in rows}
    leaves = [row for row in rows if row.name not in parents | heads and row.root in namespaces]
    return [
        SequenceRecord(
            namespace=namespaces[leaf.root],
            agent=f"{RECOVERED_PREFIX}{number}",
            branch=0,
            root=leaf.root,
            head=leaf.name,
            num_tokens=totals[leaf.name],
            canonical_tokens=0,
            last_use=now,
        )
        for number, leaf in enumerate(sorted(leaves, key=lambda row: row.name))
    ]


def _records(shards: Shards, part: int) -> Iterator[BlockRow | None]:
    """The records of a part as rows of this part alone, None for each that does not verify."""
    record_format = shards.formats[part]
    buffer = np.empty(record_format.record_bytes, dtype=np.uint8)
    for slot in shards.slots(part):
        try:
            shards.read(part, slot, buffer[:PAGE])
            if not buffer[:PAGE].any():
                continue
            shards.read(part, slot, buffer)
            block = record_format.decode(buffer)
        except BadRecord:
            yield None
            continue
        parent = BlockHash(block.parent)
        name = (block_hash if block.num_tokens == record_format.block_tokens else tail_name)(parent, block.ids)
        crc = record_format.payload_crc(buffer)
        row = BlockRow(name, parent, BlockHash(block.root), block.ids, (slot,), (crc,))
        yield row if name == block.name else None
