"""Normalise what clients change in a prompt on every call without new content: remove it, sort it, or move it.

Four kinds, each requested by name:

    attribution   the line with which a client signs each request, at the head of its system prompt
    dates         whole lines that state the date or time, in system prompts and in what clients add to user messages
    tools         the order of tool definitions, and of the keys in them
    tail          with tools: the part of a system text that clients change between conversations, those of known ones
                  and others by their `headings` (`tails`); moves to the head of the first user message, where it costs
                  no tools

Pure: reports what it removed and where, so that others can show it and compute what it would have cost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rekindle.text.messages import Message
from rekindle.text.places import Place
from rekindle.text.tails import is_late, volatile_spans

ATTRIBUTION = "x-anthropic-billing-header:"
_PAIRS = r"(?:[ \t]*[\w-]+=[^;\n]*;)+(?:[ \t]*[\w-]+=[^;\s]*(?=\n|\Z))?"
# Where blocks were joined without a line break, the line ends after its last pair.
_LINE = re.compile(rf"[ \t]*{ATTRIBUTION}{_PAIRS}[ \t]*")
_ODD_LINE = re.compile(rf"\s*{ATTRIBUTION}[^\n]*")  # without pairs: only at the start of a text
_BREAKS = re.compile(r"\n*")
# A longer line is no attribution: expressions read no more than this of a line, so that they never take long.
LONGEST_LINE = 4096
LONGEST_INDENT = 64
_ADDED = re.compile(r"<(system-reminder|env|environment_details)>")
_KEY_ORDER = {key: at for at, key in enumerate(("type", "function", "name", "description", "parameters"))}
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6}\.?"
DATES = re.compile(
    rf"""(?ix) \d{{4}}-\d\d?-\d\d? (?:t\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?
    | \d\d?[/.]\d\d?[/.]\d{{2,4}} | \d{{4}}/\d\d?/\d\d?
    | \d\d?(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})? | {_MONTH}\s+\d\d?(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?
    | \b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b | \b(?:mon|tue|wed|thu|fri|sat|sun)\b
    | \d\d?:\d\d(?::\d\d)?(?:\.\d+)?(?:\s*[ap]\.?m\b)? | \b1[5-9]\d{{8}}(?:\d{{3}})?\b""",
)
_ZONES = re.compile(r"\b(?:UTC|GMT|Z|[A-Z]{1,4}S?T)\b(?:\s*[+-]\s*\d\d?(?:[:.]?\d\d)?)?|\b[A-Z]\w+(?:/[A-Z]\w+)+\b")
_YEAR = re.compile(r"\b20\d\d\b")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_WORDS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+")
_NAMES = frozenset("date time datetime today today's todays now timestamp".split())
_AROUND = frozenset("a and as at current currently day for in is it it's iso local of on system the this was".split())
_LONGEST = 200  # characters of a line that holds only a date


# Dates and times as people and programs write them, wherever prompts are compared.
#
# Owns what counts as one, and which whole lines hold nothing else: clients put those into prompts, and they change
# without any action of the user.


def without_dates(text: str) -> str:
    """Replace every date and time in the text by one sign."""
    return DATES.sub("◦", text)


def says_date(line: str) -> bool:
    """Whether a line states the date or time, and nothing else."""
    found = _read(line)
    return found is not None and found[0] and (bool(found[1] & _NAMES) or found[1] == {"it", "is"})


def is_date(line: str) -> bool:
    """Whether a line is a date or time, and nothing else."""
    found = _read(line)
    return found is not None and found[0] and not found[1]


def announces_date(line: str) -> bool:
    """Whether a line is a heading for a date or time."""
    found = _read(line)
    return found is not None and not found[0] and bool(found[1] & _NAMES)


def _read(line: str) -> tuple[bool, set[str]] | None:
    """Whether the line holds a date, and its other words; None if it says anything else."""
    if len(line) > _LONGEST:
        return None
    rest, num_dates = DATES.subn(" ", line)
    rest = _YEAR.sub(" ", _ZONES.sub(" ", rest)) if num_dates else rest
    words = {word.lower().replace("’", "'") for word in _WORDS.findall(_CAMEL.sub(" ", rest))}
    return (num_dates > 0, words) if words <= _NAMES | _AROUND else None


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that was removed from a prompt, sorted or moved.

    `message_index` counts the messages as sent (None: the tools). `text` is what was there, for tools their names;
    `digest` distinguishes it from what another request sends; `place` is where it was, in the normalised messages.
    """

    kind: str
    message_index: int | None
    text: str
    digest: str
    place: Place


@dataclass(frozen=True, slots=True)
class Normal:
    """Messages and tools as they are rendered, and what was removed from them.

    For each message as sent: `indices` its index now (None: nothing is left of it), `cuts` what was removed, `added`
    how many characters were put before it.
    """

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None
    removed: tuple[Removed, ...] = ()
    indices: tuple[int | None, ...] = ()
    cuts: tuple[tuple[Cut, ...], ...] = ()
    added: tuple[int, ...] = ()

    @property
    def as_sent(self) -> list[Message]:
        """The messages under the indices they were sent with, empty ones for those that were removed."""
        if not self.indices:
            return list(self.messages)
        return [self.messages[index] if index is not None else Message("system", "") for index in self.indices]

    def place(self, sent: Place) -> Place:
        """Return the place in the normalised messages for one in the messages as sent."""
        index = sent.message_index
        if index is None or index >= len(self.indices):
            return sent
        now = self.indices[index]
        if now is None:  # in a removed message: after the one before it
            before = [each for each in self.indices[:index] if each is not None]
            return Place(before[-1], None) if before else Place(None, None)
        if sent.num_chars is None:
            return Place(now, None)
        gone = sum(max(0, min(cut.end, sent.num_chars) - cut.start) for cut in self.cuts[index])
        return Place(now, sent.num_chars - gone + self.added[index])


def attribution_end(text: str) -> int:
    """Return the end of the attribution line that a text begins with; 0: it begins with none."""
    return _line_end(_LINE, text, 0) or _line_end(_ODD_LINE, text, 0) or 0


def _line_end(line: re.Pattern[str], text: str, start: int) -> int | None:
    """Return the end of such a line at `start`, line breaks included; None: there is none, or it is too long."""
    most = start + LONGEST_LINE
    found = line.match(text, start, most)
    if found is None or (found.end() == most and most < len(text)):
        return None
    breaks = _BREAKS.match(text, found.end())
    return breaks.end() if breaks else found.end()


def _attribution_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield the lines that sign a request; one without pairs only at the start of the text."""
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
    """A range of characters to remove from a content."""

    kind: str
    start: int
    end: int


def normalise(
    messages: Sequence[Message], tools: Sequence[Any] | None, kinds: Set[str], *, headings: Sequence[str] = ()
) -> Normal:
    """Remove from messages and tools what `kinds` names; a message of which nothing is left is removed, too.

    Idempotent. Without kinds, nothing changes. `headings`: how lines begin from which on a system text is volatile.
    """
    target = _tail_target(messages) if "tail" in kinds and tools else None
    late = _late(messages, target)
    leading = () if target is None else (*range(target), late)
    cuts = tuple(
        tuple(_cuts(message, kinds if at in leading else kinds - {"tail"}, headings))
        for at, message in enumerate(messages)
    )
    ordered = _ordered(tools) if tools and "tools" in kinds else tools
    is_reordered = ordered is not None and tools is not None and _serialized(ordered) != _serialized(tools)
    if not is_reordered and not any(cuts) and late is None:
        return Normal(tuple(messages), tools)
    moved = _moved(messages, cuts)
    kept: list[Message] = []
    indices: list[int | None] = [None] * len(messages)
    removed: list[Removed] = []
    if is_reordered:
        names = ", ".join(map(_name, tools or ()))
        removed.append(Removed("tools", None, names, _digest(_serialized(tools)), Place(None, None)))
    for index in sorted(range(len(messages)), key=lambda at: at if at != late else at - 1.5):
        message, mine = messages[index], cuts[index]
        content = (moved if index == target else "") + _without(message.content, mine)
        is_gone = bool(mine) and not content.strip() and len(messages) > 1
        removed += _removed(index, message.content, mine, len(kept), is_gone=is_gone)
        if index == target and late is not None:
            text = messages[late].content
            removed.append(Removed("tail", late, text, _digest(text), Place(len(kept), None)))
        if not is_gone:
            indices[index] = len(kept)
            kept.append(message if content == message.content else replace(message, content=content))
    added = tuple(len(moved) if index == target else 0 for index in range(len(messages)))
    return Normal(tuple(kept), ordered, tuple(removed), tuple(indices), cuts, added)


def _tail_target(messages: Sequence[Message]) -> int | None:
    """Return the index of the first user message, if only system messages come before it."""
    first = next((at for at, message in enumerate(messages) if message.role != "system"), None)
    return first if first and messages[first].role == "user" else None


def _late(messages: Sequence[Message], target: int | None) -> int | None:
    """Return the index of the message that moves before the first user message; None: there is none."""
    at = None if target is None else target + 1
    return at if at is not None and at < len(messages) and _is_late(messages[at]) else None


def _is_late(message: Message) -> bool:
    return message.role == "system" and is_late(message.content)


def _moved(messages: Sequence[Message], cuts: Sequence[Sequence[Cut]]) -> str:
    """Return the text that moves before the first user message, with what separates them."""
    parts = [
        message.content[cut.start : cut.end].strip()
        for message, mine in zip(messages, cuts, strict=True)
        for cut in mine
        if cut.kind == "tail"
    ]
    return "".join(f"{part}\n\n" for part in parts)


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


def _cuts(message: Message, kinds: Set[str], headings: Sequence[str]) -> list[Cut]:
    """The ranges to remove, in order and disjoint."""
    content, found = message.content, []
    if "attribution" in kinds and message.role == "system" and ATTRIBUTION in content:
        found += [Cut("attribution", *span) for span in _attribution_lines(content)]
    if "dates" in kinds:
        for start, end in _regions(message):
            found += [Cut("dates", *span) for span in _date_lines(content, start, end)]
    if "tail" in kinds and message.role == "system":
        found += [Cut("tail", *span) for span in volatile_spans(content, headings)]
    found.sort(key=lambda cut: cut.start)
    return [cut for at, cut in enumerate(found) if not at or cut.start >= found[at - 1].end]


def _regions(message: Message) -> list[tuple[int, int]]:
    """The ranges whose lines come from the client, not from its user."""
    if message.role == "system":
        return [(0, len(message.content))]
    return list(_added(message.content)) if message.role == "user" else []


def _added(content: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges inside the elements that clients add, without their tags. Linear in the content."""
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
    """Strip from a line what marks it as an item, a heading or an element."""
    return re.sub(r"</?[\w-]+>", " ", line).strip().lstrip("#*->• ").rstrip("* ")


def _name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _ordered(tools: Sequence[Any]) -> list[Any]:
    return sorted(map(_in_order, tools), key=_name)


def _in_order(value: Any) -> Any:
    """Return the value with the keys of objects sorted: those of a definition as usual, all others by name."""
    if isinstance(value, Mapping):
        keys: Iterable[str] = sorted(value, key=lambda key: (_KEY_ORDER.get(key, len(_KEY_ORDER)), key))
        return {key: _in_order(value[key]) if key != "required" else _names(value[key]) for key in keys}
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value


def _names(value: Any) -> Any:
    """Sort `required` of a schema: a set, written as a list."""
    is_set = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return sorted(value) if is_set else _in_order(value)


def _serialized(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
