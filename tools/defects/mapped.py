"""Defects in files of packed weights."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

FILE = "tests/model/test_weights_file.py"
CHANGED = f"{FILE}::test_a_changed_byte_is_noticed_wherever_it_is"
CUT = f"{FILE}::test_a_file_that_is_cut_short_is_refused"
FORM = "model/weights_file.py"

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
)
