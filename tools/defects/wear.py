"""Defects in what is written to the disk, its count, and a day's budget of it."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

COUNT, LOG, WRITER = "store/maintenance/wear.py", "store/files/log_frames.py", "store/threads/writer.py"
STORE, ENGINE = "tests/store/test_wear.py", "tests/engine/test_wear.py"
TWICE = "tests/engine/test_seen_twice.py"

WEAR: tuple[Mutant, ...] = (
    one(
        "wear: a checkpoint is not counted",
        LOG,
        "(piece_bytes if piece not in self._pieces else 0)",
        "0",
        f"{STORE}::test_the_log_shows_what_sqlite_writes",
    ),
    one(
        "wear: a checkpoint writes no more than a page has",
        LOG,
        "max(page_bytes, _FILE_PAGE_BYTES)",
        "page_bytes",
        f"{STORE}::test_small_pages_count_as_what_a_file_system_writes",
    ),
    one(
        "wear: an index has pages of 4 KiB",
        "store/rows/index.py",
        "connect_writer(path, page_bytes=PAGE_BYTES)",
        "connect_writer(path)",
        "tests/store/test_index.py::test_a_new_index_has_small_pages_and_a_log_of_megabytes",
    ),
    one(
        "wear: a log is measured in pages of one size",
        "store/files/sqlite_file.py",
        "{log_bytes // page_bytes}",
        "{log_bytes // 2048}",
        "tests/store/test_written_before.py::test_agents_of_0_1_are_warm",
    ),
    one(
        "wear: blocks do not wait for their turn",
        WRITER,
        "timeout=max(0.0, until - time.monotonic())",
        "timeout=0.0",
        f"{STORE}::test_blocks_that_come_shortly_before_their_turn_are_written_with_it",
    ),
    one(
        "wear: blocks wait for their turn although staging is short",
        WRITER,
        "isinstance(item, SequenceRecord) or self._staging.is_half_full",
        "isinstance(item, SequenceRecord)",
        f"{STORE}::test_blocks_do_not_wait_for_their_turn_where_staging_is_short",
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
    one(
        "wear: what is seen twice is not written",
        "engine/blocks/prefix_cache.py",
        "most=sequence.seen_blocks)",
        "most=None if sequence.seen_blocks is None else 0)",
        f"{TWICE}::test_what_two_prompts_share_is_written_and_the_rest_is_not",
    ),
    one(
        "wear: what is seen once is written with its tail",
        "engine/blocks/prefix_cache.py",
        "        if sequence.saves_all:\n            self.saving.add_block",
        "        if sequence.is_turn:\n            self.saving.add_block",
        f"{TWICE}::test_a_prompt_seen_once_is_not_written",
    ),
    one(
        "wear: a branch seen once has no record of what was seen twice",
        "engine/memory/memory.py",
        "            self._beginnings.note(branch, num_blocks)\n            self._save([branch])\n",
        "            self._beginnings.note(branch, num_blocks)\n",
        f"{TWICE}::test_what_two_prompts_share_is_written_and_the_rest_is_not",
    ),
    one(
        "wear: a shared beginning is not marked as used",
        "engine/memory/memory.py",
        "            self.book.put(replace(owner, last_use=branch.last_use))\n",
        "",
        f"{TWICE}::test_a_beginning_that_is_reused_is_used_by_the_one_who_keeps_it",
    ),
    one(
        "wear: every prompt gets a record of the beginning it shares",
        "engine/memory/memory.py",
        "owner = self._beginnings.owner(branch, num_blocks)",
        "owner = None",
        f"{TWICE}::test_what_two_prompts_share_is_written_and_the_rest_is_not",
    ),
    one(
        "wear: replies to one prompt see it twice",
        "engine/intake/request_builder.py",
        'return "seen" if index == 0 else "none"',
        'return "seen"',
        f"{TWICE}::test_replies_to_one_prompt_do_not_see_it_twice",
    ),
    one(
        "wear: a reply that was rewritten makes no second turn",
        "engine/intake/prompt_lookup.py",
        "and request.num_replies > branch.num_replies",
        "and request.num_replies > branch.num_replies + 99",
        f"{TWICE}::test_a_conversation_with_a_second_turn_survives_a_restart",
    ),
    one(
        "wear: the same examples make a second turn",
        "engine/intake/prompt_lookup.py",
        "and request.num_replies > branch.num_replies",
        "and request.num_replies >= branch.num_replies",
        f"{TWICE}::test_prompts_with_the_same_examples_are_seen_once_each",
    ),
)
