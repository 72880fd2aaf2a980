"""Changing the key of an encrypted store: while it is in use, and when the change is killed at any point."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import StoreError
from rekindle.store.files.keys import MOST_KEYS, StoreKeys, add_key, directory_keys, keep_key, store_keys
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.warm import WarmStore
from tests.store.chains import Chain, fast_directory, open_store, save, warm_tokens

OLD, NEW, THIRD = (bytes([digit]) * 32 for digit in (1, 2, 3))
FS = OsFileSystem()


class Killed(OsFileSystem):
    """Ends its process by SIGKILL at the operation of this number that changes anything, half of a write done."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def write(self, fd: int, offset: int, data: Any) -> None:
        if not self.left:
            super().write(fd, offset, bytes(data)[: len(data) // 2])
        self._step()
        super().write(fd, offset, data)

    def resize(self, fd: int, num_bytes: int) -> None:
        self._step()
        super().resize(fd, num_bytes)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


@pytest.fixture
def places() -> Iterator[list[Path]]:
    """A store's directory with two slots, and one of sessions, all encrypted with the old key."""
    top = fast_directory()
    directories = [top / "store", top / "data"]
    for directory in (*directories, top / "store/slot-0", top / "store/slot-5"):
        directory_keys(directory, FS, OLD)
    yield [*directories, top / "store/slot-0", top / "store/slot-5"]
    shutil.rmtree(top)


def opens(places: list[Path], key: bytes) -> list[StoreKeys | None]:
    """What a key finds in each place."""
    found: list[StoreKeys | None] = []
    for place in places:
        try:
            found.append(store_keys(place, FS, key))
        except StoreError as error:
            assert "another key" in str(error)
            found.append(None)
    return found


def killed_at(step: int, change: Callable[[OsFileSystem], object]) -> bool:
    """Whether a change was killed at this step, in a process of its own; False if it ended before."""
    process = os.fork()
    if not process:
        how = signal.SIGUSR2  # an error
        try:
            change(Killed(step))
            how = signal.SIGUSR1
        finally:
            os.kill(os.getpid(), how)
    _, status = os.waitpid(process, 0)
    assert status in (signal.SIGUSR1, signal.SIGKILL), status
    return status == signal.SIGKILL


def ends_at_every_step(places: list[Path], change: Callable[[OsFileSystem], object], key: bytes) -> int:
    """Kill a change at each of its steps, from the beginning; a key opens all each time. Returns how many there are."""
    before, contents = opens(places, key), [(place / "secret").read_bytes() for place in places]
    step = 0
    while killed_at(step, change):
        assert opens(places, key) == before, step
        if step % 3 == 0:  # the same call ends what was begun
            change(FS)
            assert opens(places, key) == before, step
        for place, content in zip(places, contents, strict=True):
            (place / "secret").write_bytes(content)
        step += 1
    return step


def test_a_change_that_is_killed_anywhere_leaves_all_readable_and_can_be_ended(places: list[Path]) -> None:
    before = opens(places, OLD)
    assert None not in before and before[0] == before[2] == before[3] != before[1]
    assert ends_at_every_step(places, lambda fs: add_key(places[:2], OLD, NEW, fs), OLD) > 16
    assert opens(places, OLD) == opens(places, NEW) == before
    assert add_key(places[:2], OLD, NEW) == 4  # once more changes nothing
    assert ends_at_every_step(places, lambda fs: keep_key(places[:2], NEW, fs), NEW) > 16
    assert opens(places, NEW) == before and opens(places, OLD) == [None] * 4
    for place in places:
        assert [path.name for path in place.iterdir() if path.is_file()] == ["secret"]
        assert (place / "secret").stat().st_size == 8 + 1 + 92


def test_what_cannot_be_changed_changes_nothing(places: list[Path]) -> None:
    directory_keys(places[1] / "slot-1", FS, OLD)
    keep_key(places[:1], OLD)
    add_key([places[1]], OLD, NEW)
    keep_key([places[1]], NEW)
    before = [(place / "secret").read_bytes() for place in places]
    for change in (lambda: add_key(places[:2], OLD, THIRD), lambda: keep_key(places[:2], OLD)):
        with pytest.raises(StoreError, match="another key"):
            change()
    (places[3] / "secret").write_bytes(bytes(32))
    with pytest.raises(StoreError, match="without encryption"):
        add_key(places[:1], OLD, NEW)
    assert [(place / "secret").read_bytes() for place in places[:3]] == before[:3]
    for number in range(MOST_KEYS - 1):
        add_key([places[1]], NEW, bytes([10 + number]) * 32)
    with pytest.raises(StoreError, match="end the last change first"):
        add_key([places[1]], NEW, b"x" * 32)
    assert opens(places[1:2], NEW) != [None]


def test_the_old_content_is_overwritten(places: list[Path]) -> None:
    held = os.open(places[0] / "secret", os.O_RDONLY)
    keep_key(places[:1], OLD)
    assert os.pread(held, 200, 0).strip(b"\0")  # nothing to drop, nothing written
    add_key(places[:1], OLD, NEW)
    assert not os.pread(held, 200, 0).strip(b"\0")
    os.close(held)


def test_a_store_in_use_goes_on_and_a_new_slot_has_the_new_key(
    opened: Callable[..., WarmStore], tmp_path: Path
) -> None:
    directory = tmp_path / "store"
    store = opened(key=OLD.hex())
    first, second = Chain.of(store, range(40)), Chain.of(store, range(500, 540))
    save(store, first)
    add_key([directory], OLD, NEW)
    save(store, second, "bob")
    assert warm_tokens(store, first) == warm_tokens(store, second) == 40
    keep_key([directory], NEW)
    assert directory_keys(directory / "slot-0", FS, NEW).secret == store.secret
    save(store, Chain.of(store, range(900, 940)), "cleo")
    store.check("records")
    store.close()
    with pytest.raises(StoreError, match="another key"):
        open_store(directory, key=OLD.hex())
    with closing(open_store(directory, key=NEW.hex())) as again:
        again.start()
        assert warm_tokens(again, first) == warm_tokens(again, second) == 40
        assert {record.agent for record in again.sequences()} == {"ann", "bob", "cleo"}
