"""The one process of an engine that has the store open: records by their keys, read and saved for all its workers.

Owns the open store, what keys stand for, and the ends of branches. Payloads here are those of all heads. The thread of
the scheduler makes keys and turns; workers read and save by them, one save at a time.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds
from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.config import StoreSettings
from rekindle.spec import KVLayout
from rekindle.store.values import BlockBytes, SequenceRecord, StoredBlock, StoreStats
from rekindle.store.warm import WarmStore
from rekindle_vllm.branches import Branches
from rekindle_vllm.names import Scope
from rekindle_vllm.steps import Address

Bytes = npt.NDArray[np.uint8]
POLL_S = 0.0005  # of a full staging buffer; a record takes the writer as long
OPEN: WeakValueDictionary[str, RecordOwner] = WeakValueDictionary()  # of this process, by token


class RecordOwner:
    """An open store, and what its engine is reading and saving."""

    def __init__(self, store: WarmStore, layout: KVLayout, fingerprint: bytes, branches: Branches) -> None:
        self.layout = layout
        self.store = store
        self._fingerprint = fingerprint
        self._branches = branches
        self._keys = itertools.count(1)
        self._loads: dict[int, tuple[StoredBlock, ...]] = {}
        self._saves: dict[int, tuple[BlockIdentity, ...]] = {}
        self._parts: dict[int, int] = {}  # of loads and saves
        self._saving = threading.Lock()
        self.address = Address(os.getpid(), secrets.token_hex(16))
        OPEN[self.address.token] = self

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        fingerprint: bytes,
        settings: StoreSettings,
        *,
        model: str = "",
        namespaces: Sequence[str] = ("default",),
    ) -> RecordOwner:
        """Open the store of this fingerprint and start its threads; StoreLocked if another process has it."""
        branches = Branches()
        store = WarmStore.open(
            settings.directory(),
            fingerprint=fingerprint,
            layout=layout,
            settings=settings,
            model=model,
            namespaces=namespaces,
            on_lost=branches.lost,
            read_records=record_reader("auto"),
        )
        branches.restore(store.sequences())
        store.start()
        return cls(store, layout, fingerprint, branches)

    def root(self, scope: Scope) -> BlockHash:
        """The parent of a scope's first blocks."""
        return scope.root(self._fingerprint, self.store.secret)

    def locate(self, names: Sequence[BlockHash], parent: BlockHash, ids: TokenIds) -> list[StoredBlock]:
        """The leading run of records that are on disk and hold exactly these ids after `parent`."""
        return self.store.locate(names, parent=parent, ids=ids)

    def num_known(self, names: Sequence[BlockHash]) -> int:
        """How many leading records are on disk or on their way; damaged ones count if later ones are there."""
        return self.store.num_known(names)

    def num_sound(self, names: Sequence[BlockHash]) -> int:
        """As `num_known`, up to the first record that is known to be damaged; costs a look at each."""
        sound = (self.store.writer.is_pending(name) or self.store.contains(name) for name in names)
        return sum(1 for _ in itertools.takewhile(bool, sound))

    def plan_load(self, blocks: Iterable[StoredBlock], part: int = 0) -> int:
        """Return a key for a part of these records, to be read."""
        key, wanted = next(self._keys), tuple(block.only((part,)) for block in blocks)
        assert all(block.places for block in wanted), f"a record has no part {part}, and reading nothing would succeed"
        self._loads[key], self._parts[key] = wanted, part
        return key

    def plan_save(self, identities: Iterable[BlockIdentity], part: int = 0) -> int:
        """Return a key for a part of records with these identities, parents first, to be saved."""
        key = next(self._keys)
        self._saves[key], self._parts[key] = tuple(identities), part
        return key

    def part(self, key: int) -> int:
        """The part of the records that a key stands for."""
        return self._parts[key]

    def forget(self, keys: Iterable[int]) -> None:
        """Forget keys whose records were read, saved or given up."""
        for key in keys:
            self._loads.pop(key, None)
            self._saves.pop(key, None)
            self._parts.pop(key, None)

    def begin_load(self, key: int, first: int, rows: Sequence[Bytes]) -> Future[int]:
        """Read records of a key from the `first` on into `rows` [payload_bytes]; the result: how many were intact.

        The rows may not be read or changed before.
        """
        wanted, count = self._loads[key][first : first + len(rows)], Future[int]()

        def room(at: int, run: Sequence[StoredBlock]) -> list[dict[int, Bytes]]:
            return [dict.fromkeys(block.parts, row) for block, row in zip(run, rows[at:], strict=False)]

        self.store.load(wanted, lambda at, run: None, count.set_result, room)
        return count

    def save(self, key: int, first: int, rows: Sequence[Bytes], deadline: float) -> int:
        """Queue payloads of a key's records from the `first` on for saving; return how many were taken.

        Where the staging buffer is full, waits until the `deadline` of `time.monotonic`. Another part than the first
        is taken of records only whose first part was.
        """
        identities, part = self._saves[key][first : first + len(rows)], self._parts[key]
        with self._saving:
            for number, (identity, row) in enumerate(zip(identities, rows, strict=True)):
                if part and not self.num_sound([identity.hash]):
                    return number
                if not self._stage(BlockBytes(identity, {part: row}), deadline):
                    return number
        return len(rows)

    def _stage(self, block: BlockBytes, deadline: float) -> bool:
        while not self.store.stage(block):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def finish(
        self,
        scope: Scope,
        agent: str | None,
        root: BlockHash,
        names: Sequence[BlockHash],
        points: Collection[int],
        *,
        worth: Callable[[Collection[int]], set[int]],
        shared: Collection[int],
        positions_of: Callable[[int], Iterable[int]],
    ) -> None:
        """Save the end of a turn after its records: `names` of all that were saved, at least one.

        `points`: token counts after which an engine may go on; what is `worth` it of these and of those of the branch's
        earlier turns stays, with the parts that end. `shared` ones, of requests that have not ended, stay until its
        next turn. `positions_of` a point are those that the store keeps parts for.
        """
        now = time.time()
        place = self._branches.place(scope.namespace, agent, names, now)
        tokens = len(names) * self.layout.block_tokens
        record = SequenceRecord(place.namespace, place.agent, place.branch, root, names[-1], tokens, tokens, now)
        kept = self._branches.points(place, points, worth) | {*shared}
        positions = tuple(sorted({at for point in kept for at in positions_of(point)}))
        self.store.save_turn(replace(record, resume_points=positions, is_rolling=True))

    def stats(self) -> StoreStats:
        """The figures of the store."""
        return self.store.stats()

    def close(self) -> None:
        """Save what is queued and release the directory. Closing twice is safe."""
        self.store.close()
