"""Stores that no server has open: listed, checked, rebuilt, copied, collected; without their model."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.config import StoreSettings
from rekindle.errors import StoreError, StoreLocked
from rekindle.store import admin
from rekindle.store.commands import Pin
from rekindle.store.files.description import read_description
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, LAYOUT, SIZE, Chain, open_store, save, warm_tokens
from tests.store.test_damage import record_at

Opened = Callable[..., WarmStore]
NAME = FINGERPRINT.hex()


def two_agents(opened: Opened) -> tuple[Chain, Chain]:
    """A stopped store of ann (five blocks and a tail) and bob, who shares two blocks with ann."""
    store = opened()
    ann, bob = Chain.of(store, range(5 * SIZE + 3)), Chain.of(store, [*range(2 * SIZE), *range(700, 700 + SIZE)])
    save(store, ann, "ann")
    save(store, bob, "bob")
    store.close()
    return ann, bob


def flip(directory: Path, name: bytes, part: int = 0) -> None:
    """Damage a block's record."""
    path = next(p for p in (directory / NAME).glob(f"blocks-{part}-*") if name in p.read_bytes())
    with path.open("r+b") as file:
        file.seek(record_at(path, name) + 900)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_sound_store_checks_out(opened: Opened, tmp_path: Path) -> None:
    two_agents(opened)
    seen: list[tuple[int, int]] = []
    report = admin.check_store(tmp_path / "store", NAME, lambda *step: seen.append(step))
    assert report == admin.CheckReport(7, [], [], None) and report.is_sound
    assert seen == [(number, 7) for number in range(1, 8)]


def test_a_check_says_what_was_lost_and_to_whom(opened: Opened, tmp_path: Path) -> None:
    ann, bob = two_agents(opened)
    flip(tmp_path / "store", ann.blocks[3].identity.hash)
    report = admin.check_store(tmp_path / "store", NAME)
    assert report.damaged == [(ann.blocks[3].identity.hash.hex(), "payload checksum differs")]
    assert report.agents_affected == [("default", "ann", 0, 3 * SIZE)] and report.index_problem is None
    flip(tmp_path / "store", bob.blocks[1].identity.hash, part=1)
    report = admin.check_store(tmp_path / "store", NAME)
    assert sorted(report.agents_affected) == [("default", "ann", 0, SIZE), ("default", "bob", 0, SIZE)]
    store = opened()
    assert (warm_tokens(store, ann), warm_tokens(store, bob)) == (SIZE, SIZE)


def test_an_index_newer_than_its_shards_costs_only_what_is_gone(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    old = Chain.of(store, range(2 * SIZE))
    save(store, old, "old")
    store.close()
    before = {path: path.read_bytes() for path in (tmp_path / "store" / NAME).glob("blocks-*")}
    store = opened()
    new = Chain.of(store, [*range(2 * SIZE), *range(800, 800 + 60 * SIZE)])
    save(store, new, "new")
    store.close()
    for path in (tmp_path / "store" / NAME).glob("blocks-*"):
        if path in before:
            path.write_bytes(before[path])
        else:
            path.unlink()
    report = admin.check_store(tmp_path / "store", NAME)
    assert report.num_blocks == 62 and len(report.damaged) == 60
    assert report.agents_affected == [("default", "new", 0, 2 * SIZE)]
    assert any("No such file" in reason for _, reason in report.damaged)
    store = opened()
    assert (warm_tokens(store, old), warm_tokens(store, new)) == (2 * SIZE, 2 * SIZE)
    for _ in range(70):  # each load finds the next one that is missing
        save(store, new, "again")
        warm_tokens(store, new)
    assert warm_tokens(store, new) == 62 * SIZE and store.stats().last_error is None
    store.check("records")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(b"", "missing"), (b"garbage" * 999, "cannot be read"), (None, "no free|lost|missing|slots")],
)
def test_a_check_of_a_lost_index_changes_nothing(
    opened: Opened, tmp_path: Path, damage: bytes | None, said: str
) -> None:
    two_agents(opened)
    index = tmp_path / "store" / NAME / "index.db"
    if damage is None:
        with sqlite3.connect(index) as connection:
            connection.execute("DELETE FROM block WHERE id IN (SELECT id FROM block WHERE part = 0 LIMIT 1)")
        connection.close()
    else:
        index.write_bytes(damage)
    report = admin.check_store(tmp_path / "store", NAME)
    assert report.index_problem is not None and re.search(said, report.index_problem)
    assert "rebuild" in report.index_problem and not report.is_sound
    assert not list(index.parent.glob("*damaged-*"))


def test_a_rebuild_keeps_agents_the_old_index_still_tells(opened: Opened, tmp_path: Path) -> None:
    ann, bob = two_agents(opened)
    store = opened()
    assert store.submit(Pin("default", "ann", 500.0)).result(10)
    store.close()
    flip(tmp_path / "store", bob.blocks[2].identity.hash)
    report = admin.rebuild_store(tmp_path / "store", NAME)
    assert (report.num_blocks, report.num_lost, report.num_sequences) == (6, 1, 1)
    assert [(record.agent, record.num_tokens) for record in admin.agents_of(tmp_path / "store", NAME)] == [
        ("ann", 5 * SIZE + 3)
    ]
    store = opened()
    assert store.pins() == {("default", "ann"): 500.0}
    assert (warm_tokens(store, ann), warm_tokens(store, bob)) == (len(ann.ids), 2 * SIZE)
    store.check("records")


def test_a_row_of_another_agent_is_not_salvaged(opened: Opened, tmp_path: Path) -> None:
    two_agents(opened)
    with sqlite3.connect(tmp_path / "store" / NAME / "index.db") as connection:
        connection.execute("UPDATE agent SET id = 'eve' WHERE id = 'ann'")
        connection.execute("UPDATE sequence SET num_tokens = 1000 WHERE num_tokens = ?", (3 * SIZE,))
    connection.close()
    admin.rebuild_store(tmp_path / "store", NAME)
    found = {record.agent: record.num_tokens for record in admin.agents_of(tmp_path / "store", NAME)}
    assert sorted(found) == ["\x01recovered-0", "\x01recovered-1"]
    assert sorted(found.values()) == [3 * SIZE, 5 * SIZE + 3]


def test_chains_of_other_namespaces_are_recovered_where_they_belong(opened: Opened, tmp_path: Path) -> None:
    store = opened(namespaces=("default", "team"))
    theirs, unknown = Chain.of(store, range(40), "team"), Chain.of(store, range(40), "nobody told")
    save(store, theirs, "ann")
    save(store, unknown, "bob")
    store.close()
    (tmp_path / "store" / NAME / "index.db").unlink()
    store = opened()  # the namespaces of earlier opens are remembered
    assert [(r.namespace, r.agent, r.num_tokens) for r in store.sequences()] == [("team", "\x01recovered-0", 40)]
    assert warm_tokens(store, theirs) == warm_tokens(store, unknown) == 40
    store.check("records")


def test_a_stopped_store_works_elsewhere(opened: Opened, tmp_path: Path) -> None:
    ann, bob = two_agents(opened)
    shutil.copytree(tmp_path / "store", tmp_path / "elsewhere" / "deep")
    shutil.rmtree(tmp_path / "store")
    for path in (tmp_path / "elsewhere").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), f"{path} names the old place"
    assert admin.check_store(tmp_path / "elsewhere" / "deep", NAME).is_sound
    store = open_store(tmp_path / "elsewhere" / "deep")
    store.start()
    try:
        assert (warm_tokens(store, ann), warm_tokens(store, bob)) == (len(ann.ids), len(bob.ids))
        save(store, Chain.of(store, range(90, 170)), "cat")
        store.check("records")
    finally:
        store.close()


def test_stores_are_listed_also_while_one_is_in_use(opened: Opened, tmp_path: Path) -> None:
    assert admin.list_stores(tmp_path / "store") == []
    store = opened(model="tiny/model")
    save(store, Chain.of(store, range(40)))
    other = WarmStore.open(tmp_path / "store", fingerprint=bytes(32), layout=LAYOUT, settings=StoreSettings())
    other.close()
    (tmp_path / "store" / "not a store").mkdir()
    found = {info.fingerprint: info for info in admin.list_stores(tmp_path / "store")}
    assert set(found) == {NAME, bytes(32).hex()}
    used, idle = found[NAME], found[bytes(32).hex()]
    assert (used.model, used.num_agents, used.num_blocks, used.in_use_by) == (
        "tiny/model",
        1,
        3,
        f"process {os.getpid()}",
    )
    assert used.bytes > 3 * 4096 and used.problem is None
    assert (idle.model, idle.num_agents, idle.num_blocks, idle.in_use_by) == ("", 0, 0, None)


def test_all_else_is_refused_while_a_server_has_the_store(opened: Opened, tmp_path: Path) -> None:
    opened()
    directory = tmp_path / "store"
    for call in (
        lambda: admin.check_store(directory, NAME),
        lambda: admin.rebuild_store(directory, NAME),
        lambda: admin.purge_agent(directory, NAME, "default", "ann"),
        lambda: admin.agents_of(directory, NAME),
    ):
        with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
            call()
    assert admin.collect_stale(directory, None, 0.0, clock=lambda: 1e12) == []
    with pytest.raises(StoreError, match="there is no store"):
        admin.check_store(directory, "00" * 32)
    with pytest.raises(StoreError, match="there is no store"):
        admin.check_store(directory, "../..")


def test_a_store_without_description_says_what_to_do(opened: Opened, tmp_path: Path) -> None:
    two_agents(opened)
    path = tmp_path / "store" / NAME / "layout.json"
    assert read_description(path.parent, OsFileSystem()).layout.digest == LAYOUT.digest
    for content in (b"{}", b"[]", b"\xff", b'{"format": 2}', path.read_bytes().replace(b'"window"', b'"widow"')):
        path.write_bytes(content)
        with pytest.raises(StoreError, match="start the server once"):
            admin.check_store(tmp_path / "store", NAME)
    opened().close()
    assert admin.check_store(tmp_path / "store", NAME).is_sound


def test_stale_stores_are_removed_and_nothing_else(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, day = tmp_path / "store", 86400.0
    for number in range(4):
        WarmStore.open(directory, fingerprint=bytes([number] * 32), layout=LAYOUT, settings=StoreSettings()).close()
    paths = [directory / bytes([number] * 32).hex() for number in range(4)]
    held = WarmStore.open(directory, fingerprint=bytes([3] * 32), layout=LAYOUT, settings=StoreSettings())
    now = max(path.stat().st_mtime for path in paths[0].iterdir())
    for path in (paths[1], paths[2]):
        for file in path.iterdir():
            os.utime(file, (now - 40 * day, now - 40 * day))
    (paths[2] / "notes.txt").write_text("mine")
    (directory / "elsewhere").mkdir()
    (directory / ("ab" * 32)).symlink_to(directory / "elsewhere")
    with caplog.at_level(logging.WARNING):
        opened(clock=lambda: now + day, model="new").close()
    assert [path.exists() for path in paths] == [True, False, True, True]
    assert [path.name for path in paths[2].iterdir()] == ["notes.txt"]
    assert len([r for r in caplog.records if "removed the store" in r.message]) == 2
    would_go = admin.stale_stores(directory, NAME, 30 * day, clock=lambda: now + 31 * day)
    gone = admin.collect_stale(directory, NAME, 30 * day, clock=lambda: now + 31 * day)
    assert would_go == gone
    assert {info.fingerprint for info in gone} == {paths[0].name, paths[2].name}
    held.close()
    assert (directory / "elsewhere").is_dir() and (directory / NAME).is_dir() and paths[3].is_dir()
