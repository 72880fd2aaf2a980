"""Defects in experts that are one call of the kernels, and in layers that have them."""

from __future__ import annotations

from tools.defects.kernels import native
from tools.defects.mutant import Mutant, one

EXPERTS = "tests/model/test_mixtures.py"
OUTPUTS = f"{EXPERTS}::test_outputs_are_those_of_experts_one_by_one"
CHOSEN = f"{EXPERTS}::test_the_experts_that_a_router_chooses"
ROUTER = f"{EXPERTS}::test_another_router_is_left_alone"
DECODER = "tests/model/test_decoder.py"
LAYERS = f"{DECODER}::test_mixtures_give_the_outputs_of_their_own_code"
LEFT = f"{EXPERTS}::test_a_layer_that_computes_something_else_is_left_alone"
OTHER_GATE = f"{EXPERTS}::test_another_gate_is_left_alone"


def experts(name: str, old: str, new: str, *tests: str) -> Mutant:
    """Build a mutant of the experts' C++."""
    return native(name, "experts.cpp", old, new, *tests or (OUTPUTS,))


MIXTURES: tuple[Mutant, ...] = (
    experts(
        "one row for all that chose an expert", "next[call.indices[slot]]++;\n  }", "next[call.indices[slot]];\n  }"
    ),
    experts(
        "rows of an expert beyond the first many taken for the first", "{expert, room + done, std", "{expert, room, std"
    ),
    experts("a token's second expert without its row", "n = 1; n < call.chosen", "n = 2; n < call.chosen"),
    experts("the first expert for all", "weights_[part.expert];", "weights_[0];"),
    experts("a row's scale taken for those after it", "scales_.memory[row + r]", "scales_.memory[row]"),
    experts("the scale of a row not copied with it", "scales_.memory[row] = scales_.memory[from];", ""),
    experts(
        "a bias added before the product is rounded",
        "simd::add(simd::round_bf16(sum), simd::load",
        "simd::add(sum, simd::load",
    ),
    experts("the bias of the first panel for all", "weights.bias + column, width", "weights.bias, width"),
    experts("gates without their limit", "simd::smaller(simd::broadcast(experts.limit), gate)", "gate"),
    experts("the other values limited on one side", "simd::larger(simd::broadcast(-limit), ", "("),
    experts("nothing added to what gates multiply", "simd::add(up, simd::broadcast(1.f))", "up"),
    experts("gates without their slope", "simd::mul(gate, simd::broadcast(experts.alpha))", "gate"),
    experts(
        "the tail of gates in turns left out",
        "memcpy(pairs, row + 2 * at, count",
        "memcpy(pairs, row + 2 * at, count / LANES * LANES",
    ),
    experts("products with shares in bf16 not rounded", "call.share_format == RK_FP32 ? part :", "true ? part :"),
    experts(
        "the share of an expert's first choice twice",
        "call.shares)[slot] << 16",
        "call.shares)[slot / 2 * 2] << 16",
    ),
    one(
        "experts fused whatever their gate computes",
        "model/layer_parts.py",
        "if same_results(gated(gate, rows), theirs))",
        "if theirs is not None)",
        LEFT,
        OTHER_GATE,
    ),
    one(
        "experts fused whatever they compute",
        "compute/cpu/mixtures.py",
        "is not None and same(ours, theirs)",
        "is not None",
        OTHER_GATE,
    ),
    one(
        "blocks of experts in 4 bits unpacked beyond their memory",
        "compute/cpu/kernels/native/dots.hpp",
        "at_once = near && !std::is_same_v<Format, Int4>",
        "at_once = near",
        f"{EXPERTS}::test_experts_are_fused_whatever_their_weights_are",
    ),
    one("experts with hooks fused", "compute/cpu/mixtures.py", " or is_changed(module)", "", LEFT),
    one("experts with a norm fused", "compute/cpu/mixtures.py", " or module.has_post_expert_norm", "", LEFT),
    one(
        "experts beyond the last one read",
        "compute/cpu/mixtures.py",
        "<= int(chosen.max()) < self.layer.experts:",
        "<= int(chosen.max()):",
        f"{EXPERTS}::test_strides_and_empty_steps",
    ),
    native(
        "shares of all experts where they are those of the chosen",
        "routing.cpp",
        "if (router.chosen_only) {",
        "if (false) {",
        CHOSEN,
    ),
    native("an expert chosen again", "routing.cpp", "taken[indices[n]] = 1.f;", "", CHOSEN),
    native("the last of equal logits", "routing.cpp", "values[i] > values[best]", "values[i] >= values[best]", CHOSEN),
    native(
        "experts of rows that are not normed",
        "decoder.cpp",
        "apply_mixture(job, *d.mixture, normed, added);",
        "apply_mixture(job, *d.mixture, out, added);",
        LAYERS,
    ),
    native(
        "shares in fp32 read as bf16",
        "decoder.cpp",
        "shares.memory, router.share_format,",
        "shares.memory, RK_BF16,",
        LAYERS,
    ),
    one(
        "mixtures fused in layers that do something else",
        "model/observation.py",
        " or not torch.equal(output, given[0] + given[2])",
        "",
        f"{DECODER}::test_mixtures_that_do_something_else_are_left_alone",
    ),
    one(
        "routers known whatever their shares",
        "model/compare.py",
        ".all()) and same_results(a, b)",
        ".all())",
        ROUTER,
    ),
    one(
        "a router's block fused whatever it adds",
        "model/layer_parts.py",
        " or not torch.equal(theirs, expected[None])",
        "",
        f"{EXPERTS}::test_another_block_is_left_alone",
    ),
)
