"""Pictures in prompts: another one is other text, the same one the same, and each row of it has its place."""

from __future__ import annotations

import base64
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from rekindle.errors import BadRequest
from rekindle.text.messages import GUARD, content_text
from rekindle.text.omissions import Omissions
from rekindle.text.pictures import MOST_PICTURES, PICTURE_IDS, Picture, PictureForm, is_known, texts_and_marks
from rekindle.text.vocabulary import control_code, pieces_of
from tests.drawn_pictures import drawn, file_of, part_of, text

PLACEHOLDER, AROUND, NEXT = 5, 6, 7
TOKENS = np.array([AROUND, PLACEHOLDER, PLACEHOLDER, NEXT, PLACEHOLDER, AROUND], dtype=np.uint32)


def form(identity: bytes = b"one") -> PictureForm:
    return PictureForm(identity, PLACEHOLDER, PLACEHOLDER, lambda width, height: TOKENS)


def mutual_form() -> PictureForm:
    """As Gemma 3 has it: text around each picture, another token in the template, rows that see each other."""
    return PictureForm(b"one", NEXT, PLACEHOLDER, lambda width, height: TOKENS, around="\n\n", is_mutual=True)


def picture(seed: int, width: int = 9, height: int = 6) -> Picture:
    return Picture.read(base64.b64encode(file_of(drawn(seed, width, height))).decode(), "here")


def prompt(*parts: int | Picture) -> np.ndarray:
    ids = [[part] if isinstance(part, int) else form().run(part.mark) for part in parts]
    return np.array([*chain.from_iterable(ids)], dtype=np.uint32)


def test_ids_follow_from_file_and_processor() -> None:
    one, other = picture(1), picture(2)
    runs = [form().run(one.mark), form().run(picture(1).mark), form().run(other.mark), form(b"two").run(one.mark)]
    assert runs[0] == runs[1]
    assert len({tuple(run[:1]) for run in runs[1:]}) == 3  # already by their first token
    assert all(PICTURE_IDS <= token < 2 * PICTURE_IDS and is_known(np.array([token]), 9) for token in chain(*runs))
    assert not is_known(np.array([9]), 9) and not is_known(np.array([2 * PICTURE_IDS]), 9)
    key = b"".join(map(control_code, runs[0]))
    assert list(pieces_of(key)) == runs[0]  # keys hold them whole


def test_every_row_has_its_place() -> None:
    """Of two pictures next to each other, one of them twice, wherever a step begins and ends."""
    one, other = picture(1), picture(2)
    ids = prompt(1, one, other, 2, one, 3)
    placed = form().placed(ids, {each.mark.key: each for each in (other, one)})
    assert placed is not None
    assert placed.ids.tolist() == [1, *TOKENS, *TOKENS, 2, *TOKENS, 3]
    rows = {span.at + at: (span.picture, span.first + at) for span in placed.spans for at in range(span.count)}
    expected = {
        start + at: (each, row) for start, each in ((1, one), (7, other), (14, one)) for row, at in enumerate((1, 2, 4))
    }
    assert rows == expected
    for start in range(len(ids)):
        for end in range(start + 1, len(ids) + 1):
            found = {
                start + span.at + at: (span.picture, span.first + at)
                for span in placed.within(start, end)
                for at in range(span.count)
            }
            assert found == {at: row for at, row in rows.items() if start <= at < end}
    assert placed.after(12) == (one,) and placed.after(11) == (other, one) and placed.after(19) == ()
    assert [placed.divided(position) for position in range(len(ids))] == [None] * len(ids)
    assert form().placed(prompt(1, 2), {}) is None
    cut = form().placed(ids[:4], {one.mark.key: one})
    assert cut is not None and cut.ids.tolist() == [1, *TOKENS[:3]]


def test_rows_that_see_each_other_are_not_divided() -> None:
    one = picture(1)
    placed = mutual_form().placed(prompt(1, one, 2), {one.mark.key: one})
    assert placed is not None
    assert [placed.divided(position) for position in range(9)] == [*[None] * 3, (2, 4), *[None] * 5]
    assert all(span.is_mutual for span in placed.within(0, 9))
    with pytest.raises(BadRequest, match="ends inside a picture"):
        mutual_form().placed(prompt(1, one)[:4], {one.mark.key: one})


def test_text_around_a_picture_is_one_with_the_text_next_to_it() -> None:
    """As a tokenizer reads it: two line feeds after one are a token of three."""
    mark = picture(1).mark
    run = mutual_form().run(mark)
    shown = mutual_form().shown([8, "user\n", NEXT, NEXT, "a", 9], [f"{mark}{mark}a"])
    assert shown == [8, "user\n\n\n", *run, "\n\n\n\n", *run, "\n\na", 9]


def test_a_picture_that_the_request_lacks_is_refused() -> None:
    one, other = picture(1), picture(2)
    with pytest.raises(BadRequest, match="does not have"):
        form().placed(prompt(1, one), {other.mark.key: other})


def test_marks_stand_where_pictures_were_sent() -> None:
    """Texts next to one are not moved away from it by a paragraph; other texts are paragraphs, as ever."""
    parts = [text("a"), text("b"), part_of(file_of(drawn(1, 9, 6))), text("c"), part_of(file_of(drawn(2, 9, 6)))]
    omissions = Omissions(strict=True, sees=True)
    found = list(texts_and_marks(content_text(parts, "content", omissions)))
    assert found == ["a\nb", picture(1).mark, "c", picture(2).mark]
    assert list(omissions.pictures) == [picture(1).mark.key, picture(2).mark.key]
    assert GUARD in str(picture(1).mark) and omissions.all().left_out == ()
    many = [part_of(file_of(drawn(seed, 2, 2))) for seed in range(MOST_PICTURES + 1)]
    with pytest.raises(BadRequest, match=f"at most {MOST_PICTURES}"):
        content_text(many, "content", Omissions(sees=True))


def test_a_template_must_show_every_picture() -> None:
    mark = picture(1).mark
    assert form().shown([8, PLACEHOLDER, "a"], [f"{mark}a"]) == [8, *form().run(mark), "a"]
    assert form().shown([8, PLACEHOLDER], ["a"]) == [8, PLACEHOLDER]  # which nobody sent
    for pieces in ([8], [PLACEHOLDER, PLACEHOLDER]):
        with pytest.raises(BadRequest, match="message of the user"):
            form().shown(pieces, [str(mark)])


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "cannot be read"),
        (b"no picture", "cannot be read"),
        (file_of(drawn(0, 9, 6), "TIFF"), "cannot be read"),
        (file_of(drawn(0, 9, 6))[:20], "cannot be read"),
        (file_of(drawn(0, 130, 2)), "64 times"),
        (file_of(Image.new("1", (6_400, 6_400))), "40,000,000"),
        (file_of(Image.new("1", (14_000, 14_000))), "DecompressionBombError"),
        (bytes(21 << 20), "20 MiB"),
    ],
)
def test_what_is_no_picture_is_refused(file: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        Picture.read(base64.b64encode(file).decode(), "messages[3].content[1]")
    assert refused.value.param == "messages[3].content[1]"
