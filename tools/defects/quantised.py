"""Defects in quantised checkpoints, and in layers that bitsandbytes quantises."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

LOADER, BNB = (f"tests/model/test_{name}.py" for name in ("loader", "bnb_linears"))
PACKED = f"{LOADER}::test_what_is_widened_is_packed_in_8_bits"

QUANTISED: tuple[Mutant, ...] = (
    one(
        "what is widened left wide",
        "compute/load.py",
        'return widened and can and settings.weights == "native"',
        'return can and widened and settings.weights == "auto"',
        PACKED,
    ),
    one(
        "what is widened in int8 whatever is set",
        "compute/load.py",
        'return widened and can and settings.weights == "native"',
        "return widened and can",
        f"{LOADER}::test_weights_that_are_asked_for_are_what_it_is_packed_in",
    ),
    one(
        "layers of compressed-tensors that round their inputs",
        "model/loader.py",
        '            module.__dict__.pop("forward", None)  # that of its class is left\n',
        "",
        PACKED,
    ),
    one(
        "values of 16 bits next to widened ones of another dtype",
        "model/loader.py",
        "parameter.data = parameter.data.to(dtype)",
        "pass",
        f"{LOADER}::test_the_dtype_of_what_is_widened_may_be_chosen",
    ),
    one(
        "memory judged by what the files hold",
        "model/checkpoint.py",
        'factor = 2.0 if entry["dtype"].startswith("F8") else factors.get(entry["dtype"], 1.0)',
        "factor = 1.0",
        f"{LOADER}::test_memory_is_judged_by_what_is_taken_once_it_is_wide",
    ),
    one(
        "scales of bitsandbytes not counted",
        "model/loader.py",
        "for tensor in (*model.parameters(), *scales):",
        "for tensor in model.parameters():",
        f"{BNB}::test_linear_layers_take_as_many_bits_and_are_near_their_own",
    ),
    one(
        "columns in 16 bits for all rows where one is large",
        "model/checkpoint_form.py",
        'described["llm_int8_threshold"] = bnb_linears.NO_THRESHOLD',
        'described["llm_int8_threshold"] = 6.0',
        f"{LOADER}::test_what_stays_small_takes_what_its_files_hold",
    ),
    one(
        "the same where bitsandbytes quantises",
        "model/bnb_linears.py",
        "NO_THRESHOLD = 0.0",
        "NO_THRESHOLD = 6.0",
        f"{BNB}::test_linear_layers_take_as_many_bits_and_are_near_their_own",
    ),
    one(
        "experts left in 16 bits next to layers in 4",
        "compute/cpu/weights.py",
        '"bnb-4bit": ("bf16", "int4"),',
        '"bnb-4bit": ("bf16", "bf16"),',
        f"{BNB}::test_experts_are_packed_by_the_kernels",
    ),
    one(
        "wide experts that nothing is said of",
        "compute/cpu/weights.py",
        "left = experts.wide_bytes(self.model)",
        "left = 0",
        f"{BNB}::test_experts_that_stay_wide_are_said_to",
    ),
    one(
        "checkpoints that compile kernels for minutes",
        "model/refusals.py",
        'if method in COMPILED and not device.startswith("cuda"):',
        "if method in ():",
        f"{LOADER}::test_what_needs_kernels_compiled_at_load_is_refused_on_the_cpu",
    ),
)
