"""Defects in what serves requests: engine, store, sessions, HTTP."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

BODIES = "tests/hostile/test_bodies.py"
PATHS = "tests/exactness/test_paths.py"
CRASHES = "tests/store/test_crash.py::test_saved_turns_survive_a_crash_at_any_moment"
DRAFTS = "tests/engine/test_speculation.py"
IDLE = "tests/engine/test_background.py"
FORESEEN = "tests/engine/test_anticipation.py"
PLACES = "tests/engine/test_places.py"
REPLIES = "tests/text/test_replies.py"
RETENTION = "tests/store/test_retention.py"
FILLED = (
    "tests/engine/test_scheduler.py::test_what_one_prefill_leaves_of_the_bound_others_get_whole_or_up_to_a_part_of_it"
)
MADE_WAY = (
    "tests/engine/test_scheduler.py::"
    "test_a_first_token_of_who_decodes_nothing_waits_for_long_decodes_in_every_second_step"
)
MAY_ASK = "tests/engine/test_scheduler.py::test_prompts_get_a_part_of_the_bound_while_another_namespace_may_ask"
SHORT = (
    "tests/engine/test_scheduler.py::"
    "test_a_short_prompt_of_another_namespace_ends_in_the_next_step_which_is_a_short_one"
)
TRACES = "tests/store/test_purge_traces.py"

DEPLOY = "tests/server/test_deploy.py"
EXTENSION = "tests/server/test_extension.py"
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
        SHORT,
    ),
    one(
        "who comes waits for one step of who was there",
        "engine/core/scheduler.py",
        "max(least - 1, self.of(namespace))",
        "max(least, self.of(namespace))",
        SHORT,
    ),
    one(
        "a first token waits for rows of other prompts",
        "engine/core/scheduler.py",
        "start, seconds = sequence.num_computed, self._spare_s\n                spare",
        "start, seconds = sequence.num_computed, bound\n                spare",
        FILLED,
    ),
    one(
        "a request waits for all that another namespace's prompts can fill",
        "engine/core/scheduler.py",
        "if len(namespaces) > 1 else stall",
        "if len(namespaces) > 9 else stall",
        MAY_ASK,
    ),
    one(
        "steps stay short after all others have left",
        "engine/core/scheduler.py",
        " if now - at < RECENT_S}",
        "}",
        MAY_ASK,
    ),
    one(
        "long decodes leave prompts nothing",
        "engine/core/scheduler.py",
        "min(stall, decodes_s + self._spare_s)",
        "min(stall, self._spare_s)",
        MAY_ASK,
    ),
    one(
        "a first token waits for others' long decodes",
        "engine/core/scheduler.py",
        "self._made_way = bool(guests) and doubled and not self._made_way",
        "self._made_way = False",
        MADE_WAY,
    ),
    one(
        "decodes wait as long as others ask",
        "engine/core/scheduler.py",
        "bool(guests) and doubled and not self._made_way",
        "bool(guests) and doubled",
        MADE_WAY,
    ),
    one(
        "short decodes wait, too",
        "engine/core/scheduler.py",
        "self._made_way = bool(guests) and doubled and not",
        "self._made_way = bool(guests) and not",
        MADE_WAY,
    ),
    one(
        "streams wait for a prompt of their own namespace",
        "engine/core/scheduler.py",
        "if namespace not in hosts and count <= fit:",
        "if count <= fit:",
        MADE_WAY,
    ),
    one(
        "decodes wait for a prompt that does not end",
        "engine/core/scheduler.py",
        "if namespace not in hosts and count <= fit:",
        "if namespace not in hosts:",
        MADE_WAY,
    ),
    one(
        "the first token of a known prompt waits for rows of other prompts",
        "engine/core/scheduler.py",
        "any(chunk.ends_prompt for chunk in chunks)",
        "any(chunk.ends_prompt for chunk in chunks[len(decoding) :])",
        "tests/engine/test_scheduler.py::test_a_prompt_that_is_known_ends_in_a_short_step",
    ),
    one(
        "values are parsed however many there are",
        "server/border.py",
        "if len(raw) > FEW_BYTES:",
        "if len(raw) > 1 << 30:",
        f"{BODIES}::test_values_are_counted_outside_of_strings",
    ),
    one(
        "a half of a character of UTF-16 begins a string",
        "server/border.py",
        '() if b"\\0" in raw else JSON_STRING',
        "JSON_STRING",
        f"{BODIES}::test_strings_are_not_looked_for_in_another_encoding",
    ),
    one(
        "brackets in a string count",
        "server/border.py",
        "        between = raw[at:start]\n",
        "        between = raw[at:end]\n",
        f"{BODIES}::test_values_are_counted_outside_of_strings",
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
        "a drafted token is accepted whatever was sampled",
        "engine/core/core.py",
        "        if int(sequence.ids[-1]) != chunk.draft[count - 1]:\n",
        "        if False:\n",
        f"{DRAFTS}::test_a_reply_is_the_same_with_right_and_with_wrong_drafts[greedy]",
    ),
    one(
        "rows of a draft are published before they are sampled",
        "engine/core/core.py",
        "                chunk.sequence.num_computed = chunk.start + chunk.num_rows\n",
        "                chunk.sequence.num_computed = chunk.end\n",
        f"{DRAFTS}::test_a_reply_is_the_same_with_right_and_with_wrong_drafts[greedy]",
    ),
    one(
        "a drafted token that breaks the model ends the reply",
        "engine/core/core.py",
        "            elif not chunk.draft:\n",
        "            else:\n",
        f"{DRAFTS}::test_a_drafted_token_that_breaks_the_model_ends_no_reply[q4h]",
    ),
    one(
        "drafts go past the last token of a reply",
        "engine/core/speculation.py",
        "sequence.max_new_tokens - sequence.num_generated - 1)",
        "sequence.max_new_tokens - sequence.num_generated)",
        f"{DRAFTS}::test_it_ends_with_its_last_token_and_computes_none_after_it[5]",
    ),
    one(
        "the rows of drafts cost nothing",
        "engine/core/speculation.py",
        "        rates = gained / np.maximum(seconds, 1e-9)\n",
        "        rates = gained.astype(float)\n",
        f"{DRAFTS}::test_as_many_rows_as_pay",
    ),
    one(
        "a reply depends on its drafts where bits depend on rows",
        "engine/core/speculation.py",
        " and is_steady and",
        " and",
        f"{DRAFTS}::test_nothing_is_drafted_where_bits_depend_on_the_rows_of_a_step",
    ),
    one(
        "replies quote the branches of every agent",
        "engine/intake/prompt_lookup.py",
        '        mine = self._memory.book.of(namespace, prompt.agent) if prompt.reuse != "off" else []\n',
        "        mine = list(self._memory.book.branches())\n",
        "tests/engine/test_preparing.py::test_a_reply_may_quote_what_its_agent_has_stored_elsewhere",
    ),
    one(
        "blocks restored in the wrong order",
        "engine/blocks/loads.py",
        "BlockPart(targets[index], part, load",
        "BlockPart(targets[-1 - index], part, load",
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
        "matching/matcher.py",
        "ids = np.concatenate([branch.ids[: match.num_tokens], rest])",
        "ids = encoder.encode(rendered)",
        "tests/exactness/test_identity.py::test_sampled_ids_are_kept",
    ),
    one(
        "bytes saved before they have arrived",
        "store/threads/writer.py",
        "            for block in batch.blocks:\n                block.wait()\n",
        "",
        "tests/exactness/test_copies.py::test_blocks_travel_many_at_a_time_and_are_waited_for[llama]",
    ),
    one("shards never synced", "store/threads/writer.py", "        self._shards.sync()\n", "", CRASHES),
    Mutant(
        "committed before it is synced",
        (
            Edit("store/threads/writer.py", "        self._shards.sync()\n", ""),
            Edit(
                "store/threads/writer.py",
                "        with self._lock:\n            self._bad -= ",
                "        self._shards.sync()\n        with self._lock:\n            self._bad -= ",
            ),
        ),
        (CRASHES,),
    ),
    one(
        "records that the kernels refuse are used",
        "store/threads/readers.py",
        "and not self._read_slowly(wanted[at], buffers)",
        "and False",
        "tests/store/test_readers.py::test_damage_of_any_region_is_found_and_nothing_of_it_stays[auto-0]",
    ),
    one(
        "bytes that failed their checksum stay in hot memory",
        "store/threads/readers.py",
        "        wanted.payload[:] = 0\n",
        "",
        "tests/store/test_readers.py::test_damage_of_any_region_is_found_and_nothing_of_it_stays[auto-0]",
    ),
    one(
        "what was read after a bad block counts",
        "store/threads/readers.py",
        "min(self._end, bad)",
        "max(self._end, bad)",
        "tests/store/test_readers.py::test_a_load_ends_at_its_first_bad_block_whoever_is_faster",
    ),
    one(
        "names of new shards not synced",
        "store/files/shards.py",
        "            self._fs.sync_directory(self._directory)\n",
        "",
        CRASHES,
    ),
    one(
        "holes punched before the commit",
        "store/threads/writer.py",
        "            self.writes.keep()\n        with self._lock:",
        "            self.writes.keep()\n            self.room.give_back(freed)\n        with self._lock:",
        CRASHES,
    ),
    one(
        "reported as saved before it is",
        "store/threads/writer.py",
        "            self._ledger.move(saved)\n",
        "            self._ledger.move(saved)\n            for turn in saved:\n"
        "                self._on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)\n",
        CRASHES,
    ),
    one(
        "a parent evicted before its child",
        "store/rows/retention.py",
        "order.add(block_hash, None if parent == root else parent, group",
        "order.add(block_hash, None, group",
        f"{RETENTION}::test_a_shared_prefix_leaves_last",
        f"{RETENTION}::test_a_branch_is_shortened_from_its_end_and_that_is_told",
    ),
    one(
        "a parent that is not evicted after its last child",
        "cache/eviction/order.py",
        "        if parent >= 0:\n            self._put(parent)\n",
        "",
        "tests/cache/test_eviction.py::test_a_parent_takes_the_place_of_its_own_last_use",
    ),
    one(
        "an eviction order that trusts the clock",
        "cache/eviction/order.py",
        "if now < slots.last_use[slot]:",
        "if False:",
        "tests/cache/test_eviction.py::test_the_clock_may_go_back",
    ),
    one(
        "an eviction order that grows without its quotas",
        "cache/eviction/order.py",
        "            self._quotas.grow(size)\n",
        "            pass\n",
        "tests/cache/test_eviction.py::test_an_order_grows_with_its_quotas_and_lifetimes",
    ),
    one(
        "a namespace that takes all of hot memory",
        "engine/blocks/prefix_cache.py",
        "        self._bound(sequence.root)\n",
        "",
        "tests/engine/test_evicting.py::test_a_namespace_beyond_its_share_gives_way_before_others",
    ),
    one(
        "the type that a tag states passed over",
        "text/replies/tagged.py",
        "_STATED.get(attributes.strip(), types_of(self._tools, self._name, key=key))",
        "types_of(self._tools, self._name, key=key)",
        REPLIES,
    ),
    one(
        "a part of a tag taken for a value",
        "text/replies/tagged.py",
        "return end, len(text) - kept",
        "return end, len(text)",
        REPLIES,
    ),
    one(
        "line breaks of values lost where tags have none",
        "text/replies/tagged.py",
        'return value.removesuffix("\\n") if self._tags.lines else value',
        'return value.removesuffix("\\n")',
        "tests/text/test_tagged_values.py::test_a_value_keeps_line_breaks_at_its_ends",
    ),
    one(
        "an escape of Python cut in two",
        "text/replies/pythonic.py",
        "return (escape if _OPEN_ESCAPE.fullmatch(text, escape) else len(text)), False",
        "return len(text), False",
        REPLIES,
    ),
    one(
        "a comma inside a list of Python ends its value",
        "text/replies/pythonic.py",
        "elif not opened and sign in",
        "elif sign in",
        REPLIES,
    ),
    one(
        "a pinned chain evicted",
        "store/rows/retention.py",
        "        if pinned_until >= now:\n",
        "        if pinned_until == now:\n",
        f"{RETENTION}::test_a_pin_holds_the_whole_chain",
    ),
    one(
        "parents of the batch not held",
        "store/rows/retention.py",
        "        elif block_hash in self._held:\n",
        "        elif block_hash == now:\n",
        f"{RETENTION}::test_a_batch_longer_than_the_budget_keeps_its_own_beginning",
        f"{RETENTION}::test_a_branch_that_fills_the_disk_is_not_shortened_for_its_own_next_turn",
    ),
    Mutant(
        "a clock that went backwards trusted",
        (
            Edit("store/rows/retention.py", "return min(max(0.0, use), now)\n", "return max(0.0, use)\n"),
            Edit("store/rows/ledger.py", "max(0.0, now - JUST_BEFORE_S)", "row.last_use"),
        ),
        (f"{RETENTION}::test_a_use_in_the_future_makes_nobody_immortal", "tests/store/test_clock.py"),
    ),
    Mutant(
        "purged slots not zeroed",
        (
            Edit("store/maintenance/purging.py", "        parts.shards.punch(freed)\n", ""),
            Edit(
                "store/maintenance/purging.py", "    return parts.shards.is_zero(*slot, buffer)\n", "    return True\n"
            ),
            Edit("store/maintenance/room.py", "            self._shards.punch(freed)\n", "            pass\n"),
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
        "store/threads/writer.py",
        "                elif isinstance(item, SavingBlock):\n                    self._free_staged([item])\n",
        "",
        "tests/engine/test_dying.py::test_orders_fail_when_the_writer_dies_and_the_engine_goes_on",
    ),
    one(
        "log of the index not emptied in a purge",
        "store/maintenance/purging.py",
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
        "an agent deleted while its words in sessions cannot be",
        "server/agents/deletions.py",
        "        self._check_extensions(agent)\n",
        "",
        f"{EXTENSION}::test_an_agent_is_not_deleted_while_its_sessions_cannot_be",
    ),
    one(
        "an agent purged from a stopped store while its words in sessions cannot be",
        "cli/stopped.py",
        "        if not forgetting:\n",
        "        if False:\n",
        f"{EXTENSION}::test_nor_is_it_purged_from_a_stopped_store",
    ),
    one(
        "a page without the views of extensions",
        "server/page/page.py",
        "if extension.page is not None]",
        "if extension.page is NotImplemented]",
        "tests/page/test_files.py::test_the_page_has_the_views_of_extensions",
    ),
    one(
        "two objects of one session in memory",
        "rekindle_sessions/service/loaded.py",
        "self._live.setdefault((namespace, id), read)",
        "self._live[namespace, id] = read",
        "tests/sessions/service/test_loaded.py::test_what_is_not_used_leaves_memory_and_what_is_busy_stays",
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
        "if self._parts.store is not None and (unsaved or not is_flushed):",
        "if self._parts.store is not None and not is_flushed:",
        "tests/engine/test_refusing_disk.py::test_offloading_what_cannot_be_saved_drops_nothing",
    ),
    one(
        "a turn that ends during an offload is taken for one that the disk refuses",
        "engine/memory/agent_commands.py",
        "for each in self.unsaved(namespace, agent) if each.last_use == used.get(each.number)]",
        "for each in self.unsaved(namespace, agent) if used]",
        "tests/engine/test_refusing_disk.py::test_a_turn_that_ends_during_an_offload_stays_and_is_no_trouble_of_the_disk",
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
        "server/anthropic/reply.py",
        "max(0, max(before, default=0) - reused)",
        "max(before, default=0)",
        "tests/server/test_anthropic.py::test_marked_prefixes_are_created_once_and_read_then",
    ),
    one(
        "rows of the index are trusted unchecked",
        "store/files/table.py",
        "            return bool(self.mac(row) == row[-1])\n",
        "            return bool(self.mac(row))\n",
        "tests/store/test_row_damage.py::test_a_bit_of_the_namespace_gives_no_agent_to_another_tenant",
    ),
    one(
        "the last column of a row not under its MAC",
        "store/files/table.py",
        "tuple(covered) or row._fields[:-1]",
        "tuple(covered) or row._fields[:-2]",
        "tests/store/test_table.py::test_what_is_written_is_read_and_verifies",
    ),
    one(
        "stored responses are trusted unchecked",
        "server/responses/records.py",
        "if not (self._tables.response.holds(row) and self._tables.content.holds(content)):",
        "if False:",
        "tests/server/test_responses_damage.py::test_a_changed_column_gives_nobody_what_is_not_theirs[content]",
    ),
    one(
        "a purge does not look at the files",
        "store/maintenance/purging.py",
        "parts.ledger.has_left(forgotten) or _in_files(parts, forgotten)",
        "None",
        "tests/store/test_purging.py::test_a_purge_that_left_something_in_the_index_says_so",
    ),
    one(
        "any host without a key",
        "server/gate/caller.py",
        "access is not None and access is not self._keys.without",
        "access is not None",
        "tests/server/test_guard.py::test_rebound_names_are_refused",
    ),
    one(
        "a figure under a new name, which no alert asks for",
        "server/observers/gauges.py",
        '"saving_ok", "saving_ok"',
        '"saving_ok", "saves_ok"',
        f"{DEPLOY}::test_expressions_ask_for_figures_and_labels_that_there_are",
    ),
    one(
        "a figure without the label that alerts ask for",
        "server/observers/metrics.py",
        '"Requests without a complete reply", ("status",)',
        '"Requests without a complete reply", ("code",)',
        f"{DEPLOY}::test_expressions_ask_for_figures_and_labels_that_there_are",
    ),
)
