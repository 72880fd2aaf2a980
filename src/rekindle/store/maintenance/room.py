"""Disk space: how much the records may take, and eviction when more is needed.

Owns the budget and the eviction figures. The budget is for the whole directory: stores of other models are removed
before records of this one are evicted, and what remains of them is not this one's to use. The ledger chooses what to
evict, in a separate transaction before the batch that needs the room is written, so the records never exceed the
budget. Only the writer thread makes room.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rekindle.config import DISK_SHARE, MOST_DISK_BYTES, StoreSettings
from rekindle.store.files.shards import Shards
from rekindle.store.maintenance.other_stores import OtherStores
from rekindle.store.rows.ledger import BranchKey, Ledger
from rekindle.store.rows.slots import Slot

logger = logging.getLogger(__name__)

OnLost = Callable[[str, str, int, int], object]


def budget(wanted: int | None, *, free_bytes: int, used_bytes: int) -> int:
    """Bytes the records may take: the configured size, else a share of the free space plus what they already use."""
    return wanted if wanted is not None else int(min(MOST_DISK_BYTES, DISK_SHARE * (free_bytes + used_bytes)))


def file_bytes(paths: Iterable[Path]) -> int:
    """Total bytes of SQLite files and their logs; missing files count as zero."""
    sizes = []
    for path in paths:
        for name in (path.name, f"{path.name}-wal"):
            with contextlib.suppress(OSError):
                sizes.append(path.with_name(name).stat().st_size)
    return sum(sizes)


def text_files_of(directory: Path, settings: StoreSettings) -> tuple[Path, ...]:
    """The files that share the disk budget of a store below `directory`; they may be missing."""
    is_named = settings.slot != "auto" and directory == settings.own_directory().resolve()
    return (settings if is_named else replace(settings, dir=directory, slot="off")).text_files()


class DiskRoom:
    """`disk_bytes` for the records, `others` and `text_files`; `on_lost` is called for each shortened branch.

    `text_files` are those of sessions and stored responses, whose limits belong to their owners.
    """

    def __init__(
        self,
        ledger: Ledger,
        shards: Shards,
        others: OtherStores,
        *,
        disk_bytes: int,
        counts: Counter[str],
        on_lost: OnLost,
        text_files: Sequence[Path] = (),
    ) -> None:
        self.disk_bytes = disk_bytes
        self._text_files = tuple(text_files)
        self.on_lost = on_lost
        self._ledger = ledger
        self._shards = shards
        self._others = others
        self._counts = counts
        self._most = disk_bytes  # for the records, when last measured
        self._block_bytes = sum(f.record_bytes for f in shards.formats)
        self.is_full = False  # from the first batch that did not fit until one does again
        self._full_logged = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that hold a block."""
        return sum(f.record_bytes * self._ledger.slots.num_used(f.part) for f in self._shards.formats)

    @property
    def num_blocks(self) -> int:
        """How many more blocks with all their parts fit; negative if there are more than the budget allows."""
        return (self._most - self.used_bytes) // self._block_bytes

    def make(
        self, num_blocks: int, keep: Callable[[], Collection[bytes]], touched: Mapping[BranchKey, float], now: float
    ) -> int:
        """Remove other stores and then evict until `num_blocks` more blocks fit; return how many do fit.

        None of `keep` is evicted, which is asked if anything has to be. `touched` are uses not yet written to the rows.
        """
        self._measure(num_blocks, now)
        if self.num_blocks < num_blocks:
            with self._ledger.transaction() as freed:
                self._ledger.touch(touched, now)
                shortened = self._ledger.evict(lambda: self.num_blocks < num_blocks, keep(), now)
            self._counts["blocks_evicted"] += sum(part == 0 for part, _ in freed)
            self._counts["sequences_evicted"] += sum(cut.num_tokens == 0 for cut in shortened)
            for cut in shortened:
                self.on_lost(cut.namespace, cut.agent, cut.branch, cut.num_tokens)
            self.give_back(freed)
        if num_blocks:
            self.is_full = self.num_blocks < num_blocks
            self._log_full()
        return max(0, min(num_blocks, self.num_blocks))

    def _measure(self, num_blocks: int, now: float) -> None:
        """Find what the budget leaves for the records, and remove other stores if `num_blocks` more do not fit.

        Servers that run at once on a directory each have at least an equal part: the one with more shrinks when it
        saves next.
        """
        ours = self.disk_bytes - file_bytes(self._text_files)
        self._most = ours - self._others.num_bytes()
        missing = num_blocks * self._block_bytes + self.used_bytes - self._most
        if missing > 0 and self._most < ours:
            self._others.make_room(missing, now)
            num_open = self._others.num_open()
            self._most = max(ours - self._others.num_bytes(), ours // (1 + num_open) if num_open else 0)

    def drop(self, block_hash: bytes) -> None:
        """Remove a block with all that follow it, in a transaction of the caller, who gives back what it frees."""
        for cut in self._ledger.drop(block_hash):
            self.on_lost(cut.namespace, cut.agent, cut.branch, cut.num_tokens)

    def give_back(self, freed: Sequence[Slot]) -> None:
        """Punch freed slots. A failure is harmless: the slots are free anyway."""
        try:
            self._shards.punch(freed)
        except OSError as error:
            logger.warning("space of freed blocks could not be given back: %s", error)

    def forget_full(self) -> None:
        """Reset the full state after a deletion, so that it is logged again when the store is next full."""
        self.is_full = self._full_logged = False

    def _log_full(self) -> None:
        if self.is_full and not self._full_logged:
            logger.warning(
                "the store is full (%d of %d bytes): new blocks do not all fit next to what is pinned, so "
                "turns are not saved; give it more disk_bytes, or unpin or delete agents",
                self.used_bytes,
                self.disk_bytes,
            )
        self._full_logged = self._full_logged or self.is_full


def ignore(namespace: str, agent: str, branch: int, num_tokens: int) -> None:
    """Do nothing: the default for `on_lost` and `on_saved`."""
