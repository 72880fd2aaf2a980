"""Defects in what is computed of a prompt: its text, its blocks, the model."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

PATHS = "tests/exactness/test_paths.py"
ALONE = "tests/exactness/test_against_transformers.py"

COMPUTING = (
    one(
        "position off by one after a cut",
        "model/batch.py",
        "np.arange(step.start, step.start + step.num_rows)",
        "np.arange(step.start, step.start + step.num_rows) + (step.start > 0)",
        f"{PATHS}::test_prefill_in_chunks_equals_one_piece[llama-native]",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "position off by one in the mask",
        "kv/plan.py",
        "hidden = context > (positions if",
        "hidden = context - 1 > (positions if",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "a mask that hides what rows see of each other",
        "kv/plan.py",
        "else torch.full_like(positions, rows.sees - 1)",
        "else positions",
        "tests/kv/test_paged_attention.py::test_rows_that_see_each_other",
    ),
    one(
        "K and V swapped",
        "kv/decode.py",
        "            return k, v\n",
        "            return v, k\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "halves of V swapped",
        "kv/decode.py",
        "            return k, v\n",
        "            return k, v.roll(v.shape[-1] // 2, -1)\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "8-bit codes beyond their range",
        "kv/q8h.py",
        ".clamp_(-LARGEST_CODE, LARGEST_CODE)",
        "",
        "tests/kv/test_q8h.py::test_codes_and_scales_are_the_golden_bytes",
    ),
    one(
        "8-bit V rotated back in the order of 4-bit codes",
        "kv/coded.py",
        "q8h.query_rotation, q8h.output_rotation",
        "q8h.query_rotation, q4h.output_rotation",
        "tests/kv/test_paged_attention.py::test_vectorised_agrees_with_the_definitions",
    ),
    one(
        "first two blocks read in the wrong order",
        "kv/plan.py",
        "        per_piece = most //",
        "        table = [*table[1::-1], *table[2:]] if len(table) > 1 else table\n        per_piece = most //",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "window ignored",
        "kv/plan.py",
        "            hidden |= context <= positions - shape.window\n",
        "            hidden |= context < 0\n",
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-gemma3]",
    ),
    one(
        "softcap ignored",
        "model/adapter.py",
        "        softcap=float(softcap) if softcap else None,\n",
        "        softcap=None,\n",
        "tests/model/test_logits.py::test_float64_native_equals_the_model[gemma2]",
    ),
    one(
        "RoPE base changed",
        "compute/load.py",
        "    config = read_config(source.fetch_description())\n",
        "    config = read_config(source.fetch_description())\n"
        '    config.rope_parameters["rope_theta"] = config.rope_parameters["rope_theta"] * 2\n',
        f"{ALONE}::test_logits_at_every_position[fp64-sdpa-1e-12-llama]",
    ),
    one(
        "tail not copied on write",
        "cache/blocks/table.py",
        "must_copy = last < len(self.blocks) and not self.pool.is_private(self.blocks[last])",
        "must_copy = False",
        f"{PATHS}::test_forks_share_blocks_and_write_their_own[llama-q4h]",
    ),
    Mutant(
        "block of another fingerprint accepted",
        (
            Edit("cache/blocks/hashing.py", "for part in (fingerprint, ", 'for part in (b"", '),
            Edit("store/files/directory.py", "fingerprint.hex()", '"any"'),
        ),
        ("tests/exactness/test_identity.py::test_kv_of_another_model_is_not_used[weights]",),
    ),
    one(
        "block of another format accepted",
        "compute/load.py",
        "fingerprint=fingerprint(identity, layout)",
        "fingerprint=identity",
        "tests/exactness/test_identity.py::test_kv_of_another_model_is_not_used[formats]",
    ),
    one(
        "second BOS added when resuming",
        "text/prompt.py",
        "        return self._encode_key(prompt.key[resume_byte:], most=most)\n",
        "        rest = self._encode_key(prompt.key[resume_byte:], most=most)\n"
        "        return np.concatenate([np.array(self._leading, dtype=np.uint32), rest])\n",
        "tests/exactness/test_identity.py::test_a_resumed_prompt_has_one_bos",
    ),
    one(
        "second BOS added to a rendered one",
        "text/prompt.py",
        "        if pieces[: len(leading)] == leading:\n",
        "        if pieces is None:\n",
        "tests/text/test_prompt.py::test_completions_get_leading_tokens_once[bos]",
    ),
    one(
        "rows not padded",
        "kv/plan.py",
        "ROW_MULTIPLE = 4",
        "ROW_MULTIPLE = 1",
        "tests/kv/test_attention_exactness.py",
    ),
    one(
        "context not padded to whole tiles",
        "kv/plan.py",
        "num_context = -(-rows.until // TILE) * TILE - first",
        "num_context = -(-rows.until // 64) * 64 - first",
        "tests/kv/test_attention_exactness.py",
    ),
    one(
        "presence counted like frequency",
        "model/adjustments.py",
        "counts.astype(np.float64) + params.presence_penalty",
        "counts.astype(np.float64) * (1 + params.presence_penalty)",
        "tests/model/test_adjustments.py",
    ),
    one(
        "repetition penalty on the reply alone",
        "model/adjustments.py",
        "np.concatenate([history.prompt, history.reply]) if is_repeating",
        "history.reply if is_repeating",
        "tests/model/test_adjustments.py",
    ),
    one(
        "parent of another namespace",
        "matching/matcher.py",
        "self._agents.get((namespace, parent), {})",
        "next((held for (_, agent), held in self._agents.items() if agent == parent), {})",
        "tests/matching/test_matcher.py::test_an_agent_without_branches_goes_on_from_its_parents_as_they_were_sampled",
    ),
    one(
        "attribution line removed from any message",
        "text/normalise.py",
        'in kinds and message.role == "system" and',
        "in kinds and",
        "tests/text/test_normalise.py",
    ),
    one(
        "a prompt of any length is tokenised",
        "text/length.py",
        "        if num_bytes > self.max_bytes:\n",
        "        if False:\n",
        "tests/text/test_length.py::test_a_text_of_as_many_bytes_as_may_fit_is_taken_and_one_more_is_not",
    ),
)
