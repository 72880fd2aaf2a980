"""Defects in slot files of llama-server and in what goes from them into blocks and back."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

FILE, LAYOUT, SECTIONS, SHAPES, SNAPSHOTS, TRANSFER = (
    f"rekindle_backends/llama/{name}.py"
    for name in ("slot_file", "layout", "sections", "shapes", "snapshots", "transfer")
)
OF_FILE, OF_TRANSFER = (f"tests/backends/llama/test_{name}.py" for name in ("slot_file", "transfer"))
ROUND_TRIP = f"{OF_FILE}::test_every_row_is_found_and_the_file_written_again_is_the_same"
NO_DAMAGE = f"{OF_FILE}::test_no_damage_leads_out_of_the_file"
IDENTITY = f"{OF_FILE}::test_an_identity_covers_all_but_the_slots"
RESUMABLE = f"{OF_TRANSFER}::test_what_can_be_resumed_is_what_has_its_rows"
WINDOW = f"{OF_TRANSFER}::test_a_window_has_its_rows_and_one_that_no_token_sees"
STATE = f"{OF_TRANSFER}::test_a_state_goes_on_from_its_own_token_with_the_rows_before_it"
BLOCKS = f"{OF_TRANSFER}::test_blocks_give_the_file_of_any_slot_and_any_beginning"

SLOTS: tuple[Mutant, ...] = (
    one("a slot file whose counts are believed", SECTIONS, "if num_bytes > self.left:", "if num_bytes < 0:", NO_DAMAGE),
    one(
        "a slot file of another version",
        SECTIONS,
        'if (version := reader.number("<I", "its head")) != VERSION:',
        'if (version := reader.number("<I", "its head")) > VERSION:',
        f"{OF_FILE}::test_files_of_another_kind_are_named",
    ),
    one(
        "a slot file that ends with its first memory",
        FILE,
        "if shape is not None and own != shape:",
        "if shape is not None and own.version != shape.version:",
        f"{OF_FILE}::test_files_of_another_shape_are_refused",
    ),
    one(
        "a slot file read in the first way that fits",
        FILE,
        "if len(found) > 1:",
        "if len(found) > 4:",
        f"{OF_FILE}::test_a_file_that_can_be_read_in_two_ways_teaches_no_shape",
    ),
    one("V by channels, taken for rows", FILE, "channels[:, cells].T", "channels[:, cells]", ROUND_TRIP),
    one("an identity without the rotation", SHAPES, 'if name != "num_streams"}', 'if name == "version"}', IDENTITY),
    one("an identity that has the slots", SHAPES, 'if name != "num_streams"}', "if name}", IDENTITY),
    one(
        "a slot file in the stream of another slot",
        FILE,
        "file.write(bytes(4 * (shape.num_streams - stream - 1)))",
        "file.write(bytes(4 * (shape.num_streams - 1)))",
        ROUND_TRIP,
    ),
    one(
        "a slot file that is left half written",
        FILE,
        "Path(path).unlink(missing_ok=True)",
        "Path(path).touch()",
        f"{OF_FILE}::test_a_file_that_cannot_be_written_to_its_end_is_removed",
    ),
    one(
        "a window for a model without one",
        LAYOUT,
        "if shape.attention and not shape.attention[0].k:",
        "if False:",
        f"{OF_TRANSFER}::test_models_whose_states_are_not_rows_are_refused",
    ),
    one(
        "a file that lacks a token of its text",
        TRANSFER,
        "right = len(positions) == num_tokens and bool((positions == np.arange(num_tokens)).all())",
        "right = bool((np.diff(positions) > 0).all())",
        f"{OF_TRANSFER}::test_files_without_each_token_once_are_refused",
    ),
    one(
        "rows in the order of the cells",
        TRANSFER,
        "_cells(order[at : at + stop - begin])",
        "slice(at, at + stop - begin)",
        BLOCKS,
    ),
    one(
        "rows of a window in the row of all blocks without one",
        TRANSFER,
        "there &= np.repeat(part.has, BLOCK_TOKENS)[:end]",
        "there &= np.repeat(part.rows >= 0, BLOCK_TOKENS)[:end]",
        WINDOW,
    ),
    one(
        "a row that is there because its block is",
        TRANSFER,
        'there: Flags = words == np.arange(1, num_tokens + 1, dtype="<i4")',
        "there: Flags = words >= 0",
        RESUMABLE,
    ),
    one(
        "a window without the row that a checkpoint goes on from",
        TRANSFER,
        "(last_missing < ends - window)",
        "(last_missing <= ends - window)",
        f"{OF_TRANSFER}::test_rows_of_a_window_that_a_file_lacks_stay",
    ),
    one("a window of a short conversation", TRANSFER, "(ends > window) & ", "(ends > 0) & ", RESUMABLE),
    one(
        "a window without the row that llama-server asks for",
        TRANSFER,
        "positions = range(num_tokens - window - 1, num_tokens)",
        "positions = range(num_tokens - window, num_tokens)",
        WINDOW,
    ),
    one(
        "rows beyond the state",
        TRANSFER,
        "good[1:] = np.isin(ends[1:], states.ends(blocks))",
        "good[1:] = ends[1:] >= max(states.ends(blocks), default=len(ends))",
        STATE,
    ),
    one(
        "a state that is not after the last token",
        TRANSFER,
        "0 < file.state.num_tokens == len(file.tokens) == num_tokens",
        "0 < file.state.num_tokens",
        f"{OF_TRANSFER}::test_a_state_that_is_not_after_the_last_token_is_not_taken",
    ),
    one(
        "a state of another text",
        TRANSFER,
        "0 < file.state.num_tokens == len(file.tokens) == num_tokens",
        "0 < file.state.num_tokens == len(file.tokens)",
        f"{OF_TRANSFER}::test_a_state_that_is_not_after_the_last_token_is_not_taken",
    ),
    one(
        "a state one token off",
        SECTIONS,
        "RecurrentState(int(cells[0, 0]) + 1,",
        "RecurrentState(int(cells[0, 0]),",
        STATE,
    ),
    one("a state written one token off", FILE, "1, num_tokens - 1, 0, 0", "1, num_tokens, 0, 0", ROUND_TRIP),
    one("a state in the place of an earlier one", SNAPSHOTS, "and not self._mark(row)[0]", "", STATE),
    one("a row of another text where nobody looks", TRANSFER, "found[0] = 0", "found[:0] = 0", WINDOW),
    one(
        "a long state read while another slot computes",
        "rekindle_backends/llama/keeping.py",
        "if read_s > SHORT_S and any(",
        "if read_s > SHORT_S and all(",
        "tests/backends/llama/test_slot_memory.py::test_a_long_state_is_read_when_nothing_computes_or_is_due",
    ),
)
