"""Defects in files of packed weights and in what is taken from them."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

FILE, SAVED = (f"tests/model/test_{name}.py" for name in ("weights_file", "saved_weights"))
STARTING = "tests/engine/test_starting.py"
CHANGED = f"{FILE}::test_a_changed_byte_is_noticed_wherever_it_is"
CUT = f"{FILE}::test_a_file_that_is_cut_short_is_refused"
FORM = "compute/cpu/weights_file.py"
SAME_BITS = f"{SAVED}::test_the_second_start_maps_and_gives_the_same_bits"

MAPPED: tuple[Mutant, ...] = (
    one(
        "the sum of mapped weights passed over",
        FORM,
        'if _sum(memory) != entry["sum"]:',
        "if False:",
        CHANGED,
    ),
    one(
        "the end of a file of weights not looked for",
        FORM,
        "if size != file_bytes:",
        "if size > file_bytes:",
        CUT,
    ),
    one(
        "a changed index of weights taken",
        FORM,
        "if _digest(encoded) != digest:",
        "if not encoded:",
        CHANGED,
    ),
    one(
        "another model's file of weights taken",
        FORM,
        'if index["key"] != key:',
        "if not key:",
        f"{FILE}::test_another_models_file_and_what_is_no_file_are_refused",
    ),
    one(
        "a file of weights written by two at once",
        FORM,
        "fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "file.fileno()",
        f"{FILE}::test_two_writers_at_once_leave_one_whole_file",
    ),
    one(
        "mapped weights of other kernels or code taken",
        "compute/cpu/saved_weights.py",
        "hashlib.blake2b(identity + conditions.encode(), digest_size=16)",
        "hashlib.blake2b(identity, digest_size=16)",
        f"{SAVED}::test_other_kernels_have_another_file",
    ),
    one(
        "one file for all formats of a model's weights",
        "compute/cpu/saved_weights.py",
        'f"{chosen.weights} {self.source}"',
        "self.source",
        f"{SAVED}::test_other_weights_and_other_formats_have_other_files",
    ),
    one(
        "mapped weights in modules of another shape",
        "compute/cpu/packed.py",
        "return (packed.columns, packed.depth) == (columns, depth) and",
        "return",
        f"{SAVED}::test_weights_that_do_not_fit_change_nothing",
    ),
    one(
        "mapped experts in the order of another projection",
        "compute/cpu/experts.py",
        'weights.pop(f"{path}.{name}.{number}") for number in range(count)',
        'weights.pop(f"{path}.{name}.{number}") for number in reversed(range(count))',
        SAME_BITS,
    ),
    one(
        "notes on packing forgotten by the next start",
        "compute/cpu/saved_weights.py",
        "(*contents.notes, *described, note)",
        "(*described, note)",
        f"{SAVED}::test_notes_on_packing_are_repeated",
    ),
    one(
        "packed weights never written",
        "engine/components.py",
        "(self.prefault, self.weights_writer)",
        "(self.prefault,)",
        f"{STARTING}::test_packed_weights_are_written_once_served_and_mapped_by_the_next_start",
    ),
)
