"""Defects in the object tier: its objects, heads, exports, imports and collection."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

HEADS = "rekindle_tier/heads.py"
OBJECTS = "rekindle_tier/objects.py"
EXPORTS = "rekindle_tier/exports.py"
IMPORTS = "rekindle_tier/imports.py"
PATIENCE = "rekindle_tier/pace.py"
COLLECTION = "rekindle_tier/collection.py"
SEALING = "rekindle_tier/sealing.py"
RECORDS = "rekindle_tier/records.py"
BREAKER = "rekindle_tier/pace.py"
MAINTENANCE = "rekindle_tier/tier.py"
INTAKE = "rekindle_tier/prompts.py"
OF_HEADS, OF_OBJECTS, OF_SEALING = (
    "tests/tier/test_heads.py",
    "tests/tier/test_objects.py",
    "tests/tier/test_sealing.py",
)
OF_PATIENCE = "tests/tier/test_patience.py"
OF_COLLECTION, OF_BREAKER = "tests/tier/test_collection.py", "tests/tier/test_breaker.py"
ENGINE, SINGLE = "tests/engine/test_tier.py", "tests/engine/test_tier_objects.py"

TIER: tuple[Mutant, ...] = (
    one(
        "a head that is overwritten, whoever wrote it since",
        OBJECTS,
        'if found is None or found["e_tag"] != expected.e_tag:',
        "if found is None:",
        f"{OF_OBJECTS}::test_a_swap_needs_the_version_that_was_read",
    ),
    one(
        "a first head that overwrites another's first",
        OBJECTS,
        'self._send(path, sealed, "create")',
        'self._send(path, sealed, "overwrite")',
        f"{OF_OBJECTS}::test_a_swap_needs_the_version_that_was_read",
    ),
    one(
        "objects out of order",
        OBJECTS,
        "_answer(ahead.pop(0), seconds_left())",
        "_answer(ahead.pop(), seconds_left())",
        f"{OF_OBJECTS}::test_many_come_in_order_until_one_is_missing",
    ),
    one(
        "objects that are waited for without end",
        OBJECTS,
        "_answer(ahead.pop(0), seconds_left())",
        "_answer(ahead.pop(0), 2 * ANSWER_S)",
        f"{OF_OBJECTS}::test_a_silent_store_is_given_up",
    ),
    one(
        "a sum that is read and written without a lock",
        "rekindle_tier/imports.py",
        "        with self._lock:\n            for name",
        "        if numbers:\n            for name",
        "tests/tier/test_tally.py::test_nothing_that_threads_add_at_once_is_lost",
    ),
    one(
        "a lock that is waited for forever",
        OBJECTS,
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        f"{SINGLE}::test_a_process_that_hangs_with_the_lock_delays_exports_and_nothing_else",
    ),
    one(
        "a lock that keeps everybody from asking",
        EXPORTS,
        "                self.locked = str(error)\n",
        "                self.locked = str(error)\n                self._breaker.failed(str(error))\n",
        f"{SINGLE}::test_a_process_that_hangs_with_the_lock_delays_exports_and_nothing_else",
    ),
    one(
        "another replica's branch dropped by a merge",
        HEADS,
        "sorted((branch, *others), key",
        "sorted((branch,), key",
        f"{OF_HEADS}::test_no_end_is_lost_in_whatever_order_replicas_write",
    ),
    one(
        "the newest branch dropped where there are too many",
        HEADS,
        "key=lambda each: -each.last_use)[:most]",
        "key=lambda each: each.last_use)[:most]",
        f"{OF_HEADS}::test_texts_that_part_are_branches_the_latest_first",
    ),
    one(
        "a text from before a purge exported after it",
        HEADS,
        "if branch.last_use <= self.purged_at or any(",
        "if any(",
        f"{OF_HEADS}::test_what_ended_before_a_purge_does_not_come_back",
    ),
    one(
        "another agent's head taken",
        HEADS,
        "if (head.namespace, head.agent) != (namespace, agent):",
        "if head.namespace != namespace:",
        f"{OF_HEADS}::test_another_agents_head_is_not_taken",
    ),
    one(
        "a newer version's head replaced",
        EXPORTS,
        "        except NewerHead:\n            raise\n",
        "",
        f"{SINGLE}::test_a_head_that_is_none_is_replaced_unless_it_is_a_newer_one",
    ),
    one(
        "a head before the blocks that it names",
        EXPORTS,
        """            self._send(stored, found.head)
            if self._objects.swap(name, changed.encode(), found.version) is not None:
""",
        """            if self._objects.swap(name, changed.encode(), found.version) is not None:
                self._send(stored, found.head)
""",
        f"{SINGLE}::test_an_object_that_cannot_be_written_keeps_no_other_agent_out",
    ),
    one(
        "an old head that revives who was purged",
        HEADS,
        "head if note is None else head.purged(read_note(note[0]))",
        "head",
        f"{ENGINE}::test_an_old_head_revives_nobody_who_was_purged",
    ),
    one(
        "objects that are read whatever their size",
        OBJECTS,
        "is_small = num_bytes <= most_bytes + OVERHEAD",
        "is_small = True",
        f"{OF_OBJECTS}::test_an_object_that_is_too_large_is_not_read",
    ),
    one(
        "a branch that cannot be exported tried before all others",
        EXPORTS,
        "self._waiting.setdefault(key)",
        "self._waiting = OrderedDict([(key, None), *self._waiting.items()])",
        f"{SINGLE}::test_an_object_that_cannot_be_written_keeps_no_other_agent_out",
    ),
    one(
        "damaged objects that are not written again",
        EXPORTS,
        "return len(block.places) > 1 or any(name in self._objects.suspects for name in names)",
        "return len(block.places) > 1 and any(names)",
        f"{SINGLE}::test_a_damaged_block_is_written_again_with_the_next_turn",
    ),
    one(
        "loading where computing is faster",
        IMPORTS,
        "pace.predict(self._num_bytes(wanted)) < patience.most_s",
        "pace.predict(self._num_bytes(wanted)) > 0",
        f"{SINGLE}::test_nothing_is_asked_for_where_computing_is_faster",
    ),
    one(
        "a head asked for whatever an answer takes",
        IMPORTS,
        "if not can or not self._breaker.allows():",
        "if not self._breaker.allows():",
        f"{SINGLE}::test_nothing_is_asked_for_where_computing_is_faster",
    ),
    one(
        "blocks waited for as long again as their head",
        IMPORTS,
        "wait_s=wait_s, waited_before_s=waited_s, latency_s",
        "wait_s=wait_s, waited_before_s=0.0, latency_s",
        f"{SINGLE}::test_a_request_waits_for_head_and_blocks_together",
    ),
    one(
        "a request with little time that counts as a failure of the object store",
        IMPORTS,
        "error.waited_s < max(EVIDENT_S, EVIDENT * self._pace.predict(num_bytes))",
        "error.waited_s < 0",
        f"{SINGLE}::test_a_request_with_little_time_keeps_no_other_from_asking",
    ),
    one(
        "a trickle that counts as a failure of the object store",
        IMPORTS,
        "            if num_bytes:\n                self._crawled",
        "            if num_bytes < 0:\n                self._crawled",
        f"{SINGLE}::test_what_trickles_is_given_up_and_what_has_come_is_used",
    ),
    one(
        "blocks that trickle in waited for as long as computing takes",
        PATIENCE,
        "self._slack_s - (self._loss_s() - self._least_loss_s)",
        "self._slack_s",
        f"{OF_PATIENCE}::test_a_trickle_is_given_up_when_it_has_cost_as_much_as_silence",
    ),
    one(
        "a trickle that may lose what was gained before",
        PATIENCE,
        "self._loss_s() - self._least_loss_s",
        "self._loss_s()",
        f"{OF_PATIENCE}::test_a_trickle_is_given_up_when_it_has_cost_as_much_as_silence",
    ),
    one(
        "blocks waited for beyond what computing takes",
        PATIENCE,
        "self._least_loss_s), self.most_s - self.waited_s)",
        "self._least_loss_s), 2 * self.most_s - self.waited_s)",
        f"{OF_PATIENCE}::test_nothing_is_waited_for_when_computing_would_be_done",
    ),
    one(
        "a bandwidth that is believed forever",
        "rekindle_tier/pace.py",
        "self._clock() > self._seen + OLD_S\n        return",
        "self._clock() < self._seen\n        return",
        f"{OF_BREAKER}::test_a_bandwidth_that_nobody_measures_keeps_nobody_from_trying",
    ),
    one(
        "a record under another block's name used",
        RECORDS,
        "if found != identity or not np.array_equal(found.ids, identity.ids):",
        "if found.num_tokens > identity.num_tokens:",
        f"{SINGLE}::test_a_record_that_went_wrong_before_it_was_encrypted_is_not_used[another's]",
    ),
    one(
        "a record whose checksum differs used",
        "store/files/records.py",
        "if zlib.crc32(record[end:].data) != payload_crc:",
        "if payload_crc < 0:",
        f"{SINGLE}::test_a_record_that_went_wrong_before_it_was_encrypted_is_not_used[flipped]",
    ),
    one(
        "one nonce for all objects",
        "store/files/ciphers.py",
        "nonce = secrets.token_bytes(NONCE_BYTES)",
        "nonce = bytes(NONCE_BYTES)",
        f"{OF_SEALING}::test_equal_data_is_sealed_differently_each_time",
    ),
    Mutant(
        "objects that open under any name",
        (
            Edit(SEALING, "seal(data, name.encode())", 'seal(data, b"")'),
            Edit(SEALING, "sealed[len(MAGIC) :], name.encode())", 'sealed[len(MAGIC) :], b"")'),
        ),
        (f"{OF_SEALING}::test_another_name_or_secret_does_not_open_it",),
    ),
    one(
        "a breaker that never opens",
        BREAKER,
        "return self._num_failures >= self._most_failures",
        "return self._num_failures >= 1000 * self._most_failures",
        f"{OF_BREAKER}::test_failures_in_a_row_open_it",
    ),
    one(
        "an open breaker that lets all through when its time is over",
        BREAKER,
        """            self._until = self._clock() + self._pause()
            return True
""",
        """            return True
""",
        f"{OF_BREAKER}::test_one_at_a_time_tries_again_and_waits_longer_each_time",
    ),
    one(
        "objects deleted that a head names",
        COLLECTION,
        "for name, each in blocks.items() if name not in named]",
        "for name, each in blocks.items() if name not in named or each]",
        f"{OF_COLLECTION}::test_only_old_objects_that_no_head_names_are_deleted",
    ),
    Mutant(
        "young objects deleted",
        (
            Edit(COLLECTION, "if each.modified > self._now() - YOUNG_S:", "if each.modified > self._now():"),
            Edit(COLLECTION, "and modified <= self._now() - YOUNG_S:", "and modified <= self._now():"),
        ),
        (f"{OF_COLLECTION}::test_only_old_objects_that_no_head_names_are_deleted",),
    ),
    one(
        "objects deleted that were written again since they were listed",
        COLLECTION,
        "if modified is not None and modified <= self._now() - YOUNG_S:",
        "if modified is not None:",
        f"{OF_COLLECTION}::test_what_is_written_again_while_it_is_looked_through_stays",
    ),
    one(
        "objects of a newer version's heads deleted",
        COLLECTION,
        "            except NewerHead:\n                raise\n",
        "",
        f"{OF_COLLECTION}::test_nothing_is_deleted_while_a_newer_version_writes",
    ),
    one(
        "a time to live in milliseconds",
        COLLECTION,
        "each.last_use < self._now() - ttl_s",
        "each.last_use < self._now() - 1e3 * ttl_s",
        f"{OF_COLLECTION}::test_agents_that_were_unused_for_too_long_are_dropped",
    ),
    one(
        "a budget that drops the agents used last",
        COLLECTION,
        "sorted(heads, key=lambda read: read.last_use)",
        "sorted(heads, key=lambda read: -read.last_use)",
        f"{OF_COLLECTION}::test_beyond_its_bytes_the_least_recently_used_agents_are_dropped",
    ),
    one(
        "a purge that leaves the agent's objects",
        "rekindle_tier/tier.py",
        "return Forgotten(*self._collection.delete_unshared(head)) if head.branches else None",
        "return Forgotten(len(head.branches), 0) if head.branches else None",
        f"{ENGINE}::test_a_forgotten_agent_is_forgotten_everywhere",
    ),
    one(
        "a tombstone that is not heeded",
        INTAKE,
        "was_forgotten = bool(head.purged_at) and self._forget(namespace, agent, head.purged_at)",
        "was_forgotten = bool(head.purged_at)",
        f"{ENGINE}::test_a_forgotten_agent_is_forgotten_everywhere",
    ),
    one(
        "a purge that is heard again every minute",
        MAINTENANCE,
        "            self._seen[each.name] = each.modified\n",
        "",
        f"{OF_COLLECTION}::test_purges_of_others_are_heard_once_each",
    ),
    one(
        "a tier that every replica collects",
        MAINTENANCE,
        "if got is not None and now - json.loads(got[0]) < COLLECT_S:",
        "if got is not None and now - json.loads(got[0]) < 0:",
        f"{OF_COLLECTION}::test_one_replica_collects_in_an_hour",
    ),
    one(
        "a prompt that is not matched again with what was taken in",
        "engine/intake/request_builder.py",
        "            if has_more:\n",
        "            if has_more and not waited_s:\n",
        f"{ENGINE}::test_an_agent_goes_on_at_another_replica",
    ),
)
