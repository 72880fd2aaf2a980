"""examples/deploy/backup.py: a copy of a store that is in use is a store, with what was saved before."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.store.commands import Delete
from rekindle.store.files.sqlite_file import connect_writer
from rekindle.store.warm import WarmStore
from tests.needs import ROOT
from tests.store.chains import SIZE, Chain, open_store, save, warm_tokens

BACKUP = runpy.run_path(str(ROOT / "examples" / "deploy" / "backup.py"))


def copied(store: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["backup.py", str(store), str(copy)])
    return int(BACKUP["main"]())


def test_a_copy_of_a_store_in_use_has_what_was_saved(
    opened: Callable[..., WarmStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, copy = opened(), tmp_path / "copies" / "first"
    chains = {name: Chain.of(store, range(start, start + 3 * SIZE + 5)) for name, start in (("ann", 0), ("bob", 500))}
    for name, chain in chains.items():
        save(store, chain, name)
    assert copied(tmp_path / "store", copy, monkeypatch) == 0
    later = Chain.of(store, range(900, 900 + SIZE))
    save(store, later, "cleo")
    assert (copy / "secret").stat().st_mode & 0o077 == 0 and not list(copy.rglob("lock"))
    for source, target, why in (
        (tmp_path / "store", copy, "exists: a copy is made in a new directory"),
        (tmp_path / "stroe", tmp_path / "copies" / "second", "is no store of a server"),
        (tmp_path / "store" / "secret", tmp_path / "copies" / "second", "is no store of a server"),
    ):
        with pytest.raises(SystemExit) as ended:
            copied(source, target, monkeypatch)
        assert ended.value.code == 2 and why in capsys.readouterr().err
    assert not (tmp_path / "copies" / "second").exists()
    other = open_store(copy)
    try:
        other.start()
        assert {record.agent for record in other.sequences()} == {"ann", "bob"}
        for chain in chains.values():
            assert warm_tokens(other, chain) == len(chain.ids)
        assert warm_tokens(other, later) == 0
        other.check()
    finally:
        other.close()


def test_a_block_that_was_overwritten_meanwhile_is_missing_in_the_copy(
    opened: Callable[..., WarmStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copy = opened(), tmp_path / "copy"
    kept, gone = (Chain.of(store, range(start, start + 2 * SIZE)) for start in (0, 500))
    save(store, kept, "ann")
    save(store, gone, "bob")
    copy_sparse = BACKUP["copy_sparse"]

    def after_an_eviction(file: Path, target: Path) -> None:
        if not store_changed:
            store_changed.append(file)
            assert store.submit(Delete("default", "bob")).result(10) > 0
            save(store, Chain.of(store, range(900, 900 + 2 * SIZE)), "cleo")
        copy_sparse(file, target)

    store_changed: list[Path] = []
    monkeypatch.setitem(BACKUP["main"].__globals__, "copy_sparse", after_an_eviction)
    assert copied(tmp_path / "store", copy, monkeypatch) == 0 and store_changed
    other = open_store(copy)
    try:
        other.start()
        assert {record.agent for record in other.sequences()} == {"ann", "bob"}, "the index was copied first"
        assert (warm_tokens(other, kept), warm_tokens(other, gone)) == (len(kept.ids), 0)
    finally:
        other.close()


def test_sessions_that_a_server_has_open_are_left_out_and_named(
    opened: Callable[..., WarmStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened()
    file = tmp_path / "store" / "sessions.db"
    file.touch()
    connection = connect_writer(file, locking="exclusive")
    try:
        assert copied(tmp_path / "store", tmp_path / "copy", monkeypatch) == 3
        assert str(file) in capsys.readouterr().err and not (tmp_path / "copy" / "sessions.db").exists()
    finally:
        connection.close()
    assert copied(tmp_path / "store", tmp_path / "again", monkeypatch) == 0
    assert (tmp_path / "again" / "sessions.db").exists()
