"""After a crash at any moment the store opens, agrees with itself and still has every turn it called saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from rekindle.store.shards import Shards
from rekindle.store.writer import Writer
from tests.store.chains import FINGERPRINT, SIZE, Chain, fast_directory, open_store, save, warm_tokens
from tests.store.recording import Crash, RecordingFileSystem, copy_index, replay

CRASHES: tuple[Crash, ...] = ("kept", "dropped", "torn", "reordered")


class Campaign:
    """One run of a scenario, and for each of its operations: the index at that moment and the turns saved by then.

    `seen` keeps digests of what was looked at already: many crashes leave the same files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: set[bytes] = set()
        self.live = directory / "live"
        self.place = self.live / FINGERPRINT.hex()
        self.saved: list[dict[str, int]] = []
        self.chains: dict[str, list[int]] = {}
        self._now: dict[str, int] = {}
        self.fs = RecordingFileSystem(self.place, self._before)

    def _before(self, number: int) -> None:
        copy_index(self.place, self.directory / f"index-{number}")
        self.saved.append(dict(self._now))

    def run(self) -> None:
        store = open_store(self.live, fs=self.fs, shard_bytes=1 << 14)
        store.on_saved = lambda namespace, agent, branch, num_tokens: self._now.__setitem__(agent, num_tokens)
        store.start()
        for agent, length in (
            ("ann", 40),
            ("bob", 50),
            ("ann", 75),
            ("bob", 52),
            ("ann", 90),
            ("cat", 33),
            ("ann", 91),
        ):
            shared = list(range(20))
            own = [1000 * ord(agent[0]) + number for number in range(length - 20)]
            self.chains[agent] = shared + own
            save(store, Chain.of(store, self.chains[agent]), agent)
        self._now.pop("bob")
        store.delete("default", "bob").result(10)
        assert store.flush(10)
        save(store, Chain.of(store, list(range(70))), "dan")
        self.chains["dan"] = list(range(70))
        self.secret = store.secret
        self._before(len(self.fs.log))
        store.close()

    def after_crash(self, number: int, crash: Crash) -> Path | None:
        """A directory as a crash before operation `number` may leave it; None if there was one like it before."""
        target = self.directory / "crashed"
        shutil.rmtree(target, ignore_errors=True)
        copy_index(self.directory / f"index-{number}", target / self.place.name)
        (target / "secret").write_bytes(self.secret)
        digest = blake2b(repr(self.saved[number]).encode())
        for path, content in replay(self.fs.log[:number], crash, np.random.default_rng(number)).items():
            (target / self.place.name / path.name).write_bytes(content)
        for path in sorted(target.rglob("*.*")):
            digest.update(path.name.encode() + path.read_bytes())
        new = digest.digest() not in self.seen
        self.seen.add(digest.digest())
        return target if new else None

    def holds(self, number: int, crash: Crash) -> None:
        """Open what the crash left and look."""
        crashed = self.after_crash(number, crash)
        if crashed is None:
            return
        store = open_store(crashed, shard_bytes=1 << 14)
        store.start()
        try:
            store.check("records")
            there = {record.agent: record.num_tokens for record in store.sequences()}
            for agent, num_tokens in self.saved[number].items():
                assert there.get(agent, 0) >= num_tokens, f"{agent} had {num_tokens} saved tokens"
            for record in store.sequences():
                ids = store.sequence_ids(record)
                assert len(ids) == record.num_tokens
                assert warm_tokens(store, Chain.of(store, ids)) == record.num_tokens
            save(store, Chain.of(store, list(range(7, 7 + 3 * SIZE))), "after")
            store.check("records")
            assert store.stats().last_error is None
        finally:
            store.close()


@pytest.fixture
def campaign() -> Iterator[Campaign]:
    directory = fast_directory()
    yield Campaign(directory)
    shutil.rmtree(directory)


def test_saved_turns_survive_a_crash_at_any_operation(campaign: Campaign) -> None:
    campaign.run()
    assert len(campaign.fs.log) > 60
    for number in range(len(campaign.fs.log) + 1):
        for crash in CRASHES:
            campaign.holds(number, crash)
    assert len(campaign.seen) > 100


def _without_sync(shards: Shards) -> None:
    """A careless store: never makes its shards durable."""


def _late_sync(self: Writer, blocks: list, turns: list, save: Callable = Writer._save) -> None:
    """A careless store: the transaction comes first."""
    sync, self._shards.sync = self._shards.sync, lambda: None
    try:
        save(self, blocks, turns)
    finally:
        self._shards.sync = sync
    sync()


@pytest.mark.parametrize(
    ("owner", "name", "careless"), [(Shards, "sync", _without_sync), (Writer, "_save", _late_sync)]
)
def test_a_careless_store_fails_this_test(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, careless: Callable
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, careless)
        campaign.run()
    with pytest.raises(AssertionError):
        for number in range(len(campaign.fs.log) + 1):
            campaign.holds(number, "dropped")


def test_the_open_of_a_crashed_store_is_the_same_store(campaign: Campaign) -> None:
    campaign.run()
    crashed = campaign.after_crash(len(campaign.fs.log), "dropped")
    assert crashed is not None
    store = open_store(crashed, shard_bytes=1 << 14)
    assert {record.agent for record in store.sequences()} == {"ann", "cat", "dan"}
    store.close()
