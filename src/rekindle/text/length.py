"""How long a prompt may be before it is tokenised.

Owns one fact: no token has more than `longest` bytes of text, so a text of more than `max_context` times as many cannot
fit. Bytes are counted in microseconds, tokens at a second per megabyte. What a caller sends may be longer than its
prompt, because templates drop parts of it (reasoning of old turns, blanks at the ends): it is refused if it is several
times as long, before it is rendered. Knows no template and no tokenizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import PromptTooLong
from rekindle.text.messages import Message

LEFT_OUT = 8  # how many times longer than its prompt the input of a template may be
LEAST_BYTES = 4 << 10  # of a prompt that are always processed: milliseconds of work


@dataclass(frozen=True, slots=True)
class PromptBound:
    """What fits into `max_context` tokens of at most `longest` bytes each."""

    max_context: int
    longest: int

    @property
    def max_bytes(self) -> int:
        """The most bytes of text that can fit."""
        return max(LEAST_BYTES, self.max_context * self.longest)

    @property
    def max_sent(self) -> int:
        """The most characters that can become a prompt that fits, guards inside look-alikes included."""
        return LEFT_OUT * self.max_bytes

    def check(self, num_bytes: int) -> None:
        """Raise PromptTooLong for a rendered prompt of more bytes than can fit."""
        if num_bytes > self.max_bytes:
            raise self.refusal(math.ceil(num_bytes / self.longest), f"{num_bytes:,} bytes")

    def check_sent(self, num_chars: int) -> None:
        """Raise PromptTooLong for input that cannot fit, whatever the template drops of it."""
        if num_chars > self.max_sent:
            raise self.refusal(num_chars // (LEFT_OUT * self.longest), f"{num_chars:,} characters were sent")

    def check_ids(self, num_ids: int) -> None:
        """Raise PromptTooLong for more ids than the context holds."""
        if num_ids > self.max_context:
            raise self.refusal(num_ids)

    def check_count(self, num_messages: int) -> None:
        """Raise PromptTooLong for more messages than the context has tokens: each becomes at least one."""
        if num_messages > max(LEAST_BYTES, self.max_context):
            raise self.refusal(num_messages, f"{num_messages:,} messages")

    def check_messages(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Apply `check_count` and `check_sent` to a conversation."""
        self.check_count(len(messages))
        self.check_sent(num_chars(messages, tools))

    def refusal(self, num_tokens: int, size: str = "") -> PromptTooLong:
        """Return the error for a prompt of at least so many tokens; `size` says in words how that is known."""
        return PromptTooLong.of(max(num_tokens, self.max_context + 1), self.max_context, size=size)


def num_chars(messages: Iterable[Message], tools: Sequence[Any] | None) -> int:
    """Characters of a conversation, as it was sent."""
    return sum(map(_num_chars, messages)) + sum(_sizes(tools or ()))


def exceeds(values: Iterable[Any], most: int) -> bool:
    """Whether JSON values are larger than `most`: characters of all their strings, and one for any other value."""
    return any(total > most for total in itertools.accumulate(_sizes(values)))


def _num_chars(message: Message) -> int:
    calls = sum(len(call.arguments) + len(call.name) + len(call.id or "") for call in message.tool_calls)
    texts = (message.content, message.reasoning, message.name, message.tool_call_id)
    return calls + sum(len(text) for text in texts if text)


def _sizes(values: Iterable[Any]) -> Iterator[int]:
    """Characters of every string inside JSON values, and one for any other value."""
    for value in values:
        yield len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            yield from map(len, map(str, value))
            yield from _sizes(value.values())
        elif isinstance(value, list | tuple):
            yield from _sizes(value)
