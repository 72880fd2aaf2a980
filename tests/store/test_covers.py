"""Window parts on disk: those that a branch needs at its end and at its resume points, and no others."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from rekindle.store.commands import Delete, Move, Purge
from rekindle.store.warm import WarmStore
from tests.store.chains import (
    BLOCK_BYTES,
    FINGERPRINT,
    LAYOUT,
    SIZE,
    Chain,
    load,
    one_batch,
    open_store,
    save,
)
from tests.store.machine import StoreMachine

Opened = Callable[..., WarmStore]
WINDOW_PART = LAYOUT.parts[1]
WINDOW = WINDOW_PART.layers[0].window or 0
RUNS = st.lists(st.integers(0, 1), max_size=6)
AGENTS = st.sampled_from(["ann", "bob", "cat"])


def needed(chain: Chain, positions: set[int]) -> set[bytes]:
    """Hashes of the blocks that show a token of the window before one of these positions, or of a block before that."""
    return {
        chain.blocks[at // SIZE].identity.hash
        for position in positions
        for at in range(max(0, position - SIZE - WINDOW), position)
    }


def windows_on_disk(store: WarmStore) -> set[bytes]:
    """Hashes of the blocks with a stored window part."""
    with store.index.reading() as connection:
        return {row[0] for row in connection.execute("SELECT name FROM block WHERE part = 1")}


def stage(store: WarmStore, chain: Chain, wanted: set[bytes]) -> None:
    """Stage a chain, with the window parts of the wanted blocks alone."""
    for block in chain.blocks:
        parts = (0, 1) if block.identity.hash in wanted else (0,)
        assert store.stage(replace(block, payloads={part: block.payloads[part] for part in parts}))


class CoverMachine(StoreMachine):
    """Model: the ids, tokens and resume points of every branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches: dict[str, tuple[list[int], int, set[int]]] = {}

    @initialize()
    def open(self) -> None:
        self.store = open_store(self.directory, shard_bytes=1 << 14)
        self.store.start()

    def turn_of(self, agent: str, ids: list[int], num_tokens: int, points: set[int]) -> None:
        chain = self.chain(ids)
        with one_batch(self.store):
            stage(self.store, chain, needed(chain, {at for at in points if at <= num_tokens} | {num_tokens}))
            record = chain.record(agent, num_tokens=num_tokens)
            self.store.save_turn(replace(record, resume_points=tuple(points)))
        self.branches[agent] = (ids, num_tokens, points)

    @rule(
        agent=AGENTS,
        runs=RUNS,
        tail=st.integers(1, SIZE - 1),
        cut=st.integers(0, SIZE - 1),
        points=st.sets(st.integers(0, 100), max_size=2),
    )
    def turn(self, agent: str, runs: list[int], tail: int, cut: int, points: set[int]) -> None:
        ids = [number for run in runs for number in [run] * SIZE] + [7] * tail
        self.turn_of(agent, ids, len(ids) - min(cut, tail - 1), points)

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), agent=AGENTS)
    def fork(self, data: st.DataObject, agent: str) -> None:
        source = data.draw(st.sampled_from(sorted(self.branches)))
        ids, num_tokens, points = self.branches[source]
        record = replace(self.chain(ids).record(agent, num_tokens=num_tokens), resume_points=tuple(points))
        assert self.store.submit(Move("default", agent, "fork", (record,))).result(10)
        self.branches[agent] = (ids, num_tokens, points)

    @rule(agent=AGENTS, is_purged=st.booleans())
    def delete(self, agent: str, is_purged: bool) -> None:
        command = Purge("default", agent) if is_purged else Delete("default", agent)
        self.store.submit(command).result(10)
        self.branches.pop(agent, None)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def exactly_what_is_needed_is_stored(self) -> None:
        if self.store is None:
            return
        self.store.check("records")
        expected: set[bytes] = set()
        for ids, num_tokens, points in self.branches.values():
            expected |= needed(self.chain(ids), {at for at in points if at <= num_tokens} | {num_tokens})
        assert windows_on_disk(self.store) == expected


CoverMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCoverMachine = CoverMachine.TestCase


def test_a_long_branch_keeps_its_last_window_alone(opened: Opened) -> None:
    store = opened()
    ids = list(range(100, 100 + 20 * SIZE))
    for turn in range(1, 21):
        chain = Chain.of(store, ids[: turn * SIZE])
        stage(store, chain, needed(chain, {turn * SIZE}))
        store.save_turn(chain.record("ann"))
        assert store.flush(10)
        assert len(windows_on_disk(store)) <= -(-WINDOW // SIZE) + 2
    assert store.stats().num_blocks == 20
    assert store.stats().used_bytes < 20 * BLOCK_BYTES
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    assert [sorted(payloads) for payloads in load(store, found)][-3:] == [[0, 1]] * 3
    store.check("records")


def test_a_rolling_branch_leaves_what_its_points_need_of_all_parts_that_were_saved(opened: Opened) -> None:
    store = opened()
    ids = list(range(100, 100 + 20 * SIZE))
    other = Chain.of(store, ids[: 3 * SIZE])
    save(store, other, "bob")
    for turn in (8, 20):
        chain = Chain.of(store, ids[: turn * SIZE])
        stage(store, chain, {block.identity.hash for block in chain.blocks})
        store.save_turn(replace(chain.record("ann"), resume_points=(6 * SIZE + 1,), is_rolling=True))
        assert store.flush(10)
        points = needed(chain, {6 * SIZE + 1, turn * SIZE}) | needed(other, {3 * SIZE})
        assert windows_on_disk(store) == points
    store.check("records")


def test_parts_that_were_saved_before_a_crash_end_with_their_turn(opened: Opened, tmp_path: Path) -> None:
    """Killed between the parts of a resume point and its turn: the older point stays, the parts of no turn go."""
    store = opened()
    ids = list(range(100, 100 + 12 * SIZE))
    old = Chain.of(store, ids[: 6 * SIZE])
    stage(store, old, needed(old, {6 * SIZE}))
    store.save_turn(old.record("ann"))
    new = Chain.of(store, ids)
    stage(store, new, needed(new, {12 * SIZE}))
    assert store.flush(10)
    place, copy = tmp_path / "store", tmp_path / "killed"
    shutil.copytree(place, copy)  # what is on disk while the process runs is what a kill leaves
    store.close()
    with closing(open_store(copy)) as killed:
        killed.start()
        assert {record.num_tokens for record in killed.sequences()} == {6 * SIZE}
        assert windows_on_disk(killed) == needed(old, {6 * SIZE})
        killed.check("records")


@pytest.mark.parametrize("lost", ["the index", "covers", "a window's row"])
def test_what_is_repaired_can_be_resumed_at_its_ends(opened: Opened, tmp_path: Path, lost: str) -> None:
    store = opened()
    chains = {agent: Chain.of(store, range(first, first + 9 * SIZE + 3)) for agent, first in (("ann", 0), ("bob", 500))}
    for agent, chain in chains.items():
        stage(store, chain, needed(chain, {9 * SIZE + 3}))
        store.save_turn(chain.record(agent))
    assert store.flush(10)
    expected = windows_on_disk(store)
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    if lost == "the index":
        index.write_bytes(b"")
    else:
        with closing(sqlite3.connect(index)) as connection, connection:
            changes = {
                "covers": "UPDATE cover SET mac = x'00'",
                "a window's row": "UPDATE block SET crc = 7 WHERE id = (SELECT MAX(id) FROM block WHERE part = 1)",
            }
            connection.execute(changes[lost])
    store = opened()
    assert sum(record.num_tokens == 9 * SIZE + 3 for record in store.sequences()) == 2
    left = windows_on_disk(store)
    assert left == expected or (lost == "a window's row" and len(expected - left) == 1 and left < expected)
    store.check("records")


def test_a_part_that_is_written_alone_keeps_a_block_that_is_found_bad_meanwhile(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(5 * SIZE))
    stage(store, chain, set())
    store.save_turn(chain.record("bob"))
    assert store.flush(10)
    first = chain.blocks[0]
    with one_batch(store):
        assert store.stage(replace(first, payloads={1: first.payloads[1]}))
        store.writer.call(lambda ledger: store.writer.mark_bad(first.identity.hash))
    assert store.stage(replace(chain.blocks[1], payloads={1: chain.blocks[1].payloads[1]}))
    assert store.flush(10)
    assert not store.contains(first.identity.hash), "its first part is bad still"
    store.check()


def test_a_bad_block_that_is_saved_again_leaves_no_cover_of_what_it_lost(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(5 * SIZE))
    save(store, chain)
    block = chain.blocks[3]
    store.writer.mark_bad(block.identity.hash)
    assert store.stage(replace(block, payloads={0: block.payloads[0]}))
    assert store.flush(10)
    assert store.parts(block.identity.hash) == {0}
    store.check("records")


@pytest.mark.parametrize("size", ["small", "large"])
def test_after_a_crash_lost_covers_are_settled_also_if_a_row_is_damaged(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    store = opened()
    chain = Chain.of(store, range(9 * SIZE))
    save(store, chain)
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    log = index.with_name("index.db-wal")
    with closing(sqlite3.connect(index)) as connection:
        with connection:
            connection.execute("UPDATE block SET last_use = 7.25 WHERE slot = 8 AND part = 0")
            connection.execute("DELETE FROM cover")
        crashed = {path: path.read_bytes() for path in (index, log)}
    for path, content in crashed.items():
        path.write_bytes(content)
    if size == "large":
        monkeypatch.setattr("rekindle.store.maintenance.opening.QUICKLY_CHECKED_BYTES", 0)
    store = opened()
    store.check("records")
    assert len(windows_on_disk(store)) <= -(-WINDOW // SIZE) + 2


def test_a_damaged_window_is_written_again_with_its_block(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chain = Chain.of(store, range(4 * SIZE))
    save(store, chain)
    store.close()
    shard = tmp_path / "store" / FINGERPRINT.hex() / "blocks-1-000.safetensors"
    content = bytearray(shard.read_bytes())
    content[4096 + 600] ^= 1  # in the payload of the first slot
    shard.write_bytes(content)
    store = opened()
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    assert load(store, found) == [], "the first block is damaged"
    block = chain.blocks[0]
    assert store.parts(block.identity.hash) == frozenset()
    assert store.stage(replace(block, payloads={0: block.payloads[0]}))
    assert store.flush(10)
    assert store.parts(block.identity.hash) == {0}, "its damaged part must not count as stored"
    assert store.stage(replace(block, payloads={1: block.payloads[1]}))
    assert store.flush(10)
    assert len(load(store, store.locate(chain.full_names, parent=chain.root, ids=chain.ids))) == 4
    store.check("records")
