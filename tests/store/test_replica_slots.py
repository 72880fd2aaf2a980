"""Replicas on one directory: each has a slot, a killed one's is taken over warm, and none is had by two."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rekindle.config import StoreSettings
from rekindle.errors import StoreError, StoreLocked, StoreRefused
from rekindle.store import admin
from rekindle.store.files.keys import derived_secret
from rekindle.store.replica_slots import ReplicaSlots
from rekindle.store.warm import WarmStore
from tests.forks import forking
from tests.store.chains import FINGERPRINT, LAYOUT, SIZE, Chain, open_store, save, warm_tokens

NAME, OTHER = FINGERPRINT.hex(), bytes(32)
SECRET, IDS = "seventeen letters", range(3 * SIZE + 5)
Claim = Callable[..., tuple[str, WarmStore]]


def opened(directory: Path, settings: StoreSettings) -> WarmStore:
    """A started store of the tiny layout."""
    store = open_store(directory)
    store.start()
    return store


def claimed(directory: Path, slot: str = "auto", **more: Any) -> tuple[str, WarmStore]:
    """Open the store that the settings find; return its slot, too."""
    given = {name: more.pop(name) for name in ("secret", "stale_ttl_s") if name in more}
    slots = ReplicaSlots(StoreSettings(dir=directory, slot=slot, **given), more.pop("model", FINGERPRINT), **more)
    store = slots.open(opened)
    return slots.settings.slot, store


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[Claim]:
    """`claimed` in the test's directory; what is left open is closed."""
    with ExitStack() as stack:

        def make(slot: str = "auto", **more: Any) -> tuple[str, WarmStore]:
            found, store = claimed(tmp_path, slot, **more)
            stack.callback(store.close)
            return found, store

        yield make


def test_each_has_its_own_and_a_free_one_is_warm(claim: Claim, tmp_path: Path) -> None:
    (first, one), (second, two) = claim(), claim()
    assert (first, second) == ("0", "1")
    assert one.secret == two.secret == (tmp_path / "secret").read_bytes() == (tmp_path / "slot-1/secret").read_bytes()
    chain = Chain.of(one, IDS)
    assert chain.blocks[0].identity.hash == Chain.of(two, IDS).blocks[0].identity.hash
    save(one, chain)
    assert warm_tokens(two, chain) == 0
    one.close()
    found, heir = claim()
    assert (found, warm_tokens(heir, chain)) == ("0", len(IDS))
    assert claim()[0] == "2"


def test_without_a_slot_everything_is_as_before(claim: Claim, tmp_path: Path) -> None:
    assert claim("off")[0] == "off"
    assert {path.name for path in tmp_path.iterdir()} == {"secret", NAME}


def test_one_that_is_named_is_taken_or_refused(claim: Claim, tmp_path: Path) -> None:
    assert claim("3")[0] == "3"
    with pytest.raises(StoreLocked, match=rf"slot-3/.* in use by process {os.getpid()};.*slot=auto"):
        claim("3")
    assert sorted(path.name for path in tmp_path.glob("slot-*")) == ["slot-3"]


def test_a_free_one_that_remembers_goes_before_a_new_one(claim: Claim) -> None:
    claim("2")[1].close()
    assert claim()[0] == "2"
    assert claim()[0] == "0"


def test_another_models_slot_is_no_obstacle(claim: Claim, tmp_path: Path) -> None:
    settings = StoreSettings(dir=tmp_path, slot="auto")

    def open_other(directory: Path, settings: StoreSettings) -> WarmStore:
        return WarmStore.open(directory, fingerprint=OTHER, layout=LAYOUT, settings=settings)

    with closing(ReplicaSlots(settings, OTHER).open(open_other)):
        assert claim()[0] == "0"


def test_when_all_are_in_use_the_error_says_so(claim: Claim) -> None:
    for number in range(2):
        assert claim(num_slots=2)[0] == str(number)
    with pytest.raises(StoreError, match=r"all 2 slots of .* are in use .*: stop a replica"):
        claim(num_slots=2)


def test_threads_that_start_together_have_different_ones(tmp_path: Path) -> None:
    claim_them_all(tmp_path, num=8)
    again = claim_them_all(tmp_path, num=8)  # now all of them exist
    assert sorted(again) == [str(number) for number in range(8)]


def claim_them_all(directory: Path, num: int) -> list[str]:
    """The slots of so many threads that start at the same moment; the stores are closed."""
    together, found, stores = threading.Barrier(num), list[str](), list[WarmStore]()

    def start() -> None:
        together.wait()
        slot, store = claimed(directory)
        found.append(slot)
        stores.append(store)

    threads = [threading.Thread(target=start) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert len(set(found)) == num, found
    return found


def replica(directory: Path, pipe: Connection) -> None:
    """What a process of its own does until it is killed: claim a slot at the word, save a chain, say so."""
    pipe.send("ready")
    pipe.recv()
    slot, store = claimed(directory)
    chain = Chain.of(store, range(int(slot) * 1000, int(slot) * 1000 + len(IDS)))
    save(store, chain)
    pipe.send((slot, store.secret, chain.blocks[-1].identity.hash))
    pipe.recv()


def test_processes_that_start_together_and_one_that_is_killed(claim: Claim, tmp_path: Path) -> None:
    context = forking()
    pipes, processes = [], []
    for _ in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=replica, args=(tmp_path, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 3
        for pipe in pipes:
            pipe.send("go")
        told = [pipe.recv() for pipe in pipes]
        assert sorted(slot for slot, *_ in told) == ["0", "1", "2"]
        assert len({secret for _, secret, _ in told}) == 1
        slot, secret, head = told[1]
        processes[1].kill()
        processes[1].join()
        found, heir = claim()
        assert (found, heir.secret) == (slot, secret) and heir.contains(head)
        chain = Chain.of(heir, range(int(slot) * 1000, int(slot) * 1000 + len(IDS)))
        assert warm_tokens(heir, chain) == len(IDS)
        assert claim()[0] == "3"
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_glance_of_another_process_does_not_cost_the_memory(claim: Claim, tmp_path: Path) -> None:
    claim()[1].close()
    with (tmp_path / "slot-0" / NAME / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as listing takes
        slot, _ = claim(sleep=lambda seconds: fcntl.flock(lock, fcntl.LOCK_UN))
    assert slot == "0"


def test_a_damaged_one_is_repaired_as_any_store(claim: Claim, tmp_path: Path) -> None:
    _, store = claim()
    chain = Chain.of(store, IDS)
    save(store, chain)
    store.close()
    (tmp_path / "slot-0" / NAME / "index.db").write_bytes(b"no index" * 1000)
    slot, store = claim()
    assert (slot, warm_tokens(store, chain)) == ("0", len(IDS))


@pytest.mark.parametrize("what", ["secret", "link", "file"])
def test_one_that_cannot_be_used_is_passed_over(
    claim: Claim, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    claim()[1].close()
    place = tmp_path / "slot-0"
    if what == "secret":
        (place / "secret").write_bytes(bytes(32))
    elif what == "link":
        (place / NAME / "index.db").rename(place / "elsewhere")
        (place / NAME / "index.db").symlink_to(place / "elsewhere")
    else:
        (place / NAME / "lock").unlink()
        (place / NAME / "lock").mkdir()
    with caplog.at_level(logging.WARNING):
        assert claim()[0] == "1"
    words = {"secret": "has another secret than", "link": "is a symbolic link", "file": "Is a directory"}[what]
    assert "slot 0 is passed over" in caplog.text and words in caplog.text
    with pytest.raises(StoreError, match=words):
        claim("0")


def test_a_disk_that_refuses_makes_no_new_one(claim: Claim, tmp_path: Path) -> None:
    claim()[1].close()

    def full(directory: Path, settings: StoreSettings) -> WarmStore:
        raise StoreRefused(os.strerror(errno.ENOSPC))

    slots = ReplicaSlots(StoreSettings(dir=tmp_path, slot="auto"), FINGERPRINT)
    with pytest.raises(StoreRefused, match="No space"):
        slots.open(full)
    assert slots.settings.slot == "0" and not (tmp_path / "slot-1").exists()


def test_equal_secrets_give_equal_names_anywhere(tmp_path: Path) -> None:
    stores = [claimed(tmp_path / name, slot, secret=SECRET)[1] for name, slot in (("a", "off"), ("b", "auto"))]
    other = claimed(tmp_path / "c", "off", secret=SECRET + "!")[1]
    one, two = (Chain.of(store, IDS) for store in stores)
    assert [block.identity.hash for block in one.blocks] == [block.identity.hash for block in two.blocks]
    assert Chain.of(other, IDS).root != one.root == two.root
    assert stores[0].secret == derived_secret(SECRET) and SECRET.encode() not in stores[0].secret
    for store in (*stores, other):
        store.close()
    assert open_and_close(tmp_path / "b" / "slot-0") == open_and_close(tmp_path / "a") == derived_secret(SECRET)


def open_and_close(directory: Path) -> bytes:
    """The secret of a store that is opened without the setting, as tools do."""
    with closing(open_store(directory)) as store:
        return store.secret


@pytest.mark.parametrize("slot", ["off", "auto"])
def test_another_secret_is_refused_and_changes_nothing(tmp_path: Path, slot: str) -> None:
    claimed(tmp_path, slot)[1].close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=r"made with another secret.*leave `secret` .*out") as caught:
        claimed(tmp_path, slot, secret=SECRET)
    assert SECRET not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_slots_are_listed_checked_and_collected_with_their_directory(claim: Claim, tmp_path: Path) -> None:
    claim("off")[1].close()
    for slot in ("0", "1"):
        _, store = claim(slot)
        save(store, Chain.of(store, IDS))
        store.close()
    listed = {info.slot: info for info in admin.list_stores(tmp_path)}
    assert {slot: info.num_agents for slot, info in listed.items()} == {None: 0, 0: 1, 1: 1}
    assert [info.slot for info in admin.list_stores(tmp_path / "slot-1")] == [None]
    for info in listed.values():
        assert admin.check_store(info.parent(tmp_path), NAME).is_sound
    _, held = claim("1")
    gone = admin.collect_stale(tmp_path, None, 0.0, clock=lambda: 1e12)
    assert sorted(str(info.slot) for info in gone) == ["0", "None"]
    assert [info.slot for info in admin.list_stores(tmp_path)] == [1]
    held.close()


def test_other_models_stale_stores_leave_every_slot(claim: Claim, tmp_path: Path) -> None:
    place = tmp_path / "slot-5" / OTHER.hex()
    place.mkdir(parents=True)
    (place / "lock").touch()
    claim("1")[1].close()
    assert place.exists()
    os.utime(place / "lock", (1, 1))
    assert claim()[0] == "1" and not place.exists()
