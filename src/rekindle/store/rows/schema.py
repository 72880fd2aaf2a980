"""The tables of the index as rows by name, what rows mean to the store, and the keyed hash that identifies an agent.

A column is a field of its row: SQL, MACs and the rows' types follow from it (`table`). Rows in a changed form need a
new INDEX_VERSION.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES, BlockHash, BlockIdentity, TokenIds, id_bytes
from rekindle.errors import StoreError
from rekindle.store.files.ciphers import Changed
from rekindle.store.files.damage import DamagedRow
from rekindle.store.files.keys import StoreKeys
from rekindle.store.files.sealed_records import SEAL_BYTES
from rekindle.store.files.sqlite_file import create, version_of
from rekindle.store.files.table import KeyedTable, Mac, Table, row_key
from rekindle.store.files.veil import ID_BYTES, Veil
from rekindle.store.values import Place, SequenceRecord, StoredBlock

INDEX_VERSION = 4


class MetaRow(NamedTuple):
    """A setting of the store, or a high-water mark."""

    key: Annotated[str, "TEXT PRIMARY KEY"]
    value: int
    mac: Mac = b""


class FreeRow(NamedTuple):
    """A slot without a block."""

    part: int
    slot: int
    mac: Mac = b""


class AgentRow(NamedTuple):
    """An agent: its key is the keyed hash of its namespace and id."""

    agent: Annotated[bytes, "BLOB PRIMARY KEY"]
    namespace: str
    id: str
    pinned_until: Annotated[float, "REAL NOT NULL DEFAULT 0"]
    mac: Mac = b""

    def is_named(self, secret: bytes) -> bool:
        """Whether the key is that of the namespace and id."""
        try:
            return bool(self.agent == agent_key(self.namespace, self.id, secret))
        except (TypeError, AttributeError, ValueError):
            return False


class SequenceRow(NamedTuple):
    """A branch of an agent. `turn_ends`: u32 little-endian."""

    agent: bytes
    branch: int
    root: BlockHash
    head: BlockHash
    num_tokens: int
    canonical_tokens: int
    last_use: float
    turn_ends: bytes
    mac: Mac = b""

    @classmethod
    def of(cls, agent: bytes, record: SequenceRecord) -> SequenceRow:
        """The row of a branch of the agent with this key."""
        ends = np.array(record.turn_ends, dtype="<u4").tobytes()
        sizes = record.num_tokens, record.canonical_tokens, record.last_use
        return cls(agent, record.branch, record.root, record.head, *sizes, ends)

    def record(self, owner: AgentRow) -> SequenceRecord:
        """The branch as the store's callers know it."""
        where = owner.namespace, owner.id, self.branch, self.root, self.head
        ends = tuple(np.frombuffer(self.turn_ends, dtype="<u4").tolist())
        return SequenceRecord(*where, self.num_tokens, self.canonical_tokens, self.last_use, ends)

    def cut(self, head: BlockHash, num_tokens: int) -> SequenceRow:
        """The branch's first tokens, which end in the block `head`."""
        ends = np.frombuffer(self.turn_ends, dtype="<u4")
        canonical, kept = min(self.canonical_tokens, num_tokens), ends[ends <= num_tokens].tobytes()
        return self._replace(head=head, num_tokens=num_tokens, canonical_tokens=canonical, turn_ends=kept)


class BlockRow(NamedTuple):
    """The record of one part of a block. `ids`: u32 little-endian, or what `BlockIds` makes of them."""

    name: BlockHash
    part: int
    parent: BlockHash
    root: BlockHash
    slot: int
    num_tokens: int
    ids: bytes
    crc: int
    last_use: float
    mac: Mac = b""


class BlockIds:
    """How rows have the ids of blocks, and the seals of their records, under the veil of an encrypted store.

        clear         ids
        encrypted     trace of the ids | sealed (ids | seal of the record)

    Children of one block are ordered by it, those with common leading ids next to each other.
    """

    def __init__(self, veil: Veil | None) -> None:
        self._veil = veil

    def rows(self, block: StoredBlock, last_use: float) -> list[BlockRow]:
        """The rows of a block, one for each stored part."""
        own, ids = block.identity, id_bytes(block.identity.ids)
        start = self.sought(own.parent, ids)
        found = []
        for each in block.places:
            where = own.hash, each.part, own.parent, own.root, each.slot, own.num_tokens
            rest = b"" if self._veil is None else self._veil.seal(ids + each.seal, _bound(own.hash, each.part))
            found.append(BlockRow(*where, start + rest, each.crc, last_use))
        return found

    def sought(self, parent: bytes, ids: bytes) -> bytes:
        """What sorts next to the children of a block that share the most leading ids with these."""
        return ids if self._veil is None else self._veil.trace(parent, ids)

    def sealed(self, rows: Sequence[BlockRow]) -> list[bytes]:
        """What rows have of the keys of their records; nothing in a clear store."""
        return [] if self._veil is None else [row.ids[-SEAL_BYTES:] for row in rows]

    def opened(self, row: BlockRow) -> tuple[TokenIds, bytes]:
        """The token ids [num_tokens] of a row that verifies, and its record's seal; DamagedRow if they do not open."""
        held, size = row.ids, ID_BYTES * row.num_tokens
        if self._veil is not None:
            try:
                held = self._veil.open(held[size:], _bound(row.name, row.part))
            except Changed as error:
                raise DamagedRow(f"ids of a block: {error}") from error
        return np.frombuffer(held[:size], dtype="<u4").astype(np.uint32), held[size:]

    def block(self, rows: Sequence[BlockRow]) -> StoredBlock:
        """The block that has these rows, at least one; as `opened`."""
        found = [self.opened(row) for row in rows]
        first = rows[0]
        identity = BlockIdentity(first.name, first.parent, first.root, found[0][0])
        places = (Place(row.part, row.slot, row.crc, seal) for row, (_, seal) in zip(rows, found, strict=True))
        return StoredBlock(identity, tuple(places))


def _bound(block_hash: bytes, part: int) -> bytes:
    return b"block.ids" + block_hash + part.to_bytes(4, "little")


class CoverRow(NamedTuple):
    """A part of a block that a branch needs to be resumed."""

    agent: bytes
    branch: int
    name: bytes
    part: int
    mac: bytes = b""


META = Table("meta", MetaRow)
FREE = Table("free", FreeRow, "PRIMARY KEY(part, slot)")
AGENT = Table("agent", AgentRow, matched=("namespace", "id"))
SEQUENCE = Table("sequence", SequenceRow, "PRIMARY KEY(agent, branch)")
BLOCK = Table("block", BlockRow, "UNIQUE(name, part), UNIQUE(part, slot)", options="", hidden="id INTEGER PRIMARY KEY")
COVER = Table("cover", CoverRow, "PRIMARY KEY(agent, branch, name, part)")
TABLES: tuple[Table[Any], ...] = (META, FREE, AGENT, SEQUENCE, BLOCK, COVER)
# The child index contains the ids, so the child with the most leading ids in common is adjacent to the queried ids:
# O(log n), even below a root with ten thousand children.
_INDEXES = (
    "CREATE INDEX block_child ON block(parent, ids) WHERE part = 0",
    "CREATE INDEX sequence_head ON sequence(head)",
    "CREATE INDEX cover_part ON cover(name, part)",
)


@dataclass(frozen=True, slots=True)
class IndexTables:
    """The tables of one index, and how its rows have the ids of blocks."""

    meta: KeyedTable[MetaRow]
    free: KeyedTable[FreeRow]
    agent: KeyedTable[AgentRow]
    sequence: KeyedTable[SequenceRow]
    block: KeyedTable[BlockRow]
    cover: KeyedTable[CoverRow]
    ids: BlockIds

    @classmethod
    def of(cls, keys: StoreKeys) -> IndexTables:
        """Those under the keys of a store."""
        key, veil = row_key(keys.secret, "index"), Veil.of(keys, "index")
        return cls(
            KeyedTable(META, key),
            KeyedTable(FREE, key),
            KeyedTable(AGENT, key, veil),
            KeyedTable(SEQUENCE, key),
            KeyedTable(BLOCK, key),
            KeyedTable(COVER, key),
            BlockIds(veil),
        )

    @property
    def all(self) -> tuple[KeyedTable[Any], ...]:
        """Every table, for what does not ask what its rows are."""
        return self.meta, self.free, self.agent, self.sequence, self.block, self.cover


def agent_key(namespace: str, agent: str, secret: bytes) -> bytes:
    """The keyed hash that identifies an agent's rows."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, key=secret, person=b"rekindle.agent")
    for field in (namespace.encode(), agent.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new index.

    StoreError for one of another version, sqlite3.DatabaseError if the file is not an index.
    """
    version, tables = version_of(db)
    is_index = tables >= {table.name for table in TABLES}
    if version == 0 and not tables:
        create(db, [*(table.create for table in TABLES), *_INDEXES], INDEX_VERSION)
    elif version > INDEX_VERSION and is_index:
        raise StoreError(
            f"{path} was written by a newer Rekindle (version {version}, this one knows {INDEX_VERSION}): "
            "use that one, or choose another directory as store"
        )
    elif version != INDEX_VERSION or not is_index:
        raise sqlite3.DatabaseError(f"tables {sorted(tables)} of version {version}")
