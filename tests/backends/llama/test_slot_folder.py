"""The folder of slot files: whose it is, where it lies, and what is left of those that were killed."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from rekindle.errors import BackendFailed
from rekindle_backends.llama.slot_folder import PREFIX, RamDisk


def test_folders_of_the_dead_are_removed_and_of_the_living_stay(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "1.bin").write_bytes(b"a conversation")
    living = RamDisk([tmp_path], least_free=0)
    assert not dead.exists() and stat.S_IMODE(living.path.stat().st_mode) == 0o700
    other = RamDisk([tmp_path], least_free=0)
    assert living.path.is_dir() and other.path != living.path
    for each in (living, other):
        each.close()
    assert not list(tmp_path.iterdir())


def test_pipes_and_links_of_our_prefix_are_passed_over(tmp_path: Path) -> None:
    """Any user may make one in a place that all share; opening a pipe would wait for somebody who writes to it."""
    kept = tmp_path / "kept"
    kept.mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}pipe")
    (tmp_path / f"{PREFIX}link").symlink_to(kept, target_is_directory=True)
    starting = threading.Thread(target=lambda: RamDisk([tmp_path], least_free=0).close(), daemon=True)
    starting.start()
    starting.join(timeout=60)
    assert not starting.is_alive()
    assert {each.name for each in tmp_path.iterdir()} == {"kept", f"{PREFIX}pipe", f"{PREFIX}link"}


def test_a_place_without_room_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    disk = RamDisk([first, second], least_free=0)
    assert disk.path.parent == second and "is no RAM disk" in caplog.text
    with pytest.raises(BackendFailed, match="MB free, a state takes"):
        disk.new_name(1 << 60)
    disk.close()
