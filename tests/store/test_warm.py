"""The store's promises to the engine: order, dedupe, bounds, failures, locks and permissions."""

from __future__ import annotations

import errno
import logging
import math
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rekindle.errors import StoreError, StoreLocked
from rekindle.store.commands import Delete, Pin
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.warm import BlockBytes, WarmStore
from tests.store.chains import (
    BLOCK_BYTES,
    FINGERPRINT,
    LAYOUT,
    SIZE,
    Chain,
    load,
    open_store,
    payload_of,
    save,
    warm_tokens,
)

Opened = Callable[..., WarmStore]


def test_an_agent_is_found_again(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(3 * SIZE + 5))
    save(store, chain, "ann")
    store.close()
    store = opened()
    (record,) = store.sequences()
    assert record == chain.record("ann")
    assert np.array_equal(store.sequence_ids(record), chain.ids)
    assert warm_tokens(store, chain) == len(chain.ids)


def test_a_run_ends_at_the_first_block_that_differs(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(4 * SIZE))
    save(store, chain)
    names, ids = chain.full_names, chain.ids
    assert [x.identity.hash for x in store.locate(names, parent=chain.root, ids=ids)] == names
    assert [x.identity.hash for x in store.locate(names[1:], parent=names[0], ids=ids[SIZE:])] == names[1:]
    assert store.locate(names[1:], parent=chain.root, ids=ids[SIZE:]) == []
    other = ids.copy()
    other[2 * SIZE + 1] += 1
    assert len(store.locate(names, parent=chain.root, ids=other)) == 2, "token ids are compared, not names alone"
    assert store.locate([], parent=chain.root, ids=ids[:0]) == []


def test_the_child_with_the_longest_common_ids_is_found(opened: Opened) -> None:
    store = opened()
    base = [9] * SIZE
    for number, rest in enumerate(([1], [1, 2, 9], [1, 2, 3, 4], [1, 3], [*range(1, 17)], [1 << 31, 5])):
        save(store, Chain.of(store, base + rest), f"agent {number}")
    parent = Chain.of(store, base).full_names[0]
    for asked, shared in (
        ([1, 2, 3, 5], 3),
        ([1, 2, 8], 2),
        ([1, 3, 3], 2),
        ([1, 9], 1),
        ([1 << 31], 1),
        ([2], 0),
        ([0], 0),
    ):
        found = store.child(parent, np.array(asked, dtype=np.uint32))
        assert (found[1] if found else 0) == shared, asked
        assert found is None or found[0].identity.ids[:shared].tolist() == asked[:shared]
    assert store.child(Chain.of(store, []).root, np.array([9, 9, 8], dtype=np.uint32))[1] == 2


def test_blocks_on_disk_are_not_written_again(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(3 * SIZE + 5))
    save(store, chain, "ann")
    before = store.stats()
    save(store, chain, "bob")
    store.close()
    store = opened()
    save(store, chain, "cat")
    after = store.stats()
    assert (after.blocks_written, after.bytes_written) == (0, 0)
    assert (after.num_agents, after.num_blocks) == (3, before.num_blocks) == (3, 4)


def test_a_turn_writes_its_new_tokens_and_at_most_one_block(opened: Opened) -> None:
    store = opened()
    written = []
    for length in range(SIZE + 3, 6 * SIZE, 7):
        save(store, Chain.of(store, range(length)))
        written.append(store.stats().blocks_written)
    assert max(np.diff(written)) <= 2
    assert store.stats().num_blocks == len(Chain.of(store, range(length)).blocks), "old tails were not freed"


def test_staging_is_bounded_and_copies(opened: Opened) -> None:
    store = open_store_unstarted(opened)
    chain = Chain.of(store, range(40 * SIZE))
    taken = 0
    for block in chain.blocks:
        scratch = {part: data.copy() for part, data in block.payloads.items()}
        if not store.stage(BlockBytes(block.identity, scratch)):
            break
        taken += 1
        for data in scratch.values():
            data[:] = 0
    assert taken == 4
    store.start()
    assert store.flush(10)
    assert store.stage(chain.blocks[taken]), "no room although all was saved"
    assert store.flush(10)
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    assert len(load(store, found)) == taken + 1
    store.check("records")


def open_store_unstarted(opened: Opened) -> WarmStore:
    """A store with room for four waiting blocks whose threads do not run yet."""
    return opened(start=False, staging_bytes=4 * BLOCK_BYTES)


def test_a_block_whose_parent_was_never_saved_is_not_saved(opened: Opened) -> None:
    saved: list[tuple[str, str, int, int]] = []
    store = opened(on_saved=lambda *turn: saved.append(turn))
    chain = Chain.of(store, range(4 * SIZE + 1))
    for number, block in enumerate(chain.blocks):
        if number == 1:
            store.skip(block.identity.hash)
        else:
            assert store.stage(block)
    store.save_turn(chain.record("ann"))
    assert store.flush(10)
    stats = store.stats()
    assert (stats.unsaved_evicted, stats.blocks_orphaned, stats.turns_unsaved, stats.num_blocks) == (1, 3, 1, 1)
    assert saved == [] and store.sequences() == []
    assert store.num_known(chain.full_names) == 1
    store.check("records")
    save(store, chain)
    assert store.num_known(chain.full_names) == 4
    assert saved == [("default", "ann", 0, len(chain.ids))]


def test_saved_is_said_only_when_it_is_true(opened: Opened, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def on_saved(namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        (record,) = store.sequences()
        seen.append((record.num_tokens, warm_tokens(store, Chain.of(store, range(num_tokens)))))

    store = opened(on_saved=on_saved)
    for length in (20, 50, 51):
        save(store, Chain.of(store, range(length)))
    assert seen == [(20, 20), (50, 50), (51, 51)]


class FailingFileSystem(OsFileSystem):
    """Refuses to write or sync shards while `error` is set."""

    error: int | None = None
    kind = "write"

    def write(self, fd: int, offset: int, data: np.ndarray | bytes) -> None:
        if self.error is not None and self.kind == "write":
            raise OSError(self.error, os.strerror(self.error))
        super().write(fd, offset, data)

    def sync_data(self, fd: int) -> None:
        if self.error is not None and self.kind == "sync":
            raise OSError(self.error, os.strerror(self.error))
        super().sync_data(fd)


@pytest.mark.parametrize(("kind", "error"), [("write", errno.ENOSPC), ("sync", errno.EIO)])
def test_a_failing_save_is_said_once_and_harms_nothing(
    opened: Opened, kind: str, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    fs = FailingFileSystem()
    store = opened(fs=fs)
    first = Chain.of(store, range(2 * SIZE))
    save(store, first)
    fs.kind, fs.error = kind, error
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            save(store, Chain.of(store, range(number, number + 60)), "bob")
    assert len([r for r in caplog.records if "SAVING FAILED" in r.message]) == 1
    stats = store.stats()
    assert not stats.saving_ok and stats.first_error_at == 100.0
    assert stats.first_error is not None and os.strerror(error) in stats.first_error
    assert (stats.failed_saves >= 3, stats.turns_unsaved, stats.turns_saved) == (True, 3, 1)
    assert stats.last_error is not None and os.strerror(error) in stats.last_error
    assert warm_tokens(store, first) == 2 * SIZE
    store.check("records")
    fs.error = None
    again = Chain.of(store, range(60))
    assert store.num_known(again.full_names) == 2
    save(store, again, "bob")
    assert store.stats().last_error is None and store.stats().saving_ok
    assert warm_tokens(store, again) == 60
    store.check("records")
    fs.error = errno.EROFS
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for number in range(2):
            save(store, Chain.of(store, range(300 + number, 400)), "cat")
    assert len([r for r in caplog.records if "SAVING FAILED" in r.message]) == 1, "failing anew is said anew"
    stats = store.stats()
    assert not stats.saving_ok and stats.first_error is not None and os.strerror(errno.EROFS) in stats.first_error


def test_what_is_read_is_counted(opened: Opened) -> None:
    store = opened()
    chain = Chain.of(store, range(3 * SIZE))
    save(store, chain)
    assert (store.stats().blocks_read, store.stats().bytes_read) == (0, 0)
    assert warm_tokens(store, chain) == 3 * SIZE
    assert (store.stats().blocks_read, store.stats().bytes_read) == (3, 3 * BLOCK_BYTES)


def test_a_failing_transaction_leaves_nothing_behind(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chain = Chain.of(store, range(50))
    save(store, chain)
    with sqlite3.connect(tmp_path / "store" / FINGERPRINT.hex() / "index.db") as other:
        other.execute("CREATE TRIGGER no BEFORE INSERT ON sequence BEGIN SELECT RAISE(ABORT, 'no'); END")
        other.commit()
        save(store, Chain.of(store, range(7, 70)), "bob")
        # The writer may have saved some of bob's blocks before it came to the turn; that is no part of what failed.
        assert store.stats().failed_saves == 1
        assert [record.agent for record in store.sequences()] == ["ann"]
        store.check("records")
        other.execute("DROP TRIGGER no")
    other.close()
    again = Chain.of(store, range(7, 70))
    save(store, again, "bob")
    assert warm_tokens(store, again) == 63
    store.check("records")


def test_a_first_save_that_fails_takes_no_slots(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    with sqlite3.connect(tmp_path / "store" / FINGERPRINT.hex() / "index.db") as other:
        other.execute("CREATE TRIGGER no BEFORE INSERT ON block BEGIN SELECT RAISE(ABORT, 'no'); END")
        other.commit()
        save(store, Chain.of(store, range(50)))
        assert store.stats().failed_saves > 0 and store.stats().num_blocks == 0
        store.check("records")
        other.execute("DROP TRIGGER no")
    other.close()
    chain = Chain.of(store, range(50))
    save(store, chain)
    assert warm_tokens(store, chain) == 50
    store.check("records")


def test_a_full_store_refuses_and_says_so(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(disk_bytes=6 * BLOCK_BYTES)
    small = Chain.of(store, range(2 * SIZE))
    save(store, small)
    assert store.submit(Pin("default", "ann", math.inf)).result(10)
    with caplog.at_level(logging.WARNING):
        save(store, Chain.of(store, [5] * 10 * SIZE), "bob")
        save(store, Chain.of(store, [6] * 10 * SIZE), "cat")
    stats = store.stats()
    assert stats.used_bytes <= stats.disk_bytes
    assert stats.blocks_refused > 0 and stats.turns_unsaved == 2 and stats.last_error is None
    assert len([r for r in caplog.records if "full" in r.message]) == 1
    assert warm_tokens(store, small) == 2 * SIZE
    store.check("records")


def test_deleting_frees_what_only_that_agent_used(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    shared = [1] * 3 * SIZE
    ann, bob = Chain.of(store, [*shared, *[2] * 20]), Chain.of(store, [*shared, *[3] * 20])
    save(store, ann, "ann")
    save(store, bob, "bob")
    assert store.submit(Delete("default", "nobody")).result(10) == 0
    assert store.submit(Delete("default", "ann")).result(10) == 2 * len(LAYOUT.parts)
    assert warm_tokens(store, bob) == len(bob.ids)
    assert warm_tokens(store, ann) == len(shared)
    bytes_of_ann = payload_of(ann.blocks[3].identity.hash, 0).tobytes()
    for path in (tmp_path / "store").rglob("blocks-0-*"):
        assert bytes_of_ann not in path.read_bytes(), "a freed slot still holds its block"
    store.submit(Delete("default", "bob")).result(10)
    assert (store.stats().num_blocks, store.stats().used_bytes) == (0, 0)
    store.check("records")


def test_shards_are_safetensors_files(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(30 * SIZE)))
    store.close()
    paths = sorted((tmp_path / "store").rglob("*.safetensors"))
    assert len(paths) > 4
    for path in paths:
        with safe_open(path, "np") as file:
            slots, record_bytes = file.get_tensor("blocks").shape
        assert record_bytes % 4096 == 0
        assert (path.stat().st_size - slots * record_bytes) % 4096 == 0


def test_shards_take_only_the_space_of_their_records(opened: Opened, tmp_path: Path) -> None:
    store = opened(shard_bytes=1 << 26)
    chain = Chain.of(store, range(2 * SIZE))
    save(store, chain)
    (path,) = (tmp_path / "store").rglob("blocks-0-*")
    assert path.stat().st_size > 1 << 25
    assert path.stat().st_blocks * 512 < 1 << 16
    before = path.stat().st_blocks
    store.submit(Delete("default", "ann")).result(10)
    assert path.stat().st_blocks < before


def test_nobody_else_can_read_it(opened: Opened, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened()
        save(store, Chain.of(store, range(40)))
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FINGERPRINT.hex()).symlink_to(elsewhere)
    (tmp_path / "b" / FINGERPRINT.hex()).mkdir(parents=True)
    (tmp_path / "b" / FINGERPRINT.hex() / "index.db").symlink_to(elsewhere / "x")
    (tmp_path / "c").mkdir()
    (elsewhere / "x").write_bytes(bytes(32))
    (tmp_path / "c" / "secret").symlink_to(elsewhere / "x")
    for name in "abc":
        with pytest.raises(StoreError, match=r"link|symbolic"):
            open_store(tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in elsewhere.iterdir()] == [("x", bytes(32))]


def test_a_second_process_is_refused_and_told_who_has_it(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        open_store(tmp_path / "store")
    code = (
        "import sys; from pathlib import Path; from rekindle.errors import StoreLocked\n"
        "from tests.store.chains import open_store\n"
        "try: open_store(Path(sys.argv[1]))\n"
        "except StoreLocked as error: print(error); sys.exit(7)"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 7 and f"process {os.getpid()}" in second.stdout, second
    store.close()
    assert subprocess.run(command, env=environment, capture_output=True, text=True).returncode == 0


def test_two_models_share_a_directory_and_its_secret(opened: Opened, tmp_path: Path) -> None:
    from rekindle.config import StoreSettings

    one = opened()
    other = WarmStore.open(tmp_path / "store", fingerprint=bytes(32), layout=LAYOUT, settings=StoreSettings())
    try:
        assert other.secret == one.secret and len(one.secret) == 32
        assert 0 < other.stats().disk_bytes <= 50 * 10**9
    finally:
        other.close()


def test_an_unusable_directory_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="as store"):
        open_store(tmp_path / "file")
    store = open_store(tmp_path / "store")
    store.close()
    (tmp_path / "store" / "secret").write_bytes(b"short")
    with pytest.raises(StoreError, match="secret is damaged"):
        open_store(tmp_path / "store")


def test_close_answers_every_load(opened: Opened) -> None:
    store = opened(readers=1)
    chain = Chain.of(store, range(4 * SIZE))
    save(store, chain)
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    begun, go_on = threading.Event(), threading.Event()
    counts: list[int] = []

    def deliver(first: int, run: object) -> None:
        begun.set()
        assert go_on.wait(60)

    for _ in range(3):
        store.load(found, deliver, counts.append)
    assert begun.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert store.readers.stopping.wait(60)
    go_on.set()
    closing.join(60)
    assert len(counts) == 3 and counts[1:] == [0, 0]


def test_a_broken_receiver_does_not_stop_the_readers(opened: Opened) -> None:
    store = opened(readers=1)
    chain = Chain.of(store, range(2 * SIZE))
    save(store, chain)
    found = store.locate(chain.full_names, parent=chain.root, ids=chain.ids)
    counts: list[int] = []
    store.load(found, lambda first, run: 1 / 0, counts.append)
    store.load(found, lambda first, run: None, lambda count: 1 / 0)
    assert len(load(store, found)) == 2
    assert counts == [0]
