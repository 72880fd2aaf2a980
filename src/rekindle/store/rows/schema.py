"""The tables of the index as rows by name, what rows mean to the store, and the keyed hash that identifies an agent.

A column is a field of its row: SQL, MACs and the rows' types follow from it (`table`). Rows in a changed form need a
new INDEX_VERSION.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES, BlockHash, BlockIdentity, TokenIds, id_bytes
from rekindle.errors import StoreError
from rekindle.store.files.sqlite_file import create, version_of
from rekindle.store.files.table import KeyedTable, Mac, Table, row_key
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
    """The record of one part of a block. `ids`: u32 little-endian."""

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

    @classmethod
    def of(cls, block: StoredBlock, last_use: float) -> list[BlockRow]:
        """The rows of a block, one for each stored part."""
        own, ids = block.identity, id_bytes(block.identity.ids)
        return [
            cls(own.hash, each.part, own.parent, own.root, each.slot, own.num_tokens, ids, each.crc, last_use)
            for each in block.places
        ]

    def token_ids(self) -> TokenIds:
        """The block's token ids [num_tokens]."""
        return np.frombuffer(self.ids, dtype="<u4").astype(np.uint32)


def stored_block(rows: Sequence[BlockRow]) -> StoredBlock:
    """The block that has these rows, at least one."""
    first = rows[0]
    identity = BlockIdentity(first.name, first.parent, first.root, first.token_ids())
    return StoredBlock(identity, tuple(Place(row.part, row.slot, row.crc) for row in rows))


class CoverRow(NamedTuple):
    """A part of a block that a branch needs to be resumed."""

    agent: bytes
    branch: int
    name: bytes
    part: int
    mac: bytes = b""


META = Table("meta", MetaRow)
FREE = Table("free", FreeRow, "PRIMARY KEY(part, slot)")
AGENT = Table("agent", AgentRow)
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


class IndexTables(NamedTuple):
    """The tables of one index."""

    meta: KeyedTable[MetaRow]
    free: KeyedTable[FreeRow]
    agent: KeyedTable[AgentRow]
    sequence: KeyedTable[SequenceRow]
    block: KeyedTable[BlockRow]
    cover: KeyedTable[CoverRow]

    @classmethod
    def of(cls, secret: bytes) -> IndexTables:
        """Those whose rows are sealed with the store's secret."""
        key = row_key(secret, "index")
        return cls(*(KeyedTable(table, key) for table in TABLES))

    @property
    def all(self) -> tuple[KeyedTable[Any], ...]:
        """Every table, for what does not ask what its rows are."""
        return self


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
