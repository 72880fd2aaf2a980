"""Defects in receipts: what they name, who finds them, how long they are kept; and in the checks of restored blocks."""

from __future__ import annotations

from tools.defects.mutant import one

KEPT = "tests/server/test_receipts.py"
CHAINS = "tests/engine/test_chain_of.py"
OF_TURNS = "tests/sessions/http/test_coordination_receipts.py"
CHECKED = "tests/exactness/test_restored.py"
OF_CHAINS = "tests/exactness/test_restored_chains.py"

RECEIPTS = (
    one(
        "a receipt that names the block itself as the one before it",
        "engine/core/reporting.py",
        "before = _index(sequence, num_tokens) - 1",
        "before = _index(sequence, num_tokens)",
        CHAINS,
    ),
    one(
        "a receipt of a preempted request that ends its engine",
        "engine/core/reporting.py",
        "if before >= len(ended.hashes):",
        "if False:",
        CHAINS,
    ),
    one(
        "a front's tail that is named by all that the turn has of it",
        "engine/core/reporting.py",
        "sequence.ids[index * sequence.block_tokens : num_tokens])",
        "sequence.ids[index * sequence.block_tokens :])",
        CHAINS,
    ),
    one(
        "a receipt by which a front has KV of a backend that keeps it to itself",
        "server/observers/receipts.py",
        '"holds": "kv" if engine.has_kv else "ids"',
        '"holds": "kv"',
        "tests/backends/test_memory.py::test_a_receipt_says_that_blocks_hold_ids_alone",
    ),
    one(
        "a block that a reply read in part is not named",
        "engine/sequence.py",
        "self.read = of_blocks[-1][0] if of_blocks else None",
        "self.read = of_blocks[-2][0] if of_blocks[1:] else None",
        CHAINS,
    ),
    one(
        "a receipt for every tenant until it is written",
        "server/responses/waiting_receipts.py",
        "for key, each in self._receipts.items() if key[:2] == (namespace, id)}",
        "for key, each in self._receipts.items() if key[1] == id}",
        f"{KEPT}::test_receipts_are_in_one_namespace_and_go_with_their_agent",
    ),
    one(
        "a receipt that outlives its agent in the file",
        "server/responses/receipt_rows.py",
        "if (row.namespace, row.agent) == (namespace, agent) or not self._table.holds(row)",
        "if not self._table.holds(row)",
        f"{KEPT}::test_receipts_are_in_one_namespace_and_go_with_their_agent",
    ),
    one(
        "a receipt of an agent that was deleted meanwhile",
        "server/responses/stored.py",
        'is_gone = self._forgotten.get((receipt.namespace, receipt.agent or ""), 0) > ticket',
        "is_gone = False",
        f"{KEPT}::test_the_oldest_receipts_of_a_namespace_make_room_and_a_changed_one_is_missing",
    ),
    one(
        "the newest receipts make room",
        "server/responses/receipt_rows.py",
        "ORDER BY number LIMIT ?",
        "ORDER BY number DESC LIMIT ?",
        f"{KEPT}::test_the_oldest_receipts_of_a_namespace_make_room_and_a_changed_one_is_missing",
    ),
    one(
        "a changed receipt is believed",
        "server/responses/receipt_rows.py",
        "if not all(map(self._table.holds, rows)):",
        "if False:",
        f"{KEPT}::test_the_oldest_receipts_of_a_namespace_make_room_and_a_changed_one_is_missing",
    ),
    one(
        "a receipt lost at a stop",
        "server/responses/stored.py",
        "receipts = self._receipts.all()",
        "receipts = list[Receipt]()",
        f"{KEPT}::test_a_receipt_names_what_was_read_and_outlives_a_restart",
    ),
    one(
        "an edited template that no receipt shows",
        "server/observers/receipts.py",
        "name: hashlib.sha256(text.encode()).hexdigest() for",
        "name: hashlib.sha256(name.encode()).hexdigest() for",
        f"{KEPT}::test_a_receipt_names_what_was_read_and_outlives_a_restart",
    ),
    one(
        "receipts that outlive their session in the file",
        "server/responses/receipt_rows.py",
        '"DELETE FROM receipt WHERE namespace = ? AND id = ?", answers',
        '"DELETE FROM receipt WHERE namespace = ? AND id = ?", ()',
        OF_TURNS,
    ),
    one(
        "receipts that outlive their session until they are written",
        "server/responses/stored.py",
        "self._receipts.drop(lambda each: each.namespace == namespace and each.id in ids)",
        "self._receipts.drop(lambda each: False)",
        OF_TURNS,
    ),
    one(
        "a turn whose message names another turn's receipt",
        "rekindle_sessions/http/routes.py",
        '"receipt": receipt_of(id, own)',
        '"receipt": receipt_of(id, message.number)',
        OF_TURNS,
    ),
    one(
        "receipts of turns that ended on another server",
        "rekindle_sessions/log/records.py",
        "num_imported = sum(event.at == row.created for event in rows)",
        "num_imported = 0",
        "tests/sessions/http/test_coordination_receipts.py::test_turns_of_another_server_name_no_receipt",
    ),
    one(
        "an agent's requests that name no receipt",
        "server/observers/history.py",
        "receipt, choice = (None, None) if id is None",
        "receipt, choice = (None, None) if id",
        f"{KEPT}::test_a_receipt_names_what_was_read_and_outlives_a_restart",
    ),
    one(
        "turns that have no receipts",
        "rekindle_sessions/http/observed.py",
        "None if receipt is None else ReplyId(receipt, 0)",
        "None",
        OF_TURNS,
    ),
    one(
        "a receipt of a session that was deleted meanwhile",
        "rekindle_sessions/http/observed.py",
        'event.kind == "turn_complete" and is_there()',
        'event.kind == "turn_complete"',
        f"{OF_TURNS}::test_a_session_that_was_deleted_while_its_reader_slept_gets_no_receipt",
    ),
)

CHECKS = (
    one(
        "a receipt that knows nothing of what differed after a block",
        "engine/core/restore_checks.py",
        "self.verdicts.note(gone, differed=True)",
        "self.verdicts.note([block_hash], differed=True)",
        CHECKED,
    ),
    one(
        "a block that differs and counts as equal at receipts",
        "engine/core/verdicts.py",
        "return Verdict(known.count(False), known.count(True))",
        "return Verdict(len(known), 0)",
        CHECKED,
    ),
    one(
        "every restored block is as computed",
        "engine/core/restore_checks.py",
        "return chunk.end - first if np.array_equal(there, again) else 0",
        "return chunk.end - first",
        CHECKED,
    ),
    one(
        "what followed a block that differs stays in memory",
        "engine/core/purge.py",
        "(found if block_hash in found else others).update(path)",
        "others.update(path)",
        CHECKED,
    ),
    one(
        "a block that differs is served again after a restart",
        "store/warm.py",
        "self.writer.call(lambda _: self.writer.room.drop(block_hash)).add",
        "self.writer.call(lambda _: None).add",
        CHECKED,
    ),
    one(
        "what followed a block that differs is found until it is deleted",
        "store/warm.py",
        "for each in self._query(lambda: self.index.descendants(block_hash), nothing):",
        "for each in [block_hash, *nothing]:",
        CHECKED,
    ),
    one(
        "what another processor computed differs",
        "store/warm.py",
        "self._query(lambda: self.index.row_of(block_hash), 0) >= first",
        "self._query(lambda: self.index.row_of(block_hash), 0) >= 0",
        CHECKED,
    ),
    one(
        "restored blocks are checked while requests run",
        "engine/core/core.py",
        "            if not chunks and self.checks.wants_step:\n                self.checks.step()\n",
        "        if self.checks.wants_step:\n            self.checks.step()\n",
        CHECKED,
    ),
    one(
        "an agent is forgotten and its token ids wait to be checked",
        "engine/core/core.py",
        "self.checks.clear()",
        "self.checks.__len__()",
        CHECKED,
    ),
    one(
        "a block is checked in its first rows only",
        "engine/core/restore_checks.py",
        "if num_compared == self._cache.pool.block_tokens:",
        "if num_compared:",
        f"{CHECKED}::test_a_large_block_is_checked_a_chunk_a_step",
    ),
    one(
        "restored windows are as computed",
        "engine/core/chain_checks.py",
        "*(running.chain.parts if is_last else ())",
        "",
        f"{OF_CHAINS}::test_windows_that_were_restored_are_compared_too",
    ),
    one(
        "a chain keeps its blocks from a request",
        "engine/core/core.py",
        "            self.checks.yield_to_requests()\n",
        "",
        f"{OF_CHAINS}::test_a_request_gets_the_blocks_of_a_chain_at_once",
    ),
    one(
        "a chain that another processor began differs",
        "engine/core/chain_checks.py",
        "or not all(map(store.is_own, hashes))",
        "or not hashes",
        f"{OF_CHAINS}::test_a_chain_that_another_processor_began_is_not_checked",
    ),
    one(
        "a chain for each block that is due",
        "engine/core/chain_checks.py",
        "self._num_due < self.one_in * num_blocks or",
        "self._num_due < self.one_in or",
        f"{OF_CHAINS}::test_one_block_of_so_many_is_computed_and_only_chains_that_have_room_are",
    ),
)
