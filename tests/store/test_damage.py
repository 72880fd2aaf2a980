"""Whatever is wrong on disk reads as "not there": it shortens a prefix and is never an error, and heals by itself."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.store.commands import Delete
from rekindle.store.files.records import MAGIC
from rekindle.store.rows.index import PAGE_BYTES
from rekindle.store.threads.readers import RUN_BLOCKS
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, SIZE, Chain, load, save, warm_tokens

Opened = Callable[..., WarmStore]
IDS = list(range(5 * SIZE + 3))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store" / FINGERPRINT.hex()


def saved(opened: Opened, ids: list[int] = IDS) -> Chain:
    store = opened()
    chain = Chain.of(store, ids)
    save(store, chain)
    store.close()
    return chain


def record_at(path: Path, name: bytes) -> int:
    """Where the record of a block lies in a shard."""
    content = path.read_bytes()
    return content.rindex(MAGIC, 0, content.index(name))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("victim", [0, 2, 4])
def test_a_flipped_bit_shortens_the_prefix(
    opened: Opened, place: Path, part: int, victim: int, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = saved(opened)
    path = next(p for p in place.glob(f"blocks-{part}-*") if chain.blocks[victim].identity.hash in p.read_bytes())
    with path.open("r+b") as file:
        file.seek(record_at(path, chain.blocks[victim].identity.hash) + 700)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    store = opened(kernels=kernels)
    known = store.locate(chain.full_names, parent=chain.root, ids=chain.ids[: 5 * SIZE])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(load(store, known)) == victim
            assert warm_tokens(store, chain) == victim * SIZE
    said = [r for r in caplog.records if "damaged" in r.message]
    assert len(said) == 1 and chain.blocks[victim].identity.hash.hex() in said[0].message
    assert store.stats().bad_records == 1
    assert not store.contains(chain.blocks[victim].identity.hash)

    save(store, chain, "bob")
    assert warm_tokens(store, chain) == len(IDS), "a damaged block was not written again"
    store.check("records")


def test_a_truncated_shard_shortens_the_prefix(opened: Opened, place: Path) -> None:
    chain = saved(opened)
    path = place / "blocks-0-000.safetensors"
    os.truncate(path, record_at(path, chain.blocks[1].identity.hash) + 1000)
    store = opened()
    assert warm_tokens(store, chain) == SIZE
    save(store, chain, "bob")
    assert warm_tokens(store, chain) >= 2 * SIZE
    for _ in range(5):
        save(store, chain, "bob")
        warm_tokens(store, chain)
    assert warm_tokens(store, chain) == len(IDS)
    store.check("records")


def test_a_missing_shard_shortens_the_prefix(opened: Opened, place: Path) -> None:
    chain = saved(opened)
    for path in place.glob("blocks-1-*"):
        path.unlink()
    store = opened()
    assert warm_tokens(store, chain) == 0
    assert [record.num_tokens for record in store.sequences()] == [len(IDS)]
    other = Chain.of(store, [9] * 40)
    save(store, other, "bob")
    assert warm_tokens(store, other) == 40


def test_a_record_in_the_wrong_slot_is_not_served(opened: Opened, place: Path) -> None:
    store = opened()
    chain = Chain.of(store, [1] * 3 * SIZE)
    for block in chain.blocks:
        # equal ids and equal payloads: only names and parents tell these blocks apart
        store.stage(replace(block, payloads={part: np.full_like(data, 7) for part, data in block.payloads.items()}))
    store.save_turn(chain.record("ann"))
    store.close()
    path = place / "blocks-0-000.safetensors"
    a, b = (record_at(path, chain.blocks[i].identity.hash) for i in (0, 1))
    content = bytearray(path.read_bytes())
    size = abs(b - a)
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    path.write_bytes(content)
    store = opened()
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    assert len(found) == 3
    counts: list[int] = []
    ended = threading.Event()
    store.load(found, lambda first, run: None, lambda count: (counts.append(count), ended.set()))
    assert ended.wait(60)
    assert counts == [0]


@pytest.mark.parametrize("damage", ["garbage", "missing", "empty", "no tables"])
def test_a_lost_index_is_made_anew_from_the_records(opened: Opened, place: Path, damage: str) -> None:
    store = opened()
    long, short = Chain.of(store, IDS), Chain.of(store, [*range(SIZE), 5, 5])
    save(store, long)
    save(store, short, "bob")
    save(store, Chain.of(store, [3] * 70), "gone")
    store.submit(Delete("default", "gone")).result(10)
    store.close()
    if damage == "garbage":
        (place / "index.db").write_bytes(np.random.default_rng(0).bytes(50_000))
    elif damage == "no tables":
        with sqlite3.connect(place / "index.db") as connection:
            connection.execute("DROP TABLE block")
    elif damage == "empty":
        (place / "index.db").write_bytes(b"")
    else:
        (place / "index.db").unlink()
    store = opened()
    found = {record.agent: store.sequence_ids(record).tolist() for record in store.sequences()}
    if damage == "no tables":
        assert found == {"ann": IDS, "bob": list(short.ids)}
    else:
        assert sorted(found.values()) == sorted([IDS, list(short.ids)])
        assert set(found) == {"\x01recovered-0", "\x01recovered-1"}
    store.check("records")
    assert warm_tokens(store, long) == len(IDS)
    assert warm_tokens(store, short) == SIZE + 2
    save(store, Chain.of(store, [4] * 90), "new")
    store.check("records")
    store.close()
    reopened = opened()
    assert warm_tokens(reopened, long) == len(IDS)
    assert len(reopened.sequences()) == 3


@pytest.mark.parametrize("number", range(12))
def test_a_damaged_page_of_the_index_is_no_error(opened: Opened, place: Path, number: int) -> None:
    chain = saved(opened)
    content = bytearray((place / "index.db").read_bytes())
    page = number * PAGE_BYTES
    content[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
    (place / "index.db").write_bytes(content)
    store = opened()
    assert warm_tokens(store, chain) in (*range(0, len(IDS), SIZE), len(IDS))
    for record in store.sequences():
        assert len(store.sequence_ids(record)) in (0, len(IDS))
    save(store, Chain.of(store, [3] * 40), "bob")
    store.stats()


@pytest.mark.parametrize("again", ["gone", "saved again elsewhere"])
def test_slots_reused_while_a_load_is_under_way_are_not_delivered(opened: Opened, again: str) -> None:
    store = opened(readers=1)
    chain = Chain.of(store, range((RUN_BLOCKS + 2) * SIZE))
    save(store, chain)
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    assert len(found) == RUN_BLOCKS + 2
    delivered: list[int] = []
    first, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    counts: list[int] = []

    def deliver(index: int, run: Sequence[object]) -> None:
        delivered.extend(range(index, index + len(run)))
        first.set()
        assert go_on.wait(60)

    store.load(found, deliver, lambda count: (counts.append(count), ended.set()))
    assert first.wait(60)
    store.submit(Delete("default", "ann")).result(10)
    save(store, Chain.of(store, [8] * ((RUN_BLOCKS + 3) * SIZE)), "bob")
    if again == "saved again elsewhere":
        save(store, chain)
    go_on.set()
    assert ended.wait(60)
    assert counts == [RUN_BLOCKS]
    assert delivered == [*range(RUN_BLOCKS)], "one run was read before"
    assert store.stats().bad_records == 0, "a block that only moved is not damaged"
    assert load(store, found) == []
    assert warm_tokens(store, chain) == (len(chain.ids) if again == "saved again elsewhere" else 0)
