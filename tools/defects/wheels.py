"""Defects in the wheels: turns, votes and contexts of sessions, blocks of another engine, logs that are analysed."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

BALLOTS, CONTEXTS, DECISIONS, ROUNDS = (
    f"rekindle_sessions/machine/{name}.py" for name in ("ballots", "contexts", "decisions", "rounds")
)
TURNS, VOTES = "tests/sessions/test_coordination.py", "tests/sessions/test_deciding.py"
BRANCHES, GROUPS, POINTS = (f"rekindle_vllm/{name}.py" for name in ("branches", "groups", "points"))
OF_BRANCHES, OF_GROUPS = "tests/vllm/test_branches.py", "tests/vllm/test_groups.py"
CONVERSATIONS, PRUNING, RECOMPUTED = (
    f"rekindle_lab/analyze/{name}.py" for name in ("conversations", "pruning", "recomputed")
)
ANALYSED, LOGS = "tests/lab/analyze/test_analyze.py", "tests/lab/analyze/test_analyze_log.py"

WHEELS: tuple[Mutant, ...] = (
    one(
        "what was heard while speaking comes before one's own words",
        CONTEXTS,
        "        held = self._held.pop(name)\n        if said is not None:\n",
        "        self._entries[name] += self._held.pop(name)\n        held = []\n        if said is not None:\n",
        f"{TURNS}::test_what_is_said_to_a_speaker_comes_behind_its_own_words",
    ),
    one(
        "a rewind to before a participant came in",
        CONTEXTS,
        "while left > 0 and at > first:",
        "while left > 0 and at > 0:",
        f"{TURNS}::test_nobody_is_rewound_to_before_it_came_in",
    ),
    one(
        "a merge that leaves out what a rewind took back",
        CONTEXTS,
        "min([count, *(places[key] for key in gone if key in places)])",
        "count",
        f"{TURNS}::test_a_long_past_is_not_searched_at_each_merge_and_rewind",
    ),
    one(
        "a broadcast in which each hears those before",
        ROUNDS,
        'together=topology == "broadcast"',
        "together=False",
        f"{TURNS}::test_in_a_broadcast_all_answer_the_same_and_are_heard_in_the_order_of_seats",
    ),
    one(
        "whispers that everybody hears",
        ROUNDS,
        '    if topology == "whisper" and request.to is None:\n',
        "    if False:\n",
        f"{TURNS}::test_in_a_whisper_round_each_is_heard_by_the_next_alone",
    ),
    one(
        "an even vote won by the first option",
        DECISIONS,
        "return (ahead[0], ()) if len(ahead) == 1 else (None, ahead)",
        "return ahead[0], ()",
        f"{VOTES}::test_an_even_vote_decides_nothing",
    ),
    one(
        "a runoff in which spent ballots still count",
        DECISIONS,
        "2 * votes[outcome] > sum(votes.values())",
        "2 * votes[outcome] > len(rounds[-1])",
        f"{VOTES}::test_a_ballot_without_a_choice_left_leaves_the_count",
    ),
    one(
        "consensus of all instead of those who vote",
        DECISIONS,
        "question.threshold * sum(votes.values()) - 1e-9",
        "question.threshold * len(ballots) - 1e-9",
        f"{VOTES}::test_a_threshold_is_a_share_of_those_who_vote",
    ),
    one(
        "reasons of a secret vote in the order of seats",
        DECISIONS,
        "for why in sorted(reason(question.options, each.text) for each in ballots if each.ranking[:1] == (option,))",
        "for why in [reason(question.options, each.text) for each in ballots if each.ranking[:1] == (option,)]",
        f"{VOTES}::test_reasons_of_a_secret_vote_are_told_in_the_same_order_whoever_gave_them",
    ),
    one(
        "an option that a reply rejects is voted for",
        BALLOTS,
        "if not _REJECTING.search(before)}",
        "}",
        f"{VOTES}::test_a_reply_counts_as_the_one_option_that_it_clearly_means",
    ),
    one(
        "records of a window from the token on that the engine needs first",
        GROUPS,
        "first = min(max(0, point - window + 1) // size * size for size in sizes)",
        "first = max(0, point - window + 1)",
        f"{OF_GROUPS}::test_of_windows_all_records_in_blocks_that_the_engine_keeps_are_needed",
    ),
    one(
        "a state inside a block",
        GROUPS,
        "table[number] if last % size == 0 and table[number] != NULL",
        "table[number] if table[number] != NULL",
        f"{OF_GROUPS}::test_states_are_where_their_blocks_end",
    ),
    one(
        "a store that keeps a window for the token before the point",
        GROUPS,
        "        found = {point + 1}  # ",
        "        found = {point}  # ",
        f"{OF_GROUPS}::test_a_store_keeps_the_records_that_a_point_needs",
    ),
    one(
        "an engine that goes on inside of a block",
        POINTS,
        "if point % self._groups.resume_tokens == 0 and self._is_whole(point, first, found):",
        "if self._is_whole(point, first, found):",
        f"{OF_GROUPS}::test_points_are_where_records_and_all_blocks_end",
    ),
    one(
        "a named agent's memory continued without its name",
        BRANCHES,
        "kind_of(place.agent).continues_unnamed if agent is None else",
        "True if agent is None else",
        f"{OF_BRANCHES}::test_unnamed_conversations_continue_unnamed_ones_only",
    ),
    one(
        "the branch used last is replaced",
        BRANCHES,
        "return free or min(places,",
        "return free or max(places,",
        f"{OF_BRANCHES}::test_of_many_branches_the_one_used_longest_ago_is_replaced",
    ),
    one(
        "conversations that begin alike taken for one",
        CONVERSATIONS,
        "            if has_reply or is_whole:\n",
        "            if True:\n",
        f"{ANALYSED}::test_turns_of_one_conversation_are_found_by_what_was_said",
    ),
    one(
        "all pictures of a log alike",
        PRUNING,
        "json.dumps(part, sort_keys=True).encode()",
        'b""',
        f"{LOGS}::test_pictures_are_lines_that_differ_with_them",
    ),
    one(
        "tools in another order counted as new text",
        RECOMPUTED,
        'tuple(sorted(_WORDS.findall(piece))) if cause == "tool_order" else piece',
        "piece",
        f"{ANALYSED}::test_tools_in_another_order_are_burned_by_their_order",
    ),
)
