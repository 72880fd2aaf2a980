"""Covers: which parts that end (see `rekindle.parts`) each branch keeps, to be resumed at its resume points.

Owns the rows of `cover`: one for each part of a block that a branch needs. One that loses its last cover is
freed by the ledger; one that never had a cover, left by a crash or an earlier version, at the next open. Parts of
layers with full attention need no cover: they stay as long as their block. Used only by the ledger, inside its
transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping

from rekindle.parts import EndingPart
from rekindle.store.rows.schema import CoverRow, IndexTables

PartKey = tuple[bytes, int]  # block hash, part

_UNCOVERED = """
SELECT name, part FROM block WHERE part > 0
    AND NOT EXISTS (SELECT 1 FROM cover WHERE cover.name = block.name AND cover.part = block.part)
"""
_UNKNOWN = """
DELETE FROM cover WHERE NOT EXISTS (SELECT 1 FROM sequence WHERE agent = cover.agent AND branch = cover.branch)
    OR NOT EXISTS (SELECT 1 FROM block WHERE name = cover.name AND part = cover.part)
"""


class Covers:
    """The covers in `db`. `ending`: the parts that end, with the kind of each."""

    def __init__(
        self, db: sqlite3.Connection, tables: IndexTables, ending: Mapping[int, EndingPart], block_tokens: int
    ) -> None:
        self._db = db
        self._cover = tables.cover
        self._ending = ending
        self._block_tokens = block_tokens

    def __bool__(self) -> bool:
        return bool(self._ending)

    def put(
        self,
        agent: bytes,
        branch: int,
        head: bytes,
        num_tokens: int,
        positions: Iterable[int],
        parent_of: Callable[[bytes], bytes | None],
    ) -> None:
        """Cover these positions of a branch of `num_tokens`, the last in `head`, instead of what it covered before.

        Walks from the end of the branch to the first of them.
        """
        self.drop(agent, branch)
        needed = self._needed(positions)
        index, block_hash = -(-num_tokens // self._block_tokens) - 1, head
        first = min((index for index, _ in needed), default=0)
        found: list[CoverRow] = []
        while index >= first:
            found += [CoverRow(agent, branch, block_hash, part) for part in self._ending if (index, part) in needed]
            parent = parent_of(block_hash)
            if parent is None:
                break
            index, block_hash = index - 1, parent
        self._cover.insert(self._db, *(row for row in found if self._is_stored(row.name, row.part)))

    def _needed(self, positions: Iterable[int]) -> set[tuple[int, int]]:
        """Return (index of a block, part) of all that these positions need."""
        size = self._block_tokens
        return {
            (index, part)
            for position in positions
            for part, kind in self._ending.items()
            for index in kind.kept_blocks(position, size)
        }

    def _is_stored(self, block_hash: bytes, part: int) -> bool:
        query = "SELECT 1 FROM block WHERE name = ? AND part = ?"
        return self._db.execute(query, (block_hash, part)).fetchone() is not None

    def of(self, agent: bytes, branch: int | None) -> list[PartKey]:
        """Return what a branch covers, or all branches of an agent (None)."""
        query = "SELECT name, part FROM cover WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)"
        return self._db.execute(query, (agent, branch)).fetchall()

    def drop(self, agent: bytes, branch: int | None) -> None:
        """Forget what a branch covers, or all branches of an agent (None)."""
        self._db.execute("DELETE FROM cover WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)", (agent, branch))

    def drop_block(self, block_hash: bytes) -> None:
        """Forget who covers a block that is removed."""
        self._db.execute("DELETE FROM cover WHERE name = ?", (block_hash,))

    def drop_part(self, block_hash: bytes, part: int) -> None:
        """Forget who covers a part that is removed."""
        self._db.execute("DELETE FROM cover WHERE name = ? AND part = ?", (block_hash, part))

    def uncovered(self, parts: Iterable[PartKey]) -> list[PartKey]:
        """Return those of these parts that no branch covers."""
        query = "SELECT 1 FROM cover WHERE name = ? AND part = ?"
        return [key for key in parts if self._db.execute(query, key).fetchone() is None]

    def all_uncovered(self) -> list[PartKey]:
        """Forget covers of what is gone; return every stored window part that no branch covers. Reads all rows."""
        self._db.execute(_UNKNOWN)
        return [(name, part) for name, part in self._db.execute(_UNCOVERED) if part in self._ending]
