"""Defects of what a card computes: kernels in Triton, the pieces of a context, and whether they may be used there."""

from __future__ import annotations

from tools.defects.mutant import one

TESTS = "tests/cuda/test_attention.py"
RIGHT = f"{TESTS}::test_kernels_agree_with_the_definitions"
MUTUAL = f"{TESTS}::test_rows_that_see_each_other"
GRAPHS = "tests/cuda/test_graphs.py"
RECORDED = f"{GRAPHS}::test_a_recorded_step_computes_others_of_its_bucket"
PRODUCTS = "tests/cuda/test_products.py"
CODES = f"{PRODUCTS}::test_codes_and_scales_are_the_processors"
SAME = f"{PRODUCTS}::test_products_are_the_processors_to_the_bit"
BYTES = f"{TESTS}::test_kernels_write_the_bytes_that_torch_writes"
ROWS, DECODER = (f"tests/cuda/test_{name}.py" for name in ("rows", "decoder"))
SUMS, GATES = f"{ROWS}::test_rows_are_summed_and_normed", f"{ROWS}::test_rows_are_gated"
PACKED = f"{DECODER}::test_products_of_packed_weights_with_the_same_rows_have_their_bits"
OUTPUTS = f"{DECODER}::test_layers_give_what_their_own_code_gives"

CARDS = (
    one(
        "card: a row sees the token after it",
        "rekindle_cuda/attend.py",
        "(where <= last[:, None])",
        "(where <= last[:, None] + 1)",
        RIGHT,
    ),
    one(
        "card: a window that is a token longer",
        "rekindle_cuda/attend.py",
        "own[:, None] - SHAPE.window",
        "own[:, None] - SHAPE.window - 1",
        RIGHT,
    ),
    one(
        "card: rows that see each other see those before them alone",
        "rekindle_cuda/attend.py",
        "last = tl.maximum(own, sees - 1)",
        "last = own",
        MUTUAL,
    ),
    one(
        "card: a window counted from the end of rows that see each other",
        "rekindle_cuda/attend.py",
        "(where > own[:, None] - SHAPE.window)",
        "(where > last[:, None] - SHAPE.window)",
        MUTUAL,
    ),
    one(
        "card: many rows at once, of which some see each other",
        "rekindle_cuda/work.py",
        " or bool(span.mutual)",
        "",
        MUTUAL,
    ),
    one(
        "card: sums of pieces that do not fade",
        "rekindle_cuda/attend.py",
        "value, top = value * fade + piece * share, highest",
        "value, top = value + piece * share, highest",
        RIGHT,
    ),
    one(
        "card: sinks that take no weight",
        "rekindle_cuda/attend.py",
        "weight * fade + tl.exp2((sink - highest) * _LOG2E)",
        "weight * fade",
        RIGHT,
    ),
    one(
        "card: scores beyond their cap",
        "rekindle_cuda/attend.py",
        "    if SHAPE.softcap:\n",
        "    if False:\n",
        RIGHT,
    ),
    one(
        "card: the scales of Q4H without those that no encoder writes",
        "rekindle_cuda/formats.py",
        "tl.where(largest == 0.0, 0, scale)",
        "scale",
        BYTES,
    ),
    one(
        "card: codes of Q8H rounded down",
        "rekindle_cuda/formats.py",
        "    level = (level + 12582912.0) - 12582912.0",
        "    level = tl.floor(level)",
        BYTES,
    ),
    one(
        "card: rows that are not finite pass",
        "rekindle_cuda/formats.py",
        'tl.store(worst + r, float("inf")',
        "tl.store(worst + r, 0.0",
        f"{TESTS}::test_rows_that_are_not_finite_fail_and_leave_finite_bytes",
    ),
    one(
        "card: spare rows that are no zeros",
        "rekindle_cuda/attend.py",
        "tl.where(count > 0, value / weight, 0.0)",
        "value / weight",
        RIGHT,
    ),
    one(
        "graphs: the tables of the step that was recorded",
        "rekindle_cuda/graphs.py",
        "        self.sheet.send(tables)\n        if drawn",
        "        if drawn",
        RECORDED,
    ),
    one(
        "graphs: logits that the next launch overwrites",
        "rekindle_cuda/graphs.py",
        "worst.clone(), logits.clone()",
        "worst.clone(), logits",
        RECORDED,
    ),
    one(
        "graphs: a plan without the magnitudes of its step",
        "rekindle_cuda/graphs.py",
        "AttentionPlan(layout, self._device, worst)), logits",
        "AttentionPlan(layout, self._device)), logits",
        f"{GRAPHS}::test_rows_that_are_not_finite_fail_in_a_graph_too",
    ),
    one(
        "graphs: ids that were drawn are not those of the next step",
        "rekindle_cuda/graphs.py",
        "        if drawn is not None:\n            self.sheet",
        "        if False:\n            self.sheet",
        f"{GRAPHS}::test_ids_that_the_device_has_drawn_take_the_place_of_those_of_a_step",
    ),
    one(
        "graphs: tables that a graph does not read",
        "rekindle_cuda/attention.py",
        "            if self._is_given and self._plan is plan:\n",
        "            if False:\n",
        f"{GRAPHS}::test_layers_may_not_attend_otherwise_while_a_step_is_recorded",
    ),
    one(
        "card: items of a launch that was split begin at the first one's",
        "rekindle_cuda/work.py",
        "starts[own] = np.cumsum(cuts[own]) - cuts[own]",
        "starts = np.cumsum(cuts) - cuts",
        f"{GRAPHS}::test_work_of_many_items_is_split_between_launches",
    ),
    one(
        "card: prompts see their context from its start",
        "rekindle_cuda/prompts.py",
        "causal_lower_right(span.num_rows, num_tokens)",
        "None",
        f"{TESTS}::test_prompts_of_many_rows_are_attended_to_at_once",
    ),
    one(
        "card: kernels that write other bytes are used",
        "rekindle_cuda/compute.py",
        '    return f"{count} bytes of {HARD_VECTORS} vectors are stored differently there" if count else None',
        "    return None",
        f"{TESTS}::test_hard_vectors_are_stored_as_on_a_processor",
    ),
    one(
        "card: a save that is not waited for",
        "rekindle_cuda/arena.py",
        "            copied.synchronize()\n",
        "",
        "tests/cuda/test_arena.py::test_a_payload_is_not_touched_before_its_copy_is_waited_for",
    ),
    one(
        "card: a load in no order with a purge",
        "rekindle_cuda/arena.py",
        "own(after=self._used)",
        "own(after=None)",
        "tests/cuda/test_arena.py::test_a_load_is_copied_after_what_was_saved_or_wiped_before",
    ),
    one(
        "card: a load in no order with a save",
        "rekindle_cuda/arena.py",
        "copied = self._used = ",
        "copied = ",
        "tests/cuda/test_arena.py::test_a_load_is_copied_after_what_was_saved_or_wiped_before",
    ),
    one(
        "card: weights rounded down",
        "rekindle_cuda/rounding.py",
        "        units = (units + _WHOLE) - _WHOLE\n",
        "        units = tl.floor(units)\n",
        CODES,
    ),
    one(
        "card: a scale by the first piece of a deep row",
        "rekindle_cuda/rounding.py",
        "        most = tl.maximum(most, _most(",
        "        tl.maximum(most, _most(",
        CODES,
    ),
    one(
        "card: groups of 4 bits by their largest error",
        "rekindle_cuda/rounding.py",
        "tl.argmin(error, 1)",
        "tl.argmax(error, 1)",
        CODES,
    ),
    one(
        "card: codes of 4 bits by the multipliers of others",
        "rekindle_cuda/products.py",
        "((codes << 4) >> 4) * low",
        "((codes << 4) >> 4) * high",
        SAME,
    ),
    one(
        "card: products without their bias",
        "rekindle_cuda/products.py",
        "    if BIASED:\n",
        "    if False:\n",
        SAME,
    ),
    one(
        "card: layers as deep as any are packed",
        "compute/cpu/packed.py",
        '"bf16" if depth > MOST_INT8_DEPTH else weight_format',
        "weight_format",
        "tests/cuda/test_packed.py::test_what_no_format_suits_is_left_to_torch",
    ),
    one(
        "card: other layers than those that were packed from",
        "rekindle_cuda/packer.py",
        'values if layout == "columns first" else values.T',
        "values",
        "tests/cuda/test_packed.py::test_layers_are_those_of_the_processor[gpt2-int8]",
    ),
    one(
        "card: rows that are not finite multiply as zeros",
        "rekindle_cuda/rounding.py",
        'tl.where(largest <= _LEAST, 0.0, float("nan"))',
        "tl.where(largest <= _LEAST, 0.0, 0.0)",
        f"{PRODUCTS}::test_what_is_not_finite_is_nan_and_touches_nothing_else",
    ),
    one(
        "pieces of a cpu's size everywhere",
        "kv/plan.py",
        "MOST_SCORES_ELSEWHERE = 1 << 26",
        "MOST_SCORES_ELSEWHERE = 1 << 21",
        "tests/kv/test_attention_exactness.py::test_pieces_are_small_where_they_stay_in_a_cpus_cache_alone",
    ),
    one(
        "card: the mean of a row taken over its padding",
        "rekindle_cuda/elementwise.py",
        "tl.sum(value * value, 1, keep_dims=True) / WIDTH.columns",
        "tl.sum(value * value, 1, keep_dims=True) / WIDTH.padded",
        SUMS,
    ),
    one(
        "card: what a norm is given in place of the sum",
        "rekindle_cuda/elementwise.py",
        "        value += tl.load(base.data",
        "        value = tl.load(base.data",
        SUMS,
    ),
    one(
        "card: the gelu of another steepness",
        "rekindle_cuda/elementwise.py",
        "1.5957691216057308",
        "1.702",
        GATES,
    ),
    one(
        "card: heads rotated the other way",
        "rekindle_cuda/placing.py",
        "tl.where(is_first, along - across, along + across)",
        "tl.where(is_first, along + across, along - across)",
        f"{OUTPUTS}[llama]",
    ),
    one(
        "card: dimensions that are not rotated lost",
        "rekindle_cuda/placing.py",
        "tl.where(is_rotated, turned, own)",
        "turned",
        f"{OUTPUTS}[glm4-moe]",
    ),
    one(
        "card: norms of q taken for those of k",
        "rekindle_cuda/placing.py",
        "cos, sin, k_norm, TURN.k_rounding",
        "cos, sin, q_norm, TURN.q_rounding",
        f"{OUTPUTS}[qwen3]",
    ),
    one(
        "card: norms of what attention gives left out",
        "rekindle_cuda/decoder.py",
        'norms.get("attention_output")',
        "None",
        f"{OUTPUTS}[gemma2]",
    ),
    one(
        "card: norms of what MLPs give left out",
        "rekindle_cuda/decoder.py",
        'self.norms.get("mlp_output")',
        "None",
        f"{OUTPUTS}[gemma2]",
    ),
    one(
        "card: neighbours in a head never rotated",
        "rekindle_cuda/decoder.py",
        'ROTARY: tuple[Rotary, ...] = ("whole", "first", "pairs")',
        'ROTARY: tuple[Rotary, ...] = ("whole", "first")',
        f"{OUTPUTS}[glm]",
    ),
    one(
        "card: MLPs fused whatever their own weights give",
        "rekindle_cuda/decoder.py",
        "self._rows(found.columns), same) else None",
        "self._rows(found.columns), lambda ours, theirs: True) else None",
        f"{DECODER}::test_an_mlp_is_compared_over_its_own_weights_too",
    ),
    one(
        "card: weights that lie together kept twice",
        "rekindle_cuda/linears.py",
        "setattr(module, name, nn.Parameter(part, requires_grad=False))",
        "pass",
        f"{DECODER}::test_weights_that_lie_together_take_no_more_memory_and_serve_their_modules_too",
    ),
    one(
        "card: packed weights that lie together kept twice",
        "rekindle_cuda/linears.py",
        "        module.packed = whole.part(first, end)\n",
        "        pass\n",
        PACKED,
    ),
    one(
        "card: columns of packed weights taken for the first ones",
        "rekindle_cuda/packing.py",
        "(each[first:end] for each in self.held[:3])",
        "(each[: end - first] for each in self.held[:3])",
        PACKED,
    ),
)
