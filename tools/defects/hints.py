"""Defects in what a client hears of its prompt while it is computed, and in what it says of its session."""

from __future__ import annotations

from tools.defects.mutant import one

HINTED = "tests/server/test_hints.py"
SCHEDULED = "tests/engine/test_scheduler.py"
PROGRESS = "tests/server/test_prompt_progress.py"

HINTS = (
    one(
        "progress without what was reused",
        "server/openai/replies.py",
        "processed = progress.reused_tokens + progress.computed_tokens",
        "processed = progress.computed_tokens",
        f"{PROGRESS}::test_a_chat_says_how_far_its_prompt_is_cold_and_warm",
    ),
    one(
        "progress that goes back",
        "server/openai/replies.py",
        "if processed <= before:",
        "if processed == before:",
        f"{PROGRESS}::test_a_prompt_that_made_room_for_others_is_only_said_to_be_further_on",
    ),
    one(
        "progress whose cache changes",
        "server/openai/replies.py",
        "self._said[index] = cached, processed",
        "self._said[index] = progress.reused_tokens, processed",
        f"{PROGRESS}::test_a_prompt_that_made_room_for_others_is_only_said_to_be_further_on",
    ),
    one(
        "the role in every chunk of progress",
        "server/openai/replies.py",
        "[{**self._chunk(index, {}), **said}]",
        '[{**self._chunk(index, {"role": "assistant"}), **said}]',
        f"{PROGRESS}::test_clients_that_join_deltas_get_the_same_message",
    ),
    one(
        "progress of the first choice for all",
        "server/openai/text.py",
        "said = self._progress.of(index, progress)",
        "said = self._progress.of(0, progress)",
        f"{PROGRESS}::test_a_text_completion_has_it_too_and_every_choice_its_own",
    ),
    one(
        "progress that a backend does not know, asked for in silence",
        "config/services.py",
        'return self.address is None or self.kind == "llama.cpp"',
        "return True",
        "tests/backends/test_dialects.py::test_progress_that_the_backend_does_not_know_is_named",
    ),
    one(
        "a name in the body before that of a header",
        "server/answers/hints.py",
        "if caller.agent is None:",
        "if asked.session_id:",
        f"{HINTED}::test_sessions_name_agents",
    ),
    one(
        "a completion without its parent",
        "server/openai/calls.py",
        "            parent=caller.parent,\n            task=",
        "            task=",
        f"{HINTED}::test_a_child_continues_its_parent_in_every_dialect",
    ),
    one(
        "a session of a body without its parent",
        "server/gate/caller.py",
        "name = family.parent if family.sub is None else None",
        "name = None",
        f"{HINTED}::test_a_session_that_a_body_names_continues_the_parent_of_a_header",
    ),
    one(
        "a session whose name is taken as it is",
        "server/gate/caller.py",
        "check_agent_id(_part(check_new_agent_id(session, where=where)), where=where)",
        "check_new_agent_id(session, where=where)",
        f"{HINTED}::test_sessions_name_agents",
    ),
    one(
        "a priority without bounds",
        "server/answers/hints.py",
        "max(-MOST_PRIORITY, min(hints.priority or 0, MOST_PRIORITY))",
        "hints.priority or 0",
        f"{HINTED}::test_a_priority_is_bounded",
    ),
    one(
        "a priority that is lost",
        "engine/intake/request_builder.py",
        "priority=request.priority,",
        "priority=0,",
        f"{HINTED}::test_a_higher_priority_gets_ahead_in_the_queue",
    ),
    one(
        "a priority that counts next to other tenants",
        "engine/core/scheduler.py",
        "for request in sorted(requests, key=lambda request: request.times.submitted):",
        "for request in sorted(requests, key=lambda request: request.counts_from):",
        f"{SCHEDULED}::test_a_priority_makes_a_request_so_many_seconds_older_in_its_namespace_alone",
    ),
    one(
        "a priority that waits until it is late",
        "engine/core/scheduler.py",
        "sum(now - request.counts_from > LONGEST_WAIT_S for request in mine)",
        "sum(now - request.times.submitted > LONGEST_WAIT_S for request in mine)",
        f"{SCHEDULED}::test_a_priority_makes_a_request_so_many_seconds_older_in_its_namespace_alone",
    ),
    one(
        "a next prompt computed ahead though its request says no",
        "server/answers/hints.py",
        "anticipates=hints.anticipates is not False",
        "anticipates=True",
        f"{HINTED}::test_the_next_prompt_is_computed_ahead_unless_a_request_says_no",
    ),
    one(
        "extensions that change replies ignored",
        "server/answers/hints.py",
        "asked = [name for name in _CHANGES_REPLIES if given.get(name)]",
        "asked = [name for name in _CHANGES_REPLIES if given.get(name) == 0]",
        f"{HINTED}::test_wrong_types_are_refused",
    ),
    one(
        "no thinking at all, ignored",
        "server/answers/hints.py",
        "if given.get(_MOST_THINKING) is not None",
        "if given.get(_MOST_THINKING)",
        f"{HINTED}::test_wrong_types_are_refused",
    ),
    one(
        "hints without effect that nobody names",
        "server/answers/hints.py",
        "(*hints.ignored, *_unserved(request, hints, engine))",
        "hints.ignored",
        f"{HINTED}::test_what_has_no_effect_is_named_or_refused",
    ),
    one(
        "a session that ends once",
        "server/observers/endings.py",
        "self._waiting.discard((namespace, agent))",
        "self._waiting.copy()",
        f"{HINTED}::test_a_session_that_ends_leaves_memory_and_can_go_on",
    ),
    one(
        "sessions that end and stay in memory",
        "server/observers/endings.py",
        "self._engine.agent(agent, namespace=namespace).offload()",
        "self._engine.agent(agent, namespace=namespace).info()",
        f"{HINTED}::test_a_session_that_ends_leaves_memory_and_can_go_on",
    ),
)
