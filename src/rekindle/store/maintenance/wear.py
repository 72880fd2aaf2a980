"""What a store writes to the disk: since it was opened, on this day (UTC), and how much more it may on a day.

Owns the count of a day, which is kept in the index by the transactions of saves, and so survives a restart; a kill
loses what the index took from the last save on. Counted are records, and the index as far as its log shows
(`files.log_frames`); not counted is what others own: sessions, stored responses, packed weights, and the stores' locks.
The day's figure is for all stores of a directory, those of other models are asked now and then. Any thread may read;
only the writer thread counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rekindle.config import show_bytes
from rekindle.store.files.log_frames import LogFrames
from rekindle.store.maintenance.opening import OpenedStore
from rekindle.store.rows.written import Written, day_of

logger = logging.getLogger(__name__)
LOOK_S = 60.0  # how old the other stores' figures may be


class DiskWrites:
    """Bytes written, and whether more may be: `most` on a day, None for any number.

    A budget that has less left than a whole block takes is used up. What is written then are changes that somebody
    waits for, deletions above all; a day may end above the budget by these, and by the index's share of one save.
    """

    def __init__(self, parts: OpenedStore, *, most: int | None, clock: Callable[[], float]) -> None:
        self.most = most
        self._shards = parts.shards
        self._ledger = parts.ledger
        self._others = parts.others
        self._clock = clock
        self._block_bytes = sum(f.record_bytes for f in parts.shards.formats)
        self._log = LogFrames(parts.place.index_path)
        self.index_bytes = 0  # since it was opened
        self.num_counted = 0  # bytes, since it was opened
        self._today = self._kept = Written.kept(parts.index.meta())
        self._elsewhere = Written()
        self._looked_at = float("-inf")
        self._logged_on: int | None = None
        self._is_blind = False
        self.count()

    @property
    def record_bytes(self) -> int:
        """Bytes of records written since the store was opened."""
        return self._shards.num_written

    @property
    def today(self) -> int:
        """Bytes that the stores of the directory wrote today; other processes' as of a minute ago."""
        day = day_of(self._clock())
        return self._today.on(day) + self._elsewhere.on(day)

    @property
    def left(self) -> int | None:
        """Bytes that may still be written today; None: any number."""
        return None if self.most is None else max(0, self.most - self.today)

    @property
    def may_write(self) -> bool:
        """Whether today's budget has room for a block."""
        return self.left is None or self.left >= self._block_bytes

    def num_fitting(self, sizes: Iterable[int]) -> int:
        """How many of the leading ones of these records [bytes] today's budget has room for."""
        left, count = self.left, 0
        for count, size in enumerate(sizes, 1):
            if left is not None and (left := left - size) < 0:
                return count - 1
        return count

    def count(self) -> None:
        """Add what was written since the last call to this day; another one than before begins at 0."""
        now = self._clock()
        day = day_of(now)
        try:
            self.index_bytes += self._log.new_bytes()
        except OSError as error:  # SQLite has its files open and may write all the same
            if not self._is_blind:
                logger.warning("what the store's index writes cannot be counted: %s", error)
            self._is_blind = True
        total = self.index_bytes + self.record_bytes
        self._today = Written(day, self._today.on(day) + total - self.num_counted)
        self.num_counted = total
        if day != self._elsewhere.day or abs(now - self._looked_at) >= LOOK_S:
            self._elsewhere, self._looked_at = Written(day, self._others.written_on(day)), now

    def keep(self) -> None:
        """Count, and put the day's figure into the index if it is another, in the current transaction."""
        self.count()
        if self._today.num_bytes and self._today != self._kept:
            self._ledger.slots.set_meta(self._today.marks())
            self._kept = self._today

    def report_used_up(self) -> None:
        """Say that nothing is saved for the rest of the day; once a day."""
        day = day_of(self._clock())
        if day == self._logged_on or self.most is None:
            return
        self._logged_on = day
        logger.warning("%s", used_up(self.today, self.most))


def used_up(today: int, most: int) -> str:
    """Say what a used-up budget means, and what to do."""
    return (
        f"the disk writes of today are used up ({show_bytes(today)} of {show_bytes(most)}): turns stay in memory and "
        "will not survive a restart; from 00:00 UTC on they are saved with their agent's next turn; "
        "give more disk_writes_a_day to save them now"
    )
