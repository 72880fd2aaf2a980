"""The events of a reply, and the parsed reply.

Owns the events that a reply is parsed into, piece by piece, and their sum. Knows no model's format.

Always true: the `raw` of all events of a reply, joined, is the structured reply (see text/replies).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from rekindle.text.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class _Words:
    """A piece of text; `generated` is what the model generated, if that differs."""

    text: str
    generated: str | None = None

    @property
    def raw(self) -> str:
        """What was generated."""
        return self.text if self.generated is None else self.generated


class TextDelta(_Words):
    """Text of the reply."""

    __slots__ = ()


class ReasoningDelta(_Words):
    """Reasoning of the model before its answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are counted from 0."""

    index: int
    id: str
    name: str
    raw: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of a call: verbatim where the model writes JSON, else the JSON of what it wrote."""

    index: int
    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended; `whole`: its arguments are closed."""

    index: int
    whole: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Blanks:
    """What belongs to no other event: marks around reasoning, white space after it and after calls."""

    raw: str


Event = ReasoningDelta | TextDelta | CallStart | ArgumentsDelta | CallEnd | Blanks


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call as it was read; `whole`: its arguments are closed."""

    id: str
    name: str
    arguments: str
    whole: bool


def new_call_id() -> str:
    """A new id in OpenAI's format."""
    return f"call_{uuid.uuid4().hex}"


class ParsedReply:
    """Collects the events of one reply."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._starts: list[CallStart] = []
        self._arguments: list[list[str]] = []
        self._whole: list[bool] = []

    @property
    def reasoning(self) -> str:
        """The reasoning, empty if there is none."""
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The text without reasoning and calls."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[SentCall]:
        """The calls so far; one that has not ended is not whole."""
        rows = zip(self._starts, self._arguments, self._whole, strict=True)
        return [SentCall(start.id, start.name, "".join(pieces), whole) for start, pieces, whole in rows]

    @property
    def has_whole_call(self) -> bool:
        """Whether there is a complete call."""
        return any(self._whole)

    def take(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case TextDelta():
                self._texts.append(event.text)
            case CallStart():
                self._starts.append(event)
                self._arguments.append([])
                self._whole.append(False)
            case ArgumentsDelta():
                self._arguments[event.index].append(event.text)
            case CallEnd():
                self._whole[event.index] = event.whole

    def message(self) -> Message:
        """The reply as a caller would send it back."""
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in self.calls)
        return Message("assistant", self.text, tool_calls=calls, reasoning=self.reasoning or None)
