"""One budget for a directory: what several models have in it stays within `disk_bytes` together."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from rekindle.cache.blocks.hashing import root_hash
from rekindle.config import StoreSettings
from rekindle.errors import StoreLocked
from rekindle.store.commands import Pin
from rekindle.store.files.directory import StoreDirectory
from rekindle.store.files.sync import FileSystem, OsFileSystem
from rekindle.store.maintenance.stale import remove, store_bytes
from rekindle.store.warm import WarmStore
from tests.store.chains import BLOCK_BYTES, LAYOUT, SIZE, Chain, save, warm_tokens

NUM_BLOCKS = 64  # of each model; a budget of 100 is less than two models have, more than one
OpenModel = Callable[..., WarmStore]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[OpenModel]:
    """Opens the store of a model, named by a number, in the directory that all of them share."""
    stores: list[WarmStore] = []

    def open_one(number: int, num_blocks: float = 100, fs: FileSystem | None = None) -> WarmStore:
        settings = StoreSettings(staging_bytes=1 << 20, disk_bytes=int(num_blocks * BLOCK_BYTES))
        store = WarmStore.open(
            tmp_path / "store",
            fingerprint=bytes([number] * 32),
            layout=LAYOUT,
            settings=settings,
            model=f"m{number}",
            fs=fs,
        )
        stores.append(store)
        store.start()
        return store

    yield open_one
    for store in stores:
        store.close()


def place(tmp_path: Path, number: int) -> Path:
    return tmp_path / "store" / bytes([number] * 32).hex()


def talk(store: WarmStore, number: int, agent: str = "ann", num_blocks: int = NUM_BLOCKS) -> Chain:
    """Save that many blocks of an agent with the model of this number."""
    seed = sum(agent.encode()) * 10_000
    root = root_hash(fingerprint=bytes([number] * 32), namespace="default", cache_salt="", secret=store.secret)
    chain = Chain(root, Chain.of(store, [seed + token for token in range(num_blocks * SIZE)]).ids)
    save(store, chain, agent)
    return chain


def age(path: Path, seconds: float) -> None:
    for file in path.iterdir():
        used = file.stat().st_mtime - seconds
        os.utime(file, (used, used))


def taken(tmp_path: Path) -> int:
    """Bytes on disk of the records of all models."""
    shards = (tmp_path / "store").glob("*/blocks-*.safetensors")
    return sum(path.stat().st_blocks * 512 for path in shards)


def test_two_models_stay_within_one_budget(model: OpenModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = model(1)
    talk(first, 1)
    first.close()
    second = model(2)
    with caplog.at_level(logging.WARNING):
        chain = talk(second, 2)
    assert taken(tmp_path) <= 100 * BLOCK_BYTES
    assert warm_tokens(second, chain) == NUM_BLOCKS * SIZE, "the model that is served keeps all of its own"
    assert not place(tmp_path, 1).exists()
    (line,) = (record.getMessage() for record in caplog.records if "removed the store" in record.getMessage())
    assert "of m1" in line and "1 agents" in line and "disk_bytes" in line


def test_what_fits_beside_others_removes_nothing(model: OpenModel, tmp_path: Path) -> None:
    first = model(1)
    talk(first, 1)
    first.close()
    second = model(2, num_blocks=2 * NUM_BLOCKS + 60)  # indexes and locks of the other count, too
    talk(second, 2)
    assert place(tmp_path, 1).exists() and second.stats().blocks_evicted == 0


def test_the_least_recently_used_goes_first_and_pins_last(model: OpenModel, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store = model(number, num_blocks=1000)
        talk(store, number, num_blocks=20)
        if number == 1:
            assert store.submit(Pin("default", "ann", math.inf)).result(10)
        store.close()
    for number, seconds in ((1, 300.0), (2, 100.0), (3, 200.0)):
        age(place(tmp_path, number), seconds)
    of_others = sum(store_bytes(place(tmp_path, number)) for number in (1, 2, 3))
    each = of_others // 3 // BLOCK_BYTES
    last = model(4, num_blocks=of_others / BLOCK_BYTES + 4)
    talk(last, 4, "a", num_blocks=2)
    assert [place(tmp_path, number).exists() for number in (1, 2, 3)] == [True, True, True]
    talk(last, 4, "b", num_blocks=6)
    assert [place(tmp_path, number).exists() for number in (1, 2, 3)] == [True, True, False]
    talk(last, 4, "c", num_blocks=each)
    assert [place(tmp_path, number).exists() for number in (1, 2, 3)] == [True, False, False]
    talk(last, 4, "d", num_blocks=each)
    assert not place(tmp_path, 1).exists(), "a pin keeps an agent from going before others, not for ever"


def test_models_that_run_at_once_share_the_budget(model: OpenModel, tmp_path: Path) -> None:
    first, second = model(1), model(2)
    chain = talk(first, 1, num_blocks=70)
    other = talk(second, 2, num_blocks=40)
    assert place(tmp_path, 1).exists() and place(tmp_path, 2).exists()
    assert warm_tokens(second, other) == 40 * SIZE, "half of the budget is its own"
    assert warm_tokens(first, chain) == 70 * SIZE, "nobody else changes a store that is open"
    talk(first, 1, "bob", num_blocks=4)
    assert first.stats().blocks_evicted > 0
    assert taken(tmp_path) <= 100 * BLOCK_BYTES, "the one with more shrinks when it saves"


def test_a_budget_that_is_smaller_than_before_holds_at_once(model: OpenModel, tmp_path: Path) -> None:
    for number in (1, 2):
        store = model(number, num_blocks=1000)
        talk(store, number)
        store.close()
    second = model(2)
    assert second.flush(10)
    assert taken(tmp_path) <= 100 * BLOCK_BYTES and not place(tmp_path, 1).exists()
    assert second.stats().blocks_evicted == 0


def test_what_cannot_be_removed_is_said_once(
    model: OpenModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unremovable(OsFileSystem):
        """A system that removes no file."""

        def remove(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

    first = model(1)
    talk(first, 1)
    first.close()

    second = model(2, fs=Unremovable())
    for agent in "ab":
        talk(second, 2, agent, num_blocks=20)
    said = [record for record in caplog.records if "could not be removed" in record.getMessage()]
    assert len(said) == 1 and taken(tmp_path) <= 100 * BLOCK_BYTES


def test_a_lock_that_was_removed_meanwhile_is_taken_again(tmp_path: Path) -> None:
    class Removing(OsFileSystem):
        """Another process removes the store after its lock was opened and before it is locked."""

        def lock(self, fd: int, wait: Literal["wait", "soon", "refuse"]) -> bool:
            if not removed:
                removed.append(True)
                assert remove(place(tmp_path, 1), OsFileSystem())
            return super().lock(fd, wait)

    removed: list[bool] = []
    StoreDirectory.claim(tmp_path / "store", bytes([1] * 32), OsFileSystem()).release()
    held = StoreDirectory.claim(tmp_path / "store", bytes([1] * 32), Removing())
    with pytest.raises(StoreLocked):
        StoreDirectory.claim(tmp_path / "store", bytes([1] * 32), OsFileSystem())
    held.release()
