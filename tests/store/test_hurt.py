"""A store whose files were hurt opens, or says clearly what its operator must mend; it serves nothing wrong; it heals.

Hundreds of bit flips, cuts and overwritten runs at random offsets of shards and index, and files that are missing,
swapped, foreign, older, newer, or links. `HURTS` sets how many of each (`make torture`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rekindle.errors import StoreError
from rekindle.store.commands import Delete, Purge
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.shards import shard_header
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, LAYOUT, SIZE, Chain, fast_directory, open_store, save, warm_tokens

NUM_HURTS = int(os.environ.get("HURTS", "60"))
SHARD_BYTES = 1 << 15
FORMATS = [RecordFormat.of(LAYOUT, part.index) for part in LAYOUT.parts]


@dataclass(frozen=True)
class Whole:
    """A closed store as its files, early and late, and what it held then."""

    early: dict[str, bytes]
    late: dict[str, bytes]
    secret: bytes
    chains: dict[str, list[int]]


def files_of(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def opened_at(directory: Path) -> WarmStore:
    return open_store(directory, shard_bytes=SHARD_BYTES)


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    directory = fast_directory()
    place = directory / FINGERPRINT.hex()
    shared = list(range(40))
    chains = {
        agent: shared + [100 * number + i for i in range(30 + 17 * number)]
        for number, agent in enumerate(("ann", "bob", "cat", "dan"), start=1)
    }
    store = opened_at(directory)
    store.start()
    for agent in ("ann", "bob"):
        save(store, Chain.of(store, chains[agent][:60]), agent)
    save(store, Chain.of(store, [7] * 90), "gone")
    store.close()
    early = files_of(place)
    store = opened_at(directory)
    store.start()
    store.submit(Delete("default", "gone")).result(10)
    for agent, ids in chains.items():
        save(store, Chain.of(store, ids), agent)
    store.check("records")
    store.close()
    yield Whole(early, files_of(place), (directory / "secret").read_bytes(), chains)
    shutil.rmtree(directory)


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    shutil.rmtree(made)


def lay_out(directory: Path, files: dict[str, bytes], secret: bytes) -> Path:
    """Put the files of a store there, instead of what is there; return where its shards are."""
    place = directory / FINGERPRINT.hex()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    (directory / "secret").write_bytes(secret)
    return place


def serves_nothing_wrong(store: WarmStore, whole: Whole) -> None:
    """Every payload that can be loaded is that of its name (`load` asserts it), and no call raises."""
    for ids in whole.chains.values():
        assert 0 <= warm_tokens(store, Chain.of(store, ids)) <= len(ids)
    for record in store.sequences():
        ids = store.sequence_ids(record)
        assert len(ids) in (0, record.num_tokens)
        warm_tokens(store, Chain.of(store, ids, record.namespace))
        store.has_lost(record)
    store.stats()


def is_whole(store: WarmStore) -> bool:
    """What `check` says."""
    try:
        store.check("records")
    except (AssertionError, sqlite3.Error, ValueError, TypeError, OverflowError):
        return False
    return True


def heals(store: WarmStore, whole: Whole) -> None:
    """Saving goes on: what was lost is saved again, and then everything is whole and warm."""
    for _ in range(8):  # a load may find one damaged block at a time
        for agent, ids in whole.chains.items():
            warm_tokens(store, Chain.of(store, ids))
            save(store, Chain.of(store, ids), agent)
    for ids in whole.chains.values():
        assert warm_tokens(store, Chain.of(store, ids)) == len(ids)
    assert store.stats().last_error is None


def used_ranges(files: dict[str, bytes], name: str) -> list[tuple[int, int]]:
    """Where records in use lie in a shard."""
    _, part, number = Path(name).stem.split("-")
    form = FORMATS[int(part)]
    slots_per_shard = (len(files[name]) - len(shard_header(1, form))) // form.record_bytes
    header = len(shard_header(slots_per_shard, form))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        index = bytearray(files["index.db"])
        index[18:20] = b"\1\1"  # not in WAL mode, which a database in memory cannot be
        connection.deserialize(bytes(index))
        slots = [row[0] for row in connection.execute("SELECT slot FROM block WHERE part = ?", (int(part),))]
    rows = [slot - int(number) * slots_per_shard for slot in slots]
    return [
        (header + row * form.record_bytes, header + (row + 1) * form.record_bytes)
        for row in rows
        if 0 <= row < slots_per_shard
    ]


def hurt(content: bytes, random: np.random.Generator) -> tuple[bytes, tuple[int, int]]:
    """The content with a flipped bit, a run of noise or zeros, or cut off; and the range that may differ."""
    at = int(random.integers(len(content)))
    kind = random.choice(["flip", "noise", "zeros", "cut"])
    if kind == "cut":
        return content[:at], (at, len(content))
    length = 1 if kind == "flip" else int(random.integers(1, 6000))
    run = content[at : at + length]
    if kind == "flip":
        new = bytes([run[0] ^ 1 << int(random.integers(8))])
    else:
        new = random.bytes(len(run)) if kind == "noise" else bytes(len(run))
    return content[:at] + new + content[at + len(run) :], (at, at + len(run))


@pytest.mark.usefixtures("quiet")
def test_hurt_shards_are_noticed_not_served_and_mended(directory: Path, whole: Whole) -> None:
    random = np.random.default_rng(1)
    noticed = 0
    names = sorted(name for name in whole.late if name.startswith("blocks-"))
    assert len(names) >= 4
    for number in range(NUM_HURTS):
        name = str(random.choice(names))
        content, (first, last) = hurt(whole.late[name], random)
        lay_out(directory, {**whole.late, name: content}, whole.secret)
        old = whole.late[name]
        differs = any(
            content[max(a, first) : min(b, last)] != old[max(a, first) : min(b, last)]
            for a, b in used_ranges(whole.late, name)
            if a < last and first < b
        )
        store = opened_at(directory)
        store.start()
        try:
            assert is_whole(store) == (not differs), f"hurt {number} of {name} at {first}"
            serves_nothing_wrong(store, whole)
            heals(store, whole)
            assert is_whole(store)
        finally:
            store.close()
        noticed += differs
    assert noticed > NUM_HURTS // 10


@pytest.mark.usefixtures("quiet")
def test_a_hurt_index_is_noticed_not_served_and_mended(directory: Path, whole: Whole) -> None:
    random = np.random.default_rng(2)
    outcomes = {"went on": 0, "made anew": 0, "refused": 0}
    for number in range(NUM_HURTS):
        content, _ = hurt(whole.late["index.db"], random)
        place = lay_out(directory, {**whole.late, "index.db": content}, whole.secret)
        try:
            store = opened_at(directory)
        except StoreError:
            outcomes["refused"] += 1
            continue
        store.start()
        try:
            serves_nothing_wrong(store, whole)
            save(store, Chain.of(store, range(50, 120)), "after")
            went_on = store.stats().last_error is None
            assert went_on or not is_whole(store), f"hurt {number}: saving fails though check finds nothing"
        finally:
            store.close()
        if not went_on:
            # what its message tells the operator to do
            for path in place.glob("index.db*"):
                path.unlink()
            store = opened_at(directory)
            store.start()
        else:
            store = opened_at(directory)
            store.start()
        outcomes["went on" if went_on else "made anew"] += 1
        try:
            serves_nothing_wrong(store, whole)
            if not went_on:
                heals(store, whole)
                assert is_whole(store)
        finally:
            store.close()
    print(outcomes)
    assert outcomes["refused"] == 0 and outcomes["went on"] > NUM_HURTS // 4


@pytest.mark.usefixtures("quiet")
def test_a_hurt_log_of_the_index_costs_the_last_turns_at_most(directory: Path, whole: Whole) -> None:
    """The WAL of a store that was killed: what it holds beyond the damage is lost, nothing else."""
    random = np.random.default_rng(3)
    store = opened_at(directory)
    store.start()
    for agent, ids in whole.chains.items():
        save(store, Chain.of(store, ids), agent)
    files = files_of(directory / FINGERPRINT.hex())
    secret = store.secret
    store.close()
    files.pop("index.db-shm")
    assert len(files["index.db-wal"]) > 10_000
    for _ in range(NUM_HURTS // 2):
        content, _ = hurt(files["index.db-wal"], random)
        lay_out(directory, {**files, "index.db-wal": content}, secret)
        store = opened_at(directory)
        store.start()
        try:
            assert is_whole(store)
            serves_nothing_wrong(store, whole)
            heals(store, whole)
        finally:
            store.close()


def other_store(directory: Path) -> dict[str, bytes]:
    """The files of a store with another secret and other agents."""
    store = opened_at(directory / "other")
    store.start()
    for number in range(5):
        save(store, Chain.of(store, [number] * (20 + 9 * number)), f"stranger {number}")
    store.close()
    return files_of(directory / "other" / FINGERPRINT.hex())


def swapped(files: dict[str, bytes], a: str, b: str) -> dict[str, bytes]:
    return {**files, a: files[b], b: files[a]}


MIXED: dict[str, Callable[[Whole, Path], dict[str, bytes]]] = {
    "index older than shards": lambda whole, path: {**whole.late, "index.db": whole.early["index.db"]},
    "index newer than shards": lambda whole, path: {**whole.early, "index.db": whole.late["index.db"]},
    "another store's index": lambda whole, path: {**whole.late, "index.db": other_store(path)["index.db"]},
    "another store's shards": lambda whole, path: {**other_store(path), "index.db": whole.late["index.db"]},
    "a shard missing": lambda whole, path: {n: c for n, c in whole.late.items() if n != "blocks-0-000.safetensors"},
    "all shards missing": lambda whole, path: {n: c for n, c in whole.late.items() if not n.startswith("blocks")},
    "shards swapped": lambda whole, path: swapped(whole.late, "blocks-0-000.safetensors", "blocks-0-001.safetensors"),
    "parts swapped": lambda whole, path: swapped(whole.late, "blocks-0-000.safetensors", "blocks-1-000.safetensors"),
    "shards empty": lambda whole, path: {n: b"" if n.startswith("blocks") else c for n, c in whole.late.items()},
}


@pytest.mark.parametrize("kind", MIXED)
def test_files_that_do_not_belong_together_serve_nothing_wrong(directory: Path, whole: Whole, kind: str) -> None:
    lay_out(directory, MIXED[kind](whole, directory), whole.secret)
    store = opened_at(directory)
    store.start()
    # no row of another store's index verifies: it is set aside and made anew
    assert is_whole(store) == (kind == "another store's index"), "check says nothing"
    serves_nothing_wrong(store, whole)
    heals(store, whole)
    store.close()
    store = opened_at(directory)
    store.start()
    for ids in whole.chains.values():
        assert warm_tokens(store, Chain.of(store, ids)) == len(ids)
    store.close()


FOREIGN = {
    "blocks-0-copy.safetensors": b"x",
    "blocks-0-000 (copy).safetensors": b"y" * 9000,
    "blocks-7-000.safetensors": b"z",
    "blocks-0--01.safetensors": b"z",
    "notes.txt": b"do not touch",
    "index.db.bak": b"old",
    "index.db-journal": b"a journal that is none" * 100,
    ".DS_Store": b"\0\1",
}


@pytest.mark.parametrize("index", ["there", "missing"])
def test_foreign_files_are_left_alone(directory: Path, whole: Whole, index: str) -> None:
    files = {**whole.late, **FOREIGN}
    if index == "missing":
        del files["index.db"]
    place = lay_out(directory, files, whole.secret)
    (place / "blocks-0-099.safetensors").mkdir()
    (directory / "another-dir").mkdir()
    (directory / ("ab" * 32)).write_bytes(b"a file where a store might be")
    store = opened_at(directory)
    store.start()
    assert is_whole(store)
    for ids in whole.chains.values():
        assert warm_tokens(store, Chain.of(store, ids)) == len(ids)
    heals(store, whole)
    save(store, Chain.of(store, [5] * 100), "purged")
    store.submit(Purge("default", "purged")).result(10)
    assert store.known_elsewhere("default", "ann") is None
    store.close()
    after = files_of(place)
    assert {name: after.get(name) for name in FOREIGN if name != "index.db-journal"} == {
        name: content for name, content in FOREIGN.items() if name != "index.db-journal"
    }


@pytest.mark.parametrize("what", ["link", "dangling link", "directory"])
def test_what_stands_in_a_shards_place_is_not_followed(
    directory: Path, whole: Whole, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = lay_out(directory, whole.late, whole.secret)
    shard, elsewhere = place / "blocks-0-000.safetensors", directory / "elsewhere"
    held = shard.read_bytes()
    shard.unlink()
    if what == "directory":
        shard.mkdir()
    else:
        shard.symlink_to(elsewhere)
    if what == "link":
        elsewhere.write_bytes(held)
    store = opened_at(directory)
    store.start()
    assert not is_whole(store)
    serves_nothing_wrong(store, whole)
    for ids in whole.chains.values():
        assert warm_tokens(store, Chain.of(store, ids)) < len(ids), "a link was followed"
    with caplog.at_level(logging.ERROR):
        save(store, Chain.of(store, [3] * 3 * SIZE), "new")
    if store.stats().last_error is not None:
        assert "SAVING FAILED" in caplog.text and not store.stats().saving_ok
    store.close()
    assert elsewhere.exists() == (what == "link")
    assert what != "link" or elsewhere.read_bytes() == held
    # the operator takes it away
    shard.rmdir() if what == "directory" else shard.unlink()
    store = opened_at(directory)
    store.start()
    heals(store, whole)
    assert is_whole(store)
    store.close()
