"""What must always hold of a store at rest, derived anew from the index and the records themselves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, block_hash, tail_hash
from rekindle.store.index import Index
from rekindle.store.readers import read_record
from rekindle.store.records import BadRecord
from rekindle.store.schema import COLUMNS, agent_key
from rekindle.store.shards import Shards


def check_index(index: Index, block_tokens: int, secret: bytes) -> None:
    """Assert that slots, blocks, parents, sequences and agents agree; says the first difference."""
    with index.reading() as connection:
        connection.execute("BEGIN")
        try:
            _check_macs(connection, index)
            for part in range(index.num_parts):
                _check_slots(connection, part)
            blocks = _check_blocks(connection, index.num_parts, block_tokens)
            _check_sequences(connection, blocks, secret)
        finally:
            connection.execute("ROLLBACK")


def _check_macs(connection: sqlite3.Connection, index: Index) -> None:
    for table, mac in index.macs.items():
        rows = connection.execute(f"SELECT {COLUMNS[table]} FROM {table}")
        num_damaged = sum(not mac.holds(row) for row in rows)
        assert not num_damaged, f"{num_damaged} rows of {table} do not verify"


def _check_slots(connection: sqlite3.Connection, part: int) -> None:
    used = [row[0] for row in connection.execute("SELECT slot FROM block WHERE part = ?", (part,))]
    free = [row[0] for row in connection.execute("SELECT slot FROM free WHERE part = ?", (part,))]
    mark = connection.execute("SELECT value FROM meta WHERE key = ?", (f"num_slots.{part}",)).fetchone()
    num_slots = mark[0] if mark else 0
    assert len(set(used)) == len(used), f"part {part}: two blocks in one slot"
    assert not set(used) & set(free), f"part {part}: slots both used and free: {sorted(set(used) & set(free))[:5]}"
    differing = set(used + free) ^ set(range(num_slots))
    assert not differing, f"part {part}: slots lost, or beyond the mark of {num_slots}: {sorted(differing)[:5]}"


def _check_blocks(
    connection: sqlite3.Connection, num_parts: int, block_tokens: int
) -> dict[bytes, tuple[bytes, bytes, int]]:
    """Block name -> (parent, root, tokens), all parts agreeing."""
    blocks: dict[bytes, tuple[bytes, bytes, int]] = {}
    parts: dict[bytes, list[int]] = {}
    query = "SELECT name, part, parent, root, num_tokens, ids FROM block ORDER BY part"
    for name, part, parent, root, num_tokens, ids in connection.execute(query):
        assert blocks.setdefault(name, (parent, root, num_tokens)) == (parent, root, num_tokens), (
            f"parts of {name.hex()} disagree"
        )
        parts.setdefault(name, []).append(part)
        held = np.frombuffer(ids, dtype="<u4").astype(np.uint32)
        assert 0 < len(held) == num_tokens <= block_tokens, f"{name.hex()}: {len(held)} ids of {num_tokens} tokens"
        named = (block_hash if num_tokens == block_tokens else tail_hash)(BlockHash(parent), held)
        assert named == name, f"{name.hex()} is not the name of its parent and ids"
    for name, (parent, root, _) in blocks.items():
        assert parts[name] == list(range(num_parts)), f"{name.hex()} has parts {parts[name]} of {num_parts}"
        if parent != root:
            assert parent in blocks, f"{name.hex()}: parent {parent.hex()} is missing"
            assert blocks[parent][1:] == (root, block_tokens), f"{name.hex()}: its parent has another root or is a tail"
    return blocks


def _check_sequences(
    connection: sqlite3.Connection, blocks: dict[bytes, tuple[bytes, bytes, int]], secret: bytes
) -> None:
    agents = {row[0]: row[1:] for row in connection.execute("SELECT agent, namespace, id FROM agent")}
    for key, (namespace, name) in agents.items():
        assert key == agent_key(namespace, name, secret), f"agent {name!r} stands under another key"
    query = "SELECT agent, branch, root, head, num_tokens, canonical_tokens FROM sequence"
    seen = set()
    for agent, branch, root, head, num_tokens, canonical_tokens in connection.execute(query):
        assert agent in agents, f"a sequence of an unknown agent: branch {branch}"
        seen.add(agent)
        total, last, at = 0, 0, head
        while at != root:
            assert at in blocks, f"branch {branch} of {agents[agent]}: block {at.hex()} is missing"
            parent, of_root, size = blocks[at]
            assert of_root == root, f"branch {branch} of {agents[agent]} runs into another root"
            total, last, at = total + size, last or size, parent
        assert total - last < num_tokens <= total or num_tokens == total == 0, (
            f"branch {branch} of {agents[agent]}: {num_tokens} tokens, its chain has {total}"
        )
        assert canonical_tokens <= num_tokens, f"branch {branch} of {agents[agent]}: more canonical tokens than tokens"
    assert seen == set(agents), f"agents without a sequence: {[agents[key] for key in set(agents) - seen][:5]}"


def damaged_blocks(
    index: Index, shards: Shards, names: Sequence[BlockHash], progress: Callable[[int, int], object]
) -> Iterator[tuple[BlockHash, str]]:
    """(name, what is wrong) of every one of these blocks with a record that is not what the index says."""
    buffers = [np.empty(f.record_bytes, dtype=np.uint8) for f in shards.formats]
    for number, name in enumerate(names, 1):
        stored = index.block(name)
        try:
            if stored is None:
                raise BadRecord("not all its parts are in the index")
            for part, buffer in enumerate(buffers):
                read_record(shards, stored, part, buffer)
        except BadRecord as bad:
            yield name, str(bad)
        progress(number, len(names))


def shortened_branches(index: Index, damaged: Collection[BlockHash]) -> list[tuple[str, str, int, int]]:
    """(namespace, agent, branch, tokens left) of every branch that cannot be loaded to its end."""
    chains = index.parents()
    intact: dict[bytes, tuple[int, bool]] = {}  # name -> intact tokens from the root on, and whether that is all
    shortened = []
    for record in index.sequences():
        path, at = [], bytes(record.head)
        while at != record.root and at in chains and at not in intact:
            path.append(at)
            at = chains[at][0]
        tokens, whole = intact.get(at, (0, at == record.root))
        for name in reversed(path):
            whole = whole and name not in damaged
            tokens += chains[name][1] if whole else 0
            intact[name] = (tokens, whole)
        if tokens < record.num_tokens:
            shortened.append((record.namespace, record.agent, record.branch, tokens))
    return shortened
