"""Defects in layers that are one call of the kernels, and in weights of 8 and 4 bits."""

from __future__ import annotations

from dataclasses import replace

from tools.defects.kernels import native
from tools.defects.mutant import Mutant, one

DECODER, MODULES, WEIGHTS = (f"tests/model/test_{name}.py" for name in ("decoder", "fused_modules", "weights"))
FORMATS = "tests/model/test_formats.py"
OUTPUTS = f"{DECODER}::test_layers_give_the_outputs_of_their_own_code"
OTHERS = f"{DECODER}::test_layers_of_another_form_are_left_alone"
DIFFERENT = f"{DECODER}::test_layers_that_do_something_else_are_left_alone"
DUMMIES = f"{DECODER}::test_dummies_attend_to_nothing"
HEADS = f"{DECODER}::test_dummies_stay_where_torch_computes_the_head"
PARTS = f"{MODULES}::test_what_is_fused_of_each_architecture_gives_its_logits"
INT4 = "tests/kernels/test_int4.py"
IN_4_BITS = f"{INT4}::test_outputs_are_those_of_the_definition_to_the_bit"
SHAPES = f"{MODULES}::test_a_module_that_is_fused_takes_rows_of_any_shape"

LAYERS: tuple[Mutant, ...] = (
    native(
        "the second half of a head rotated the other way",
        "elementwise.hpp",
        "simd::sub(product(first, cos + i), product(second, sin + i))",
        "simd::add(product(first, cos + i), product(second, sin + i))",
        OUTPUTS,
    ),
    native(
        "weights of a norm applied to other values",
        "elementwise.hpp",
        "simd::load(weight + at)",
        "simd::load(weight)",
        PARTS,
    ),
    native("a norm always rounded first", "elementwise.hpp", "if (rounds_first) x =", "x =", PARTS),
    native(
        "the end of a row left out of its norm",
        "elementwise.hpp",
        "for (; at < count; at += LANES) {\n    const",
        "for (; at + LANES <= count; at += LANES) {\n    const",
        SHAPES,
    ),
    native(
        "the gate of the other half",
        "decoder.cpp",
        "elementwise::gate<elementwise::silu>(gates[row], gates[row] + mlp.inner, mlp.inner);",
        "elementwise::gate<elementwise::silu>(gates[row], gates[row], mlp.inner);",
        PARTS,
    ),
    native(
        "what attention adds normed without its row",
        "decoder.cpp",
        "normalise(d.mlp_norm, out[row], normed[row]);",
        "normalise(d.mlp_norm, normed[row], normed[row]);",
        OUTPUTS,
    ),
    native(
        "norms of what attention gives left out",
        "decoder.cpp",
        "if (d.attention_output_norm.weight != nullptr) normalise(d.attention_output_norm, normed[row], normed[row]);",
        "",
        OUTPUTS,
    ),
    native(
        "norms of what MLPs give left out",
        "decoder.cpp",
        "if (d.mlp_output_norm.weight != nullptr) normalise(d.mlp_output_norm, added[row], added[row]);",
        "",
        OUTPUTS,
    ),
    native(
        "norms of heads left out",
        "decoder.cpp",
        "if (norm.weight != nullptr) normalise(norm, head, head);",
        "",
        OUTPUTS,
    ),
    native(
        "positions of the first row for all",
        "decoder.cpp",
        "call.cos + row * size, call.sin + row * size",
        "call.cos, call.sin",
        OUTPUTS,
    ),
    native(
        "dummies attend to what memory held",
        "decoder.cpp",
        "(job.rows - used) * output.stride",
        "0 * output.stride",
        DUMMIES,
    ),
    native(
        "norms of q taken for those of k",
        "decoder.cpp",
        "place_heads(d.k_norm, *call, row, qkv[1], layer->k_dim);",
        "place_heads(d.q_norm, *call, row, qkv[1], layer->k_dim);",
        OUTPUTS,
    ),
    one(
        "layers fused whatever they compute",
        "model/compare.py",
        "return bool(((ours - theirs).norm(dim=1) <= allowed).all())",
        "return True",
        DIFFERENT,
        OTHERS,
    ),
    one(
        "layers compared at the first positions only",
        "model/observation.py",
        "for start in (0, max(last, 0))",
        "for start in (0, 0)",
        OTHERS,
    ),
    one(
        "layers compared with their own rows only",
        "model/fused_layers.py",
        "for each in (*seen, *smaller)",
        "for each in seen",
        DIFFERENT,
    ),
    one(
        "no dummies although torch computes the head",
        "compute/load.py",
        " or packed.has_linears(draft.model)",
        "",
        HEADS,
    ),
    one(
        "norms without the 1 that is added to weights",
        "model/layer_parts.py",
        "for offset in (0.0, 1.0)",
        "for offset in (0.0,)",
        PARTS,
    ),
    one(
        "parts over layers that the device does not multiply by",
        "model/layer_parts.py",
        "if not all(map(is_linear, linears)):",
        "if not linears:",
        "tests/model/test_layer_parts.py::test_what_is_no_linear_layer_to_the_device_has_no_parts",
    ),
    one(
        "modules fused that are nearly alike",
        "model/compare.py",
        "return bool(near.all()) and float(unequal.max()) <= MOST_UNEQUAL",
        "return bool(near.all())",
        f"{MODULES}::test_what_computes_something_else_is_left_alone",
    ),
    one(
        "MLPs in 8 bits fused whatever their own weights give",
        "model/compare.py",
        "<= share * b.norm(dim=-1)",
        "<= 9 * b.norm(dim=-1)",
        f"{MODULES}::test_the_modules_own_weights_are_compared_in_8_bits_too",
    ),
    one(
        "MLPs in 8 bits fused that are nearly alike",
        "model/layer_parts.py",
        "import random_rows, same_choices, same_products, same_results",
        "import random_rows, same_choices, same_products, same_in_8_bits as same_results",
        f"{MODULES}::test_what_computes_something_else_is_left_alone",
    ),
    one(
        "hot memory taken beyond its share",
        "engine/started_once.py",
        "arena.num_blocks // MOST_SHARE",
        "arena.num_blocks",
        "tests/engine/test_started_once.py",
    ),
    one(
        "int8 taken by its KL alone",
        "compute/cpu/weights.py",
        "found.kl <= MAX_KL and found.agreement >= LEAST_AGREEMENT",
        "found.kl <= MAX_KL",
        f"{WEIGHTS}::test_int8_is_taken_within_both_bounds_only",
    ),
    one(
        "formats of KV that change ten times too much",
        "model/auto_formats.py",
        "            if found <= MAX_KL:",
        "            if found <= 10 * MAX_KL:",
        f"{FORMATS}::test_the_layer_that_4_and_8_bits_harm_is_native_and_as_few_others_as_the_bound_needs",
    ),
    one(
        "KV that is not finite taken for near",
        "model/divergence.py",
        "return kl if math.isfinite(kl) else math.inf",
        "return kl if math.isfinite(kl) else 0.0",
        f"{FORMATS}::test_a_reference_knows_the_likeliest_tokens_and_all_others_as_one",
    ),
    one(
        "KV of int8 weights taken for the checkpoint's",
        "compute/load.py",
        "known = inputs(dtype=found.dtype, weight_format=ready.weights)",
        "known = inputs(dtype=found.dtype)",
        f"{WEIGHTS}::test_kv_of_rounded_weights_is_never_mixed_with_that_of_others",
    ),
    one(
        "a tied embedding rounded with its head",
        "compute/cpu/packed.py",
        "replaced = users if weights.format in GATHERED else linears",
        "replaced = users",
        f"{WEIGHTS}::test_a_tied_embedding_keeps_its_values",
    ),
    one(
        "int8 weights kept where they do not suit",
        "model/compare.py",
        "    return bool(small) and bool(each[finite].all()) and",
        "    return",
        f"{WEIGHTS}::test_a_layer_that_int8_does_not_suit_stays_in_bf16",
    ),
    one(
        "one wrong column of int8 not seen",
        "model/compare.py",
        "bool(small) and bool(each[finite].all()) and",
        "bool(small) and",
        f"{WEIGHTS}::test_one_wrong_column_of_many_is_seen",
    ),
    one(
        "experts in int8 after the self-check",
        "compute/cpu/experts.py",
        "            setattr(module, PACKED_NAME, {})",
        "            pass",
        f"{WEIGHTS}::test_the_self_check_leaves_the_model_as_it_was",
    ),
    one(
        "the head in 4 bits as other layers",
        "compute/cpu/packed.py",
        'of_head = weight_format == "int4" and',
        "of_head = False and",
        f"{WEIGHTS}::test_the_bundled_model_in_int4_says_mostly_the_same",
    ),
    one(
        "int8 left out where int4 does not suit",
        "compute/cpu/packed.py",
        '"int4": ("int4", "int8", "bf16"),',
        '"int4": ("int4", "bf16"),',
        f"{WEIGHTS}::test_a_layer_that_int4_does_not_suit_is_in_int8",
    ),
    native("rows of 8 bits not rotated", "int8.hpp", "  rotate(x, depth);\n", "", "tests/kernels/test_int8.py"),
    native(
        "128 not subtracted where it was added to rows",
        "dots.hpp",
        "simd::shift_left(simd::load_bits(column_sums), 7)",
        "simd::shift_left(simd::load_bits(column_sums), 6)",
        "tests/kernels/test_int8.py::test_outputs_are_those_of_the_definition_to_the_bit",
        level="avx512",
    ),
    native("columns of 4 bits not rotated", "int4.hpp", "  int8::rotate(x, depth);\n", "", IN_4_BITS),
    native(
        "the multiplier of the largest value taken for the best",
        "int4.hpp",
        "std::min_element(errors, errors + MULTIPLES)",
        "std::min_element(errors + MULTIPLES - 1, errors + MULTIPLES)",
        f"{INT4}::test_the_best_multiplier_is_better_than_the_one_of_the_largest_value",
    ),
    native(
        "errors of multipliers without the bounds of codes",
        "int4.hpp",
        "simd::mul(within, multiple)",
        "simd::mul(code, multiple)",
        IN_4_BITS,
    ),
    native(
        "codes beyond 7 and -7",
        "int4.hpp",
        "(int8_t)std::min(std::max(code, -HIGHEST), HIGHEST)",
        "(int8_t)std::min(std::max(code, -HIGHEST - 1), HIGHEST)",
        IN_4_BITS,
    ),
    native("multipliers one too small", "int4.hpp", "simd::broadcast_bits(1)", "simd::zero_bits()", IN_4_BITS),
    native(
        "the multiplier of a block's first half for both",
        "int4.hpp",
        "second(simd::shift_right(both, 4))",
        "second(simd::both(both, nibble))",
        IN_4_BITS,
    ),
    native(
        "the offset of codes added twice",
        "int4.hpp",
        "shift_left(multiplier, 3)",
        "shift_left(multiplier, 4)",
        IN_4_BITS,
    ),
    native(
        "sums of the first half's multipliers",
        "linear.cpp",
        "codes[k] * multipliers[k / int4::GROUP]",
        "codes[k] * multipliers[k / panel::DEPTH<Int4> * 2]",
        IN_4_BITS,
        level="avx512",
    ),
    native(
        "an unpacked panel without its tail",
        "int4.hpp",
        "  memcpy(out + blocks * panel::BLOCK_WORDS, tail, panel::Int4::TAIL_WORDS * sizeof *out);\n",
        "",
        IN_4_BITS,
        level="avx512",
    ),
    replace(
        native(
            "one unpacked panel for all threads",
            "linear.cpp",
            "job.unpacked + omp_get_thread_num() * panel::panel_words<Int8>(job.blocks)",
            "job.unpacked",
            "tests/kernels/test_int8.py::test_threads_unpack_int4_weights_apart",
        ),
        alone=True,
    ),
)
