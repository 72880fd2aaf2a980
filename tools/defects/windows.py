"""Defects in window parts: where they are, how long they stay, and where a sequence is resumed with them."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

SLOTS, COVERS = "tests/cache/test_windows.py", "tests/store/test_covers.py"
RESUMED, TURNS = "tests/exactness/test_resume_points.py", "tests/engine/test_window_turns.py"
MACHINE = f"{SLOTS}::TestWindowMachine"
ANY_ORDER = f"{RESUMED}::test_any_order_of_turns_gives_the_answers_of_no_reuse"

WINDOWS: tuple[Mutant, ...] = (
    one(
        "a window a token too short",
        "parts.py",
        "return max(0, position - self.window) // block_tokens",
        "return max(0, position - self.window + 2) // block_tokens",
        SLOTS,
    ),
    one(
        "a taken slot left to the block before",
        "cache/blocks/windows.py",
        "            self._put(self._block_of[slot], ABSENT)\n",
        "",
        f"{SLOTS}::test_what_was_passed_goes_before_what_is_marked",
    ),
    one(
        "parts of a resume point go before those passed",
        "cache/blocks/windows.py",
        "(self._passed or self._kept).popitem(last=False)",
        "(self._kept or self._passed).popitem(last=False)",
        SLOTS,
    ),
    one(
        "holders of an equal block forgotten",
        "cache/blocks/windows.py",
        "        for _ in range(self._refs[slot]):\n            self.hold(target)\n",
        "",
        SLOTS,
    ),
    one(
        "resumed without one of two windows",
        "cache/blocks/windows.py",
        "        position, at = missing * block_tokens, 0\n",
        "        position, at = missing * block_tokens, at + 1\n",
        SLOTS,
    ),
    one(
        "a window released while its table needs it",
        "cache/blocks/table.py",
        "first = slots.kind.first_held(self.num_tokens, size)",
        "first = slots.kind.first_held(self.num_tokens + size, size)",
        MACHINE,
    ),
    one(
        "windows of a fork not held",
        "cache/blocks/table.py",
        "                slots.hold(forked.blocks[index])\n",
        "                pass\n",
        MACHINE,
    ),
    one(
        "windows read in the rows of their blocks",
        "kv/step_layout.py",
        "return self._rows_of(attention_part(window), np.asarray(span.blocks, np.int32)).astype(np.int32, copy=False)",
        "return np.asarray(span.blocks, np.int32)",
        ANY_ORDER,
    ),
    one(
        "windows of a copied tail not copied",
        "kv/arena.py",
        "        for part in self.layout.parts:\n            if isinstance(part.kind, StatePart):\n",
        "        for part in self.layout.parts[:1]:\n            if isinstance(part.kind, StatePart):\n",
        ANY_ORDER,
    ),
    one(
        "resumed where windows have ended",
        "engine/blocks/prefix_cache.py",
        "position = self.ending.resume_at(blocks, self._usable(sequence, matched))",
        "position = self.ending.usable(matched, sequence.num_resumable)",
        ANY_ORDER,
    ),
    one(
        "windows on disk not loaded",
        "engine/blocks/ending_parts.py",
        "parts = {self.indices[which] for which in lacking} | ({0} if index >= len(hot) else set())",
        "parts = {0} if index >= len(hot) else set()",
        RESUMED,
    ),
    one(
        "ends of prompts not marked",
        "engine/blocks/prefix_cache.py",
        "self.ending.mark(table, [at for at in sequence.resume_points if before < at <= num_stored])",
        "self.ending.mark(table, [])",
        RESUMED,
    ),
    one(
        "windows of a turn not saved",
        "engine/blocks/prefix_cache.py",
        "self._save_windows(table.blocks, [*points, end] if end else [], sequence.root)",
        "self._save_windows(table.blocks, [], sequence.root)",
        RESUMED,
    ),
    one(
        "the end of the system text is no resume point",
        "engine/intake/request_builder.py",
        "            points.add(int(np.searchsorted",
        "            points.discard(int(np.searchsorted",
        TURNS,
    ),
    one(
        "a rounded match not explained",
        "engine/core/reporting.py",
        "    if sequence.num_unresumed:\n",
        "    if False:\n",
        TURNS,
    ),
    one(
        "windows of superseded turns stay on disk",
        "store/rows/ledger.py",
        "        self._free_uncovered(covered)\n        self._release(heads)\n\n",
        "        self._release(heads)\n\n",
        COVERS,
    ),
    one(
        "a window freed that another branch covers",
        "store/rows/covers.py",
        "return [key for key in parts if self._db.execute(query, key).fetchone() is None]",
        "return list(parts)",
        COVERS,
    ),
    one(
        "a cover that reaches a block too little",
        "store/rows/covers.py",
        "kind.kept_blocks(position, size)",
        "kind.kept_blocks(position, size)[1:]",
        COVERS,
    ),
    one(
        "parts saved before a crash stay for ever",
        "store/maintenance/opening.py",
        '            if suspicion == "crashed":',
        "            if False:",
        COVERS,
    ),
    one(
        "a damaged window counts as stored with its block",
        "store/threads/writer.py",
        "damaged=self._bad)",
        "damaged=())",
        COVERS,
    ),
    one(
        "covers of a lost part kept",
        "store/rows/ledger.py",
        "                    self._covers.drop_part(identity.hash, row.part)\n",
        "                    pass\n",
        COVERS,
    ),
    one(
        "a tail not held while its window is read",
        "engine/blocks/prefix_cache.py",
        "self.load(sequence, held, found.on_disk)",
        "self.load(sequence, hot, found.on_disk)",
        RESUMED,
    ),
    one(
        "the slot of a copy given to a reserved block",
        "cache/blocks/table.py",
        "return [first, *(index for index in lacking if index > first)] if must_copy else lacking",
        "return lacking",
        f"{SLOTS}::test_the_copy_of_a_shared_block_has_a_part_of_its_own",
    ),
    one(
        "a tail that others hold published as another block",
        "cache/blocks/pool.py",
        " or (self.windows and self._refs[block] > 1):",
        ":",
        SLOTS,
    ),
    one(
        "a long prompt waits for slots for all of it",
        "engine/core/admission.py",
        "sum(min(each.sequence.num_blocks_ahead, most) for each in requests)",
        "sum(each.sequence.num_blocks_ahead for each in requests)",
        RESUMED,
    ),
    one(
        "windows of cancelled prompts saved",
        "engine/core/sampling.py",
        "self._end_sequence(request, is_turn and keep)",
        "self._end_sequence(request, is_turn)",
        RESUMED,
    ),
    one(
        "purged windows not overwritten",
        "engine/core/purge.py",
        "            arena.wipe_row(part, row)\n",
        "            pass\n",
        TURNS,
    ),
)
