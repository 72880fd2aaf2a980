"""A disk that is full costs what cannot be saved, is said once, and is forgotten when there is room again.

The disk is really full: a small one is mounted where the system lets us, and everywhere files are kept from growing.
Besides, every single operation of the sync module is refused once, and from some moment on.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.errors import StoreError
from rekindle.store.commands import Delete, Purge
from rekindle.store.files.sync import Access, OsFileSystem
from rekindle.store.warm import WarmStore
from tests.store.chains import Chain, fast_directory, open_store, save, warm_tokens
from tests.store.confined import limit_files, mount_small, run_apart

SMALL_DISK = 500_000
FIRST, SECOND = list(range(70)), [5] * 200


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    shutil.rmtree(made)


def is_warm(store: WarmStore, ids: list[int]) -> bool:
    return warm_tokens(store, Chain.of(store, ids)) == len(ids)


def fill(store: WarmStore) -> list[list[int]]:
    """Save agent after agent until saving fails; the ids of those that were saved."""
    saved: list[list[int]] = []
    for number in range(500):
        before = store.stats().turns_saved
        ids = [number] * 100
        save(store, Chain.of(store, ids), f"agent {number}")
        if store.stats().turns_saved == before:
            return saved
        saved.append(ids)
    raise AssertionError("it was never full")


def on_a_small_disk(directory: Path) -> str:
    """Fill a disk to the last byte, go on, reopen, make room; "limit" where none can be mounted."""
    if not mount_small(directory, SMALL_DISK):
        return beyond_a_limit(directory)
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(200_000))
    place = directory / "store"
    store = open_store(place)
    store.start()
    saved = fill(store)
    stats = store.stats()
    assert not stats.saving_ok and stats.last_error is not None and stats.failed_saves >= 1, stats
    assert saved and all(is_warm(store, ids) for ids in saved), "what was saved has gone"
    store.check("records")
    store.close()
    try:
        store = open_store(place)
    except StoreError as error:
        assert "full" in str(error) or os.strerror(errno.ENOSPC) in str(error), error
    else:
        store.start()
        assert all(is_warm(store, ids) for ids in saved), "what was saved is not there after a restart"
        store.close()
    ballast.unlink()
    goes_on(place, saved)
    return "disk"


def beyond_a_limit(directory: Path) -> str:
    """The same with files that may not grow."""
    place = directory / "store"
    store = open_store(place)
    store.start()
    save(store, Chain.of(store, FIRST))
    limit_files(max(path.stat().st_size for path in place.rglob("*") if path.suffix != ".safetensors"))
    fill(store)
    stats = store.stats()
    assert not stats.saving_ok and stats.last_error is not None, stats
    assert is_warm(store, FIRST)
    limit_files(None)
    save(store, Chain.of(store, SECOND), "bob")
    assert store.stats().saving_ok and is_warm(store, SECOND)
    store.check("records")
    store.close()
    goes_on(place, [FIRST, SECOND])
    return "limit"


def goes_on(place: Path, saved: list[list[int]]) -> None:
    """Open the store where there is room again."""
    store = open_store(place)
    store.start()
    store.check("records")
    assert all(is_warm(store, ids) for ids in saved)
    save(store, Chain.of(store, [9] * 100), "later")
    assert store.stats().saving_ok and is_warm(store, [9] * 100)
    store.close()


@pytest.mark.parametrize("how", [on_a_small_disk, beyond_a_limit])
def test_a_full_disk_costs_what_cannot_be_saved(directory: Path, how: Any) -> None:
    print(run_apart(how, directory))


class RefusingFileSystem(OsFileSystem):
    """Refuses its operations number `first` to `last` with `error`."""

    def __init__(self, first: int, last: int, error: int) -> None:
        self.count = 0
        self.refused = range(first, last)
        self._error = error

    def _maybe_refuse(self) -> None:
        self.count += 1
        if self.count - 1 in self.refused:
            raise OSError(self._error, os.strerror(self._error))

    def make_directory(self, path: Path) -> None:
        self._maybe_refuse()
        super().make_directory(path)

    def open_file(self, path: Path, access: Access) -> int:
        if access == "create":
            self._maybe_refuse()
        return super().open_file(path, access)

    def resize(self, fd: int, num_bytes: int) -> None:
        self._maybe_refuse()
        super().resize(fd, num_bytes)

    def write(self, fd: int, offset: int, data: np.ndarray | bytes) -> None:
        self._maybe_refuse()
        super().write(fd, offset, data)

    def sync_data(self, fd: int) -> None:
        self._maybe_refuse()
        super().sync_data(fd)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        self._maybe_refuse()
        super().punch(fd, offset, num_bytes)

    def sync_directory(self, path: Path) -> None:
        self._maybe_refuse()
        super().sync_directory(path)


def work(directory: Path, fs: RefusingFileSystem) -> dict[str, list[int]]:
    """Turns, a deletion and a purge on a disk that refuses now and then; what was told saved."""
    told: dict[str, int] = {}
    store = open_store(
        directory,
        fs=fs,
        shard_bytes=1 << 14,
        on_saved=lambda namespace, agent, branch, num_tokens: told.__setitem__(agent, num_tokens),
    )
    store.start()
    turns = {agent: [*range(20), *[ord(agent[0])] * (20 + 12 * number)] for number, agent in enumerate(("ann", "bob"))}
    for agent, ids in turns.items():
        save(store, Chain.of(store, ids), agent)
        save(store, Chain.of(store, [*ids, 1, 2, 3]), agent)
    save(store, Chain.of(store, [6] * 50), "cat")
    told.pop("cat", None)
    store.submit(Delete("default", "cat")).result(10)
    save(store, Chain.of(store, [7] * 50), "dan")
    told.pop("dan", None)
    try:
        store.submit(Purge("default", "dan")).result(10)
    except StoreError as error:
        assert "purge" in str(error)
    save(store, Chain.of(store, [8] * 40), "eve")
    turns["eve"] = [8] * 40
    saved = {agent: [*turns[agent], 1, 2, 3][:num_tokens] for agent, num_tokens in told.items()}
    for ids in saved.values():
        assert is_warm(store, ids)
    store.check("records")
    # the disk is mended: all that could not be saved can be now
    fs.refused = range(0)
    for agent, ids in turns.items():
        save(store, Chain.of(store, ids), f"{agent} again")
        assert is_warm(store, ids)
    assert store.stats().saving_ok
    store.check("records")
    store.close()
    return saved


@pytest.mark.parametrize(("times", "error"), [(1, errno.ENOSPC), (7, errno.EIO)], ids=["1-ENOSPC", "7-EIO"])
def test_any_operation_may_be_refused(directory: Path, times: int, error: int) -> None:
    counting = RefusingFileSystem(0, 0, error)
    work(directory / "whole", counting)
    assert counting.count > 60
    refusals = 0
    for number in range(counting.count):
        place = directory / f"{number}"
        fs = RefusingFileSystem(number, number + times, error)
        try:
            saved = work(place, fs)
        except StoreError as refused:
            refusals += 1
            assert number < 20 and "as store" in str(refused), refused
            saved = {}
        store = open_store(place, shard_bytes=1 << 14)
        store.start()
        store.check("records")
        for agent, ids in saved.items():
            assert is_warm(store, ids), f"{agent} is gone after operation {number} was refused"
        assert [record for record in store.sequences() if record.agent == "dan"] == []
        store.close()
        shutil.rmtree(place)
    assert refusals > 0
