"""What a request loses on its way to a model that reads text: parts that it cannot see, parameters that nobody knows.

For a model that sees, pictures are collected here in place of that.

Owns the line that stands in the prompt for a picture or a document, and the record of what was left out. The same part
gives the same line in every turn, so that the history stays found. Knows the parts of all dialects by their keys.
"""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.pictures import MOST_PICTURES, Picture, base64_of

UNREAD = "arguments"
READS_TEXT = ("this model reads text", "send its text")
MOST_NAMED = 32  # kinds of parts, and parameters; a caller can invent any number of them
MOST_CHARS = 200  # of a detail in the line
MOST_NAME_CHARS = 100  # of a parameter
_HEAD_CHARS = 1 << 18  # of base64: the size of a picture is in its first bytes, after at most some metadata
_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "document",
    "input_file": "document",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
_PICTURES = ("iVBORw0K", "/9j/", "R0lGOD", "UklGR")  # how PNG, JPEG, GIF and WebP begin in base64
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.=+-]+)*;base64,", re.ASCII)
_INDEX = re.compile(r"\[\d+\]")
_UNFIT = re.compile(r"[^\w .:/?&=%#@+,()'-]")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Parts of one kind that are not in the prompt: how many, where the first one was, and the line in its place.

    `text` is empty for what has no place in the text of a message, such as a tool.
    """

    kind: str
    count: int
    param: str
    text: str


@dataclass(frozen=True, slots=True)
class Omitted:
    """All that was left out of one request; `ignored` names parameters."""

    left_out: tuple[LeftOut, ...] = ()
    ignored: tuple[str, ...] = ()


NOTHING_OMITTED = Omitted()


class Omissions:
    """Collects what is left out while one body is parsed; with `strict` each of it is a BadRequest instead.

    `sees`: pictures are read, for `pictures`. `unseen`: why they are not, and what a caller can do about it.
    """

    def __init__(self, *, strict: bool = False, sees: bool = False, unseen: tuple[str, str] = READS_TEXT) -> None:
        self.strict = strict
        self.pictures: dict[str, Picture] = {}  # by their keys
        self.sees = sees
        self._unseen = unseen
        self._left_out: dict[str, LeftOut] = {}
        self._ignored: dict[str, None] = {}

    def part(self, part: Any, where: str) -> str:
        """Return the line in place of a part of a message that is not text; BadRequest if `strict`.

        Of a picture for a model that sees, the mark; BadRequest if it cannot be read, or is not in the request.
        """
        kind = kind_of(part)
        if kind == "image" and self.sees:
            return self._picture(part, where)
        why, advice = self._unseen if kind == "image" else READS_TEXT
        if self.strict:
            raise BadRequest(f"{where} is of type {kind!r}: {why}; {advice}", param=where)
        text = line_for(part, kind, why)
        self._count(kind, where, text)
        return text

    def _picture(self, part: Mapping[str, Any], where: str) -> str:
        picture = Picture.read(base64_of(part, where), where)
        self.pictures[picture.mark.key] = picture
        if len(self.pictures) > MOST_PICTURES:
            raise BadRequest(f"{where}: a request has at most {MOST_PICTURES} pictures", param=where)
        return str(picture.mark)

    def whole(self, given: Any, where: str) -> None:
        """Record a tool or an item that cannot be served, of which nothing is shown; BadRequest if `strict`."""
        kind = kind_of(given)
        if self.strict:
            raise BadRequest(f"{where} is of type {kind!r}, which cannot be served here: leave it out", param=where)
        self._count(kind, where, "")

    def unsound(self, text: str, where: str) -> str:
        """Record that a text was sent with characters that no prompt may contain; return it, without them."""
        self._count("characters", where[:MOST_CHARS], "\ufffd")
        return text

    def _count(self, kind: str, where: str, text: str) -> None:
        known = self._left_out.get(kind)
        if known is not None:
            self._left_out[kind] = replace(known, count=known.count + 1)
        elif len(self._left_out) < MOST_NAMED:
            self._left_out[kind] = LeftOut(kind, 1, where, text)

    def parameter(self, name: str) -> None:
        """Record a parameter that is not known to change an answer; BadRequest if `strict`."""
        name = name[:MOST_NAME_CHARS]
        if self.strict:
            raise BadRequest(f"unknown parameter {name!r}: it is not supported here", param=name)
        if len(self._ignored) < MOST_NAMED:
            self._ignored[name] = None

    def key(self, name: str, where: str) -> None:
        """Record a key of an object inside the body, under one name for all items of a list."""
        if self.strict:
            param = f"{where}.{name[:MOST_NAME_CHARS]}"
            raise BadRequest(f"{param} is not supported: leave it out", param=param)
        self.parameter(f"{_INDEX.sub('[]', where)}.{name}")

    def all(self) -> Omitted:
        """Return what was left out so far."""
        return Omitted(tuple(self._left_out.values()), tuple(self._ignored))


def with_unread_calls(omitted: Omitted, count: int) -> Omitted:
    """Add the calls of a history whose arguments are no JSON object, and stand in the prompt as far as they were read.

    Never refused: a reply that was cut off has such a call, and is sent back in every turn.
    """
    others = tuple(each for each in omitted.left_out if each.kind != UNREAD)
    return replace(omitted, left_out=(*others, LeftOut(UNREAD, count, "messages", ""))) if count else omitted


def with_unread_variables(omitted: Omitted, given: Mapping[str, str], read: Set[str]) -> Omitted:
    """Add the parameters that set variables of the template, none of which it reads.

    `given`: the parameter that each variable came from. Never refused: clients send such a switch to every model.
    """
    of_use = {param for name, param in given.items() if name in read}
    ignored = dict.fromkeys((*omitted.ignored, *(param for param in given.values() if param not in of_use)))
    return replace(omitted, ignored=tuple(ignored))


REFUSE = Omissions(strict=True)


def kind_of(part: Any) -> str:
    """Return what a part is: image, document, audio, video, or the type it was sent with."""
    given = part.get("type") if isinstance(part, Mapping) else None
    return _KINDS.get(str(given), _plain(str(given))[:MOST_CHARS] if isinstance(given, str) and given else "part")


def line_for(part: Any, kind: str, why: str = READS_TEXT[0]) -> str:
    """Return the line that a model reads in place of a part, with what is known of it (size, format, name, address),
    and why it is not shown."""
    details = ", ".join(_details(part, kind)) if isinstance(part, Mapping) else ""
    return f"[{kind}{', ' if details else ''}{details}: not shown, {why}]"


def text_in(part: Mapping[str, Any]) -> str | None:
    """Return the text that a document or a search result holds, its title first; None if it holds none."""
    source = part.get("source")
    if part.get("type") == "search_result":
        texts = [part.get("title"), source, *_texts(part.get("content"))]
    elif part.get("type") == "document" and isinstance(source, Mapping):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            inside: list[Any] = [source["data"]]
        elif source.get("type") == "content":
            given = source.get("content")
            inside = [given] if isinstance(given, str) else _texts(given)
        else:
            return None
        texts = [part.get("title"), part.get("context"), *inside] if inside else []
    else:
        return None
    found = [text for text in texts if isinstance(text, str) and text]
    return "\n".join(found) if found else None


def _texts(blocks: Any) -> list[Any]:
    """Return the texts of a list of text blocks; none if any of them is something else."""
    if not isinstance(blocks, list) or any(not isinstance(block, Mapping) for block in blocks):
        return []
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    return texts if len(texts) == len(blocks) else []


def _details(part: Mapping[str, Any], kind: str) -> Iterator[str]:
    inner = next((part[key] for key in (str(part.get("type")), "source") if isinstance(part.get(key), Mapping)), part)
    titled = _first(part, inner, ("title", "filename"))
    if titled is not None:
        yield _plain(titled)
    data, form = _data_of(part, inner)
    if data is not None:
        looks = " ".join(each for each in (_pixels(data) if kind == "image" else None, form) if each)
        if looks:
            yield looks
        return
    name = _first(part, inner, ("url", "image_url", "file_url", "tool_name", "name", "file_id", "id"))
    if name is not None:
        yield _plain(name)


def _first(part: Mapping[str, Any], inner: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    found = (holder.get(key) for key in keys for holder in (inner, part))
    return next((value for value in found if isinstance(value, str) and value), None)


def _data_of(part: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the beginning of a part's data in base64 and its format; None: it has none here."""
    url = _first(part, inner, ("url", "image_url", "file_url", "file_data")) or ""
    found = _DATA_URL.match(url, 0, MOST_CHARS)
    if found is not None:
        return url[found.end() : found.end() + _HEAD_CHARS], _form(found[1] or "")
    data = _first(part, inner, ("data", "file_data"))
    if data is not None:
        return data[:_HEAD_CHARS], _form(_first(part, inner, ("media_type", "format")) or "")
    return None, ""


def _form(media_type: str) -> str:
    return _plain(media_type.rpartition("/")[2])


def _pixels(data: str) -> str | None:
    """Return width and height of a picture; None if its head, in base64, is of none of the usual formats."""
    if not data.startswith(_PICTURES):
        return None
    import imagesize

    try:
        width, height = imagesize.get(io.BytesIO(base64.b64decode(data[: len(data) // 4 * 4])))
    except (ValueError, struct.error):  # its head is damaged
        return None
    return f"{width:.0f} x {height:.0f}" if width > 0 and height > 0 else None


def _plain(text: str) -> str:
    """Return the text without what could be read as the end of the line or as a control token."""
    return _UNFIT.sub("_", text[:MOST_CHARS])
