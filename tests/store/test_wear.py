"""What is written to the disk is counted, the day's figure survives, and a day's budget is kept."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.store import admin
from rekindle.store.commands import Delete, Pin, Purge
from rekindle.store.files.log_frames import LogFrames
from rekindle.store.files.sqlite_file import connect_writer, transaction, truncate_log
from rekindle.store.rows.written import day_of
from rekindle.store.threads import writer
from rekindle.store.warm import WarmStore
from tests.store.chains import BLOCK_BYTES, SIZE, Chain, fast_directory, open_store, save, warm_tokens

Opened = Callable[..., WarmStore]
DAY = 86400.0
KERNEL = Path("/proc/thread-self/io")  # Linux


def bytes_of_this_thread() -> int | None:
    """What the calling thread has passed to write and its like, as the kernel counts it."""
    if not KERNEL.exists():
        return None
    (line,) = (line for line in KERNEL.read_text().splitlines() if line.startswith("wchar:"))
    return int(line.split()[1])


def written(store: WarmStore) -> int:
    stats = store.stats()
    return stats.bytes_written + stats.index_bytes_written


def test_the_log_shows_what_sqlite_writes(tmp_path: Path) -> None:
    path, dice = tmp_path / "index.db", random.Random(1)
    path.touch()
    db = connect_writer(path)
    db.execute("CREATE TABLE pair(a INTEGER PRIMARY KEY, b BLOB)")
    db.execute("PRAGMA wal_autocheckpoint = 50")
    frames, before, counted = LogFrames(path), bytes_of_this_thread(), 0
    for _ in range(200):
        with transaction(db):
            for _ in range(dice.randrange(1, 20)):
                row = (dice.randrange(3000), os.urandom(dice.randrange(2000)))
                db.execute("INSERT OR REPLACE INTO pair VALUES (?, ?)", row)
        counted += frames.new_bytes()
    assert LogFrames(path).new_bytes() == 0, "what another process wrote is counted again"
    truncate_log(db)
    assert frames.new_bytes() == 0, "a checkpoint is counted twice"
    db.close()
    after = bytes_of_this_thread()
    if before is not None and after is not None:
        assert counted == pytest.approx(after - before, rel=0.01)
    assert counted > 2 * path.stat().st_size > 0


def test_small_pages_count_as_what_a_file_system_writes(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    path.touch()
    db = connect_writer(path, page_bytes=2048)
    db.execute("CREATE TABLE pair(a INTEGER PRIMARY KEY, b BLOB)")
    with transaction(db):
        db.executemany("INSERT INTO pair VALUES (?, ?)", [(number, os.urandom(700)) for number in range(101)])
    truncate_log(db)
    frames = LogFrames(path)
    db.execute("VACUUM")  # every page anew
    (num_pages,) = db.execute("PRAGMA page_count").fetchone()
    assert num_pages % 2 == 1 and frames.new_bytes() == 32 + num_pages * (24 + 2048) + (num_pages + 1) // 2 * 4096
    db.close()


def test_the_figures_are_what_the_writer_writes(opened: Opened) -> None:
    store = opened()
    before = store.writer.call(lambda ledger: bytes_of_this_thread()).result()
    for number in range(60):
        save(store, Chain.of(store, range(number, number + 5 * SIZE + number)), f"agent {number % 7}")
    store.submit(Pin("default", "agent 1", 200.0)).result()
    store.submit(Delete("default", "agent 2")).result()
    after = store.writer.call(lambda ledger: bytes_of_this_thread()).result()
    stats = store.stats()
    assert stats.bytes_written >= stats.blocks_written * BLOCK_BYTES > 0
    assert stats.written_today == stats.bytes_written + stats.index_bytes_written
    if before is not None and after is not None:
        # A shard begins with a page, and pages that the log still holds are counted with their checkpoint.
        assert after - before <= written(store) <= 1.3 * (after - before)
    wear = store.wear()
    assert (wear.today, wear.a_day, wear.a_turn) == (stats.written_today, None, written(store) // stats.turns_saved)


def test_the_days_figure_survives_and_ends_with_the_day(opened: Opened) -> None:
    now = [20 * DAY + 5.0]
    store = opened(clock=lambda: now[0])
    save(store, Chain.of(store, range(5 * SIZE)))
    first = store.stats().written_today
    assert first == written(store) > 5 * BLOCK_BYTES
    store.close()
    now[0] += 100
    store = opened(clock=lambda: now[0])
    assert store.stats().written_today >= first and written(store) == 0
    save(store, Chain.of(store, range(9, 9 + 5 * SIZE)), "bob")
    assert store.stats().written_today >= first + written(store)
    now[0] = 21 * DAY
    assert store.stats().written_today == 0
    save(store, Chain.of(store, range(99, 99 + SIZE)), "cat")
    assert 0 < store.stats().written_today < first < written(store)
    now[0] = 20 * DAY + 7.0
    assert store.stats().written_today == 0, "a clock that goes back begins a day"


def test_the_days_figure_survives_a_kill(opened: Opened, tmp_path: Path) -> None:
    store = opened(clock=lambda: 20 * DAY)
    for number in range(5):
        save(store, Chain.of(store, range(number, number + 5 * SIZE)), f"agent {number}")
    stats = store.stats()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    left = open_store(tmp_path / "killed", clock=lambda: 20 * DAY + 60)
    found = left.stats().written_today
    left.close()
    assert stats.bytes_written <= found <= stats.written_today, "more was lost than the index of one save"
    assert stats.written_today - found < stats.index_bytes_written


def test_a_save_takes_no_write_more_for_each_block(opened: Opened) -> None:
    store = opened()
    save(store, Chain.of(store, range(SIZE)))
    said = list[str]()
    store.writer.call(lambda ledger: store.index.writer.set_trace_callback(said.append)).result()
    save(store, Chain.of(store, range(7, 7 + 40 * SIZE)), "bob")
    store.writer.call(lambda ledger: store.index.writer.set_trace_callback(None)).result()
    marks = [each for each in said if "written." in each]
    commits = sum(each == "COMMIT" for each in said)
    assert len(marks) <= 2 * commits < 40, (len(marks), commits)


def commits(store: WarmStore, work: Callable[[], object]) -> int:
    """In how many transactions the writer changes blocks or branches until all of `work` is durable."""
    said = list[str]()
    store.writer.call(lambda ledger: store.index.writer.set_trace_callback(said.append)).result()
    work()
    assert store.flush(10)
    store.writer.call(lambda ledger: store.index.writer.set_trace_callback(None)).result()
    return sum("INTO block(" in each or "INTO sequence(" in each for each in "\n".join(said).split("COMMIT"))


def in_pieces(store: WarmStore, chain: Chain) -> None:
    """Save a turn whose blocks come one after the other."""
    for block in chain.blocks:
        assert store.stage(block)
        time.sleep(0.05)
    store.save_turn(chain.record("ann"))


def test_blocks_that_come_shortly_before_their_turn_are_written_with_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GATHER_S", 60.0)
    store = opened()
    assert commits(store, lambda: in_pieces(store, Chain.of(store, range(5 * SIZE)))) == 1
    store.writer.call(lambda ledger: None)
    assert store.stage(Chain.of(store, range(7, 7 + SIZE)).blocks[0])
    assert store.flush(10), "a command does not wait with the blocks"


def test_blocks_do_not_wait_for_their_turn_where_staging_is_short(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GATHER_S", 60.0)
    store = opened(staging_bytes=1)  # two rows of each part
    (block,) = Chain.of(store, range(SIZE)).blocks
    assert store.stage(block)
    until = time.monotonic() + 20
    while not store.contains(block.identity.hash) and time.monotonic() < until:
        time.sleep(0.01)
    assert store.contains(block.identity.hash)


def test_a_used_up_budget_saves_nothing_until_the_day_turns(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    now = [20 * DAY]
    store = opened(clock=lambda: now[0], disk_writes_a_day=100 * BLOCK_BYTES)
    save(store, Chain.of(store, range(4 * SIZE)))
    assert store.takes_blocks and store.stats().turns_unsaved == 0
    late = [Chain.of(store, range(100 * number, 100 * number + 5 * SIZE)) for number in range(1, 40)]
    with caplog.at_level(logging.WARNING):
        for number, chain in enumerate(late):
            save(store, chain, f"late {number}")
        stats = store.stats()
        used = written(store)
        for number, chain in enumerate(late):
            save(store, chain, f"late {number}")
    assert written(store) == used, "something was written with the budget used up"
    assert not stats.may_write and stats.saving_ok and stats.has_room
    assert stats.turns_unsaved and stats.blocks_postponed and not stats.blocks_refused
    assert stats.bytes_written <= 100 * BLOCK_BYTES
    assert caplog.text.count("are used up") == 1, caplog.text
    store.check("records")
    assert store.submit(Purge("default", "ann")).result().slots_freed
    assert store.submit(Pin("default", "late 0", 1e12)).result()
    now[0] += DAY
    assert store.takes_blocks
    save(store, late[-1], "late 38")
    assert warm_tokens(store, late[-1]) == len(late[-1].ids)
    store.check("records")


def test_a_budget_counts_what_an_earlier_run_wrote(opened: Opened) -> None:
    store = opened(clock=lambda: 20 * DAY)
    save(store, Chain.of(store, range(9 * SIZE)))
    store.close()
    store = opened(clock=lambda: 20 * DAY + 60, disk_writes_a_day=9 * BLOCK_BYTES)
    assert not store.takes_blocks
    save(store, Chain.of(store, range(9, 9 + SIZE)), "bob")
    assert written(store) == 0 and store.stats().turns_unsaved == 1


def test_stores_of_a_directory_share_the_budget(opened: Opened, tmp_path: Path) -> None:
    other = opened(clock=lambda: 20 * DAY)
    save(other, Chain.of(other, range(9 * SIZE)))
    wrote = other.stats().written_today
    other.close()
    (tmp_path / "store" / bytes(range(32)).hex()).rename(tmp_path / "store" / bytes(range(1, 33)).hex())
    store = opened(clock=lambda: 20 * DAY + 1, disk_writes_a_day=wrote + 3 * BLOCK_BYTES)
    save(store, Chain.of(store, range(5 * SIZE)))
    stats = store.stats()
    assert stats.written_today >= wrote + written(store) and stats.blocks_written <= 3 and not stats.may_write
    listed = admin.list_stores(tmp_path / "store")
    assert sorted(info.written.day for info in listed) == [day_of(20 * DAY)] * 2


def test_a_count_that_is_damaged_counts_as_nothing(opened: Opened, tmp_path: Path) -> None:
    store = opened(clock=lambda: 20 * DAY)
    save(store, Chain.of(store, range(3 * SIZE)))
    path = next((tmp_path / "store").rglob("index.db"))
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("UPDATE meta SET value = 1 << 60 WHERE key = 'written.bytes'").rowcount == 1
    db.close()
    store = opened(clock=lambda: 20 * DAY, disk_writes_a_day=100 * BLOCK_BYTES)
    assert store.takes_blocks and store.stats().written_today < 1 << 30
    store.check("records")


@settings(max_examples=25)
@given(
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4 * SIZE), st.booleans()), min_size=1, max_size=14),
    most=st.integers(1, 20),
)
def test_days_of_turns_keep_the_budget_and_lose_nothing(turns: list[tuple[int, int, bool]], most: int) -> None:
    """Agents grow, days end; each day's records fit its budget, and a turn after the last is all that is needed."""
    directory, now = fast_directory(), [20 * DAY]
    store = open_store(directory, clock=lambda: now[0], disk_writes_a_day=most * BLOCK_BYTES)
    store.start()
    try:
        ids = {agent: [agent] for agent in range(4)}
        records = 0
        for agent, length, ends_day in turns:
            ids[agent] += [agent] * length
            save(store, Chain.of(store, ids[agent]), f"agent {agent}")
            stats = store.stats()
            assert stats.bytes_written - records <= most * BLOCK_BYTES + 3 * 4096, "a day's records are beyond it"
            store.check("records")
            if ends_day:
                now[0] += DAY
                records = stats.bytes_written
        agent, *_ = turns[-1]
        last = Chain.of(store, ids[agent])
        for _ in range(len(last.blocks) + 2):  # a day has room for a block at least
            now[0] += DAY
            save(store, last, f"agent {agent}")
        assert warm_tokens(store, last) == len(last.ids)
        assert store.sequences_of("default", f"agent {agent}")[0].num_tokens == len(last.ids)
        store.check("records")
    finally:
        store.close()
        shutil.rmtree(directory)
