"""Defects in what a client hears of its prompt while it is computed."""

from __future__ import annotations

from tools.defects.mutant import one

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
)
