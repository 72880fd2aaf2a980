"""Which requests of a log belong together, and what was replied to whom.

A request that repeats the messages of an earlier one, and goes on, is its next turn: the message behind them is the
reply. One that only holds a reply known from a conversation is of it, too: its beginning was edited, or dropped. System
prompts are left out of the comparison, for they change where nothing was said. Knows no template.
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
TELLING_CHARS = 80


@dataclass(frozen=True, slots=True)
class Said:
    """The reply to request `serial`, as the client sent it back."""

    serial: int
    message: Message


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's conversation, the reply that it brings of an earlier one, and the request before it."""

    conversation: str
    said: Said | None
    earlier: int | None


@dataclass(slots=True)
class _Beginning:
    """Messages some requests began with; `serial`: the latest of which they were all."""

    conversation: str
    serial: int | None = None


class Conversations:
    """Takes requests in order. Bounded: beginnings that were not seen for long are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Beginning] = OrderedDict()
        self._replies: OrderedDict[bytes, str] = OrderedDict()  # digest of a long reply -> its conversation
        self._latest: dict[str, int] = {}
        self._number = 0

    def place(self, serial: int, messages: Sequence[Message], name: str | None) -> Turn:
        """The turn that request `serial` is; `name` None: found by its messages. O(their length)."""
        spoken = [message for message in messages if message.role != "system"]
        digests = list(_digests(spoken))
        found = [(at, known) for at, digest in enumerate(digests) if (known := self._known.get(digest)) is not None]
        replies = [_digest(message) for message in spoken if _is_telling(message)]
        again = next((self._replies[reply] for reply in reversed(replies) if reply in self._replies), None)
        conversation = name or (found[-1][1].conversation if found else again or self._named_after(spoken))
        self._remember(serial, spoken, digests, conversation)
        self._replies.update(dict.fromkeys(replies, conversation))
        while len(self._replies) > MAX_KNOWN:
            self._replies.popitem(last=False)
        replied = [
            Said(known.serial, spoken[at + 1])
            for at, known in found
            if known.serial not in (None, serial) and at + 1 < len(spoken) and spoken[at + 1].role == "assistant"
        ]
        said = replied[-1] if replied else None
        before = self._latest.get(conversation)
        self._latest[conversation] = serial
        return Turn(conversation, said, before if said is None else said.serial)

    def _remember(self, serial: int, spoken: Sequence[Message], digests: Sequence[bytes], conversation: str) -> None:
        """All beginnings that hold a reply, and the whole: one user's words alone begin many conversations."""
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
    """One for each beginning of the conversation, chained."""
    digest = b""
    for message in messages:
        digest = _digest(message, digest)
        yield digest


def _digest(message: Message, before: bytes = b"") -> bytes:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    said = repr((message.role, message.content, calls)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + said, digest_size=16).digest()


def _is_telling(message: Message) -> bool:
    """Whether nobody else is likely to be replied the same."""
    return message.role == "assistant" and len(message.content) >= TELLING_CHARS
