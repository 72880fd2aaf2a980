"""Grouping of logged requests into conversations, and matching of replies to requests.

A request that repeats the messages of an earlier one and continues is its next turn: the message after them is the
reply. One that only contains a reply known from a conversation belongs to it too: its beginning was edited or dropped.
System prompts are left out of the comparison, because clients change them between turns. Knows no template.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rekindle.text.messages import Message

MAX_KNOWN = 1 << 20  # beginnings of conversations, some 150 bytes each
LABEL_CHARS = 40
DISTINCTIVE_CHARS = 80


@dataclass(frozen=True, slots=True)
class EchoedReply:
    """The reply to request `serial`, as the client sent it back."""

    serial: int
    message: Message


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's conversation, the reply to an earlier request that it contains, and that request's serial."""

    conversation: str
    reply: EchoedReply | None
    earlier: int | None


@dataclass(slots=True)
class _Beginning:
    """Messages that some requests began with; `serial`: the latest request that consisted of exactly these."""

    conversation: str
    serial: int | None = None


class Conversations:
    """Assigns requests, in order, to conversations. Bounded: the beginnings unseen for longest are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Beginning] = OrderedDict()
        self._replies: OrderedDict[bytes, str] = OrderedDict()  # digest of a long reply -> its conversation
        self._latest: dict[str, int] = {}
        self._number = 0

    def place(self, serial: int, messages: Sequence[Message], name: str | None) -> Turn:
        """Return the turn of request `serial`; `name` None: found by its messages. O(length of the messages)."""
        spoken = [message for message in messages if message.role != "system"]
        digests = list(_digests(spoken))
        found = [(at, known) for at, digest in enumerate(digests) if (known := self._known.get(digest)) is not None]
        replies = [_digest(message) for message in spoken if _is_distinctive(message)]
        again = next((self._replies[reply] for reply in reversed(replies) if reply in self._replies), None)
        conversation = name or (found[-1][1].conversation if found else again or self._named_after(spoken))
        self._remember(serial, spoken, digests, conversation)
        self._replies.update(dict.fromkeys(replies, conversation))
        while len(self._replies) > MAX_KNOWN:
            self._replies.popitem(last=False)
        replied = [
            EchoedReply(known.serial, spoken[at + 1])
            for at, known in found
            if known.serial not in (None, serial) and at + 1 < len(spoken) and spoken[at + 1].role == "assistant"
        ]
        reply = replied[-1] if replied else None
        before = self._latest.get(conversation)
        self._latest[conversation] = serial
        return Turn(conversation, reply, before if reply is None else reply.serial)

    def _remember(self, serial: int, spoken: Sequence[Message], digests: Sequence[bytes], conversation: str) -> None:
        """Store all prefixes that contain a reply, and the whole: a user message alone may begin many conversations."""
        has_reply = False
        for at, (message, digest) in enumerate(zip(spoken, digests, strict=True)):
            has_reply = has_reply or message.role == "assistant"
            is_whole = at == len(spoken) - 1
            if has_reply or is_whole:
                known = self._known.setdefault(digest, _Beginning(conversation))
                self._known.move_to_end(digest)
                if is_whole:
                    self._known[digest] = _Beginning(conversation, serial)
                else:
                    known.conversation = conversation
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _named_after(self, spoken: Sequence[Message]) -> str:
        self._number += 1
        first = next((message.content for message in spoken if message.content.strip()), "")
        words = textwrap.shorten(first[:1000], LABEL_CHARS, placeholder="...")
        return f"#{self._number} {words}".rstrip()


def _digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a chained digest for each prefix of the conversation."""
    digest = b""
    for message in messages:
        digest = _digest(message, digest)
        yield digest


def _digest(message: Message, before: bytes = b"") -> bytes:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    content = repr((message.role, message.content, calls)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + content, digest_size=16).digest()


def _is_distinctive(message: Message) -> bool:
    """Whether a reply is long enough that no other conversation is likely to contain it."""
    return message.role == "assistant" and len(message.content) >= DISTINCTIVE_CHARS
