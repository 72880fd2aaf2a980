"""Defects in what clients meet: parts left out, histories written anew, and replies of a given form."""

from __future__ import annotations

from tools.defects.mutant import one

OMISSIONS = "tests/text/test_omissions.py"
HABITS = "tests/engine/test_clients_habits.py"
FORMS = "tests/text/test_constraints.py"
REPLIES = "tests/engine/test_constrained.py"
SWEEP = "tests/server/test_parameter_sweep.py"
NORMAL = "tests/text/test_normalise.py"
CALLS = "tests/text/test_call_grammars.py"
STEER = "tests/server/test_steering.py"
STRICT = "tests/server/test_strict_tools.py"
RUN = "tests/server/test_responses_client_tools.py"
TAILS = "tests/text/test_tails.py"
OFFERS = "tests/engine/test_tail_offers.py"
SUMMARIES = "tests/engine/test_summaries.py"
BRANCHES = "tests/engine/test_branches.py"
ASIDE = "tests/engine/test_side_requests.py"

CLIENTS = (
    one(
        "the line for a picture as its caller wrote it",
        "text/omissions.py",
        'return _UNFIT.sub("_", text[:MOST_CHARS])',
        "return text[:MOST_CHARS]",
        f"{OMISSIONS}::test_lines_say_what_is_known",
    ),
    one(
        "parts left out counted once",
        "text/omissions.py",
        "replace(known, count=known.count + 1)",
        "known",
        f"{OMISSIONS}::test_what_was_left_out_is_counted_by_kind",
    ),
    one(
        "a strict reader that leaves parts out",
        "text/omissions.py",
        "if self._strict:\n            message",
        "if self._strict and part is None:\n            message",
        f"{OMISSIONS}::test_a_strict_reader_refuses_each",
    ),
    one(
        "unknown parameters not named",
        "text/omissions.py",
        "self._ignored[name] = None",
        "pass",
        f"{SWEEP}::test_what_nobody_knows_is_named_and_the_rest_is_not",
    ),
    one(
        "an alias before the name itself",
        "server/openai/aliases.py",
        "if given.get(name) is None and value is not None:",
        "if value is not None:",
        f"{SWEEP}::test_other_names_mean_the_same",
    ),
    one(
        "arguments of another value taken for the same",
        "matching/generated_arguments.py",
        "if is_same(value, other)]",
        "]",
        f"{HABITS}::test_other_arguments_are_other_arguments",
    ),
    one(
        "true taken for 1",
        "matching/generated_arguments.py",
        "return one is other",
        "return bool(one == other)",
        "tests/matching/test_generated_arguments.py",
    ),
    one(
        "every call of one value as the first",
        "matching/generated_arguments.py",
        "at = min(self._seen[turn], len(texts) - 1)",
        "at = 0",
        "tests/matching/test_generated_arguments.py",
    ),
    one(
        "tools put back into any prompt without them",
        "engine/intake/request_builder.py",
        "max(without + LEAST_GAIN, self._first_reply_begin(with_tools))",
        "without + LEAST_GAIN",
        f"{HABITS}::test_a_history_without_its_tools_keeps_them_in_the_prompt",
    ),
    one(
        "tools of a forgotten agent",
        "engine/memory/memory.py",
        "        self.tools.drop(namespace, agent)\n",
        "",
        "tests/engine/test_kept_tools.py",
    ),
    one(
        "a tail that moves without tools",
        "text/normalise.py",
        'if "tail" in kinds and tools else None',
        'if "tail" in kinds else None',
        f"{NORMAL}::test_a_tail_stays_where_nothing_is_won_or_nobody_can_take_it",
    ),
    one(
        "places in the first user message before its tail",
        "text/normalise.py",
        "sent.num_chars - gone + self.added[index]",
        "sent.num_chars - gone",
        f"{NORMAL}::test_a_changing_tail_moves_to_the_first_user_message",
    ),
    one(
        "only the first part of a tail moves",
        "text/tails.py",
        'at = stop + len(end or "")\n        yield found.start(), at',
        'yield found.start(), stop + len(end or "")\n        return',
        f"{NORMAL}::test_a_changing_tail_moves_to_the_first_user_message",
    ),
    one(
        "the grammar not followed",
        "engine/core/sampling.py",
        "            reply.matcher.take(token)\n",
        "            pass\n",
        f"{REPLIES}::test_replies_are_valid_with_every_way_to_draw",
    ),
    one(
        "the first row's mask for all",
        "model/sampler.py",
        "logits[row, :size].masked_fill_(",
        "logits[0, :size].masked_fill_(",
        f"{REPLIES}::test_several_replies_and_others_at_once",
    ),
    one(
        "masks in the logits of the model",
        "model/sampler.py",
        "    logits = logits.clone()\n",
        "",
        f"{REPLIES}::test_logprobs_are_those_of_the_model",
    ),
    one(
        "several replies with one matcher",
        "engine/intake/request_builder.py",
        "None if ready.matcher is None else ready.matcher.copy()",
        "ready.matcher",
        f"{REPLIES}::test_several_replies_and_others_at_once",
    ),
    one(
        "a reply that goes on after its end",
        "engine/core/sampling.py",
        "or (reply.matcher is not None and reply.matcher.is_over)",
        "",
        f"{REPLIES}::test_a_finished_form_ends_the_reply",
    ),
    one(
        "reasoning that the prompt has ended, again",
        "text/constraints/grammar.py",
        '        if thinking.close in opening:\n            return ""\n',
        "",
        f"{FORMS}::test_reasoning_that_the_prompt_begins_or_ends_is_known",
    ),
    one(
        "calls without tools",
        "text/constraints/grammar.py",
        "else self._call() if calls else []",
        "else self._call()",
        f"{FORMS}::test_a_call_may_take_the_place_of_the_text",
    ),
    one(
        "objects open to names of the model's own",
        "text/constraints/schema.py",
        'parts["additionalProperties"] = False',
        "pass",
        f"{FORMS}::test_formats_that_nobody_knows_are_annotations_and_objects_are_closed",
    ),
    one(
        "the fault of a schema at its root",
        "text/constraints/schema.py",
        'path, message, found = f"{path}.{key}".removeprefix("."), wrong, part',
        "found = part",
        f"{FORMS}::test_what_cannot_be_enforced_is_refused_by_its_place",
    ),
    one(
        "a custom tool's input as JSON",
        "server/responses/call_items.py",
        '            return text\n        case {"command"',
        '            return arguments\n        case {"command"',
        f"{RUN}::test_its_call_is_answered_with_the_text_and_comes_back",
    ),
    one(
        "arguments of any form as an action",
        "server/responses/call_items.py",
        "return arguments if kind is CUSTOM else None",
        "return given if given is not None else arguments",
        f"{RUN}::test_arguments_of_another_form_are_a_functions",
    ),
    one(
        "nothing of an action but its command",
        "server/responses/call_items.py",
        'if key != "type" and each not in (None, {})',
        'if key in ("command", "commands")',
        f"{RUN}::test_what_was_written_is_what_comes_back",
    ),
    one(
        "results by the id of an item",
        "server/responses/items.py",
        '            call_ids.setdefault(each, item["call_id"])\n',
        "            pass\n",
        f"{RUN}::test_histories_of_a_client_that_runs_tools",
    ),
    one(
        "calls of tools that nobody sent",
        "text/constraints/calls.py",
        "name = literal(layout.escape(tool.name))",
        'name = "/[a-z_]+/"',
        f"{CALLS}::test_wrong_arguments_and_unknown_tools_are_not",
    ),
    one(
        "further calls where one is wanted",
        "text/constraints/calls.py",
        "return self.calls.parallel and not self.layout.only_one",
        "return not self.layout.only_one",
        f"{CALLS}::test_only_one_call_where_one_is_wanted",
    ),
    one(
        "a strict schema that nobody can enforce, taken",
        "text/constraints/matcher.py",
        "if tool.is_strict:\n                raise",
        "if False:\n                raise",
        f"{CALLS}::test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_place",
    ),
    one(
        "forced calls with any arguments",
        "server/answers/steering.py",
        'if choice.is_forced or function["name"] in strict else None',
        'if function["name"] in strict else None',
        f"{STRICT}::test_forced_calls_of_chats_have_valid_arguments",
    ),
    one(
        "every tool allowed",
        "server/answers/steering.py",
        'if choice.allowed is None or function["name"] in choice.allowed\n',
        "",
        f"{STEER}::test_some_of_the_tools_can_be_allowed",
    ),
    one(
        "required keys left out in tags",
        "text/constraints/tagged.py",
        'parts.append(argument if key in required else f"({argument})?")',
        'parts.append(f"({argument})?")',
        f"{CALLS}::test_values_in_tags_are_of_their_types",
    ),
    one(
        "values in tags without definitions",
        "text/constraints/tagged.py",
        'shared = {key: self._schema[key] for key in (*DEFINITIONS, "x-guidance") if key in self._schema}',
        "shared = dict[str, Any]()",
        f"{CALLS}::test_values_in_tags_are_of_their_types",
    ),
    one(
        "an end of a system text that one change makes",
        "engine/memory/system_texts.py",
        "known.num_changes[tail.heading] >= KEEPS",
        "known.num_changes[tail.heading] >= 1",
        f"{OFFERS}::test_it_is_offered_when_the_same_line_changes_twice_and_then_costs_no_tools",
    ),
    one(
        "an offer that was not proved on the template",
        "engine/intake/tail_offers.py",
        "self._gain(changed, settled, now) >= LEAST_GAIN",
        "True",
        f"{OFFERS}::test_nothing_is_offered_where_nothing_would_be_won",
    ),
    one(
        "a heading that does nothing",
        "engine/factory.py",
        "headings=settings.prompt.tail_heading",
        "headings=()",
        f"{OFFERS}::test_it_is_offered_when_the_same_line_changes_twice_and_then_costs_no_tools",
    ),
    one(
        "a heading for a change inside a sentence",
        "text/tails.py",
        'elif re.search(r"\\w", same) or (title',
        "elif (title",
        f"{TAILS}::test_a_heading_names_the_place",
    ),
    one(
        "a heading that an earlier line has, too",
        "text/tails.py",
        'is_last = label is None or now.count("\\n", 0, found.start()) == at',
        "is_last = True",
        f"{TAILS}::test_a_heading_names_the_place",
    ),
    one(
        "most of a system text as its end",
        "text/tails.py",
        "found is None or found.start() < least",
        "found is None",
        f"{TAILS}::test_most_of_a_text_is_no_tail",
    ),
    one(
        "system texts of a forgotten agent",
        "engine/memory/system_texts.py",
        "if sender != agent}",
        "}",
        f"{OFFERS}::test_texts_are_kept_by_client_within_bounds_and_forgotten_with_their_agent",
    ),
    one(
        "a summary without the words before it",
        "engine/memory/summaries.py",
        'Message("user", form.words + text)',
        'Message("user", text)',
        f"{SUMMARIES}::test_the_second_summary_is_computed_before_it_is_sent_back",
    ),
    one(
        "a summary that no request was seen to use",
        "engine/intake/anticipation.py",
        "            self._memory.summaries.began(request.namespace, request.agent, original.messages)\n",
        "            pass\n",
        f"{SUMMARIES}::test_the_second_summary_is_computed_before_it_is_sent_back",
    ),
    one(
        "a form that was right once",
        "engine/memory/summaries.py",
        "        self._forms.pop((namespace, agent), None)\n        form",
        "        form",
        f"{SUMMARIES}::test_other_histories_are_no_form_and_end_the_one_that_was_known",
    ),
    one(
        "all of a marked summary",
        "engine/memory/summaries.py",
        "_inner(summary) if form.is_inner else summary.strip()",
        "summary.strip()",
        f"{SUMMARIES}::test_words_before_a_summary_and_messages_that_are_kept",
    ),
    one(
        "side requests dropped like others",
        "engine/memory/branches.py",
        "key=lambda each: each.number not in aside",
        "key=lambda each: 0",
        f"{BRANCHES}::test_side_requests_push_out_no_conversation_and_none_of_its_forks",
        f"{ASIDE}::test_a_conversation_its_forks_and_helpers_stay_among_ten_titles",
    ),
    one(
        "the beginning of a conversation as a side request",
        "engine/memory/branches.py",
        "for each in oldest_first[:-1] if is_aside",
        "for each in oldest_first if is_aside",
        f"{BRANCHES}::test_what_may_be_the_beginning_of_a_conversation_stays",
    ),
    one(
        "forks as side requests",
        "engine/memory/branches.py",
        "return not any(np.array_equal(branch.ids[:half], talk.ids[:half]) for talk, half in halves)",
        "return True",
        f"{BRANCHES}::test_half_of_the_shorter_one_is_much_in_common",
    ),
    one(
        "a conversation compared with a title",
        "matching/explain.py",
        "return 2 * difference.position < len(text) and 2 * known < sum(map(len, lines))",
        "return False",
        f"{ASIDE}::test_the_first_request_after_a_title_is_the_first_of_its_conversation",
    ),
    one(
        "the shortest of branches that agree as far",
        "matching/matcher.py",
        "(pair[0] < len(self.index.key(pair[1])), -len(pair[1].ids))",
        "len(pair[1].ids)",
        f"{ASIDE}::test_the_first_request_after_a_title_is_the_first_of_its_conversation",
    ),
)
