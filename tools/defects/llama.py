"""Defects in a front of llama-server: what it is sent, what its streams leave out, how one is started."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

CORE = "rekindle_backends/core.py"
SERVED = "rekindle_backends/served.py"
CALLS, COMMAND, GAPS, WIRE = (f"rekindle_backends/llama/{name}.py" for name in ("calls", "command", "gaps", "wire"))
OF_FRONT, OF_GAPS, OF_WIRE = (f"tests/backends/test_{name}.py" for name in ("llama_front", "gaps", "llama_wire"))
OF_OWN = "tests/backends/test_own_llama.py"
PASSED = f"{OF_FRONT}::test_what_is_passed_on"
SENT = f"{OF_FRONT}::test_what_it_is_sent_is_neutral"
LEFT_OUT = f"{OF_WIRE}::test_tokens_and_those_that_are_left_out"
ONLY = f"{OF_GAPS}::test_it_is_the_only_answer_where_it_says_so"

MEMORY, KEEPING, WAITING, POINTS, SLOTS, STATES, PROBE, PARTINGS = (
    f"rekindle_backends/llama/{name}.py"
    for name in ("memory", "keeping", "waiting", "points", "slots", "states", "probe", "partings")
)
JOINED = "rekindle_backends/llama/joined.py"
OF_JOINED = "tests/backends/llama/test_joined.py"
OTHER_SLOTS = f"{OF_JOINED}::test_one_that_comes_back_with_other_slots_is_refused_and_health_says_so"
OF_WAITING = "tests/backends/llama/test_waiting.py"
OF_MEMORY = "tests/backends/llama/test_slot_memory.py"
GIVEN_UP = f"{OF_MEMORY}::test_a_server_that_uses_nothing_of_what_it_restores_is_given_up_until_it_is_started_again"
AGENTS = f"{OF_MEMORY}::test_more_agents_than_slots_compute_what_is_new"
KILLED = f"{OF_MEMORY}::test_memories_outlast_both_processes"
AT_ENDS = f"{OF_MEMORY}::test_states_are_kept_at_ends_of_turns"
ENDS = "tests/backends/llama/test_prompt_ends.py"
DROPPED = f"{ENDS}::test_a_prompt_goes_on_from_the_end_of_the_one_before_the_reasoning"
LATER = f"{ENDS}::test_the_end_of_a_prompt_is_read_many_turns_later"
SHORT = f"{ENDS}::test_short_turns_leave_the_end_of_the_prompt"
ANOTHER = f"{ENDS}::test_another_text_of_the_same_length_has_no_state"
WINDOWS = f"{ENDS}::test_windows_go_on_from_there_once_a_prompt_has_parted"
REASONS = f"{ENDS}::test_a_template_with_reasoning_is_expected_to_drop_it"
STUCK = f"{ENDS}::test_a_server_without_checkpoints_is_not_asked_for_long"
STAYS = f"{ENDS}::test_what_stays_until_a_conversation_parts"
FORKS = f"{OF_MEMORY}::test_forks_and_rewinds_go_on_from_what_is_stored"

LLAMA: tuple[Mutant, ...] = (
    one(
        "a front that ends at slot files of another version",
        "rekindle_backends/assembly.py",
        "except (BackendFailed, SlotFileError, Unsupported) as error:",
        "except (BackendFailed, Unsupported) as error:",
        f"{OF_MEMORY}::test_slot_files_of_another_version_are_refused_once_and_the_front_goes_on",
    ),
    one(
        "a prompt that slots have no room for as any other refusal",
        "rekindle_backends/client.py",
        "return too_long(parsed(data)) or BadRequest(",
        "return BadRequest(",
        f"{OF_FRONT}::test_a_prompt_that_its_slots_have_no_room_for_is_too_long_in_every_dialect",
    ),
    one(
        "a wheel's program that lacks its libraries",
        COMMAND,
        "importlib.import_module(WHEEL).__path__",
        "(importlib.util.find_spec(WHEEL).submodule_search_locations or ())",
        f"{OF_OWN}::test_where_it_is_found",
    ),
    one(
        "a slot taken before its state is read",
        MEMORY,
        "if slot.unkept is not None and not _continues(request, slot, num_held, num_stored):",
        "if False:",
        AGENTS,
    ),
    one(
        "a turn that another agent's takes the place of",
        MEMORY,
        "return is_of_owner and num_held",
        "return num_held",
        f"{OF_MEMORY}::test_a_turn_is_kept_before_another_agent_continues_it",
    ),
    one(
        "a turn that is restored over",
        MEMORY,
        "num_held >= max(len(slot.unkept.ids), num_stored)",
        "num_held >= len(slot.unkept.ids)",
        f"{OF_MEMORY}::test_a_turn_is_kept_before_more_is_restored_over_it",
    ),
    one(
        "a slot that is not emptied where restoring fails",
        MEMORY,
        "await self._empty(number)",
        "pass",
        f"{OF_MEMORY}::test_what_cannot_be_restored_is_computed_in_an_empty_slot",
    ),
    one(
        "blocks that are held for a request that is not sent",
        MEMORY,
        "if running.unread is not None:",
        "if False:",
        f"{OF_MEMORY}::test_a_request_that_is_not_sent_holds_nothing",
    ),
    one(
        "rows of a purged agent that were being copied",
        KEEPING,
        "for block in filter(self._cache.pool.is_private, table.blocks):",
        "for block in ():",
        f"{OF_MEMORY}::test_a_purge_while_a_state_is_copied_leaves_nothing_of_it",
    ),
    one(
        "a server given up for states that were not restored",
        MEMORY,
        "running.num_restored = 0",
        "pass",
        f"{OF_MEMORY}::test_restoring_goes_on_once_there_is_room_again",
    ),
    one(
        "windows of known blocks that stay empty",
        KEEPING,
        "and not (first and self._has_windows)",
        "",
        f"{OF_MEMORY}::test_windows_of_whole_blocks_are_filled_again",
    ),
    one(
        "a part of a window that another block of the turn is given",
        KEEPING,
        "for block in there:",
        "for block in ():",
        f"{OF_MEMORY}::test_windows_of_whole_blocks_are_filled_again",
    ),
    one(
        "a memory of an adapter that was replaced",
        PROBE,
        '[part, part.rpartition(":")[0]]',
        "[part]",
        f"{OF_MEMORY}::test_another_adapter_and_another_rotation_have_another_memory",
    ),
    one(
        "a memory of the other factors of LongRoPE",
        PROBE,
        "max_context > usual",
        "not max_context",
        f"{OF_MEMORY}::test_another_adapter_and_another_rotation_have_another_memory",
    ),
    one(
        "a slot of another namespace's tokens",
        SLOTS,
        "num_common(self.ids, ids) if root == self.root else 0",
        "num_common(self.ids, ids)",
        f"{OF_MEMORY}::test_namespaces_share_nothing",
    ),
    one("a state that is never read", KEEPING, "if at <= now:", "if False:", KILLED),
    one(
        "a record before the blocks of its turn",
        WAITING,
        "            return {command.head}\n",
        "            return set()\n",
        KILLED,
    ),
    one(
        "a turn that is dropped with another agent's that shares its prompt",
        WAITING,
        "            self.save_all(unkept.commands)\n",
        "            unkept.commands.clear()\n",
        OF_WAITING,
    ),
    one(
        "a turn that ends while its agent is offloaded forgotten with it",
        MEMORY,
        "if slot.owner == (namespace, agent) and slot.unkept is None:",
        "if slot.owner == (namespace, agent):",
        f"{OF_WAITING}::test_a_turn_that_ends_while_its_agent_is_offloaded_is_saved",
    ),
    one(
        "a front that gives no namespace a share of hot memory",
        "engine/blocks/prefix_cache.py",
        "        self._bound(sequence.root)\n        copies = ",
        "        copies = ",
        f"{OF_MEMORY}::test_a_namespace_beyond_its_share_gives_way_before_others",
    ),
    one(
        "turns of one branch that overtake each other in two slots",
        WAITING,
        "return next(after, None) or next(",
        "return next(",
        f"{OF_WAITING}::test_turns_of_one_branch_reach_the_store_in_their_order",
    ),
    one(
        "a restored state that counts as useless with each batch of its prompt",
        MEMORY,
        "if running.was_useless in (was_useless, False):",
        "if running.was_useless is False:",
        GIVEN_UP,
    ),
    one(
        "a llama-server that is given up for good",
        MEMORY,
        "self.restores, self._num_useless = True, 0",
        "self._num_useless = 0",
        GIVEN_UP,
    ),
    one(
        "a front that waits for a writer to another user's pipe",
        "rekindle_backends/llama/slot_folder.py",
        "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_NOFOLLOW",
        "tests/backends/llama/test_slot_folder.py::test_pipes_and_links_of_our_prefix_are_passed_over",
    ),
    one(
        "a state read for an agent that was purged",
        WAITING,
        "if branch is None and slot.owner == (command.namespace, command.agent):",
        "if False:",
        f"{OF_MEMORY}::test_a_purge_empties_slots_and_disk",
    ),
    one(
        "slots that are believed after a restart of their server",
        MEMORY,
        "if self._count() != self._generation:",
        "if False:",
        KILLED,
    ),
    one(
        "windows of known blocks left empty",
        "rekindle_backends/llama/transfer.py",
        "& ~part.present(end)",
        "& (np.arange(end) >= first)",
        f"{OF_MEMORY}::test_windows_that_were_evicted_are_filled_again",
    ),
    one(
        "files of states left on the RAM disk",
        STATES,
        "            self._folder.remove(name)\n\n    async def go_back",
        "            pass\n\n    async def go_back",
        f"{OF_MEMORY}::test_no_file_is_left",
    ),
    Mutant(
        "a state after more tokens than the prompt shares",
        (
            Edit(POINTS, "return end <= most", "return True"),
            Edit(
                MEMORY,
                "num_tokens = resumable(self._cache.arena, blocks, point.num_tokens)",
                "num_tokens = max(self._points.snapshots.ends(blocks))",
            ),
        ),
        (AT_ENDS,),
    ),
    one("an earlier turn's state lost with its tail", KEEPING, "if earlier is None or own", "if True or own", AT_ENDS),
    one(
        "states of earlier turns left to be freed on disk",
        MEMORY,
        "sequence.resume_points = {*found[:MOST_KEPT], *staying.points}",
        "sequence.resume_points = {*staying.points}",
        AT_ENDS,
    ),
    one(
        "the state at the end of a prompt dropped while tools are called",
        MEMORY,
        "{*found[:MOST_KEPT], *staying.points}",
        "{*found[:MOST_KEPT]}",
        DROPPED,
    ),
    one(
        "the end of a prompt not read once its agent has come back",
        MEMORY,
        "slot.unkept.back = before.back if slot.unkept.back is None else slot.unkept.back",
        "pass",
        LATER,
    ),
    one(
        "states read at the end of every prompt",
        PARTINGS,
        "Staying(None, before",
        "Staying(num_prompt - 3, before",
        STAYS,
    ),
    one(
        "a parting at the end of a prompt that is none",
        PARTINGS,
        "num_prompt - OPENING_TOKENS",
        "num_prompt + 99",
        STAYS,
    ),
    one(
        "a slot believed where it was before it went back",
        KEEPING,
        "slot.go_back(0 if read.back is None else read.goes_to)",
        "pass",
        DROPPED,
    ),
    one(
        "a slot that computes its prompt again to go back",
        STATES,
        "cached_tokens < len(ids) - FEW",
        "cached_tokens < 0",
        STUCK,
    ),
    one(
        "windows at the end of a prompt released before they are filled",
        KEEPING,
        "table.end_parts([at for at in back if at <= end])",
        "table.end_parts()",
        WINDOWS,
    ),
    one(
        "windows at the end of a prompt freed on disk",
        MEMORY,
        "sequence.resume_points |= staying.points",
        "pass",
        WINDOWS,
    ),
    one(
        "the end of a prompt on disk not looked for after whole blocks",
        "engine/blocks/prefix_cache.py",
        "found = on_disk if nearest is None else",
        "found = on_disk if nearest is None or on_disk else",
        WINDOWS,
    ),
    one(
        "reasoning that a template has and no prompt is expected to leave out",
        "text/replies/format.py",
        "return self.thinking is not None or isinstance(self.tools, ChannelForm)",
        "return False",
        REASONS,
    ),
    one(
        "a slot that was restored believed to have the rows before",
        SLOTS,
        "        if self.spare is None:\n            return num_tokens\n",
        "        if self.spare != 0:\n            return num_tokens\n",
        f"{ENDS}::test_the_slot_that_went_back_is_not_the_one_that_goes_on",
    ),
    one("the end of a prompt kept where no window ends", PARTINGS, "back <= self._least", "back <= 0", STAYS),
    one("the state at the end of a prompt left in its file", KEEPING, "back=read.back)", "back=None)", SHORT),
    one("the end of a later turn in the place of the prompt's", KEEPING, "(own and end not in staying)", "own", SHORT),
    one("a reply begun anew without the state before it", POINTS, " in wanted:", " < 0:", LATER),
    one(
        "a state of another text taken over",
        POINTS,
        "index * self._size + child[1] >= (end := self.snapshots.end(child[0])) in wanted",
        "self.snapshots.end(child[0]) in wanted",
        ANOTHER,
    ),
    one("tails that are not looked for", POINTS, "range(min(shared, self._size - 1), 0, -1)}", "()}", FORKS),
    one(
        "ids in a gap that would have been sent",
        GAPS,
        "if stop < len(data) and data[stop] & 0xC0 == 0x80:",
        "if stop <= len(data):",
        ONLY,
    ),
    one("a gap that cannot have control tokens", GAPS, "return self._num_silent, None", "return 0, None", ONLY),
    one(
        "the first of several answers as the only one",
        GAPS,
        "is_only=found.count == 1)",
        "is_only=True)",
        ONLY,
    ),
    one("ids of large numbers first in a gap", GAPS, "known.largest <= largest", "known.largest > largest", OF_GAPS),
    one("events whose missing tokens add up", WIRE, "= self._counted if is_known", "= 2 if is_known", LEFT_OUT),
    one(
        "tokens of a draft taken for ones that were left out",
        WIRE,
        "self._has_drafts = may_draft",
        "self._has_drafts = False",
        f"{OF_WIRE}::test_how_many_are_left_out_in_a_draft_is_not_certain",
    ),
    one(
        "tokens that one number has twice",
        WIRE,
        " or self._least > counted:",
        ":",
        f"{OF_WIRE}::test_what_is_no_event",
    ),
    one(
        "a gap that is certain without a reason",
        WIRE,
        "is_certain = held.is_certain and found.is_only",
        "is_certain = held.is_certain",
        f"{OF_FRONT}::test_what_is_certain_is_remembered",
    ),
    one(
        "the token that ends a reply as its last one",
        WIRE,
        'if kind == "eos":',
        "if not kind:",
        f"{OF_WIRE}::test_the_token_that_ends_a_reply_is_none_of_it",
    ),
    one(
        "windows that are wrong after a restore",
        COMMAND,
        'flag.lstrip("-").replace("_", "-")',
        'flag.lstrip("-")',
        f"{OF_OWN}::test_flags_that_are_refused",
    ),
    one(
        "slots that share the context of one",
        COMMAND,
        '"-c", str(num_slots * max_context)',
        '"-c", str(max_context)',
        f"{OF_OWN}::test_it_starts_again_and_ends_with_us",
    ),
    one(
        "a llama-server that anyone on the machine may use",
        COMMAND,
        '{"LLAMA_API_KEY": key}, key)',
        '{"LLAMA_API_KEY": key})',
        f"{OF_OWN}::test_it_starts_again_and_ends_with_us",
    ),
    one(
        "guessed ids that are remembered",
        CORE,
        "return sequence.num_tokens if answer.num_certain is None else sequence.num_prompt + answer.num_certain",
        "return sequence.num_tokens",
        f"{OF_FRONT}::test_what_is_certain_is_remembered",
    ),
    one(
        "progress of a prompt as a token",
        WIRE,
        'if "prompt_progress" in event:',
        'if "prompt_progress" in event and not event["tokens"]:',
        f"{OF_WIRE}::test_progress_has_no_tokens",
    ),
    one("a seed that asks llama-server for any", CALLS, "sampler.seed % SEEDS", "sampler.seed % (SEEDS + 1)", SENT),
    one(
        "a repetition penalty on the last tokens only",
        CALLS,
        '"repeat_last_n": self.max_context}',
        '"repeat_last_n": PENALISED}',
        PASSED,
    ),
    one("samplers in llama-server's own order", WIRE, '"samplers": SAMPLERS,', '"samplers": SAMPLERS[::-1],', SENT),
    one("text of a choice that ends it", CALLS, r"""[\\"\x00""", r"""[\\\x00""", f"{OF_WIRE}::test_constraints"),
    one(
        "a tokenizer that is another as it says nothing",
        SERVED,
        "or not isinstance(tokens, list) or not tokens:",
        "or not isinstance(tokens, list):",
        f"{OF_FRONT}::test_what_is_said_of_it_as_another_server",
    ),
    one(
        "another model of the same name",
        SERVED,
        'if _number(entry.get("meta"), "size") != self.num_bytes:',
        "if not entry:",
        "tests/backends/test_served.py::test_another_model_of_the_same_name_is_noticed",
    ),
    one(
        "a purge that waits for another state's blocks",
        MEMORY,
        "return self.keeping.keeps_tails and self.keeping.num_filling > 0",
        "return self.keeping.num_filling > 0",
        f"{OF_MEMORY}::test_a_purge_while_a_state_is_copied_leaves_nothing_of_it",
    ),
    one(
        "a llama-server that was started again with other flags",
        JOINED,
        "and digest_of(file) == self.rows:",
        "and self.rows:",
        f"{OF_JOINED}::test_one_that_comes_back_with_other_flags_gets_none",
    ),
    one(
        "slots that a llama-server had before it was started again",
        JOINED,
        "                self.num_starts += 1\n",
        "",
        f"{OF_JOINED}::test_one_that_is_started_again_gets_its_memories_back",
    ),
    one(
        "a llama-server refused for rows that it computed beside others",
        JOINED,
        "        if not self._backend.rests():\n            raise BackendFailed(BUSY)\n",
        "",
        f"{OF_JOINED}::test_one_that_computes_is_compared_once_it_rests",
    ),
    one(
        "a process of llama-server that is counted with every look",
        JOINED,
        "            if process != self._seen:\n",
        "            if process != self._process:\n",
        f"{OF_JOINED}::test_one_that_computes_is_compared_once_it_rests",
    ),
    one(
        "a llama-server that was started again with other slots",
        JOINED,
        "        if num_slots != self._num_slots:\n            self._refuse_slots(",
        "        if not num_slots:\n            self._refuse_slots(",
        f"{OTHER_SLOTS}",
    ),
    one(
        "a llama-server that was started again with one cache for all slots",
        JOINED,
        "if _is_unified(file.shape) != _is_unified(self._shape):",
        "if False:",
        OTHER_SLOTS,
    ),
    one(
        "two fronts with one folder of slot files",
        "rekindle_backends/llama/slot_folder.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        except OSError as error:\n            os.close",
        "fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)\n        except OSError as error:\n            os.close",
        f"{OF_JOINED}::test_its_memories_outlast_a_front_that_alone_has_its_folder",
    ),
)
