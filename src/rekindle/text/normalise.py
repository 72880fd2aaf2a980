"""What clients change in a prompt on every call although nothing was said: taken out, or put in order.

Three kinds, each asked for by name:

    attribution   the line with which a client signs each request, at the head of its system prompt
    dates         whole lines that say the date or time, in system prompts and in what clients add to a user's words
    tools         the order of tool definitions, and of the keys in them

Pure: says what it took out and where it stood, so that others can show it and tell what it would have cost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rekindle.text.dates import announces_date, is_date, says_date
from rekindle.text.messages import Message
from rekindle.text.places import Place

ATTRIBUTION = "x-anthropic-billing-header:"
_PAIRS = r"(?:[ \t]*[\w-]+=[^;\n]*;)+(?:[ \t]*[\w-]+=[^;\s]*(?=\n|\Z))?"
# Where blocks were joined without a line break, the line ends behind its last pair.
_LINE = re.compile(rf"[ \t]*{ATTRIBUTION}{_PAIRS}[ \t]*")
_ODD_LINE = re.compile(rf"\s*{ATTRIBUTION}[^\n]*")  # without pairs: only where nothing stands before it
_BREAKS = re.compile(r"\n*")
# What is longer signs nothing: expressions read no more than this of a line, so that they never hold up anybody.
LONGEST_LINE = 4096
LONGEST_INDENT = 64
_ADDED = re.compile(r"<(system-reminder|env|environment_details)>")
_KEY_ORDER = {key: at for at, key in enumerate(("type", "function", "name", "description", "parameters"))}


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that was taken out of a prompt, or put in order.

    `message_index` counts the messages as sent (None: the tools). `text` is what stood there, of tools their names;
    `digest` tells it from what another request sends; `place` is where it stood, in the messages as they are now.
    """

    kind: str
    message_index: int | None
    text: str
    digest: str
    place: Place


@dataclass(frozen=True, slots=True)
class Normal:
    """Messages and tools as they are rendered, and what was taken out of them.

    Of each message as sent: `indices` its index now (None: nothing was left of it), `cuts` what went.
    """

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None
    removed: tuple[Removed, ...] = ()
    indices: tuple[int | None, ...] = ()
    cuts: tuple[tuple[Cut, ...], ...] = ()

    @property
    def as_sent(self) -> list[Message]:
        """The messages under the indices they were sent with, empty ones for those that are gone."""
        if not self.indices:
            return list(self.messages)
        return [self.messages[index] if index is not None else Message("system", "") for index in self.indices]

    def place(self, sent: Place) -> Place:
        """Where a place of the messages as sent is now."""
        index = sent.message_index
        if index is None or index >= len(self.indices):
            return sent
        now = self.indices[index]
        if now is None:  # behind a message that is gone: behind what stood before it
            before = [each for each in self.indices[:index] if each is not None]
            return Place(before[-1], None) if before else Place(None, None)
        if sent.num_chars is None:
            return Place(now, None)
        gone = sum(max(0, min(cut.end, sent.num_chars) - cut.start) for cut in self.cuts[index])
        return Place(now, sent.num_chars - gone)


def attribution_end(text: str) -> int:
    """Where the attribution line ends with which a text begins; 0: it begins with none."""
    return _line_end(_LINE, text, 0) or _line_end(_ODD_LINE, text, 0) or 0


def _line_end(line: re.Pattern[str], text: str, start: int) -> int | None:
    """Where such a line that begins at `start` ends, with the line breaks after it; None: none does, or one that is
    too long."""
    most = start + LONGEST_LINE
    found = line.match(text, start, most)
    if found is None or (found.end() == most and most < len(text)):
        return None
    breaks = _BREAKS.match(text, found.end())
    return breaks.end() if breaks else found.end()


def _attribution_lines(text: str) -> Iterator[tuple[int, int]]:
    """The lines that sign a request; one that says something else only where nothing stands before it."""
    num_found, at = 0, text.find(ATTRIBUTION)
    while at >= 0:
        before = text[max(0, at - LONGEST_INDENT) : at]
        start = at - len(before) + len(before.rstrip(" \t"))
        end = _line_end(_LINE, text, start) if start == 0 or text[start - 1] == "\n" else None
        if end is not None:
            yield start, end
            num_found += 1
        at = text.find(ATTRIBUTION, end or at + len(ATTRIBUTION))
    if not num_found and (end := _line_end(_ODD_LINE, text, 0)):
        yield 0, end


@dataclass(frozen=True, slots=True)
class Cut:
    """Characters of a content that go."""

    kind: str
    start: int
    end: int


def normalise(messages: Sequence[Message], tools: Sequence[Any] | None, kinds: Set[str]) -> Normal:
    """Take out of messages and tools what `kinds` names; a message of which nothing is left goes, too.

    Doing it twice changes nothing more. Without kinds everything stays as it is.
    """
    cuts = tuple(tuple(_cuts(message, kinds)) for message in messages)
    ordered = _ordered(tools) if tools and "tools" in kinds else tools
    is_reordered = ordered is not None and tools is not None and _spelled(ordered) != _spelled(tools)
    if not is_reordered and not any(cuts):
        return Normal(tuple(messages), tools)
    kept: list[Message] = []
    indices: list[int | None] = []
    removed: list[Removed] = []
    if is_reordered:
        names = ", ".join(map(_name, tools or ()))
        removed.append(Removed("tools", None, names, _digest(_spelled(tools)), Place(None, None)))
    for index, (message, mine) in enumerate(zip(messages, cuts, strict=True)):
        content = _without(message.content, mine)
        is_gone = bool(mine) and not content.strip() and len(messages) > 1
        indices.append(None if is_gone else len(kept))
        removed += _removed(index, message.content, mine, len(kept), is_gone=is_gone)
        if not is_gone:
            kept.append(replace(message, content=content) if mine else message)
    return Normal(tuple(kept), ordered, tuple(removed), tuple(indices), cuts)


def _removed(index: int, content: str, cuts: Sequence[Cut], now: int, *, is_gone: bool) -> Iterator[Removed]:
    gone = 0
    for cut in cuts:
        text = content[cut.start : cut.end].strip()
        yield Removed(cut.kind, index, text, _digest(text), Place(now, 0 if is_gone else cut.start - gone))
        gone += cut.end - cut.start


def _without(content: str, cuts: Sequence[Cut]) -> str:
    parts, at = [], 0
    for cut in cuts:
        parts.append(content[at : cut.start])
        at = cut.end
    return "".join((*parts, content[at:])) if cuts else content


def _cuts(message: Message, kinds: Set[str]) -> list[Cut]:
    """What goes, in order and apart from each other."""
    content, found = message.content, []
    if "attribution" in kinds and message.role == "system" and ATTRIBUTION in content:
        found += [Cut("attribution", *span) for span in _attribution_lines(content)]
    if "dates" in kinds:
        for start, end in _regions(message):
            found += [Cut("dates", *span) for span in _date_lines(content, start, end)]
    found.sort(key=lambda cut: cut.start)
    return [cut for at, cut in enumerate(found) if not at or cut.start >= found[at - 1].end]


def _regions(message: Message) -> list[tuple[int, int]]:
    """Where lines are the client's and not somebody's words."""
    if message.role == "system":
        return [(0, len(message.content))]
    return list(_added(message.content)) if message.role == "user" else []


def _added(content: str) -> Iterator[tuple[int, int]]:
    """What stands inside the elements that clients add; their tags stay where they are. Linear in the content."""
    at = 0
    never_closed: set[str] = set()
    while (opened := _ADDED.search(content, at)) is not None:
        at, name = opened.end(), opened[1]
        closed = content.find(f"</{name}>", at) if name not in never_closed else -1
        if closed < 0:
            never_closed.add(name)
            continue
        yield at, closed
        at = closed


def _date_lines(content: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    is_announced = False
    for line in content[start:end].splitlines(keepends=True):
        text = _unmarked(line) if len(line) <= LONGEST_LINE else line
        if says_date(text) or (is_announced and is_date(text)):
            yield start, start + len(line)
        elif text:
            is_announced = announces_date(text)
        start += len(line)


def _unmarked(line: str) -> str:
    """A line without what marks it as an item, a heading or an element."""
    return re.sub(r"</?[\w-]+>", " ", line).strip().lstrip("#*->• ").rstrip("* ")


def _name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _ordered(tools: Sequence[Any]) -> list[Any]:
    return sorted(map(_in_order, tools), key=_name)


def _in_order(value: Any) -> Any:
    """The same value, the keys of objects in one order: those of a definition as usual, all others by name."""
    if isinstance(value, Mapping):
        keys: Iterable[str] = sorted(value, key=lambda key: (_KEY_ORDER.get(key, len(_KEY_ORDER)), key))
        return {key: _in_order(value[key]) if key != "required" else _names(value[key]) for key in keys}
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value


def _names(value: Any) -> Any:
    """`required` of a schema: a set, written as a list."""
    is_set = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return sorted(value) if is_set else _in_order(value)


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
