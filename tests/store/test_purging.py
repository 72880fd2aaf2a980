"""After a purge nothing of the agent is on disk: in no slot, not in the index, its log or a copy set aside."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rekindle.config import StoreSettings
from rekindle.errors import StoreError
from rekindle.store.admin import purge_agent
from rekindle.store.commands import Delete, Pin, Purge
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.warm import WarmStore
from tests.cut_off import die_before, killed_in
from tests.store.chains import (
    BLOCK_BYTES,
    FINGERPRINT,
    LAYOUT,
    READERS,
    SIZE,
    Chain,
    one_batch,
    payload_of,
    save,
    warm_tokens,
)

Opened = Callable[..., WarmStore]
PARTS = len(LAYOUT.parts)


def traces(directory: Path, chain: Chain, agent: str) -> set[str]:
    """Files with bytes of the chain's payloads, its ids, its names or the agent's id."""
    ids = chain.ids.astype("<u4").tobytes()
    wanted = [agent.encode(), *(block.identity.hash for block in chain.blocks)]
    wanted += [ids[start : start + 4 * SIZE] for start in range(0, len(ids) - 4 * SIZE + 1, 4 * SIZE)]
    wanted += [payload_of(block.identity.hash, part).tobytes()[:64] for block in chain.blocks for part in range(PARTS)]
    found = set()
    for path in directory.rglob("*.*"):
        content = path.read_bytes()
        found |= {path.name for piece in wanted if piece in content}
    return found


def place(tmp_path: Path) -> Path:
    return tmp_path / "store" / FINGERPRINT.hex()


@pytest.mark.parametrize("offline", [False, True])
def test_nothing_is_left_of_a_purged_agent(opened: Opened, tmp_path: Path, offline: bool) -> None:
    store = opened()
    shared = list(range(1000, 1000 + 2 * SIZE))
    chains = {}
    for number in range(12):
        agent = f"agent-number-{number}"
        chains[agent] = Chain.of(store, shared + [7000 + 100 * number + i for i in range(3 * SIZE + 5)])
        save(store, chains[agent], agent)
    victim, own = "agent-number-5", Chain.of(store, chains["agent-number-5"].ids)
    only = [
        block
        for block in own.blocks
        if block.identity.hash not in {b.identity.hash for b in chains["agent-number-4"].blocks}
    ]
    assert len(only) == 4 and traces(tmp_path, own, victim)
    if offline:
        store.close()
        proof = purge_agent(tmp_path / "store", FINGERPRINT.hex(), "default", victim, clock=lambda: 100.0)
        store = opened()
    else:
        proof = store.submit(Purge("default", victim)).result(10)
    assert (proof.slots_freed, proof.bytes_zeroed, proof.blocks_shared) == (4 * PARTS, 4 * BLOCK_BYTES, 2)
    left = Chain(only[0].identity.parent, own.ids[2 * SIZE :])
    assert traces(tmp_path, left, victim) == set()
    assert (place(tmp_path) / "index.db-wal").stat().st_size == 0 if not offline else True
    for agent, chain in chains.items():
        assert warm_tokens(store, chain) == (len(chain.ids) if agent != victim else 2 * SIZE)
    store.check("records")
    again = store.submit(Purge("default", victim)).result(10)
    assert (again.slots_freed, again.blocks_shared) == (0, 0)


def purge_and_die(directory: Path, statement: str) -> None:
    """The process of the test below."""
    store = WarmStore.open(
        directory,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        settings=StoreSettings(),
        clock=lambda: 100.0,
        read_records=READERS["auto"],
    )
    die_before(store.index.writer, statement)
    store.start()
    store.submit(Purge("default", "agent-to-go")).result(10)


@pytest.mark.parametrize("statement", ["VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA freelist_count"])
def test_a_purge_that_was_killed_is_finished_at_the_next_open(opened: Opened, tmp_path: Path, statement: str) -> None:
    store = opened()
    chains = {agent: Chain.of(store, range(at, at + 3 * SIZE)) for at, agent in enumerate(("agent-to-go", "bob"), 7)}
    for agent, chain in chains.items():
        save(store, chain, agent)
    store.close()
    killed_in(purge_and_die, tmp_path / "store", statement)
    if statement != "PRAGMA freelist_count":
        assert traces(tmp_path, chains["agent-to-go"], "agent-to-go") >= {"index.db"}
    store = opened()
    assert traces(tmp_path, chains["agent-to-go"], "agent-to-go") == set()
    assert store.index.last_trace() == 0, "nothing is left to do"
    assert warm_tokens(store, chains["bob"]) == len(chains["bob"].ids)
    store.check("records")


@pytest.mark.parametrize("what", ["its agent", "its sequences"])
def test_a_purge_that_left_something_in_the_index_says_so(opened: Opened, what: str) -> None:
    store = opened()
    save(store, Chain.of(store, range(3 * SIZE)), "ann")
    table = {"its agent": "agent", "its sequences": "sequence"}[what]
    columns = [row[1] for row in store.index.writer.execute(f"PRAGMA table_info({table})")]
    again = f"INSERT INTO {table}({', '.join(columns)}) VALUES ({', '.join(f'old.{name}' for name in columns)})"
    trigger = f"CREATE TEMP TRIGGER again AFTER DELETE ON {table} BEGIN {again}; END"
    store.writer.call(lambda _: store.index.writer.execute(trigger)).result(10)
    with pytest.raises(StoreError, match=f"still holds .*{what}"):
        store.submit(Purge("default", "ann")).result(10)
    store.writer.call(lambda _: store.index.writer.execute("DROP TRIGGER IF EXISTS again")).result(10)
    store.submit(Purge("default", "ann")).result(10)
    store.check("records")


def test_what_waits_is_purged_and_what_cancelled_requests_left(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    done = Chain.of(store, range(500, 500 + 2 * SIZE))
    save(store, done, "ann")
    longer = Chain.of(store, range(500, 500 + 5 * SIZE))
    other = Chain.of(store, range(900, 900 + 2 * SIZE))
    save(store, Chain.of(store, range(40)), "bob")
    with one_batch(store):
        for block in [*longer.blocks, *other.blocks]:  # a turn of ann's that never ends, and one queued with its blocks
            assert store.stage(block)
        store.save_turn(other.record("ann", 1))
        purged = store.submit(Purge("default", "ann"))
    assert purged.result(10).slots_freed == 7 * PARTS
    assert traces(tmp_path, longer, "ann") | traces(tmp_path, other, "ann") == set()
    for block in longer.blocks[3:]:
        assert store.stage(block)
    assert store.flush(10)
    assert store.stats().blocks_orphaned == 2, "what stands on a purged block is not saved"
    assert [record.agent for record in store.sequences()] == ["bob"]
    store.check("records")


def test_bytes_that_a_crash_left_in_free_slots_are_purged_too(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(2 * SIZE)), "ann")
    save(store, Chain.of(store, range(60, 60 + 3 * SIZE)), "bob")
    chain = Chain.of(store, range(300, 300 + 2 * SIZE))
    files = {path: path.read_bytes() for path in place(tmp_path).glob("blocks-*")}
    save(store, chain, "eve")
    with_eve = {path: path.read_bytes() for path in place(tmp_path).glob("blocks-*")}
    store.submit(Delete("default", "eve")).result(10)
    store.close()
    assert files != with_eve
    for path, content in with_eve.items():  # a crash after the transaction: no hole was punched
        path.write_bytes(content)
    (place(tmp_path) / "index.db.damaged-0").write_bytes(b"ids of eve")
    (place(tmp_path) / "index.db.damaged-0-wal").write_bytes(b"ids of eve")
    store = opened()
    assert "blocks-0-000.safetensors" in traces(tmp_path, chain, "eve")
    proof = store.submit(Purge("default", "ann")).result(10)
    assert proof.slots_freed == 2 * PARTS
    assert traces(tmp_path, chain, "eve") == set()
    assert not list(place(tmp_path).glob("*damaged*"))
    store.check("records")


class StubbornFileSystem(OsFileSystem):
    """Says that it punched, and did not; with `stuck` even zeros do not arrive."""

    stuck = False

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        pass

    def write(self, fd: int, offset: int, data: np.ndarray | bytes) -> None:
        if not (self.stuck and isinstance(data, bytes)):
            super().write(fd, offset, data)


def test_a_hole_that_was_not_punched_is_overwritten(opened: Opened, tmp_path: Path) -> None:
    store = opened(fs=StubbornFileSystem())
    chain = Chain.of(store, range(300, 300 + 3 * SIZE))
    save(store, chain, "eve")
    proof = store.submit(Purge("default", "eve")).result(10)
    assert proof.bytes_zeroed == 3 * BLOCK_BYTES
    assert traces(tmp_path, chain, "eve") == set()


def test_a_slot_that_keeps_its_bytes_is_an_error_that_says_so(opened: Opened) -> None:
    fs = StubbornFileSystem()
    store = opened(fs=fs)
    save(store, Chain.of(store, range(300, 300 + 3 * SIZE)), "eve")
    fs.stuck = True
    with pytest.raises(StoreError, match=r"6 slots do not read as zeros.*purge again"):
        store.submit(Purge("default", "eve")).result(10)
    assert store.sequences() == []
    fs.stuck = False
    assert store.submit(Purge("default", "eve")).result(10).slots_freed == 0
    save(store, Chain.of(store, range(50)), "bob")
    assert store.stats().last_error is None


def test_a_missing_or_short_shard_does_not_stop_a_purge(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chain = Chain.of(store, range(300, 300 + 30 * SIZE))
    save(store, chain, "eve")
    store.close()
    paths = sorted(place(tmp_path).glob("blocks-0-*"))
    assert len(paths) > 3
    paths[1].unlink()
    with paths[2].open("r+b") as file:
        file.truncate(5000)
    store = opened()
    assert store.submit(Purge("default", "eve")).result(10).slots_freed == 30 * PARTS
    assert traces(tmp_path, chain, "eve") == set()
    save(store, chain, "bob")
    assert warm_tokens(store, chain) == 30 * SIZE


def test_a_purge_ends_a_pin(opened: Opened) -> None:
    store = opened()
    save(store, Chain.of(store, range(50)), "eve")
    assert store.submit(Pin("default", "eve", math.inf)).result(10)
    store.submit(Purge("default", "eve")).result(10)
    assert store.pins() == {}
    save(store, Chain.of(store, range(50)), "eve")
    assert store.pins() == {}
