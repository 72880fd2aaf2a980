"""Tails of system texts that changed since a conversation began: each stays where the stored text has it.

A tail (`text.tails`) moves to the head of the first user message. When it has changed, a resumed conversation would be
computed again from there, however long it is. Stored text shows which tails the conversation had, and before which of
its user messages; a tail that it does not have comes before the newest user message, as news. Pure; knows no branches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rekindle.text.messages import Message
from rekindle.text.tails import volatile_spans
from rekindle.text.vocabulary import MARK

ContentKey = Callable[[Message, str], bytes]  # text of a message -> how it is written in keys
BETWEEN = "\n\n"  # a tail and the words that it is put before


def with_earlier_tails(messages: Sequence[Message], stored: bytes, content_key: ContentKey) -> tuple[Message, ...]:
    """Return messages, as they were sent, with the tails that the `stored` key of their conversation has.

    The first tail takes the place of the system text's own, which moves before a later user message. Unchanged if the
    stored conversation began with the same tail or with none, or if no user message is new enough for another.
    """
    sent, unchanged = _tails(messages), tuple(messages)
    users = [at for at, message in enumerate(messages) if message.role == "user"]
    if not sent or len(users) < 2:
        return unchanged
    placed = _stored_tails(messages, users, stored, content_key)
    first = placed.pop(users[0], None)
    if first is None:
        return unchanged
    now = BETWEEN.join(sent)
    if ([*placed.values()] or [first])[-1] != now:
        if users[-1] in placed:
            return unchanged
        placed[users[-1]] = now
    parts = [first[start:end] for start, end in volatile_spans(first)]
    if (first == now and not placed) or len(parts) != len(sent):
        return unchanged
    return tuple(
        replace(message, content=f"{placed[at]}{BETWEEN}{message.content}") if at in placed else message
        for at, message in enumerate(_with_tails(messages, parts))
    )


def moved(place: int, before: str, after: str) -> int:
    """Return where a place in `before`, in characters, is in `after`, in which one part of it is another."""
    same = next((at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
    if same is None or place <= same:
        return min(place, len(after))
    return max(same, place + len(after) - len(before))


def _tails(messages: Sequence[Message]) -> list[str]:
    """Return the tails of the leading system messages, without blanks around them."""
    found = []
    for message in messages:
        if message.role != "system":
            break
        found += [message.content[start:end].strip() for start, end in volatile_spans(message.content)]
    return found


def _with_tails(messages: Sequence[Message], parts: Sequence[str]) -> list[Message]:
    """Return the messages with these tails in place of those of the leading system messages, one for one."""
    left, changed = list(parts), list(messages)
    for at, message in enumerate(messages):
        if message.role != "system":
            break
        content, done = "", 0
        for start, end in volatile_spans(message.content):
            content += message.content[done:start] + left.pop(0)
            done = end
        changed[at] = replace(message, content=content + message.content[done:]) if done else message
    return changed


def _stored_tails(
    messages: Sequence[Message], users: Sequence[int], stored: bytes, content_key: ContentKey
) -> dict[int, str]:
    """Return the tails that stored text has at the head of user messages, by the message's index, in order."""
    found: dict[int, str] = {}
    cursor = 0
    for at in users:
        key = content_key(messages[at], messages[at].content)
        place = stored.find(key, cursor) if key else -1
        if place < 0:
            break
        head = stored[max(cursor, stored.rfind(MARK, 0, place)) : place].decode("utf-8", "ignore")
        cursor = place + len(key)
        spans: Mapping[int, int] = dict(volatile_spans(head))
        if spans and head[max(spans.values()) :].strip() == "":
            found[at] = head[min(spans) :].strip()
    return found
