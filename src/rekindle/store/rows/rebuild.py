"""Rebuild the index from the records alone, after the old one was lost or damaged.

Blocks are recovered, so equal prompts are warm again. Only the index knew where agents ended: branches still readable
in the damaged one are restored under their agents if their last block is recovered. Every other chain whose root
belongs to a known namespace becomes the branch of a new "recovered" agent, so that it is found by its text and evicted
like others.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.agent_ids import recovered
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.files.damage import INDEX_DAMAGE
from rekindle.store.files.keys import StoreKeys
from rekindle.store.files.shards import Shards
from rekindle.store.files.sqlite_file import connect
from rekindle.store.rows.ledger import Ledger
from rekindle.store.rows.repair import whole_rows, with_parents
from rekindle.store.rows.schema import AgentRow, IndexTables
from rekindle.store.values import SequenceRecord, StoredBlock


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Blocks recovered, records lost (damaged, or without their parents), and branches restored or recovered."""

    num_blocks: int
    num_lost: int
    num_sequences: int

    def summary(self) -> str:
        """One human-readable sentence."""
        recovered = f"{self.num_blocks} blocks and {self.num_sequences} branches were recovered"
        return f"{recovered}, {self.num_lost} records were lost"


@dataclass(frozen=True, slots=True)
class SalvagedBranch:
    """A branch read from a damaged index, and when its agent's pin expires."""

    record: SequenceRecord
    pinned_until: float


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What could be read of a damaged index; of an encrypted store also its blocks, whose keys nothing else has."""

    branches: list[SalvagedBranch] = field(default_factory=list)
    blocks: dict[tuple[int, int], StoredBlock] = field(default_factory=dict)


def salvage(path: Path, keys: StoreKeys, shards: Shards) -> Salvaged:
    """Read an index that was set aside: branches of agents whose key matches their keyed hash, and rows of blocks."""
    tables = IndexTables.of(keys)
    found = Salvaged()
    with contextlib.suppress(*INDEX_DAMAGE), contextlib.closing(connect(path)) as connection:
        found.branches.extend(_branches(connection, tables, keys.secret))
    if shards.are_sealed:
        with contextlib.suppress(*INDEX_DAMAGE), contextlib.closing(connect(path)) as connection:
            for part in range(len(shards.formats)):
                for slot in shards.slots(part):
                    with contextlib.suppress(*INDEX_DAMAGE):  # one by one: a broken page loses its own rows alone
                        rows = tables.block.verified(connection, "WHERE part = ? AND slot = ?", part, slot)
                        if rows:
                            found.blocks[part, slot] = tables.ids.block(rows)
    return found


def _branches(connection: sqlite3.Connection, tables: IndexTables, secret: bytes) -> Iterator[SalvagedBranch]:
    agents: dict[bytes, AgentRow] = {}
    with contextlib.suppress(*INDEX_DAMAGE):
        for owner in tables.agent.rows(connection):
            if owner.is_named(secret):
                agents[owner.agent] = owner if tables.agent.holds(owner) else owner._replace(pinned_until=0.0)
    for row in filter(tables.sequence.holds, tables.sequence.rows(connection)):
        with contextlib.suppress(TypeError, ValueError):
            if row.agent in agents and 0 <= row.canonical_tokens <= row.num_tokens and math.isfinite(row.last_use):
                yield SalvagedBranch(row.record(agents[row.agent]), float(agents[row.agent].pinned_until))


def rebuild(
    ledger: Ledger,
    shards: Shards,
    now: float,
    *,
    namespaces: Mapping[BlockHash, str],
    salvaged: Salvaged,
    settings: Mapping[str, int],
) -> RebuildReport:
    """Insert every intact block whose ancestors are intact, then the branches. Reads all records once.

    `namespaces` maps each known root to its namespace. `settings` are written with the rows: an index without them
    counts as not yet created, so after a crash before the end the rebuild runs again.
    """
    num_found, whole = whole_rows(shards, [shards.slots(part) for part in range(len(shards.formats))], salvaged.blocks)
    rows = with_parents(whole)
    with ledger.transaction():
        ledger.slots.set_meta(settings)
        for part in range(len(shards.formats)):
            used = (place.slot for row in rows for place in row.places if place.part == part)
            ledger.slots.extend(part, max(used, default=-1) + 1)
        ledger.add(rows, now)
        named = _named(rows, salvaged.branches, shards.formats[0].block_tokens)
        recovered = _recovered(rows, {known.record.head for known in named}, namespaces, now)
        ledger.move([known.record for known in named] + recovered)
        for known in named:
            if known.pinned_until > 0:
                ledger.pin(known.record.namespace, known.record.agent, known.pinned_until)
        ledger.settle_covers()
    return RebuildReport(len(rows), max(0, num_found - len(rows)), len(named) + len(recovered))


def _totals(rows: Sequence[StoredBlock]) -> dict[BlockHash, int]:
    """Block hash -> tokens of its chain; expects parents first."""
    totals: dict[BlockHash, int] = {}
    for row in rows:
        own = row.identity
        totals[own.hash] = totals.get(own.parent, 0) + own.num_tokens
    return totals


def _named(rows: Sequence[StoredBlock], salvaged: Sequence[SalvagedBranch], block_tokens: int) -> list[SalvagedBranch]:
    """The salvaged branches that still end inside a recovered block."""
    totals, roots = _totals(rows), {row.identity.hash: row.identity.root for row in rows}
    return [
        known
        for known in salvaged
        if roots.get(known.record.head) == known.record.root
        and 0 <= totals[known.record.head] - known.record.num_tokens < block_tokens
    ]


def _recovered(
    rows: Sequence[StoredBlock], heads: set[BlockHash], namespaces: Mapping[BlockHash, str], now: float
) -> list[SequenceRecord]:
    """A branch for each chain of a known root in whose last block no salvaged branch ends."""
    identities = [row.identity for row in rows]
    totals, inner = _totals(rows), {each.parent for each in identities} | heads
    leaves = [each for each in identities if each.hash not in inner and each.root in namespaces]
    return [
        SequenceRecord(
            namespace=namespaces[leaf.root],
            agent=recovered(number),
            branch=0,
            root=leaf.root,
            head=leaf.hash,
            num_tokens=totals[leaf.hash],
            canonical_tokens=0,
            last_use=now,
        )
        for number, leaf in enumerate(sorted(leaves, key=lambda leaf: leaf.hash))
    ]
