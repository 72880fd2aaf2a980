"""Defects in what is written to the disk, its count, and a day's budget of it."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

COUNT, LOG, WRITER = "store/maintenance/wear.py", "store/files/log_frames.py", "store/threads/writer.py"
STORE, ENGINE = "tests/store/test_wear.py", "tests/engine/test_wear.py"

WEAR: tuple[Mutant, ...] = (
    one(
        "wear: a checkpoint is not counted",
        LOG,
        "(page_bytes if frame[:4] not in self._pages else 0)",
        "0",
        f"{STORE}::test_the_log_shows_what_sqlite_writes",
    ),
    one(
        "wear: a log that begins anew is not seen",
        LOG,
        "        if salts != self._salts:\n            self._begin(salts)\n",
        "        if not self._salts:\n            self._begin(salts)\n",
        f"{STORE}::test_the_log_shows_what_sqlite_writes",
    ),
    one(
        "wear: the day's figure is not kept",
        COUNT,
        "            self._ledger.slots.set_meta(self._today.marks())\n",
        "",
        f"{STORE}::test_the_days_figure_survives_a_kill",
    ),
    one(
        "wear: the day does not end",
        COUNT,
        "Written(day, self._today.on(day) + total - self.num_counted)",
        "Written(day, self._today.num_bytes + total - self.num_counted)",
        f"{STORE}::test_the_days_figure_survives_and_ends_with_the_day",
    ),
    one(
        "wear: other models write for nothing",
        COUNT,
        "return self._today.on(day) + self._elsewhere.on(day)",
        "return self._today.on(day)",
        f"{STORE}::test_stores_of_a_directory_share_the_budget",
    ),
    one(
        "wear: a batch beyond the budget is written whole",
        WRITER,
        "wanted[: self.writes.num_fitting(map(self._record_bytes, wanted))]",
        "wanted",
        f"{STORE}::test_days_of_turns_keep_the_budget_and_lose_nothing",
    ),
    one(
        "wear: turns move with the budget used up",
        WRITER,
        "        if not self.writes.may_write:\n",
        "        if False:\n",
        f"{STORE}::test_a_used_up_budget_saves_nothing_until_the_day_turns",
    ),
    one(
        "wear: a used-up day is not told",
        "engine/gauges.py",
        "    if not stats.may_write and stats.writes_a_day is not None:\n",
        "    if False:\n",
        f"{ENGINE}::test_turns_of_a_used_up_day_are_hot_and_saved_on_the_next",
    ),
)
