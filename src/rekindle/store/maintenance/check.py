"""Invariants of a store at rest, recomputed from the index and the records."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, block_hash, tail_hash
from rekindle.store.files.records import BadRecord
from rekindle.store.files.shards import Shards, read_record
from rekindle.store.rows.index import Index
from rekindle.store.rows.schema import IndexTables, agent_key


def check_index(index: Index, block_tokens: int, secret: bytes) -> None:
    """Assert that slots, blocks, parents, sequences and agents agree; reports the first difference."""
    with index.reading() as connection:
        connection.execute("BEGIN")
        try:
            _check_macs(connection, index)
            tables = index.tables
            for part in range(index.num_parts):
                _check_slots(connection, part)
            blocks = _check_blocks(connection, tables, block_tokens)
            _check_covers(connection)
            _check_sequences(connection, tables, blocks, secret)
        finally:
            connection.execute("ROLLBACK")


def _check_macs(connection: sqlite3.Connection, index: Index) -> None:
    for table in index.tables.all:
        num_damaged = sum(not table.holds(row) for row in table.rows(connection))
        assert not num_damaged, f"{num_damaged} rows of {table.name} do not verify"


def _check_slots(connection: sqlite3.Connection, part: int) -> None:
    used = [row[0] for row in connection.execute("SELECT slot FROM block WHERE part = ?", (part,))]
    free = [row[0] for row in connection.execute("SELECT slot FROM free WHERE part = ?", (part,))]
    mark = connection.execute("SELECT value FROM meta WHERE key = ?", (f"num_slots.{part}",)).fetchone()
    num_slots = mark[0] if mark else 0
    assert len(set(used)) == len(used), f"part {part}: two blocks in one slot"
    assert not set(used) & set(free), f"part {part}: slots both used and free: {sorted(set(used) & set(free))[:5]}"
    differing = set(used + free) ^ set(range(num_slots))
    assert not differing, f"part {part}: slots lost, or beyond the mark of {num_slots}: {sorted(differing)[:5]}"


def _check_covers(connection: sqlite3.Connection) -> None:
    lost = """
        SELECT COUNT(*) FROM cover WHERE NOT EXISTS (
            SELECT 1 FROM block WHERE block.name = cover.name AND block.part = cover.part)
            OR NOT EXISTS (SELECT 1 FROM sequence WHERE agent = cover.agent AND branch = cover.branch)
    """
    (num_lost,) = connection.execute(lost).fetchone()
    assert not num_lost, f"{num_lost} covers are of branches or parts that do not exist"


def _check_blocks(
    connection: sqlite3.Connection, tables: IndexTables, block_tokens: int
) -> dict[bytes, tuple[bytes, bytes, int]]:
    """Return block hash -> (parent, root, tokens) after checking that all parts agree."""
    blocks: dict[bytes, tuple[bytes, bytes, int]] = {}
    parts: dict[bytes, list[int]] = {}
    for row in tables.block.rows(connection, "ORDER BY part"):
        digest, part, parent, root, num_tokens = row.name, row.part, row.parent, row.root, row.num_tokens
        assert blocks.setdefault(digest, (parent, root, num_tokens)) == (parent, root, num_tokens), (
            f"parts of {digest.hex()} disagree"
        )
        parts.setdefault(digest, []).append(part)
        held, _ = tables.ids.opened(row)
        assert 0 < len(held) == num_tokens <= block_tokens, f"{digest.hex()}: {len(held)} ids of {num_tokens} tokens"
        expected = (block_hash if num_tokens == block_tokens else tail_hash)(parent, held)
        assert expected == digest, f"{digest.hex()} is not the hash of its parent and ids"
    for name, (above, of_root, _) in blocks.items():
        assert parts[name][0] == 0, f"{name.hex()} has parts {parts[name]} and not its first"
        if above != of_root:
            assert above in blocks, f"{name.hex()}: parent {above.hex()} is missing"
            is_full = blocks[above][1:] == (of_root, block_tokens)
            assert is_full, f"{name.hex()}: its parent has another root or is a tail"
    return blocks


def _check_sequences(
    connection: sqlite3.Connection, tables: IndexTables, blocks: dict[bytes, tuple[bytes, bytes, int]], secret: bytes
) -> None:
    agents = {row.agent: (row.namespace, row.id) for row in tables.agent.rows(connection)}
    for key, (namespace, name) in agents.items():
        assert key == agent_key(namespace, name, secret), f"agent {name!r} is stored under the wrong key"
    query = "SELECT agent, branch, root, head, num_tokens, canonical_tokens FROM sequence"
    seen = set()
    for agent, branch, root, head, num_tokens, canonical_tokens in connection.execute(query):
        assert agent in agents, f"a sequence of an unknown agent: branch {branch}"
        seen.add(agent)
        total, last, at = 0, 0, head
        while at != root:
            assert at in blocks, f"branch {branch} of {agents[agent]}: block {at.hex()} is missing"
            parent, of_root, size = blocks[at]
            assert of_root == root, f"branch {branch} of {agents[agent]} crosses into another root's chain"
            total, last, at = total + size, last or size, parent
        assert total - last < num_tokens <= total or num_tokens == total == 0, (
            f"branch {branch} of {agents[agent]}: {num_tokens} tokens, its chain has {total}"
        )
        assert canonical_tokens <= num_tokens, f"branch {branch} of {agents[agent]}: more canonical tokens than tokens"
    assert seen == set(agents), f"agents without a sequence: {[agents[key] for key in set(agents) - seen][:5]}"


def damaged_blocks(
    index: Index, shards: Shards, hashes: Sequence[BlockHash], progress: Callable[[int, int], object]
) -> Iterator[tuple[BlockHash, str]]:
    """Yield (hash, what is wrong) for each of these blocks whose record does not match the index."""
    buffers = [np.empty(f.record_bytes, dtype=np.uint8) for f in shards.formats]
    for number, digest in enumerate(hashes, 1):
        stored = index.block(digest)
        try:
            if stored is None:
                raise BadRecord("its first part is not in the index")
            for place in stored.places:
                read_record(shards, stored, place, buffers[place.part])
        except BadRecord as bad:
            yield digest, str(bad)
        progress(number, len(hashes))


def shortened_branches(index: Index, damaged: Collection[BlockHash]) -> list[tuple[str, str, int, int]]:
    """(namespace, agent, branch, tokens left) of every branch that cannot be loaded in full."""
    chains = index.parents()
    intact: dict[bytes, tuple[int, bool]] = {}  # hash -> intact tokens from the root, and whether the chain is whole
    shortened = []
    for record in index.sequences():
        path, at = [], bytes(record.head)
        while at != record.root and at in chains and at not in intact:
            path.append(at)
            at = chains[at][0]
        tokens, whole = intact.get(at, (0, at == record.root))
        for digest in reversed(path):
            whole = whole and digest not in damaged
            tokens += chains[digest][1] if whole else 0
            intact[digest] = (tokens, whole)
        if tokens < record.num_tokens:
            shortened.append((record.namespace, record.agent, record.branch, tokens))
    return shortened
