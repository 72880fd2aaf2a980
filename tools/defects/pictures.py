"""Defects in what a model sees: keys of pictures, places of their rows, what is computed of them and when."""

from __future__ import annotations

from tools.defects.mutant import one

IDS = "tests/text/test_seen_pictures.py"
SEEN = "tests/exactness/test_pictures.py"
REPLIES = f"{SEEN}::test_replies_are_those_of_transformers"
DIALECTS = "tests/server/test_pictures.py"
SIZES = f"{SEEN}::test_the_tokens_of_every_size_are_known_before"
UNDIVIDED = "tests/engine/test_scheduler.py::test_no_chunk_ends_among_rows_that_see_each_other"

PICTURES = (
    one(
        "one key for all pictures",
        "text/pictures.py",
        "self.identity + bytes.fromhex(mark.key)",
        "self.identity",
        f"{IDS}::test_ids_follow_from_file_and_processor",
    ),
    one(
        "one key whatever prepares a picture",
        "text/pictures.py",
        'b"rekindle.picture" + self.identity + ',
        'b"rekindle.picture" + ',
        f"{IDS}::test_ids_follow_from_file_and_processor",
    ),
    one(
        "a key by the size of a picture",
        "text/pictures.py",
        "hashlib.blake2b(data, digest_size=32)",
        'hashlib.blake2b(f"{width} {height}".encode(), digest_size=32)',
        f"{IDS}::test_marks_stand_where_pictures_were_sent",
    ),
    one(
        "a step that begins inside a picture with its first rows",
        "text/pictures.py",
        "self.first + first - self.at",
        "self.first",
        f"{IDS}::test_every_row_has_its_place",
    ),
    one(
        "every tile with the rows of the first",
        "text/pictures.py",
        "num_before += end - first",
        "num_before += 0",
        f"{IDS}::test_every_row_has_its_place",
    ),
    one(
        "the last rows of a picture taken for reused",
        "text/pictures.py",
        "if span.at + span.count > position",
        "if span.at > position",
        f"{IDS}::test_every_row_has_its_place",
    ),
    one(
        "any id taken for one of a picture",
        "text/pictures.py",
        "(ids < PICTURE_IDS) | (ids >= 2 * PICTURE_IDS)",
        "(ids >= 2 * PICTURE_IDS)",
        f"{IDS}::test_ids_follow_from_file_and_processor",
    ),
    one(
        "a picture that the template drops",
        "text/pictures.py",
        "if pieces.count(self.written) != len(marks):",
        "if pieces.count(self.written) > len(marks):",
        f"{IDS}::test_a_template_must_show_every_picture",
    ),
    one(
        "a picture of any size",
        "text/pictures.py",
        "if width * height > MOST_PIXELS:",
        "if width * height > 9 * MOST_PIXELS:",
        f"{IDS}::test_what_is_no_picture_is_refused",
    ),
    one(
        "a picture as it lies",
        "text/pictures.py",
        "_orientation(image) in _ON_ITS_SIDE",
        "_orientation(image) not in (_UPRIGHT, *_ON_ITS_SIDE)",
        f"{SEEN}::test_a_turned_picture_is_seen_upright",
    ),
    one(
        "a paragraph between a picture and its text",
        "text/messages.py",
        "before.endswith(GUARD) or after.startswith(GUARD)",
        "before.endswith(GUARD) and after.startswith(GUARD)",
        f"{IDS}::test_marks_stand_where_pictures_were_sent",
    ),
    one(
        "rows of the second sequence among those of the first",
        "model/batch.py",
        "replace(span, at=at + span.at)",
        "replace(span, at=span.at)",
        f"{SEEN}::test_rows_of_several_sequences_lie_one_after_another",
    ),
    one(
        "rows of pictures by their ids",
        "model/runner.py",
        "embedded[0, span.at : span.at + span.count] = ",
        "embedded[0, span.at : span.at] = ",
        REPLIES,
    ),
    one(
        "rows that are kept without end",
        "model/vision.py",
        "while len(self._rows) > 1 and",
        "while len(self._rows) > 9 and",
        f"{SEEN}::test_rows_are_those_of_transformers_and_bounded",
    ),
    one(
        "a picture that is kept waited for while another is computed",
        "model/vision.py",
        "result() if found is None else found",
        "result()",
        f"{SEEN}::test_a_picture_that_is_kept_is_not_waited_for",
    ),
    one(
        "penalties by ids that no model has",
        "engine/sequence.py",
        "return History(self._own_prompt, ",
        "return History(self.prompt_ids, ",
        f"{SEEN}::test_four_bits_as_for_text",
    ),
    one(
        "a stored picture looked at again",
        "engine/intake/request_builder.py",
        "pictures.after(prompt.match.num_tokens)",
        "pictures.after(0)",
        REPLIES,
    ),
    one(
        "a picture drafted",
        "engine/drafts.py",
        "following = following[: pictures[0]] if len(pictures) else following",
        "following = following[: len(following) - len(pictures)]",
        "tests/engine/test_drafts.py::test_a_draft_ends_before_a_picture",
    ),
    one(
        "ids of pictures in answers",
        "engine/intake/request_builder.py",
        "(prompt.ids if pictures is None else pictures.ids).tolist()",
        "prompt.ids.tolist()",
        REPLIES,
    ),
    one(
        "pictures in responses that are stored without them",
        "server/responses/calls.py",
        'body.get("store") is False',
        'body.get("store") is not True',
        f"{DIALECTS}::test_what_is_not_looked_at_is_said",
    ),
    one(
        "parts for every template",
        "text/template.py",
        "return shown == [False, True]",
        "return shown[1]",
        "tests/text/test_template.py::test_content_is_in_parts_where_a_template_writes_nothing_else",
    ),
    one(
        "a picture on its side",
        "model/vision_encoders.py",
        "return int(rows) // self._side, int(columns) // self._side",
        "return int(columns) // self._side, int(rows) // self._side",
        f"{SIZES}[mistral3]",
    ),
    one(
        "patches that are not merged",
        "model/vision_encoders.py",
        "images, patch_size=self._side, return",
        "images, return",
        f"{REPLIES}[mistral3]",
    ),
    one(
        "a picture of one patch by itself, which transformers fails at",
        "model/vision_encoders.py",
        "[image] * 2 if",
        "[image] * 1 if",
        f"{SEEN}::test_a_picture_of_one_patch_is_seen_as_next_to_another",
    ),
    one(
        "a picture that does not end",
        "model/vision_encoders.py",
        '+ "[IMG_END]"',
        '+ "[IMG_BREAK]"',
        f"{SIZES}[mistral3]",
    ),
    one(
        "a picture without the line feeds around it",
        "model/vision.py",
        "around=own.around",
        'around=""',
        f"{REPLIES}[gemma3-vl]",
    ),
    one(
        "line feeds next to a picture read by themselves",
        "text/pictures.py",
        "return _joined(shown)",
        "return shown",
        f"{IDS}::test_text_around_a_picture_is_one_with_the_text_next_to_it",
    ),
    one(
        "rows of a picture that see those before them alone",
        "model/vision.py",
        "is_mutual=self.mutual_rows > 0",
        "is_mutual=False",
        f"{REPLIES}[gemma3-vl]",
    ),
    one(
        "a prompt that ends inside a picture, with rows that saw a part of it",
        "text/pictures.py",
        "if self.is_mutual and end - start < len(run):",
        "if self.is_mutual and end < start:",
        f"{IDS}::test_rows_that_see_each_other_are_not_divided",
    ),
    one(
        "a picture computed in two steps",
        "engine/core/scheduler.py",
        "        if divided is None:\n",
        "        if divided is None or divided[0] < sequence.num_computed:\n",
        UNDIVIDED,
    ),
    one(
        "idle work that ends inside a picture",
        "engine/core/scheduler.py",
        " and end > start and sequence.divided(end) is None",
        " and end > start",
        UNDIVIDED,
    ),
)
