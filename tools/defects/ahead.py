"""Defects in steps that are launched before the last one was waited for."""

from __future__ import annotations

from tools.defects.mutant import one

AHEAD = "tests/engine/test_ahead.py"
REPLIES = f"{AHEAD}::test_replies_are_those_of_steps_in_turn"

LAUNCHED = (
    one(
        "blocks released that a step ahead writes to",
        "engine/core/core.py",
        "        self._end_ahead()\n        return self.cache.end(",
        "        return self.cache.end(",
        f"{AHEAD}::test_blocks_are_released_once_the_step_ahead_has_ended",
    ),
    one(
        "a purge of what a step ahead has written",
        "engine/core/purge.py",
        "    core.settle()  # a step that was launched ahead has written after the tokens that count as stored\n",
        "",
        f"{AHEAD}::test_a_purge_leaves_what_running_requests_have_stored",
    ),
    one(
        "a step ahead of a token that was drawn again",
        "engine/core/core.py",
        "launch.drawing is not None and launch.drawing.is_redrawn",
        "False",
        REPLIES,
    ),
    one(
        "a step ahead draws with the last token's number",
        "engine/core/core.py",
        "num_unknown=1",
        "num_unknown=0",
        REPLIES,
    ),
    one(
        "a step ahead from the ids of other requests",
        "model/drawing.py",
        "[order[at] for at in places]",
        "list(range(len(places)))",
        REPLIES,
    ),
    one(
        "penalties without the last token",
        "engine/core/launch.py",
        "and not request.reply.sampler.needs_history",
        "",
        f"{AHEAD}::test_what_depends_on_the_last_token_is_computed_in_turn",
    ),
    one(
        "a grammar without the last token",
        "engine/core/launch.py",
        "and request.reply.matcher is None ",
        "",
        f"{AHEAD}::test_an_engine_that_computes_ahead_gives_the_same_replies",
    ),
    one(
        "a step that fails ahead fails its request",
        "engine/core/core.py",
        "elif len(chunks) == 1 and ahead is None:",
        "elif len(chunks) == 1:",
        f"{AHEAD}::test_a_step_ahead_that_fails_is_computed_again_in_turn",
    ),
)
