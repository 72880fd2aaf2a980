"""Comparison of messages a client received with messages found: what is lost, changed or doubled. Pure.

Owns what counts as which. Sessions here are round robins without whispers: every message is for all, and no agent
speaks twice in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """A message as a client received or found it. `turn` None: not part of a turn."""

    number: int
    by: str
    text: str
    turn: int | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Message:
        """Build a message from a transcript entry, an utterance, or a complete turn, which names its speaker."""
        return cls(data["number"], data["speaker"] if "speaker" in data else data["by"], data["text"], data["turn"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many messages were received, how many of them were found unchanged, and the numbers of the others.

    `lost`: not found; `changed`: found with different words or speaker; `doubled`: received or found more than once.
    """

    received: int
    found: int
    lost: tuple[int, ...]
    changed: tuple[int, ...]
    doubled: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every message was found exactly once."""
        return not (self.lost or self.changed or self.doubled)


def compare(received: Sequence[Message], found: Sequence[Message]) -> Comparison:
    """Compare all received messages with a transcript, which may continue after them."""
    there: dict[int, Message] = {}
    for each in found:
        there.setdefault(each.number, each)
    first = {each.number: each for each in reversed(received)}
    lost = [number for number in first if number not in there]
    changed = [number for number, each in first.items() if number in there and there[number] != each]
    doubled = again(received) | again(found)
    num_found = len(first) - len(lost) - len(changed)
    return Comparison(len(first), num_found, tuple(sorted(lost)), tuple(sorted(changed)), tuple(sorted(doubled)))


def again(messages: Sequence[Message]) -> set[int]:
    """Return numbers of repeated messages: same number or turn, or the same words as the message before."""
    numbers: set[int] = set()
    turns: set[int] = set()
    doubled: set[int] = set()
    before: Message | None = None
    for each in messages:
        is_echo = before is not None and before == replace(each, number=each.number - 1, turn=before.turn)
        if each.number in numbers or each.turn in turns or is_echo:
            doubled.add(each.number)
        numbers.add(each.number)
        if each.turn is not None:
            turns.add(each.turn)
        before = each
    return doubled


def misheard(name: str, sent: Sequence[Message], heard: Sequence[Message]) -> str | None:
    """Describe how the messages an agent heard differ from those sent; None: each message once, in order.

    An empty message reaches no agent.
    """
    expected = [each for each in sent if each.text]
    if list(heard) == expected:
        return None
    compared = compare(expected, heard)
    known = {each.number for each in expected}
    strange = tuple(each.number for each in heard if each.number not in known)
    wrong = {
        "not heard": compared.lost,
        "heard with other words": compared.changed,
        "heard more than once": compared.doubled,
        "heard but never sent": strange,
    }
    found = [f"{numbered(numbers)} {what}" for what, numbers in wrong.items() if numbers]
    return f"{name}: {', '.join(found) if found else 'all messages heard, but not in order'}"


def numbered(numbers: Sequence[int]) -> str:
    """Format messages by their numbers."""
    return f"{'message' if len(numbers) == 1 else 'messages'} {', '.join(str(number) for number in numbers)}"
