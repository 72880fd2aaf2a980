"""A store at work, every moment at which it may crash, and what must be true of what each crash leaves.

Owns the notebook: which turns were submitted, which were reported saved, what eviction took back, who was deleted or
purged; and judges a crashed directory by it. A moment is an operation of the sync module, or a statement that begins,
commits or checkpoints the index; at each the index is copied and the notebook's page turned.

    submitted ──▶ told (on_saved): from here on the branch is there, whole ──▶ lost, deleted, purged: not any more
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import id_bytes
from rekindle.config import StoreSettings
from rekindle.store.commands import Delete, Pin, Purge
from rekindle.store.files import sqlite_file
from rekindle.store.files.sqlite_file import connect
from rekindle.store.maintenance.room import OnLost, ignore
from rekindle.store.rows import index
from rekindle.store.threads.writer import OnSaved
from rekindle.store.warm import WarmStore
from tests.store.chains import BLOCK_BYTES, FINGERPRINT, LAYOUT, READERS, SIZE, Chain, payload_of, save, warm_tokens
from tests.store.recording import CRASHES, SECTOR, Crash, Index, RecordingFileSystem, read_index, replay, torn_indexes

Key = tuple[str, str, int]  # namespace, agent, branch
SHARD_BYTES = 1 << 14
RECOVERED_PREFIX = "\x01recovered-"
STEPS = ("BEGIN", "COMMIT", "ROLLBACK", "PRAGMA wal_checkpoint", "PRAGMA user_version =", "ALTER", "CREATE")
CHECKPOINT_PAGES = 40  # so that the index's own checkpoints come often


@dataclass(frozen=True)
class Branch:
    """What a crash must leave of a branch: one of `versions[low:high]`, at least `required` tokens of it.

    `told` tokens were reported saved; turns under way may have made it shorter, or a deletion made an end of it.
    """

    low: int = 0
    high: int = 0
    told: int = 0
    required: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class Purged:
    """What must not be found anywhere any more."""

    namespace: str
    agent: str
    traces: tuple[bytes, ...]


@dataclass
class Moment:
    """The world as it was: how much of the log was done, the index, the notebook."""

    what: str
    num_operations: int
    index: Index
    branches: dict[Key, Branch]
    pins: dict[tuple[str, str], set[float]]
    purged: tuple[Purged, ...]


class Campaign:
    """Runs a workload below `directory` and replays its crashes. `num_states` counts those that were opened."""

    def __init__(self, directory: Path, *, disk_blocks: int = 400) -> None:
        self.directory = directory
        self.live = directory / "live"
        self.place = self.live / FINGERPRINT.hex()
        self.disk_blocks = disk_blocks
        self.moments: list[Moment] = []
        self.versions: dict[Key, list[tuple[int, ...]]] = {}
        self.branches: dict[Key, Branch] = {}
        self.pins: dict[tuple[str, str], set[float]] = {}  # until when; two while one is put in the place of another
        self.purged: tuple[Purged, ...] = ()
        self.num_states = 0
        self.num_evicted = 0
        self.also: Callable[[WarmStore], None] = lambda store: None  # what else must be true of every crash
        self.now = 1000.0
        self._seen: set[bytes] = set()
        self._indexes: dict[bytes, Index] = {}
        self._lock = threading.Lock()
        self.fs = RecordingFileSystem(self.live, lambda: self._turn_page("operation"))

    # ---- the run

    def open(
        self,
        directory: Path | None = None,
        fs: RecordingFileSystem | None = None,
        *,
        on_saved: OnSaved = ignore,
        on_lost: OnLost = ignore,
    ) -> WarmStore:
        """The store of this campaign, not started."""
        return WarmStore.open(
            directory or self.live,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            settings=StoreSettings(staging_bytes=1 << 20, disk_bytes=self.disk_blocks * BLOCK_BYTES),
            fs=fs,
            clock=lambda: self.now,
            shard_bytes=SHARD_BYTES,
            on_saved=on_saved,
            on_lost=on_lost,
            read_records=READERS["auto"],
        )

    @contextmanager
    def running(self) -> Iterator[WarmStore]:
        """A started store whose every moment is recorded."""

        def traced(path: Path, **more: float) -> sqlite3.Connection:
            connection = connect(path, **more)
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            connection.set_trace_callback(
                lambda said: self._turn_page(said.strip()) if said.strip().startswith(STEPS) else None
            )
            return connection

        with pytest.MonkeyPatch.context() as patch:
            for module in (sqlite_file, index):
                patch.setattr(module, "connect", traced)
            store = self.open(fs=self.fs, on_saved=self.told, on_lost=self.lost)
            store.start()
            try:
                yield store
                stats = store.stats()
                assert stats.failed_saves == 0, stats.last_error
                self.num_evicted += stats.blocks_evicted
            finally:
                store.close()
                self._turn_page("closed")

    def _turn_page(self, what: str) -> None:
        index = read_index(self.place) if self.place.is_dir() else {}
        digest = blake2b(b"".join(name.encode() + content for name, content in sorted(index.items()))).digest()
        with self._lock:
            index = self._indexes.setdefault(digest, index)
            state = (dict(self.branches), dict(self.pins), self.purged)
            self.moments.append(Moment(what, len(self.fs.log), index, *state))

    # ---- the notebook

    def submit(self, key: Key, ids: Sequence[int]) -> None:
        """A turn is about to be queued: from now on a crash may leave it."""
        with self._lock:
            versions = self.versions.setdefault(key, [])
            versions.append(tuple(ids))
            now = self.branches.get(key, Branch(len(versions) - 1))
            self._state(key, replace(now, high=len(versions)))

    def _state(self, key: Key, now: Branch) -> None:
        under_way = [len(ids) for ids in self.versions[key][now.low + 1 : now.high]]
        required = 0 if now.leaving else min([now.told, *under_way])
        self.branches[key] = replace(now, required=required)

    def told(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        key = (namespace, agent, branch)
        self._turn_page("told")
        with self._lock:
            now, versions = self.branches[key], self.versions[key]
            later = [i for i in range(now.low, now.high) if len(versions[i]) == num_tokens]
            assert later, f"{key} was told {num_tokens} tokens, which nobody saved"
            self._state(key, replace(now, low=later[0], told=num_tokens))

    def lost(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Eviction took the branch's end, in the transaction that began last; other turns may be submitted since."""
        key = (namespace, agent, branch)
        with self._lock:
            begun = max((at for at, moment in enumerate(self.moments) if moment.what.startswith("BEGIN")), default=0)
            for page in [self.branches, *(moment.branches for moment in self.moments[begun:])]:
                if key in page:
                    now = page[key]
                    page[key] = replace(now, told=min(now.told, num_tokens), required=min(now.required, num_tokens))

    def deleting(self, keys: Sequence[Key]) -> None:
        """These are about to go."""
        with self._lock:
            for key in keys:
                self._state(key, replace(self.branches[key], leaving=True))
                if not any(now.required for other, now in self.branches.items() if other[:2] == key[:2]):
                    self.pins.pop(key[:2], None)

    def deleted(self, keys: Sequence[Key]) -> None:
        """These are gone for good."""
        with self._lock:
            for key in keys:
                end = len(self.versions[key])
                self.branches[key] = Branch(end, end)

    def note_purge(self, store: WarmStore, namespace: str, agent: str, keys: Sequence[Key]) -> None:
        """The purge was proven: neither the agent's name nor a block that was its own may ever be found again."""
        mine = {key: self.versions[key] for key in keys}
        others = {block.identity.hash for key in self.versions if key not in mine for block in self._blocks(store, key)}
        own = {
            block.identity.hash: block
            for key in mine
            for block in self._blocks(store, key)
            if block.identity.hash not in others
        }
        traces = [agent.encode()]
        for block in own.values():
            traces += [
                block.identity.hash,
                id_bytes(block.identity.ids[-6:]),
                payload_of(block.identity.hash, 0)[:64].tobytes(),
            ]
            traces += [payload_of(block.identity.hash, part)[-64:].tobytes() for part in range(len(LAYOUT.parts))]
        self.proven(Purged(namespace, agent, tuple(traces)), keys)

    def proven(self, purged: Purged, keys: Sequence[Key]) -> None:
        """A purge has returned."""
        self.deleted(keys)
        with self._lock:
            self.purged = (*self.purged, purged)

    def _blocks(self, store: WarmStore, key: Key):
        return [block for ids in self.versions[key] for block in Chain.of(store, ids, key[0]).blocks]

    def pinning(self, namespace: str, agent: str, until: float) -> None:
        """A pin is asked for: of one that there is already, a crash leaves the old one or this."""
        with self._lock:
            if (namespace, agent) in self.pins:
                self.pins[namespace, agent] = self.pins[namespace, agent] | {until}

    def note_pin(self, namespace: str, agent: str, until: float) -> None:
        """A pin was confirmed."""
        with self._lock:
            self.pins[namespace, agent] = {until}

    def next_life(self, directory: Path, source: Path, moment: Moment | None = None) -> Campaign:
        """A campaign that goes on with the store in `source` from this page of the notebook, or its last one."""
        following = Campaign(directory, disk_blocks=self.disk_blocks)
        following.versions = self.versions
        page = moment or self
        following.branches, following.pins, following.purged = dict(page.branches), dict(page.pins), page.purged
        following.now = self.now + 1
        shutil.copytree(source, following.live)
        following.fs.adopt()
        return following

    def note_unpin(self, namespace: str, agent: str) -> None:
        """A pin is about to be taken away."""
        with self._lock:
            self.pins.pop((namespace, agent), None)

    # ---- the crashes

    def crash_everywhere(self, random: np.random.Generator, *, torn: int = 2, kinds: int = len(CRASHES)) -> None:
        """Every moment with every kind of crash, or so many drawn ones, and between moments the index's own half-done
        states."""
        for number, moment in enumerate(self.moments):
            drawn = sorted(random.choice(len(CRASHES), kinds, replace=False))
            for crash in (CRASHES[each] for each in drawn):
                self.holds(moment, moment.index, crash, random)
            after = self.moments[number + 1].index if number + 1 < len(self.moments) else moment.index
            if after is not moment.index:
                for index in torn_indexes(moment.index, after, random, torn):
                    self.holds(moment, index, CRASHES[int(random.integers(len(CRASHES)))], random)

    def crashed(self, moment: Moment, index: Index, crash: Crash, random: np.random.Generator) -> Path | None:
        """A directory as this crash may leave it; None if one like it was looked at before."""
        files = replay(self.fs.log[: moment.num_operations], crash, random)
        content = {path.relative_to(self.live): data for path, data in files.items()}
        content |= {Path(self.place.name, name): data for name, data in index.items()}
        digest = blake2b(repr((moment.branches, moment.pins, moment.purged)).encode())
        for path, data in sorted(content.items()):
            digest.update(str(path).encode() + b"\0" + data)
        if digest.digest() in self._seen:
            return None
        self._seen.add(digest.digest())
        target = self.directory / "crashed"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path, data in content.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
        return target

    def holds(self, moment: Moment, index: Index, crash: Crash, random: np.random.Generator) -> None:
        """Open what the crash left, once, and judge it."""
        target = self.crashed(moment, index, crash, random)
        if target is None:
            return
        self.num_states += 1
        try:
            self.judge(target, moment)
        except AssertionError as error:
            raise AssertionError(f"state {self.num_states} ({crash}, before {moment.what!r}): {error}") from error

    def judge(self, target: Path, moment: Moment) -> None:
        """All that must be true of a store after a crash at this moment."""
        find_nothing(target, moment.purged)
        store = self.open(target)
        store.start()
        try:
            store.check("records")
            self.all_told_is_there(store, moment)
            self.also(store)
            self.pins_are_there(store, moment)
            stats = store.stats()
            assert stats.used_bytes <= stats.disk_bytes, "more than the budget"
            self.saving_goes_on(store)
            store.check("records")
            assert store.stats().last_error is None
        finally:
            store.close()

    def saving_goes_on(self, store: WarmStore) -> None:
        """A new turn is saved; where pins leave no room for it, once they are taken away."""
        later = Chain.of(store, range(7, 7 + 3 * SIZE))
        save(store, later, "after")
        if warm_tokens(store, later) < len(later.ids):
            free = self.disk_blocks - store.stats().pinned_blocks
            assert free < len(later.blocks), f"saving does not go on next to {free} blocks that nobody pinned"
            for namespace, agent in store.pins():
                store.submit(Pin(namespace, agent, 0.0)).result(20)
            save(store, later, "after")
            assert warm_tokens(store, later) == len(later.ids), "saving does not go on without pins"

    @staticmethod
    def pins_are_there(store: WarmStore, moment: Moment) -> None:
        """Who was pinned still is, while there is anything of it."""
        pinned = store.pins()
        for (namespace, agent), until in moment.pins.items():
            if any(key[:2] == (namespace, agent) and now.required for key, now in moment.branches.items()):
                found = pinned.get((namespace, agent))
                assert found in until, f"the pin of {agent} is gone: {found} is not of {until}"

    def all_told_is_there(self, store: WarmStore, moment: Moment) -> None:
        """Every branch told saved is there, whole, with the bytes it was saved with; nothing is there that was not."""
        found = {(r.namespace, r.agent, r.branch): r for r in store.sequences()}
        for key, now in moment.branches.items():
            got = found[key].num_tokens if key in found else 0
            assert got >= now.required, f"{key} has {got} of {now.required} saved tokens"
        for key, record in found.items():
            ids = tuple(store.sequence_ids(record).tolist())
            now = moment.branches.get(key, Branch())
            allowed = self.versions.get(key, [])[now.low : now.high]
            if key[1].startswith(RECOVERED_PREFIX):
                allowed = [ids for versions in self.versions.values() for ids in versions]
            assert len(ids) == record.num_tokens, f"{key}: {len(ids)} of {record.num_tokens} ids"
            assert any(version[: len(ids)] == ids for version in allowed), f"{key} holds what was never its own"
            warm = warm_tokens(store, Chain.of(store, ids, key[0]))
            assert warm == len(ids), f"{key}: {warm} of {len(ids)} tokens are warm"


def find_nothing(directory: Path, purged: Sequence[Purged]) -> None:
    if not purged:
        return
    # holes say nothing, and there are many
    content = b"\0".join(
        path.read_bytes().replace(bytes(SECTOR), b"") for path in directory.rglob("*") if path.is_file()
    )
    for one in purged:
        for trace in one.traces:
            assert trace not in content, f"something of {one.agent}, which was purged, is still there"


class Workload:
    """Turns, forks, rewinds, superseded branches, deletions and the rest, drawn by a seed, on a campaign's store."""

    def __init__(self, campaign: Campaign, store: WarmStore, random: np.random.Generator) -> None:
        self.campaign = campaign
        self.store = store
        self.random = random
        self.agents = ["ann", "bob", "cat", "\x01nameless"]
        self.ids: dict[Key, list[int]] = {}
        self.names = iter(f"agent-{number}" for number in range(1000))

    def run(self, actions: Sequence[str]) -> None:
        """Do these, one after the other; most wait until all is durable, some do not."""
        for action in actions:
            self.campaign.now += 1
            getattr(self, action if self.ids else "turn")()
            if self.random.random() < 0.7:
                assert self.store.flush(20)
        assert self.store.flush(20)

    def _pick(self) -> Key:
        keys = sorted(self.ids)
        return keys[int(self.random.integers(len(keys)))]

    def _agent(self) -> tuple[str, str]:
        agent = self.agents[int(self.random.integers(len(self.agents)))]
        return ("other" if agent == "cat" else "default", agent)

    def _write(self, key: Key, ids: list[int]) -> None:
        self.campaign.submit(key, ids)
        chain = Chain.of(self.store, ids, key[0])
        for block in chain.blocks:
            while not self.store.stage(block):
                assert self.store.flush(20)
        self._move(key, chain, ids)

    def _move(self, key: Key, chain: Chain, ids: list[int]) -> None:
        record = chain.record(key[1], key[2], key[0], num_tokens=len(ids))
        self.store.save_turn(replace(record, last_use=self.campaign.now))
        self.ids[key] = ids

    def turn(self) -> None:
        """A conversation of its own, or one that begins as others do."""
        key = (*self._agent(), int(self.random.integers(2)))
        shared = list(range(20)) if self.random.random() < 0.5 else []
        own = self.random.integers(100, 1 << 31, int(self.random.integers(5, 70))).tolist()
        self._write(key, shared + own)

    def extend(self) -> None:
        """The next turn of a branch: its old tail is superseded."""
        key = self._pick()
        more = self.random.integers(100, 1 << 31, int(self.random.integers(1, 40))).tolist()
        self._write(key, self.ids[key] + more)

    def fork(self) -> None:
        """Another agent gets the same end."""
        source = self._pick()
        target = (source[0], self._agent()[1], int(self.random.integers(2)))
        self.campaign.submit(target, self.ids[source])
        self._move(target, Chain.of(self.store, self.ids[source], source[0]), self.ids[source])

    def rewind(self) -> None:
        """A branch ends earlier, perhaps inside a block."""
        key = self._pick()
        ids = self.ids[key]
        left = int(self.random.integers(1, len(ids) + 1))
        self.campaign.submit(key, ids[:left])
        # a branch may end inside its head block
        whole = ids[: -(-left // SIZE) * SIZE]
        record = Chain.of(self.store, whole, key[0]).record(key[1], key[2], key[0], num_tokens=left)
        self.store.save_turn(replace(record, last_use=self.campaign.now))
        self.ids[key] = ids[:left]

    def delete_branch(self) -> None:
        key = self._pick()
        self.campaign.deleting([key])
        self.store.submit(Delete(*key)).result(20)
        self.campaign.deleted([key])
        del self.ids[key]

    def delete_agent(self) -> None:
        namespace, agent, keys = self._all_of(self._pick())
        self.campaign.deleting(keys)
        self.store.submit(Delete(namespace, agent)).result(20)
        self.campaign.deleted(keys)

    def pin(self) -> None:
        namespace, agent = self._pick()[:2]
        until = self.campaign.now + 1000
        assert self.store.flush(20)
        self.campaign.pinning(namespace, agent, until)
        if self.store.submit(Pin(namespace, agent, until)).result(20):
            self.campaign.note_pin(namespace, agent, until)

    def unpin(self) -> None:
        for namespace, agent in [*self.campaign.pins]:
            self.campaign.note_unpin(namespace, agent)
            self.store.submit(Pin(namespace, agent, 0.0)).result(20)

    def touch(self) -> None:
        self.store.touch(*self._pick(), self.campaign.now)

    def purge(self) -> None:
        """One whose name and ids nobody else has."""
        namespace, agent = "default", f"purged-{next(self.names)}"
        for branch in range(2):
            self._write((namespace, agent, branch), self.random.integers(1 << 20, 1 << 31, 30 + 20 * branch).tolist())
        assert self.store.flush(20)
        _, _, keys = self._all_of((namespace, agent, 0))
        self.campaign.deleting(keys)
        self.store.submit(Purge(namespace, agent)).result(20)
        self.campaign.note_purge(self.store, namespace, agent, keys)

    def fill(self) -> None:
        """A long one by which older ones must leave a small store."""
        key = ("default", next(self.names), 0)
        self._write(key, self.random.integers(100, 1 << 31, 8 * SIZE + 3).tolist())

    def check(self) -> None:
        assert self.store.flush(20)
        self.store.check("records")

    def _all_of(self, key: Key) -> tuple[str, str, list[Key]]:
        keys = [k for k in self.ids if k[:2] == key[:2]]
        for k in keys:
            del self.ids[k]
        return key[0], key[1], keys


def drawn_actions(random: np.random.Generator, count: int) -> list[str]:
    """A workload at random in which everything comes up."""
    often = ["turn", "extend", "extend", "fork", "rewind"]
    seldom = ["delete_branch", "delete_agent", "pin", "unpin", "touch", "purge", "fill", "check"]
    return [
        "turn",
        "turn",
        "turn",
        *(str(random.choice(often if random.random() < 0.6 else seldom)) for _ in range(count)),
    ]


def recorded(
    directory: Path,
    seed: int,
    actions: Sequence[str] | None = None,
    *,
    disk_blocks: int = 400,
    restart: bool = True,
    careless: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> Campaign:
    """A campaign after its run: a workload, closed, opened again, some more of it."""
    campaign = Campaign(directory, disk_blocks=disk_blocks)
    random = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        if careless is not None:
            careless(patch)
        with campaign.running() as store:
            workload = Workload(campaign, store, random)
            workload.run(actions if actions is not None else drawn_actions(random, 25))
            ids = workload.ids
        if restart:
            with campaign.running() as store:
                workload.store = store
                workload.ids = {key: ids[key] for key in ids}
                workload.run(["extend", "turn", "fork", "rewind", "extend"])
    return campaign
