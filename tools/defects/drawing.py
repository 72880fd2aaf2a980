"""Defects in how tokens are drawn from all rows of a step at once."""

from __future__ import annotations

from tools.defects.mutant import one

DRAWING = "tests/model/test_drawing.py"
DEFINITION = f"{DRAWING}::test_tokens_are_those_of_the_definition"

DRAWN = (
    one(
        "candidates that are too few are taken for enough",
        "model/drawing.py",
        "unsure += [] if is_sure else [at]",
        "unsure += []",
        DEFINITION,
    ),
    one(
        "any of the ids that tie at the last candidate",
        "model/choice.py",
        "values.gather(1, last) > values[:, -1:]",
        "values.gather(1, last) >= values[:, -1:]",
        DEFINITION,
    ),
    one(
        "ties among candidates in any order",
        "model/choice.py",
        "    ids, order = ids.sort(dim=1)\n    values, order = values.gather(1, order).sort(",
        "    ids, order = ids.sort(dim=1, descending=True)\n    values, order = values.gather(1, order).sort(",
        DEFINITION,
    ),
    one(
        "top-p of all ids where top-k leaves a few",
        "model/choice.py",
        "torch.where(cuts.top_k < scores.shape[1], whole, every)",
        "every",
        DEFINITION,
    ),
    one(
        "a draw that may be one id too high",
        "model/choice.py",
        "(sums <= _point(sums[:, -1:], cuts))",
        "(sums < _point(sums[:, -1:], cuts))",
        f"{DRAWING}::test_a_share_begins_where_the_one_before_ends",
    ),
    one(
        "the parameters of another row",
        "model/drawn_rows.py",
        "sent.cuts.part(end - first, len(draws) - first)",
        "sent.cuts.part(0, len(draws) - end)",
        DEFINITION,
    ),
    one(
        "temperatures that single precision does not hold",
        "model/choice.py",
        "cuts.temperature.clamp(limits.tiny, limits.max)",
        "cuts.temperature",
        f"{DRAWING}::test_no_temperature_is_too_low_or_too_high_for_single",
    ),
    one(
        "the first row's mask for all",
        "model/drawn_rows.py",
        "out=row[: len(mask)]",
        "out=barred[0][: len(mask)]",
        DEFINITION,
    ),
    one(
        "tokens after the end of a mask",
        "model/drawn_rows.py",
        "barred = np.ones(",
        "barred = np.zeros(",
        DEFINITION,
    ),
    one(
        "scores of another request's row",
        "model/drawing.py",
        ".copy(row, row + 1)",
        ".copy(0, 1)",
        f"{DRAWING}::test_company_changes_no_token",
    ),
    one(
        "log probabilities of adjusted scores",
        "model/drawn_rows.py",
        "*sent.raw_scores(logits, drawn)",
        "*sent.raw_scores(scores, drawn)",
        f"{DRAWING}::test_company_changes_no_token",
    ),
    one(
        "shares that are summed in any order",
        "model/choice.py",
        "exp_().mul_(WHOLE).to(torch.int64)",
        "exp_()",
        DEFINITION,
    ),
    one(
        "ids outside of the vocabulary change the next row",
        "model/adjustments.py",
        "if (change.at >= vocab).any():",
        "if False:",
        "tests/model/test_adjustments.py::test_ids_outside_of_the_vocabulary_change_no_other_row",
    ),
    one(
        "draws that wait for the device",
        "model/drawn_rows.py",
        "    drawn = torch.cat(tokens)\n",
        "    drawn = torch.cat(tokens)\n    assert int(drawn[0].item()) >= 0\n",
        f"{DRAWING}::test_nothing_waits_for_the_device_before_results_are_wanted",
    ),
    one(
        "draws that are read on their own",
        "model/runner.py",
        "if self._drawing is None else",
        "if True else",
        "tests/model/test_runner.py::test_what_is_drawn_before_a_step_is_waited_for_comes_with_it",
    ),
    one(
        "arrays that begin anywhere",
        "model/transfer.py",
        "-(-array.nbytes // ALIGNED) * ALIGNED",
        "array.nbytes",
        "tests/model/test_transfer.py::test_what_is_packed_and_joined_comes_out_as_it_was",
    ),
)
