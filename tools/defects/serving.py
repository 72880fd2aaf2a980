"""Defects in what serves requests: engine, store, sessions, HTTP."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

PATHS = "tests/exactness/test_paths.py"
CRASHES = "tests/store/test_crash.py::test_saved_turns_survive_a_crash_at_any_moment"
IDLE = "tests/engine/test_background.py"
FORESEEN = "tests/engine/test_anticipation.py"
PLACES = "tests/engine/test_places.py"
RETENTION = "tests/store/test_retention.py"
TRACES = "tests/store/test_purge_traces.py"

SERVING = (
    one(
        "a namespace holds all slots however many others wait",
        "engine/core/shares.py",
        "        return max(1, self._scheduler.max_running // max(1, self._num_namespaces))\n",
        "        return self._scheduler.max_running\n",
        f"{PLACES}::test_places_are_divided_by_who_wants_them",
    ),
    one(
        "a preempted request is preempted again before it made progress",
        "engine/core/shares.py",
        "    return not sequence.num_preemptions or sequence.num_gained",
        "    return True or sequence.num_gained",
        f"{PLACES}::test_who_was_preempted_gets_ahead_before_it_is_again",
    ),
    one(
        "no turns if namespaces outnumber the slots",
        "engine/core/shares.py",
        "    return request.sequence.num_gained >= request.sequence.block_tokens\n",
        "    return False\n",
        f"{PLACES}::test_namespaces_that_outnumber_the_places_take_turns_of_a_block",
    ),
    one(
        "long prompts of one namespace before short ones of another",
        "engine/core/scheduler.py",
        "self._picks(prefilling, now, self._rows.of)",
        "self.picks(prefilling, now)",
        "tests/engine/test_scheduler.py::test_a_short_prompt_waits_for_one_step_of_another_namespace_that_prefills_for_long",
    ),
    one(
        "a late step always does the least",
        "engine/core/scheduler.py",
        "        if late <= bound or self.num_stall_misses % PROBE_EVERY == 1:\n",
        "        if True:\n",
        "tests/engine/test_scheduler.py::"
        "test_where_time_does_not_depend_on_rows_the_chunk_is_the_largest_and_again_the_bound_once_it_does[1]",
    ),
    one(
        "blocks restored in the wrong order",
        "engine/blocks/loads.py",
        "self._arena.write(targets[index], part, payload)",
        "self._arena.write(targets[-1 - index], part, payload)",
        f"{PATHS}::test_warm_after_reopening[llama-q4h]",
    ),
    one(
        "copied tail left empty",
        "engine/blocks/prefix_cache.py",
        "        for copy in copies:\n",
        "        for copy in copies[:0]:\n",
        f"{PATHS}::test_forks_share_blocks_and_write_their_own[llama-q4h]",
    ),
    one(
        "stored id replaced by re-tokenised id",
        "engine/intake/prompt_ids.py",
        "ids = np.concatenate([branch.ids[: match.num_tokens], rest])",
        "ids = encoder.encode(rendered)",
        "tests/exactness/test_identity.py::test_sampled_ids_are_kept",
    ),
    one("shards never synced", "store/writer.py", "        self._shards.sync()\n", "", CRASHES),
    Mutant(
        "committed before it is synced",
        (
            Edit("store/writer.py", "        self._shards.sync()\n", ""),
            Edit(
                "store/writer.py",
                "        with self._lock:\n            self._bad -= ",
                "        self._shards.sync()\n        with self._lock:\n            self._bad -= ",
            ),
        ),
        (CRASHES,),
    ),
    one(
        "names of new shards not synced",
        "store/shards.py",
        "            self._fs.sync_directory(self._directory)\n",
        "",
        CRASHES,
    ),
    one(
        "holes punched before the commit",
        "store/writer.py",
        "            self._ledger.touch(touched, now)\n        with self._lock:",
        "            self._ledger.touch(touched, now)\n            self.room.give_back(freed)\n"
        "        with self._lock:",
        CRASHES,
    ),
    one(
        "reported as saved before it is",
        "store/writer.py",
        "            self._ledger.move(saved)\n",
        "            self._ledger.move(saved)\n            for turn in saved:\n"
        "                self._on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)\n",
        CRASHES,
    ),
    one(
        "a parent evicted before its child",
        "store/retention.py",
        "order.add(block_hash, None if parent == root else parent, group",
        "order.add(block_hash, None, group",
        f"{RETENTION}::test_a_shared_prefix_leaves_last",
        f"{RETENTION}::test_a_branch_is_shortened_from_its_end_and_that_is_told",
    ),
    one(
        "a namespace that takes all of hot memory",
        "engine/blocks/prefix_cache.py",
        "        self._bound(sequence.root)\n",
        "",
        "tests/engine/test_evicting.py::test_a_namespace_beyond_its_share_gives_way_before_others",
    ),
    one(
        "a policy that is parsed and ignored",
        "engine/factory.py",
        ", policy=settings.eviction)",
        ")",
        "tests/engine/test_evicting.py::test_the_policy_says_who_leaves_memory_first",
    ),
    one(
        "a pinned chain evicted",
        "store/retention.py",
        "        if pinned_until >= now:\n",
        "        if pinned_until == now:\n",
        f"{RETENTION}::test_a_pin_holds_the_whole_chain",
    ),
    one(
        "parents of the batch not held",
        "store/retention.py",
        "        elif block_hash in self._held:\n",
        "        elif block_hash == now:\n",
        f"{RETENTION}::test_a_batch_longer_than_the_budget_keeps_its_own_beginning",
        f"{RETENTION}::test_a_branch_that_fills_the_disk_is_not_shortened_for_its_own_next_turn",
    ),
    Mutant(
        "a clock that went backwards trusted",
        (
            Edit("store/retention.py", "return min(max(0.0, use), now)\n", "return max(0.0, use)\n"),
            Edit("store/ledger.py", "max(0.0, now - JUST_BEFORE_S)", "row[6]"),
        ),
        (f"{RETENTION}::test_a_use_in_the_future_makes_nobody_immortal", "tests/store/test_clock.py"),
    ),
    Mutant(
        "purged slots not zeroed",
        (
            Edit("store/purging.py", "        parts.shards.punch(freed)\n", ""),
            Edit("store/purging.py", "    return parts.shards.is_zero(*slot, buffer)\n", "    return True\n"),
            Edit("store/room.py", "            self._shards.punch(freed)\n", "            pass\n"),
        ),
        (TRACES,),
    ),
    one(
        "a panic reaches the intake's thread",
        "engine/intake/intake.py",
        "        except BaseException as error:\n",
        "        except Exception as error:\n",
        "tests/engine/test_borders.py::test_what_fails_on_the_intake_fails_for_its_caller_only[Panic]",
    ),
    one(
        "requests after the engine's death wait forever",
        "engine/core/loop.py",
        "            self._refuse_rest(self.worker.death.error())\n",
        "            pass\n",
        "tests/engine/test_dying.py::test_a_failing_inbox_ends_the_engine",
    ),
    one(
        "blocks left in the staging buffer when the writer dies",
        "store/writer.py",
        "                elif isinstance(item, WaitingBlock):\n                    self._free_staged([item])\n",
        "",
        "tests/engine/test_dying.py::test_orders_fail_when_the_writer_dies_and_the_engine_goes_on",
    ),
    one(
        "log of the index not emptied in a purge",
        "store/purging.py",
        "        parts.index.truncate_wal()\n",
        "",
        TRACES,
    ),
    one(
        "list of agents ignores the namespace",
        "engine/api.py",
        "book.agents(namespace)",
        "book.agents(None)",
        "tests/hostile/test_namespaces.py::test_no_answer_to_the_other_tenant_holds_a_word",
        "tests/hostile/test_namespaces.py::test_another_tenants_agent_does_not_exist",
    ),
    one(
        "idle work continues alongside a request",
        "engine/core/core.py",
        "            self.background.yield_to_requests()\n",
        "            pass\n",
        f"{IDLE}::test_it_gives_way_within_a_step_and_goes_on_later",
    ),
    one(
        "idle work reads everything found on disk",
        "engine/blocks/prefix_cache.py",
        "return found if len(found) <= room // 2 else None",
        "return found",
        f"{IDLE}::test_reading_for_it_takes_no_more_than_half_either",
    ),
    one(
        "the anticipated prompt is encoded afresh",
        "engine/intake/anticipation.py",
        "ids, _ = prompt_ids(self._encoder, match, rendered)",
        "ids = self._encoder.encode(rendered)",
        f"{FORESEEN}::test_what_is_foreseen_is_found_behind_a_reply_whose_ids_are_no_encoding",
    ),
    one(
        "next prompts are anticipated while others are served",
        "engine/core/loop.py",
        "bool(self._core.scheduler.everybody())",
        "not self._core.scheduler",
        f"{FORESEEN}::test_nothing_is_foreseen_while_the_engine_is_busy",
    ),
    one(
        "cost of an attribution line counted when it did not change",
        "engine/request.py",
        " if self.is_new else 0",
        "",
        "tests/engine/test_taken_out.py::test_a_line_that_changes_costs_nothing_and_says_what_it_would_have",
    ),
    one(
        "cached breakpoints survive a purge",
        "engine/memory/agent_commands.py",
        "marked = tuple(Purge(namespace, branch.agent) for branch in kept)",
        "marked: tuple[Purge, ...] = ()",
        "tests/engine/test_keeping.py::test_a_purge_takes_them_too",
    ),
    one(
        "an unfinished upload holds its connection",
        "server/connections.py",
        "return self._has_begun and not self.cycle.more_body and not self.cycle.response_complete",
        "return self._has_begun and not self.cycle.response_complete",
        "tests/server/test_connections.py::test_connections_without_a_whole_request_give_way_to_new_ones",
    ),
    one(
        "two objects of one session in memory",
        "agents/sessions/loaded.py",
        "self._live.setdefault((namespace, id), read)",
        "self._live[namespace, id] = read",
        "tests/agents/sessions/test_loaded.py::test_what_is_not_used_leaves_memory_and_what_is_busy_stays",
    ),
    one(
        "one tenant's breakpoints displace another's",
        "engine/memory/breakpoints.py",
        "for key in list(self._names) if key[0] == turn.namespace for branch",
        "for key in list(self._names) for branch",
        "tests/engine/test_keeping.py::test_what_one_tenant_marks_ends_nothing_of_anothers",
    ),
    one(
        "an answer does not wait for its response",
        "server/responses/routes.py",
        "    await asyncio.wait([written], timeout=KEEP_S)\n",
        "    return None\n",
        "tests/server/test_responses_full.py::test_the_end_of_an_answer_waits_until_the_response_is_durable[whole]",
    ),
    one(
        "blocks that cannot be saved are offloaded",
        "engine/agent_admin.py",
        "if parts.store is not None and (unsaved or not is_flushed):",
        "if parts.store is not None and not is_flushed:",
        "tests/engine/test_refusing_disk.py::test_offloading_what_cannot_be_saved_drops_nothing",
    ),
    one(
        "a fork that the disk refuses stays registered",
        "engine/memory/agent_commands.py",
        "                self._memory.book.remove(now)\n",
        "",
        "tests/engine/test_refusing_disk.py::test_a_change_that_the_disk_refuses_changes_nothing[fork]",
    ),
    one(
        "tokens that were read counted as created, too",
        "server/anthropic/usage.py",
        "max(0, max(before, default=0) - reused)",
        "max(before, default=0)",
        "tests/server/test_anthropic.py::test_marked_prefixes_are_created_once_and_read_then",
    ),
    one(
        "rows of the index are trusted unchecked",
        "store/row_macs.py",
        "            return bool(self.of(row) == row[self._num_columns])\n",
        "            return bool(self.of(row))\n",
        "tests/store/test_row_damage.py::test_a_bit_of_the_namespace_gives_no_agent_to_another_tenant",
    ),
    one(
        "stored responses are trusted unchecked",
        "server/responses/records.py",
        "if not (self._macs.response.holds(row) and self._macs.content.holds((row[0], *row[6:]))):",
        "if False:",
        "tests/server/test_responses_damage.py::test_a_changed_column_gives_nobody_what_is_not_theirs[content]",
    ),
    one(
        "a purge does not look at the files",
        "store/purging.py",
        "parts.ledger.has_left(forgotten) or _in_files(parts, forgotten)",
        "None",
        "tests/store/test_purging.py::test_a_purge_that_left_something_in_the_index_says_so",
    ),
    one(
        "any host without a key",
        "server/gate/guard.py",
        "access is not None and access is not self._keys.without",
        "access is not None",
        "tests/server/test_guard.py::test_rebound_names_are_refused",
    ),
    one(
        "a client that left looks half-closed",
        "server/connections.py",
        "_probe(FIRST_PROBE_S)\n        return True",
        "_stop_probing()\n        return True",
        "tests/server/test_half_closed.py::test_a_client_that_left_ends_its_request",
    ),
)
