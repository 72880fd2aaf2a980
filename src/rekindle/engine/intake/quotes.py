"""Histories that their clients quote in one message to have them summarised: the same messages, written as text.

opencode writes each part of a message after a label, and long results only in part:

    <conversation>
    [User]: Read the notes.

    [Assistant]: I look.
    [Assistant tool call]: read({"path":"notes.txt"})
    [Tool result]: The key is in
    [truncated]
    </conversation>

Owns which messages of a history such a text quotes, and the text without them. Nothing that was quoted is lost: what is
not in those messages, word for word, stays in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.text.messages import Message

OPEN, CLOSE = "<conversation>\n", "\n</conversation>"
NOTE = "[All messages before this one.]"  # in place of what they say
CUT_OFF = "\n[truncated]"
LEAST_CUT_OFF = 1000  # characters of a text that is quoted in part; fewer may begin many texts
WINDOW = 64  # parts of a quote in which a text is looked for: few are not in the history
LEAST_GROUPS = 2  # of messages: one alone may be words that a user quotes
_CUT_OFF = re.compile(re.escape(CUT_OFF))
_LABEL = re.compile(r"^\[[A-Z][A-Za-z ]{1,40}\]: ?", re.MULTILINE)
Group = Sequence[Message]  # of the user's or the system's one, of the model's one with its results


@dataclass(frozen=True, slots=True)
class Unquoted:
    """How many messages of a history a text quotes, all from its beginning, and the text without them."""

    num_messages: int
    text: str


def unquoted(history: Sequence[Message], text: str, *, with_reasoning: bool) -> Unquoted | None:
    """Find the messages of a history that a text quotes; None if it quotes no reply of it.

    Messages in between that it quotes otherwise, or not at all, count as well. `with_reasoning`: replies say their
    reasoning, so that it need not stay in the text.
    """
    start, end = text.find(OPEN), text.rfind(CLOSE)
    if start < 0 or end < start + len(OPEN) - 1:
        return None
    quote = _Quote(text[start + len(OPEN) : max(end, start + len(OPEN))])
    at = num_messages = num_groups = 0
    has_reply = False
    for group in _groups(history):
        at += len(group)
        if quote.take(list(_texts(group, with_reasoning=with_reasoning))):
            num_messages, num_groups = at, num_groups + 1
            has_reply = has_reply or group[0].role == "assistant"
    if num_groups < LEAST_GROUPS or not has_reply:
        return None
    rest = "\n\n".join(each for each in (NOTE, quote.rest()) if each)
    return Unquoted(num_messages, f"{text[: start + len(OPEN)]}{rest}{text[end:]}")


def _groups(history: Sequence[Message]) -> Iterator[Group]:
    start = 0
    for at in range(1, len(history) + 1):
        if at == len(history) or history[at].role != "tool":
            yield history[start:at]
            start = at


def _texts(group: Group, *, with_reasoning: bool) -> Iterator[str]:
    """Yield what a quote may say of messages, part by part."""
    for message in group:
        if message.reasoning and with_reasoning:
            yield message.reasoning.strip()
        yield message.content.strip()
        for call in message.tool_calls:
            yield f"{call.name}({call.arguments})"


class _Quote:
    """The parts of a quote, each a label and what it says, and which of them were found in a history."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._labels = [(found.start(), found.end()) for found in _LABEL.finditer(text)]
        self._cuts = [found.start() for found in _CUT_OFF.finditer(text)]
        self._taken: dict[int, int] = {}  # where a part begins: where the next one does
        self._next = 0  # in labels; all before are looked at

    def take(self, texts: Iterable[str]) -> bool:
        """Take the parts that say these texts, in any order, after those that were taken; nothing if one is missing.

        Clients quote a call and its result, then the next call.
        """
        wanted, found, furthest = [text for text in texts if text], dict[int, int](), self._next
        for text in wanted:
            for at in range(self._next, min(len(self._labels), self._next + WINDOW)):
                start, said = self._labels[at]
                end = None if start in found else self._end(text, said)
                if end is not None:
                    found[start] = end
                    furthest = max(furthest, at + 1)
                    break
            else:
                return False
        self._taken |= found
        self._next = furthest
        return bool(wanted)

    def _end(self, text: str, start: int) -> int | None:
        """Return where the part ends that says this text from `start` on; None if it says another."""
        end = start + len(text)
        if not self._text.startswith(text, start):
            at = bisect_left(self._cuts, start + LEAST_CUT_OFF)
            cut = self._cuts[at] if at < len(self._cuts) else None
            if cut is None or cut - start > len(text) or not text.startswith(self._text[start:cut]):
                return None
            end = cut + len(CUT_OFF)
        while end < len(self._text) and self._text[end].isspace():
            end += 1
        return end if end == len(self._text) or _LABEL.match(self._text, end) else None

    def rest(self) -> str:
        """Return what was not taken."""
        kept, done = "", 0
        for start, end in sorted(self._taken.items()):
            kept, done = kept + self._text[done:start], max(done, end)
        return (kept + self._text[done:]).strip()
