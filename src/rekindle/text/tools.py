"""Tool calls in replies: which form a chat template writes them in, and reading them as they are generated.

    <tool_call>
    {"name": "look", "arguments": {"place": "attic"}}
    </tool_call>

Owns what is a call and what is text. A call begins when its name is known and its arguments begin; from then on the
arguments go out verbatim, as they come. What cannot be a call is text, exactly as generated. What went out is not taken
back: a call that breaks later ends where it breaks, and `CallEnd.whole` is False if its arguments are not closed.

Always true: the `raw` of all events, joined, is the reply.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.messages import Arguments
from rekindle.text.prompt import PromptEncoder
from rekindle.text.template import ChatTemplate
from rekindle.text.tools_json import ARGUMENTS_KEYS, Envelope, ValueScan, Verdict, skip_blanks

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """JSON between `<tool_call>` marks; `gap` is what the template puts between a reply's text and its first call."""

    gap: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the reply."""

    text: str

    @property
    def raw(self) -> str:
        """What was generated."""
        return self.text


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; calls are counted from 0."""

    index: int
    id: str
    name: str
    raw: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of a call, verbatim."""

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
    """White space behind the last call."""

    raw: str


Event = TextPiece | CallStart | ArgumentsPiece | CallEnd | Blanks


def new_call_id() -> str:
    """A fresh id in OpenAI's spelling."""
    return f"call_{uuid.uuid4().hex}"


def find_tool_format(encoder: PromptEncoder) -> ToolFormat | None:
    """The form in which this model's template writes calls; None: it writes none, or in a form not known here."""
    marks = (encoder.controls.by_content.get(mark) for mark in (OPENING, CLOSING))
    if any(token is not None and token.special for token in marks):
        return None  # tokens flagged special have no text: replies would not show them
    return format_of(encoder.template)


def format_of(template: ChatTemplate) -> ToolFormat | None:
    """As `find_tool_format`, from how the template renders a call."""
    said, verbatim = "One moment.", '{"probe": 7}'
    function = {"name": "probe_tool", "arguments": Arguments(json.loads(verbatim), verbatim)}
    tool = {"name": "probe_tool", "description": "Probes.", "parameters": {"type": "object", "properties": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": said, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
    ]
    try:
        text = template.render(messages, [{"type": "function", "function": tool}], add_generation_prompt=False)
    except BadRequest:
        return None
    found = re.search(rf"{re.escape(said)}(\s*){OPENING}\s*(\{{.*?\}})\s*{CLOSING}", text, re.DOTALL)
    try:
        call = json.loads(found[2]) if found else {}
    except ValueError:
        return None
    is_ours = call.get("name") == "probe_tool" and any(call.get(key) == {"probe": 7} for key in ARGUMENTS_KEYS)
    return ToolFormat(found[1]) if found and is_ours else None


class ToolStream:
    """Reads one reply. Holds text back only while it may belong to a call.

    With `parallel` False it ends behind the first call: `ended` says so, and nothing follows.
    """

    def __init__(self, form: ToolFormat, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        self.ended = False
        self._starts = (form.gap + OPENING, OPENING)
        self._gap = form.gap
        self._parallel = parallel
        self._new_id = new_id
        self._held = ""
        self._read = 0  # how much of `_held` was taken in already
        self._opened = 0  # where the text behind the opening mark begins in `_held`
        self._num_calls = 0
        self._final = False
        self._events: list[Event] = []
        self._envelope = Envelope()
        self._scan = ValueScan()
        self._state: Callable[[], bool] = self._blanks

    def push(self, text: str) -> list[Event]:
        """Take more of the reply; return what became certain, often nothing."""
        self._held += text
        while not self.ended and self._held and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The reply is over: return what was held back. A call that has not begun is text."""
        self._final = True
        events = self.push("")
        if self._state == self._arguments:
            events.append(CallEnd(self._num_calls - 1, False, ""))
        elif self._state == self._closing:
            events.append(CallEnd(self._num_calls - 1, True, ""))
        return events

    # Each state takes from `_held` what it can and says whether the next state should go on.

    def _blanks(self) -> bool:
        """White space where text or a call may follow: at the start, and behind a call."""
        at = skip_blanks(self._held)
        rest = self._held[at:]
        if rest.startswith(OPENING):
            return self._open(at)
        if OPENING.startswith(rest) and not self._final:
            return False
        if not rest and self._num_calls:
            self._emit(Blanks(self._held), at)
            return False
        self._state = self._text
        return True

    def _text(self) -> bool:
        at = self._held.find(OPENING)
        if at >= 0:
            self._say(at - len(self._gap) if self._held.endswith(self._gap, 0, at) else at)
            return self._open(self._held.find(OPENING))
        kept = 0 if self._final else max(_overlap(self._held, start) for start in self._starts)
        self._say(len(self._held) - kept)
        return False

    def _open(self, at: int) -> bool:
        self._read = self._opened = at + len(OPENING)
        self._envelope = Envelope()
        self._state = self._head
        return True

    def _head(self) -> bool:
        """Behind the opening mark, before name and arguments are known."""
        verdict: Verdict = "go"
        while verdict == "go":
            self._read, verdict = self._envelope.advance(self._held, self._read)
        if verdict == "more" and not self._final:
            return False
        name, arguments = self._envelope.name, self._envelope.arguments
        if name is None or verdict in ("more", "broken"):
            self._state = self._text
            self._say(self._opened)
            return True
        self._emit(CallStart(self._num_calls, self._new_id(), name, self._held[: self._read]), self._read)
        self._num_calls += 1
        if verdict == "object":
            self._scan, self._state = ValueScan(), self._arguments
            return True
        self._emit(ArgumentsPiece(self._num_calls - 1, "{}" if arguments is None else arguments, ""), 0)
        self._envelope.started = True
        self._state = self._closing
        return True

    def _arguments(self) -> bool:
        at = self._scan.read(self._held, 0)
        while not self._scan.done and at < len(self._held):
            rest = self._held[at:]
            if rest.startswith(CLOSING):
                self._pass_on(at)
                self._end(len(CLOSING), whole=False)
                return True
            if CLOSING.startswith(rest) and not self._final:
                break
            at = self._scan.read(self._held, at + 1)
        self._pass_on(at)
        if self._scan.done:
            self._envelope.resume()
            self._state = self._closing
        return self._scan.done

    def _closing(self) -> bool:
        """Behind the arguments: the end of the envelope and the closing mark."""
        while True:
            at = self._read if self._envelope.inside_value else skip_blanks(self._held, self._read)
            rest = self._held[at:]
            if not self._envelope.inside_value:
                if rest.startswith(CLOSING):
                    self._end(at + len(CLOSING), whole=True)
                    return True
                if CLOSING.startswith(rest):
                    break
            taken, verdict = self._envelope.advance(self._held, at)
            if verdict == "broken":
                self._end(self._read, whole=True)
                return True
            self._read = taken
            if verdict == "more":
                break
        if self._final:
            self._end(len(self._held), whole=True)
        return False

    def _say(self, size: int) -> None:
        text = self._held[:size]
        if self._events and isinstance(self._events[-1], TextPiece):
            text = self._events.pop().raw + text
        if text:
            self._events.append(TextPiece(text))
        self._drop(size)

    def _pass_on(self, size: int) -> None:
        if size:
            text = self._held[:size]
            self._emit(ArgumentsPiece(self._num_calls - 1, text, text), size)

    def _end(self, size: int, *, whole: bool) -> None:
        self._emit(CallEnd(self._num_calls - 1, whole, self._held[:size]), size)
        self._state = self._blanks
        self.ended = not self._parallel

    def _emit(self, event: Event, size: int) -> None:
        self._events.append(event)
        self._drop(size)

    def _drop(self, size: int) -> None:
        self._held = self._held[size:]
        self._read = 0


def _overlap(text: str, start: str) -> int:
    """Length of the longest end of `text` that is a beginning of `start`, but not all of it."""
    return next((size for size in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:size])), 0)
