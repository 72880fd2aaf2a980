"""Defects in the scores of prompts: which tokens are computed for them, and which scores are kept."""

from __future__ import annotations

from tools.defects.mutant import one

SCORES = "tests/engine/test_prompt_scores.py"
ROUTES = "tests/server/test_completions.py"

SCORED = (
    one(
        "scores that start a token too late",
        "engine/prompt_scores.py",
        "self.num_known - 1\n",
        "self.num_known\n",
        f"{SCORES}::test_a_common_beginning_is_scored_once",
    ),
    one(
        "kept scores with too few alternatives",
        "engine/blocks/score_cache.py",
        "if rows is None or rows.num_top < scores.num_top:",
        "if rows is None:",
        f"{SCORES}::test_stored_tokens_without_scores_are_computed_again",
    ),
    one(
        "scores that nobody waits for",
        "engine/blocks/prefix_cache.py",
        "if self._is_scored_elsewhere(sequence, computing):",
        "if False:",
        f"{SCORES}::test_prompts_of_a_batch_wait_for_what_one_of_them_scores",
    ),
    one(
        "a resume point after the first token to score",
        "engine/blocks/prefix_cache.py",
        "num_tokens = min(num_tokens, sequence.num_resumable)",
        "pass",
        f"{SCORES}::test_windows_and_states_are_resumed_where_scores_can_be",
    ),
    one(
        "scores of the first rows, also where they are known",
        "engine/core/core.py",
        "logits[skipped : skipped + num_scored]",
        "logits[:num_scored]",
        f"{SCORES}::test_windows_and_states_are_resumed_where_scores_can_be",
    ),
    one(
        "the reply begun from the first row of logits",
        "engine/core/core.py",
        "of_chunk[-1] if chunk.num_scored else of_chunk[0]",
        "of_chunk[0]",
        f"{SCORES}::test_a_common_beginning_is_scored_once",
    ),
    one(
        "scores that survive a purge",
        "engine/core/purge.py",
        "core.cache.scores.clear()",
        "pass",
        f"{SCORES}::test_a_purge_drops_scores",
    ),
    one(
        "every scored text remembered as a conversation",
        "engine/intake/request_builder.py",
        "is_measured=scores is not None and request.agent is None and request.messages is None,",
        "is_measured=False,",
        f"{SCORES}::test_only_a_named_agent_remembers_a_scored_text",
    ),
    one(
        "ranks counted from nought",
        "model/row_scores.py",
        "sum(dim=1, dtype=torch.int32) + 1",
        "sum(dim=1, dtype=torch.int32)",
        f"{SCORES}::test_scores_are_those_of_transformers",
    ),
    one(
        "an echo without its own logprobs",
        "server/openai/text.py",
        "if not (from_start and self._call.echo) or generation.prompt_logprobs is None:",
        "if True:",
        f"{ROUTES}::test_echo_with_logprobs_scores_the_prompt",
    ),
)
