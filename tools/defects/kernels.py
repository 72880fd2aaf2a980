"""Defects in the kernels of the CPU: their C++, and the module that calls them."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

FUSED, LINEAR = "tests/kv/test_fused.py", "tests/kernels/test_linear.py"
RIGHT = f"{FUSED}::test_kernels_agree_with_the_definitions"
BYTES = f"{FUSED}::test_kernels_write_the_bytes_that_torch_writes"
BITS = f"{FUSED}::test_bits_depend_on_no_cut_no_company_and_no_threads"
MUTUAL = f"{FUSED}::test_rows_that_see_each_other"
LOWEST = f"{FUSED}::test_the_lowest_scores_weigh_as_with_torch"
NOT_FINITE = f"{FUSED}::test_a_row_that_is_not_finite_fails_alone"
STRIDED = f"{FUSED}::test_strided_rows_are_read_where_they_are"
IN_8_BITS = "tests/kernels/test_int8.py::test_outputs_are_those_of_the_definition_to_the_bit"
PRODUCTS = f"{LINEAR}::test_products_are_those_of_fp64_to_the_bound_of_fp32_sums"
PACKED = f"{LINEAR}::test_both_layouts_pack_to_the_same_memory_on_every_level"
STRIDES = f"{LINEAR}::test_strides_of_input_and_output"


def native(name: str, file: str, old: str, new: str, *tests: str, level: str = "") -> Mutant:
    """Build a mutant of one replacement in the C++."""
    return Mutant(f"kernel: {name}", (Edit(f"compute/cpu/kernels/native/{file}", old, new),), tests, level)


ATTENTION = (
    native("values in 8 bits twice as large", "q8h.hpp", "[g] - STEP_EXPONENT", "[g] - STEP_EXPONENT + 1", RIGHT),
    native("codes in 8 bits cut instead of rounded", "q8h.hpp", "std::nearbyint(", "std::trunc(", BYTES),
    native(
        "sums in 8 bits stay rotated",
        "attention.hpp",
        "q4h::output_format(layer) != RK_BF16",
        "q4h::output_format(layer) == RK_Q4H",
        RIGHT,
    ),
    native(
        "query heads in the order of another model",
        "attention.hpp",
        "kv_head = head / job.heads_per_kv, left",
        "kv_head = head % job.layer.kv_heads, left",
        RIGHT,
    ),
    native(
        "a piece with heads of the next K/V head",
        "attention.hpp",
        "heads = std::min(together, left);",
        "heads = std::min(together, job.call.heads - head);",
        RIGHT,
    ),
    native(
        "rows of queries taken to lie next to each other",
        "attention.hpp",
        "call.q.values + row * call.q.row_stride + head",
        "call.q.values + row * call.heads * dim + head",
        STRIDED,
    ),
    native(
        "a row sees the token after it",
        "attention.hpp",
        "end = row.end - start",
        "end = row.end + 1 - start",
        RIGHT,
    ),
    native(
        "a row does not see itself",
        "attention.hpp",
        "end = row.end - start",
        "end = row.end - 1 - start",
        RIGHT,
        LOWEST,
    ),
    native(
        "a window of one token more",
        "attention.hpp",
        "window > 0 ? row.position + 1 - window - start : 0",
        "window > 0 ? row.position - window - start : 0",
        RIGHT,
    ),
    native(
        "rows that see each other see no segment after their own",
        "attention.hpp",
        "(end_of(span, end - 1) + TOKENS - 1) / TOKENS",
        "(span.start + end + TOKENS - 1) / TOKENS",
        MUTUAL,
    ),
    native(
        "what later rows hold of rows that see each other is not unpacked",
        "attention.hpp",
        "last = end_of(*piece.span, piece.end - 1);",
        "last = piece.span->start + piece.end;",
        MUTUAL,
    ),
    native(
        "a window counted from the end of rows that see each other",
        "attention.hpp",
        "row.position + 1 - window - start",
        "row.end - window - start",
        MUTUAL,
    ),
    native(
        "a window that leaves out a segment of its oldest token",
        "attention.hpp",
        "window > 0 ? span.start + first + 1 - window : 0",
        "window > 0 ? span.start + first + 2 - window : 0",
        BITS,
    ),
    native(
        "segments of several threads merged from the last",
        "attention.hpp",
        "piece.partials + (n * piece.rows() + folded) * size",
        "piece.partials + ((piece.segments() - 1 - n) * piece.rows() + folded) * size",
        BITS,
    ),
    native(
        "segments merged that a row does not see", "attention.hpp", "if (mass.sum != UNSEEN) merge(", "merge(", BITS
    ),
    native(
        "weights of a later segment not scaled",
        "attention.hpp",
        "*sum * factors[0] + mass.sum * factors[1];",
        "*sum * factors[0] + mass.sum;",
        RIGHT,
    ),
    native(
        "the first head's sink for all", "attention.hpp", "call.sinks[head] * softmax", "call.sinks[0] * softmax", RIGHT
    ),
    native(
        "the largest score without the sink",
        "attention.hpp",
        "most = sink > mass.largest ? sink : mass.largest;",
        "most = mass.largest;",
        f"{FUSED}::test_sinks_far_from_the_scores_take_nothing_or_all",
    ),
    native(
        "softcap in units of the natural logarithm",
        "attention.hpp",
        "call.softcap * softmax::LOG2_E};",
        "call.softcap};",
        RIGHT,
    ),
    native(
        "values rotated once more instead of back",
        "attention.hpp",
        "q4h::unrotate(x, dim, layer.signs);",
        "q4h::rotate(x, dim, layer.signs);",
        RIGHT,
    ),
    native(
        "the largest score of a segment is -inf",
        "softmax.hpp",
        "return largest < -FLT_MAX ? -FLT_MAX : largest;",
        "return largest;",
        LOWEST,
    ),
    native(
        "masked scores are finite", "softmax.hpp", "simd::broadcast(-INFINITY));", "simd::broadcast(-1e38f));", LOWEST
    ),
    native(
        "the sum of weights without half of them",
        "softmax.hpp",
        "sum = simd::add(simd::add(sum, low), high);",
        "sum = simd::add(sum, low);",
        RIGHT,
    ),
    native(
        "scales of K for 32 dimensions",
        "levels.hpp",
        "(int64_t)first / GROUP * TOKENS + t",
        "(int64_t)first / GROUP / 2 * TOKENS + t",
        RIGHT,
    ),
    native(
        "tokens of a pair swapped",
        "levels.hpp",
        "a = load_every_other(from + 4 * word, row",
        "a = load_every_other(from + 4 * (word + row), row",
        RIGHT,
    ),
    native(
        "the scales of V's first chunk for all",
        "levels.hpp",
        "entry = vector / WORDS * (LANES / shape.lanes_of_one);",
        "entry = 0;",
        RIGHT,
    ),
    native(
        "every segment reads the first blocks",
        "levels.hpp",
        "number = blocks + (first + t) / size;",
        "number = blocks + t / size;",
        RIGHT,
    ),
    native(
        "the scale of a pair's first token for both",
        "tiled.hpp",
        "next = load_steps(scale + groups, left",
        "next = load_steps(scale, left",
        RIGHT,
        level="amx",
    ),
    native(
        "rows 17 to 32 are the first 16",
        "tiled.hpp",
        "_tile_loadd(5, p.rows + SIDE * p.row + step * SIDE",
        "_tile_loadd(5, p.rows + step * SIDE",
        RIGHT,
        level="amx",
    ),
    native(
        "the last 32 tokens score nothing",
        "tiled.hpp",
        "  multiply_one<2>(product, column);\n  settle(rows, column, 2, most);\n",
        "",
        BITS,
        level="amx",
    ),
    native(
        "scales of the first four groups for all",
        "scales.hpp",
        "8 * (i - first))",
        "8 * ((i - first) % 4 + first - g))",
        RIGHT,
    ),
    native(
        "one scale of a token that has two",
        "scales.hpp",
        "if (groups == 2) return simd::shift_right(simd::as_bits(simd::load_bf16((const uint16_t*)from)), 16);",
        "if (groups == 2) return simd::load_bytes(from);",
        RIGHT,
    ),
    native(
        "two scales of a token that has three",
        "scales.hpp",
        "memcpy(words + i, from + i * groups, 3);",
        "memcpy(words + i, from + i * groups, 2);",
        RIGHT,
    ),
)

WRITING = (
    native("signs of the whole vector", "q4h.hpp", "x[i + j] *= signs[j];", "x[i + j] *= signs[i + j];", BYTES),
    native(
        "one sign of the rotation wrong",
        "q4h.hpp",
        "simd::sub(first, second)",
        "simd::sub(second, first)",
        BYTES,
    ),
    native("the bytes of a scale rounded down", "write.cpp", "(half + 127) >> 7", "half >> 7", BYTES),
    native("the bytes of a scale rounded to nearest", "write.cpp", "(half + 127) >> 7", "(half + 64) >> 7", BYTES),
    native(
        "zeros have the smallest scale",
        "write.cpp",
        "scales[g] = largest == 0.f ? 0 : (uint8_t)byte;",
        "scales[g] = (uint8_t)byte;",
        BYTES,
    ),
    native("codes in another order", "write.cpp", "return even | odd << 16;", "return odd | even << 16;", BYTES),
    native(
        "heads beside each other in a token",
        "write.cpp",
        "at = head * layer.block_tokens + token;",
        "at = token * layer.kv_heads + head;",
        BYTES,
    ),
    native("NaN not reported", "write.cpp", "return a > b || a != a ? a : b;", "return a > b ? a : b;", NOT_FINITE),
    native(
        "infinity stored",
        "write.cpp",
        "to[i] = (from[i] & 0x7f80) == 0x7f80 ? 0 : from[i];",
        "to[i] = from[i];",
        NOT_FINITE,
    ),
    native(
        "what a row had before not reported",
        "write.cpp",
        "float worst = call->worst[row];",
        "float worst = 0.f;",
        NOT_FINITE,
    ),
    one(
        "kernel: spare rows left as they are",
        "compute/cpu/fused_attention.py",
        "        outputs[plan.layout.num_used :].zero_()\n",
        "",
        BITS,
    ),
    one(
        "kernel: every span reads the first rows",
        "compute/cpu/fused_attention.py",
        "                row += span.num_rows\n",
        "",
        BITS,
    ),
    one(
        "kernel: spans of another step",
        "compute/cpu/fused_attention.py",
        "if self._plan is not plan:",
        "if self._plan is None:",
        BITS,
    ),
)

LINEAR_LAYERS = (
    native(
        "rows of the input taken to lie next to each other",
        "linear.cpp",
        "* call.input_stride",
        "* call.depth",
        STRIDES,
    ),
    native(
        "rows of the output taken to lie next to each other",
        "linear.cpp",
        "* call.output_stride",
        "* call.columns",
        STRIDES,
    ),
    native(
        "the bias of the first panel for all",
        "linear.cpp",
        "memcpy(bias, call.bias + column,",
        "memcpy(bias, call.bias,",
        PRODUCTS,
    ),
    native(
        "the first row's scale for all",
        "linear.cpp",
        "sums.at[r] + n, row_scales[r], panel.scales + n",
        "sums.at[r] + n, row_scales[0], panel.scales + n",
        IN_8_BITS,
    ),
    native("values of 8 bits rounded down", "int8.hpp", "__builtin_rintf(", "__builtin_floorf(", IN_8_BITS),
    native(
        "the last panel written whole",
        "linear.cpp",
        "if (out == line) memcpy(to, line, width * size);",
        "if (out == line) memcpy(to, line, (width + 1) * size);",
        STRIDES,
    ),
    native(
        "the last block of depth packed whole",
        "linear.cpp",
        "first + panel::DEPTH<Bf16> <= w.depth;",
        "first < w.depth;",
        PACKED,
    ),
    native(
        "the last block of depth left out",
        "dots.hpp",
        "count = std::min(step, blocks - block);",
        "count = std::min(step, blocks - block - 1);",
        PRODUCTS,
    ),
    native(
        "sums of earlier blocks of depth left out",
        "dots.hpp",
        "count, block == 0 ? column_sums : nullptr}",
        "count, column_sums}",
        PRODUCTS,
    ),
    native(
        "the first blocks of rows for all",
        "dots.hpp",
        "first + row * stride + block * STAGED_BLOCK<Format>;",
        "first + row * stride;",
        PRODUCTS,
    ),
    native(
        "a group of rows over the sums of another",
        "dots.hpp",
        "some, strip, ahead.at, sums.at + row);",
        "some, strip, ahead.at, sums.at + row / 2);",
        PRODUCTS,
    ),
    native(
        "values of a pair swapped",
        "dots.hpp",
        "half ? simd::seconds(pairs) : simd::firsts(pairs)",
        "half ? simd::firsts(pairs) : simd::seconds(pairs)",
        PRODUCTS,
    ),
    native(
        "rows 17 to 32 multiplied from the second block on",
        "tiles.hpp",
        "second = a + blocks * TILE_WORDS;",
        "second = a + TILE_WORDS;",
        PRODUCTS,
        level="amx",
    ),
    native(
        "ties rounded up",
        "simd.hpp",
        "add_epi32(odd, _mm256_set1_epi32(0x7fff))",
        "add_epi32(odd, _mm256_set1_epi32(0x8000))",
        PRODUCTS,
    ),
)

KERNELS = (*ATTENTION, *WRITING, *LINEAR_LAYERS)
