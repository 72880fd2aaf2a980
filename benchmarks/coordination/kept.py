"""Messages that a client was told of against messages that are there: what is lost, changed or doubled. Pure.

Owns what counts as which. Sessions here are round robins without whispers: every message is for all, and nobody speaks
twice in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """A message, as a client was told of it or found it. `turn` None: no turn brought it."""

    number: int
    by: str
    text: str
    turn: int | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Said:
        """From an entry of a transcript, an utterance, or a complete turn, which names its speaker."""
        return cls(data["number"], data["speaker"] if "speaker" in data else data["by"], data["text"], data["turn"])


@dataclass(frozen=True, slots=True)
class Kept:
    """How many messages had been told, how many of them were found as they were told, and the numbers of the others.

    `lost`: not there; `changed`: there with other words or of somebody else; `doubled`: told or found once more.
    """

    told: int
    found: int
    lost: tuple[int, ...]
    changed: tuple[int, ...]
    doubled: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether everything is there, once."""
        return not (self.lost or self.changed or self.doubled)


def compare(told: Sequence[Said], found: Sequence[Said]) -> Kept:
    """Every message that was told against a transcript, which may have more behind them."""
    there: dict[int, Said] = {}
    for each in found:
        there.setdefault(each.number, each)
    first = {each.number: each for each in reversed(told)}
    lost = [number for number in first if number not in there]
    changed = [number for number, each in first.items() if number in there and there[number] != each]
    doubled = again(told) | again(found)
    num_found = len(first) - len(lost) - len(changed)
    return Kept(len(first), num_found, tuple(sorted(lost)), tuple(sorted(changed)), tuple(sorted(doubled)))


def again(messages: Sequence[Said]) -> set[int]:
    """Numbers of messages that were there before: by their number or turn, or as the next one, word for word."""
    numbers: set[int] = set()
    turns: set[int] = set()
    doubled: set[int] = set()
    before: Said | None = None
    for each in messages:
        is_echo = before is not None and before == replace(each, number=each.number - 1, turn=before.turn)
        if each.number in numbers or each.turn in turns or is_echo:
            doubled.add(each.number)
        numbers.add(each.number)
        if each.turn is not None:
            turns.add(each.turn)
        before = each
    return doubled


def misheard(name: str, said: Sequence[Said], heard: Sequence[Said]) -> str | None:
    """What is wrong with what an agent heard of all that was said; None: each message once, in order.

    A message without words reaches nobody.
    """
    expected = [each for each in said if each.text]
    if list(heard) == expected:
        return None
    kept = compare(expected, heard)
    known = {each.number for each in expected}
    strange = tuple(each.number for each in heard if each.number not in known)
    wrong = {
        "not heard": kept.lost,
        "heard with other words": kept.changed,
        "heard more than once": kept.doubled,
        "heard that nobody told": strange,
    }
    found = [f"{numbered(numbers)} {what}" for what, numbers in wrong.items() if numbers]
    return f"{name}: {', '.join(found) if found else 'all messages heard, but not in order'}"


def numbered(numbers: Sequence[int]) -> str:
    """Messages by their numbers, in words."""
    return f"{'message' if len(numbers) == 1 else 'messages'} {', '.join(str(number) for number in numbers)}"
