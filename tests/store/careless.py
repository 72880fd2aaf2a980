"""Stores that are careless in one way each. A crash test that lets one of them pass is worth nothing.

Each is applied to the code for the time of a run; the crashes are then judged by the careful store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rekindle.store.files.shards import Shards
from rekindle.store.maintenance import purging
from rekindle.store.rows.index import Index
from rekindle.store.rows.ledger import Ledger
from rekindle.store.rows.slots import Slot, SlotTable
from rekindle.store.threads.batch import Batch
from rekindle.store.threads.writer import Writer

Careless = Callable[[pytest.MonkeyPatch], None]


def never_syncs(patch: pytest.MonkeyPatch) -> None:
    """Shards are not made durable at all."""
    patch.setattr(Shards, "sync", lambda self: None)


def commits_before_it_syncs(patch: pytest.MonkeyPatch) -> None:
    """The transaction comes first, the sync behind it."""
    sync, transaction, waiting = Shards.sync, Ledger.transaction, list[Shards]()

    @contextmanager
    def commit_then_sync(self: Ledger) -> Iterator[list[Slot]]:
        with transaction(self) as freed:
            yield freed
        while waiting:
            sync(waiting.pop())

    patch.setattr(Shards, "sync", lambda self: waiting.append(self))
    patch.setattr(Ledger, "transaction", commit_then_sync)


def does_not_sync_names(patch: pytest.MonkeyPatch) -> None:
    """New shards may vanish, however durable their bytes are."""
    sync = Shards.sync

    def bytes_alone(self: Shards) -> None:
        self._new_names = False
        sync(self)

    patch.setattr(Shards, "sync", bytes_alone)


def punches_before_it_commits(patch: pytest.MonkeyPatch) -> None:
    """Freed slots are emptied inside the transaction that frees them."""
    made, free = list[Shards](), SlotTable.free
    init = Shards.__init__

    def remembered(self: Shards, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def free_and_punch(self: SlotTable, slots: Sequence[Slot]) -> None:
        free(self, slots)
        made[-1].punch(slots)

    patch.setattr(Shards, "__init__", remembered)
    patch.setattr(SlotTable, "free", free_and_punch)


def reuses_slots_before_they_are_freed(patch: pytest.MonkeyPatch) -> None:
    """A branch's new tail is written over its old one, before the transaction that frees the old one."""
    save, next_slots, transaction = Writer._save, SlotTable.next, Ledger.transaction
    victims: list[tuple[bytes, list[int]]] = []

    def old_tails(ledger: Ledger, turns: Sequence[Any]) -> Iterator[tuple[bytes, list[int]]]:
        query = (
            "SELECT s.head FROM sequence s JOIN agent a USING(agent) WHERE a.namespace = ?1 AND a.id = ?2"
            " AND s.branch = ?3 AND s.head <> ?4 AND NOT EXISTS (SELECT 1 FROM block b WHERE b.parent = s.head)"
            " AND (SELECT COUNT(*) FROM sequence t WHERE t.head = s.head) = 1"
        )
        for turn in turns:
            for (head,) in ledger._db.execute(query, (turn.namespace, turn.agent, turn.branch, turn.head)).fetchall():
                places = ledger._db.execute("SELECT slot FROM block WHERE name = ? ORDER BY part", (head,)).fetchall()
                if places:
                    yield head, [row[0] for row in places]

    def greedy_save(self: Writer, batch: Batch) -> None:
        names = {block.identity.hash for block in batch.blocks}
        kept = {block.identity.parent for block in batch.blocks} | names
        # one at a time, and only where something new takes the place
        victims[:] = [v for v in old_tails(self._ledger, batch.turns) if v[0] not in kept][: len(names)][:1]
        try:
            save(self, batch)
        finally:
            victims.clear()

    def greedy_slots(self: SlotTable, part: int, count: int) -> list[int]:
        taken = [places[part] for _, places in victims][:count]
        return taken + next_slots(self, part, count - len(taken))

    @contextmanager
    def freed_late(self: Ledger) -> Iterator[list[Slot]]:
        with transaction(self) as freed:
            for name, places in victims:
                self._db.execute("DELETE FROM block WHERE name = ?", (name,))
                for part, slot in enumerate(places):
                    self.slots._put_free(part, slot)
            yield freed

    patch.setattr(Writer, "_save", greedy_save)
    patch.setattr(SlotTable, "next", greedy_slots)
    patch.setattr(Ledger, "transaction", freed_late)


def purges_without_emptying_the_log(patch: pytest.MonkeyPatch) -> None:
    """What was purged still stands in the index's log, and the proof does not look."""
    patch.setattr(Index, "truncate_wal", lambda self: None)
    patch.setattr(purging, "_in_files", lambda parts, forgotten: None)
    patch.setattr(Index, "drop_traces", lambda self, last: None)  # empties it, too


def purges_without_zeroing(patch: pytest.MonkeyPatch) -> None:
    """Freed slots keep their bytes, and the proof does not look."""
    patch.setattr(Shards, "punch", lambda self, slots: None)
    patch.setattr(Shards, "is_zero", lambda self, part, slot, buffer: True)


def purges_without_syncing_the_holes(patch: pytest.MonkeyPatch) -> None:
    """A power cut brings back what was purged."""
    patch.setattr(Shards, "sync_all", lambda self, slots: None)


CARELESS: tuple[Careless, ...] = (
    never_syncs,
    commits_before_it_syncs,
    does_not_sync_names,
    punches_before_it_commits,
    reuses_slots_before_they_are_freed,
    purges_without_emptying_the_log,
    purges_without_zeroing,
    purges_without_syncing_the_holes,
)
