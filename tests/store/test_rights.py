"""A directory that may not be read or written is the operator's to mend: said with its path, in one error, at once.

Each case runs in a process of another user where the tests are run by root, else in one of the same user.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import StoreError
from tests.store.chains import FINGERPRINT, Chain, fast_directory, open_store, save, warm_tokens
from tests.store.confined import become_nobody, run_apart

IDS = list(range(100))
NAME = FINGERPRINT.hex()


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    for path in [made, *made.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(made)


def saved_in(directory: Path) -> Path:
    """A closed store with one agent, below `directory`."""
    store = open_store(directory / "store")
    store.start()
    save(store, Chain.of(store, IDS))
    store.close()
    return directory / "store"


def open_as_nobody(directory: Path, denied: str, mode: int) -> str:
    """What opening says where `denied` has this mode; "" where it opens."""
    place = directory / "store"
    become_nobody(directory)
    (directory / denied).chmod(mode)
    try:
        store = open_store(place)
    except StoreError as error:
        (directory / denied).chmod(0o700)
        store = open_store(place)
        store.start()
        assert warm_tokens(store, Chain.of(store, IDS)) == len(IDS), "the refusal cost something"
        store.close()
        return str(error)
    try:
        store.start()
        assert warm_tokens(store, Chain.of(store, IDS)) in (0, 16, 32, 48, 64, 80, 96, 100)
        save(store, Chain.of(store, [3] * 70), "bob")
        stats = store.stats()
        assert stats.saving_ok or stats.last_error
        return stats.last_error or ""
    finally:
        store.close()


REFUSED = {
    "the directory cannot be entered": ("store", 0o000),
    "the directory cannot be written and lacks what is to be made": ("store/" + NAME, 0o500),
    "the model's directory cannot be entered": ("store/" + NAME, 0o000),
    "the secret cannot be read": ("store/secret", 0o000),
    "the lock cannot be opened": (f"store/{NAME}/lock", 0o000),
    "the index cannot be read": (f"store/{NAME}/index.db", 0o000),
    "the index cannot be written": (f"store/{NAME}/index.db", 0o400),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_not_be_used_is_said(directory: Path, kind: str) -> None:
    place = saved_in(directory)
    denied, mode = REFUSED[kind]
    said = run_apart(open_as_nobody, directory, denied, mode)
    assert str(place) in said and "permission" in said.lower() and "as store" in said, said


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_a_shard_that_may_not_be_used_costs_reuse_and_is_said(directory: Path, mode: int) -> None:
    saved_in(directory)
    shard = next(path for path in sorted((directory / "store" / NAME).glob("blocks-*")))
    said = run_apart(open_as_nobody, directory, str(shard.relative_to(directory)), mode)
    assert "denied" in said.lower(), said


def make_anew(directory: Path) -> str:
    """What opening a store that is not there yet says in a directory where nothing may be made."""
    become_nobody(directory)
    directory.chmod(0o500)
    with pytest.raises(StoreError) as caught:
        open_store(directory / "store")
    return str(caught.value)


def test_a_store_that_cannot_be_made_is_said(directory: Path) -> None:
    said = run_apart(make_anew, directory)
    assert str(directory / "store") in said and "as store" in said


def use_as_nobody(directory: Path) -> tuple[str, int]:
    """Who we became, and how much of another user's store could be read."""
    place = directory / "store"
    who = become_nobody(directory)
    store = open_store(place)
    store.start()
    tokens = warm_tokens(store, Chain.of(store, IDS))
    store.close()
    return who, tokens


def test_another_user_to_whom_it_was_given_can_use_it(directory: Path) -> None:
    saved_in(directory)
    who, tokens = run_apart(use_as_nobody, directory)
    assert (who, tokens) == ("nobody" if os.getuid() == 0 else "itself", len(IDS))


def enter_as_stranger(directory: Path) -> str:
    """What a stranger is told of a store that is not theirs."""
    inner = directory / "inner"
    become_nobody(inner)
    with pytest.raises(StoreError) as caught:
        open_store(directory / "store")
    return str(caught.value)


def test_a_strangers_store_stays_closed(directory: Path) -> None:
    place = saved_in(directory)
    (directory / "inner").mkdir()
    directory.chmod(0o711)
    if os.getuid() != 0:
        place.chmod(0o000)  # ours, so all that can be tried is to lock ourselves out
    said = run_apart(enter_as_stranger, directory)
    assert str(place) in said
