"""Replies in channels: a header of marks before every message says what it is.

    <|channel|>analysis<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place": "attic"}<|call|>

A message to a function is a call, its content the arguments, verbatim; a message in the channel `analysis` is
reasoning, everything else is text. Messages of one kind are separated by an empty line. Without a valid header a reply
is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.arguments import JsonArguments
from rekindle.text.replies.events import ArgumentsDelta, Blanks, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from rekindle.text.replies.reader import CallLayout, CallMarks, Passed, without
from rekindle.text.replies.sample import MARK, REPLY, TOOL, CallSample
from rekindle.text.stream import overlap

ROLE, ANALYSIS, ASIDE, ANSWER = "assistant", "analysis", "commentary", "final"
_TO = re.compile(r"to=functions\.([^\s<>{}\"]+)")
_CONSTRAIN = f"{GUARD}<|constrain|>"
_MOST_HEADER = 400  # characters: more is no header
Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class ChannelForm:
    """The marks of headers, and those that end a message; `constrain` precedes the type of a call's content.

    `call`: what the template puts before and after the name of a call, after the role.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    call: tuple[str, str]
    constrain: str = ""

    @property
    def marks(self) -> CallMarks:
        """Calls have no separate marks."""
        return CallMarks("")

    @property
    def all_marks(self) -> tuple[str, ...]:
        """Every mark."""
        return (self.start, self.channel, self.message, *self.ends, *filter(None, (self.constrain,)))

    def header(self, channel: str) -> str:
        """What begins a message in this channel, after the role."""
        return f"{self.channel}{channel}{self.message}"

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        before, after = self.call
        return before if name is None else before + name + after

    @property
    def layout(self) -> CallLayout:
        """How a call is written after the role, up to its arguments; a mark that ends the reply follows them."""
        before, after = self.call
        return CallLayout("", before, after, "", only_one=True)

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], Any]:
        """Calls are read with everything else."""
        raise AssertionError("channels have a separate reader")

    def opened_at_end_of(self, prompt: str) -> str:
        """The part of the reply at the end of a structured prompt, after the role."""
        opened = prompt[prompt.rfind(self.start) :].removeprefix(self.start)
        return opened.removeprefix(ROLE) if self.start in prompt and opened.startswith(ROLE) else ""

    def bridged(self, opened: str, prefix: str) -> str:
        """`prefix` as the continuation of a reply that begins with `opened`: text gets a header."""
        is_open = bool(opened.strip()) and not opened.endswith(self.ends)
        role = (self.ends[0] if is_open else "") + (self.start + ROLE if opened.strip() else "")
        return role + ("" if prefix.startswith((self.channel, self.call[0])) else self.header(ANSWER)) + prefix


def recognise_channels(sample: CallSample) -> ChannelForm | None:
    """The form, if a plain reply is in the channel for answers."""
    found = re.search(rf"({MARK}){ROLE}({MARK}){ANSWER}({MARK}){re.escape(REPLY)}({MARK})", sample.plain)
    if found is None:
        return None
    question = re.match(rf"({MARK})", sample.after_question)
    start, channel, message, end = found.groups()
    inside = rf"(?:(?!{re.escape(message)}).)*?"
    head = rf"{re.escape(start + ROLE)}({inside}to=functions\.){TOOL}({inside}{re.escape(message)})"
    called = re.search(rf"{head}\{{.*?\}}\s*({MARK})", start + ROLE + sample.body, re.DOTALL)
    ends = [each for each in (question and question[1], end, called and called[3]) if each]
    constrain = _CONSTRAIN if _CONSTRAIN in sample.specials else ""
    call = (called[1], called[2]) if called else (f"{channel}{ASIDE} to=functions.", f" {constrain}json{message}")
    return ChannelForm(start, channel, message, tuple(dict.fromkeys(ends)), call, constrain)


class ChannelReader:
    """Reads one reply in channels; see `BodyReader`. Without `calls`, messages to functions are text."""

    def __init__(
        self, form: ChannelForm, *, calls: bool, specials: Sequence[str], parallel: bool, new_id: Callable[[], str]
    ) -> None:
        self.ended = False
        self._form = form
        self._calls = calls
        self._specials = tuple(specials)
        self._parallel = parallel
        self._new_id = new_id
        self._breaks = (*form.ends, form.start, form.channel)
        self._held = ""
        self._kind: Kind = "text"
        self._seen: set[Kind] = set()  # kinds that had a message already
        self._joint = ""  # what separates this message from the last one of its kind
        self._num_calls = 0
        self._json = JsonArguments()
        self._final = False
        self._events: list[Event] = []
        self._state = self._header

    def push(self, text: str) -> list[Event]:
        """Read more of the reply; return the events that are now certain."""
        self._held += text
        while not self.ended and self._held and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """End the reply: return the remaining events."""
        self._final = True
        events = self.push("")
        if self._kind == "call" and self._state == self._content and not self.ended:
            events.append(CallEnd(self._num_calls - 1, self._json.whole, ""))
            self._state = self._header
        return events

    def _header(self) -> bool:
        """Before a message."""
        at = self._held.find(self._form.message)
        head = self._held[: at if at >= 0 else len(self._held)]
        if not self._is_header(head):
            self._begin("text")
            return True
        if at < 0:
            if self._final:
                self._emit(Blanks(self._held), len(self._held))
            return False
        size = at + len(self._form.message)
        name, channel = _TO.search(head), head.rpartition(self._form.channel)[2].split()
        if name is not None and self._calls:
            call_name = without(name[1].split(GUARD)[0], self._specials)
            self._emit(CallStart(self._num_calls, self._new_id(), call_name, self._held[:size]), size)
            self._num_calls += 1
            self._json = JsonArguments()
            self._begin("call")
        else:
            self._emit(Blanks(self._held[:size]), size)
            self._begin("reasoning" if channel[:1] == [ANALYSIS] else "text")
        return True

    def _is_header(self, head: str) -> bool:
        """Whether this may be a header, or the beginning of one."""
        if len(head) > _MOST_HEADER:
            return False
        marks = self._form.all_marks
        plain = min((head.partition(mark)[0] for mark in marks), key=len)
        if plain == head:
            plain = plain[: len(plain) - max(overlap(plain, mark) for mark in marks)]
        return all(ROLE.startswith(word) or word.startswith("to=") or "to=".startswith(word) for word in plain.split())

    def _begin(self, kind: Kind) -> None:
        self._kind, self._state = kind, self._content
        self._joint = "\n\n" if kind in self._seen else ""
        self._seen.add(kind)

    def _content(self) -> bool:
        found = min(((at, mark) for mark in self._breaks if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            waits = (*self._breaks, *self._specials)
            kept = 0 if self._final else max(overlap(self._held, mark) for mark in waits)
            self._pass_on(len(self._held) - kept)
            return False
        at, mark = found
        self._pass_on(at)
        size = len(mark) if mark in self._form.ends else 0
        if self._kind == "call":
            self._emit(CallEnd(self._num_calls - 1, self._json.whole, self._held[:size]), size)
            self.ended = not self._parallel
        elif size:
            self._emit(Blanks(self._held[:size]), size)
        self._state = self._header
        return True

    def _pass_on(self, size: int) -> None:
        raw = self._held[:size]
        if not raw:
            return
        text = without(raw, self._specials)
        if self._kind == "call":
            self._emit(ArgumentsDelta(self._num_calls - 1, self._followed(text), raw), size)
            return
        text, self._joint = self._joint + text, ""
        kind = ReasoningDelta if self._kind == "reasoning" else TextDelta
        self._emit(kind(text) if text == raw else kind(text, raw), size)

    def _followed(self, text: str) -> str:
        """Follow the arguments until they are closed; return what is passed on of this piece."""
        at = skip_blanks(text) if not self._json.begun else 0
        passed = [text[:at]]
        while at < len(text) and not self._json.closed:
            at, found = self._json.advance(text, at, final=False)
            passed += [found.text] if isinstance(found, Passed) else []
        return "".join((*passed, text[at:]))

    def _emit(self, event: Event, size: int) -> None:
        self._events.append(event)
        self._held = self._held[size:]
