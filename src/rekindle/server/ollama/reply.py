"""Ollama's answers, whole and as lines, encoded from deltas.

Owns how a reply is divided over lines: text and reasoning as they come, each call whole, since its arguments are an
object, and the figures on the last. A call that was cut off is text: clients run every call that they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Progress
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.answer import progress_text
from rekindle.server.answers.arguments import ArgumentsJson
from rekindle.server.answers.choice import Choice, ReplyParser, position_entry
from rekindle.server.answers.sse import line
from rekindle.server.border import Problem
from rekindle.server.ollama.calls import OllamaCall
from rekindle.server.ollama.heading import Heading, Piece
from rekindle.text.messages import GUARD, Message
from rekindle.text.replies import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta


class OllamaReply:
    """The answer to one call."""

    id = None
    events: Literal["lines"] = "lines"

    def __init__(self, heading: Heading, call: OllamaCall, generation: Generation, *, piece: Piece) -> None:
        self._heading = heading
        self._submitted = heading.timer()
        self._call = call
        self._piece = piece
        self._reading = ReplyParser(Choice(0, generation), call.form, tools=call.read_tools)
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._begun = CallStart(0, "", "", "")
        self._arguments = ArgumentsJson()
        self._raw: list[str] = []  # of the call that has begun

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return nothing: the pings have the progress."""
        return []

    def beat(self, progress: Progress | None) -> bytes:
        """Return a line without text: clients take no empty line. Ours see the progress in it."""
        known = {} if progress is None else {"progress": progress_text(progress)}
        return line(self._heading.line(self._piece()) | known)

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the lines of a delta; the log probabilities of its tokens are on the first line that follows."""
        pieces = [piece for event in self._reading.take(delta) if (piece := self._said(event)) is not None]
        lines = [self._heading.line(piece) for piece in pieces]
        if lines:
            lines[0] |= _logprobs(self._reading.choice.new_logprobs())
        return lines

    def _said(self, event: Event) -> dict[str, Any] | None:
        """Encode an event; None if it adds nothing that clients see."""
        match event:
            case TextDelta() if event.text:
                return self._text(event.text)
            case ReasoningDelta() if event.text:
                return self._piece(thinking=event.text)
            case CallStart():
                self._begun, self._arguments, self._raw = event, ArgumentsJson(), [event.raw]
            case ArgumentsDelta():
                self._arguments.push(event.text)
                self._raw.append(event.raw)
            case CallEnd():
                return self._piece(calls=[self._called()]) if event.whole else self._text(self._written(event))
        return None

    def _text(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return self._piece(text)

    def _called(self) -> dict[str, Any]:
        """Keep and return the call that has ended."""
        self._arguments.finish()
        function = {"index": len(self._calls), "name": self._begun.name, "arguments": self._arguments.value()}
        self._calls.append({"id": self._begun.id, "function": function})
        return self._calls[-1]

    def _written(self, end: CallEnd) -> str:
        """Return the call that was cut off as the model wrote it."""
        return "".join([*self._raw, end.raw]).replace(GUARD, "")

    def has_ended(self, index: int) -> bool:
        """Whether the only allowed call is complete."""
        return self._reading.has_ended

    def message(self, index: int) -> Message:
        """Return the reply as clients send it back."""
        return self._reading.parsed.message()

    def ending(self) -> list[dict[str, Any]]:
        """Return the last line, without text."""
        return [
            self._heading.line(self._piece(), done=True) | _logprobs(self._reading.choice.new_logprobs()) | self._end()
        ]

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """Return the error as a line."""
        return [problem.body("ollama")]

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        said = self._piece("".join(self._texts), thinking=self._reading.parsed.reasoning, calls=self._calls)
        return self._heading.line(said, done=True) | _logprobs(self._reading.choice.logprobs) | self._end()

    def _end(self) -> dict[str, Any]:
        report = self._reading.choice.report
        assert report is not None, self._heading.model
        figures = self._heading.figures(report, submitted=self._submitted)
        reason = "length" if self._reading.reason == "length" else "stop"
        described = self._reading.described(return_ids=self._call.return_ids)
        return {"done_reason": reason, **figures, "rekindle": described}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": [position_entry(token) for token in tokens]} if tokens else {}
