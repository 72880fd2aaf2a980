"""Pictures inside the text of prompts: what a caller sent, how it stands in a message, and by which ids.

Owns what counts as a picture, its limits and its key: the BLAKE2b-256 of the file's bytes as they were sent. In a
message it is a mark that no text may contain; in a prompt each of its tokens is an id of its own, drawn from its key,
above all ids of a vocabulary. So matching, block hashes, files and comparisons see another picture as other text, and
the same one as the same, with no rule of their own. Knows no model: how many tokens a picture has, and which of the
model's own ids they are, is its `PictureForm`.

    message   "What is in \ufdd0picture:9f8c...:640x480\ufdd0 and where?"
    template  What is in <image> and where?
    prompt    ... [fake] [row_1_col_1] [image] [image] ...       the model's own ids: `PromptPictures.ids`
    its ids   ... 9183745 12058811     8912033 15220149 ...      PICTURE_IDS + 23 bits for each token

Two pictures differ before the first row that a model computes from their pixels if anything stands before it: 23 bits
for each such token and for the row itself. Those of Mistral 3 begin with a row: 23 bits.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle.errors import BadRequest

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_IDS = 1 << 23  # ids from here on are tokens of pictures; below 2^24, as all that a key can hold
MOST_BYTES = 20 << 20  # of one file
MOST_PIXELS = 40_000_000  # of one picture: 120 MB once it is decoded
MOST_PICTURES = 64  # of one request
LONGEST = 64  # times as long as wide, or as wide as long
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION, _UPRIGHT, _ON_ITS_SIDE = 0x0112, 1, (5, 6, 7, 8)  # of EXIF
_MARK = re.compile("\ufdd0picture:([0-9a-f]{64}):([0-9]+)x([0-9]+)\ufdd0")


@dataclass(frozen=True, slots=True)
class PictureMark:
    """A picture in the text of a message: the hex key of its file, and its size as it is looked at."""

    key: str
    width: int
    height: int

    def __str__(self) -> str:
        """Return it as it stands in a message; the character around it is refused in all that callers send."""
        return f"\ufdd0picture:{self.key}:{self.width}x{self.height}\ufdd0"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a caller sent: its mark, and the bytes of its file."""

    mark: PictureMark
    data: bytes = field(repr=False, compare=False)

    @classmethod
    def read(cls, given: str, where: str) -> Picture:
        """Return the picture whose file is `given` in base64; BadRequest if it is none, or larger than the limits.

        Only the head of the file is read: damage further on is found when it is decoded.
        """
        if len(given) > MOST_BYTES * 4 // 3 + 4:
            raise _refused(f"{where}: a picture has at most {MOST_BYTES >> 20} MiB, this one is larger", where)
        try:
            data = base64.b64decode(given)
        except (binascii.Error, ValueError) as error:
            raise _refused(f"{where} is no base64: {error}", where) from None
        try:
            with _opened(data) as image:
                width, height = image.size
                if width * height <= MOST_PIXELS and _orientation(image) in _ON_ITS_SIDE:
                    width, height = height, width
        except Exception as error:
            # Border: Pillow raises whatever its readers of damaged heads do.
            message = f"{where} cannot be read as a picture ({', '.join(FORMATS)}): {type(error).__name__}"
            raise _refused(message, where) from error
        if width * height > MOST_PIXELS:
            message = f"{where} has {width} x {height} pixels: a picture has at most {MOST_PIXELS:,}, send it smaller"
            raise _refused(message, where)
        if max(width, height) > LONGEST * min(width, height):
            message = f"{where} has {width} x {height} pixels: at most {LONGEST} times as long as wide is looked at"
            raise _refused(message, where)
        return cls(PictureMark(hashlib.blake2b(data, digest_size=32).hexdigest(), width, height), data)

    def decoded(self) -> Image:
        """Return it upright and in RGB, as transformers' own reader does; BadRequest if its file is damaged."""
        from PIL import ImageOps

        try:
            with _opened(self.data) as image:
                upright = ImageOps.exif_transpose(image) if _orientation(image) != _UPRIGHT else image
                return upright.convert("RGB")
        except Exception as error:
            # Border: as in `read`.
            message = (
                f"a picture of {self.mark.width} x {self.mark.height} pixels cannot be decoded: {type(error).__name__}"
            )
            raise BadRequest(message, param="messages") from error


def _opened(data: bytes) -> Image:
    """A picture of which only the head was read."""
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)


def _orientation(image: Image) -> int:
    """How it was held, if its head says so: after the pixels of a PNG this is not looked for."""
    return int(image.getexif().get(_ORIENTATION, _UPRIGHT)) if "exif" in image.info else _UPRIGHT


def _refused(message: str, where: str) -> BadRequest:
    return BadRequest(message, param=where)


def name_of_picture(first_id: int) -> str:
    """Return what a reader of a prompt sees of a picture, by the first of its ids."""
    return f"[image {first_id - PICTURE_IDS:06x}]"


def texts_and_marks(content: str) -> Iterator[str | PictureMark]:
    """Yield the texts of a message and the marks between them, in order; no empty text."""
    end = 0
    for found in _MARK.finditer(content):
        if end < found.start():
            yield content[end : found.start()]
        yield PictureMark(found[1], int(found[2]), int(found[3]))
        end = found.end()
    if end < len(content):
        yield content[end:]


def content_for_template(content: str, guarded: Callable[[str], str]) -> str | list[dict[str, str]]:
    """Return the content of a message as templates expect it, with `guarded` texts: in parts if it has pictures."""
    parts = list(texts_and_marks(content))
    if all(isinstance(part, str) for part in parts):
        return guarded(content)
    return [{"type": "text", "text": guarded(part)} if isinstance(part, str) else {"type": "image"} for part in parts]


@dataclass(frozen=True, slots=True)
class PictureForm:
    """How pictures stand in the prompts of one model.

    `written`: the id of the control token that the template writes for a picture, in place of which come its tokens
    with the text `around` before and after them. `layout`: the model's own ids uint32 of these tokens by width and
    height; `placeholder` is that of each row computed from pixels. `identity`: of what turns a file into these rows;
    another one gives the same file other ids. `is_mutual`: rows that follow each other see each other.
    """

    identity: bytes
    written: int
    placeholder: int
    layout: Callable[[int, int], np.ndarray]
    around: str = ""
    is_mutual: bool = False

    def run(self, mark: PictureMark) -> list[int]:
        """Return the ids of a picture's tokens in a prompt."""
        count = len(self.layout(mark.width, mark.height))
        digest = hashlib.shake_256(b"rekindle.picture" + self.identity + bytes.fromhex(mark.key))
        drawn = np.frombuffer(digest.digest(3 * count), dtype=np.uint8).reshape(count, 3).astype(np.uint32)
        bits = drawn[:, 0] << 16 | drawn[:, 1] << 8 | drawn[:, 2]
        ids: list[int] = (bits % PICTURE_IDS + PICTURE_IDS).tolist()
        return ids

    def pieces(self, mark: PictureMark) -> list[str | int]:
        """Return what stands for a picture in a prompt, pieces of text among its tokens."""
        around: list[str | int] = [self.around] if self.around else []
        return [*around, *self.run(mark), *around]

    def shown(self, pieces: list[str | int], contents: Iterable[str]) -> list[str | int]:
        """Return the pieces of a rendered prompt with the tokens of its messages' pictures where the template shows
        them; BadRequest if it does not."""
        marks = [part for each in contents for part in texts_and_marks(each) if isinstance(part, PictureMark)]
        if not marks:
            return pieces
        if pieces.count(self.written) != len(marks):
            message = "the model's chat template does not show a picture there: send it in a message of the user"
            raise BadRequest(message, param="messages")
        left, shown = iter(marks), list[str | int]()
        for piece in pieces:
            shown += self.pieces(next(left)) if piece == self.written else [piece]
        return _joined(shown)

    def placed(self, ids: np.ndarray, pictures: Mapping[str, Picture]) -> PromptPictures | None:
        """Return where pictures, by their keys, are in a prompt's ids uint32 [n]; None if it has none.

        BadRequest if it has one that is not among them.
        """
        at = np.flatnonzero(ids >= PICTURE_IDS)
        if not len(at):
            return None
        runs = [(picture, np.array(self.run(picture.mark), dtype=np.uint32)) for picture in pictures.values()]
        own, spans, start, last = ids.copy(), list[PictureSpan](), int(at[0]), int(at[-1])
        while start <= last:
            picture, run = next(((each, run) for each, run in runs if _begins(ids[start:], run)), (None, None))
            if picture is None or run is None:
                raise BadRequest("the prompt has a picture that the request does not have", param="messages")
            end = min(start + len(run), len(ids))
            if self.is_mutual and end - start < len(run):
                raise BadRequest("the prompt ends inside a picture, of which all is seen at once", param="messages")
            tokens = self.layout(picture.mark.width, picture.mark.height)[: end - start]
            own[start:end] = tokens
            spans += self._spans(picture, tokens == self.placeholder, start)
            following = at[np.searchsorted(at, end) :]
            start = int(following[0]) if len(following) else last + 1
        return PromptPictures(own, tuple(spans))

    def _spans(self, picture: Picture, is_row: np.ndarray, start: int) -> Iterator[PictureSpan]:
        """The rows of a picture that begins at `start` of a prompt, by the stretches in which they stand."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_row, [False]]).astype(np.int8)))
        num_before = 0
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield PictureSpan(picture, start + first, num_before, end - first, self.is_mutual)
            num_before += end - first


def _joined(pieces: Iterable[str | int]) -> list[str | int]:
    """Return pieces of a prompt with texts that meet as one, which a tokenizer reads as one."""
    found = list[str | int]()
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        else:
            found.append(piece)
    return found


def content_pieces(
    content: str, form: PictureForm | None, split: Callable[[str], Iterable[str | int]]
) -> list[str | int]:
    """Return the pieces of a message's content in a prompt, its texts by `split`; none of pictures without a form."""
    found = list[str | int]()
    for part in texts_and_marks(content):
        if isinstance(part, str):
            found += split(part)
        elif form is not None:
            found += form.pieces(part)
    return _joined(found)


def _begins(ids: np.ndarray, run: np.ndarray) -> bool:
    """Whether ids begin with a run, as far as they go."""
    return np.array_equal(ids[: len(run)], run[: len(ids)])


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """`count` rows at positions `at`... that are rows `first`... of what a model's vision part makes of a picture.

    `is_mutual`: they see each other, so one step computes all that is not stored of them.
    """

    picture: Picture
    at: int
    first: int
    count: int
    is_mutual: bool = False

    def within(self, start: int, end: int) -> PictureSpan | None:
        """Return the part of it at positions [start, end), with positions counted from `start`; None: nothing."""
        first, last = max(self.at, start), min(self.at + self.count, end)
        if first >= last:
            return None
        return replace(self, at=first - start, first=self.first + first - self.at, count=last - first)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPictures:
    """The pictures of one prompt: the model's own ids uint32 [n] of all its tokens, and the rows that pixels give."""

    ids: np.ndarray
    spans: tuple[PictureSpan, ...]

    def within(self, start: int, end: int) -> tuple[PictureSpan, ...]:
        """Return the spans at positions [start, end), counted from `start`."""
        found = (span.within(start, end) for span in self.spans)
        return tuple(span for span in found if span is not None)

    def divided(self, position: int) -> tuple[int, int] | None:
        """Return the first position and the end of the rows around `position` that see each other; None: there are
        none, and a step may end there."""
        spans = ((span.at, span.at + span.count) for span in self.spans if span.is_mutual)
        return next(((first, end) for first, end in spans if first < position < end), None)

    def after(self, position: int) -> tuple[Picture, ...]:
        """Return the pictures of which rows lie at `position` or later, each once, in the prompt's order."""
        late = (span.picture for span in self.spans if span.at + span.count > position)
        return tuple({picture.mark.key: picture for picture in late}.values())


def is_known(ids: np.ndarray, vocab_size: int) -> bool:
    """Whether ids uint32 are all of a vocabulary or of pictures."""
    return not ((ids >= vocab_size) & ((ids < PICTURE_IDS) | (ids >= 2 * PICTURE_IDS))).any()


def base64_of(part: Mapping[str, Any], where: str) -> str:
    """Return the file in a part of a message that is a picture, in base64; BadRequest for one that is elsewhere."""
    inner = next((part[key] for key in ("image_url", "source") if isinstance(part.get(key), Mapping)), part)
    url = next((each for key in ("url", "image_url") for each in (inner.get(key), part.get(key)) if each), None)
    if isinstance(url, str):
        head, comma, data = url.partition(",")
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return data
    elif isinstance(inner.get("data"), str):
        return str(inner["data"])
    message = (
        f"{where}: pictures are not fetched, neither from an address nor by an id: send the file in base64, as a URL "
        "that begins with data:image/png;base64, or as source.data"
    )
    raise _refused(message, where)
