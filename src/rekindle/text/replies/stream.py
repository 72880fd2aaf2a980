"""Read one reply as it is generated, the part of it that the prompt has begun, and stop strings in its answer.

Owns where reasoning ends: at its mark, or at a whole call that only calls follow. What follows is read by the reader of
the format (`format`). Malformed output is text, never an error.

Always true: the `raw` of all events, joined, is the structured reply after `opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies.events import ArgumentsDelta, Blanks, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from rekindle.text.replies.format import ReplyFormat
from rekindle.text.replies.reader import without
from rekindle.text.stream import StopSearch, TextStream, overlap, structured
from rekindle.text.vocabulary import MARK

_TAIL_BYTES = 512  # of a prompt's end: longer than any cue


class ReplyStream:
    """Reads one structured reply. Defers text only while it may belong to a mark.

    `tools`: whether calls are looked for; the definitions sent with the request say more than True: they give the types
    for forms that write values without types. With `parallel` False the reply ends after its first call: `ended` is
    True, and nothing follows. `opening` is the part of the reply in the prompt; calls that it has begun are emitted,
    and one that the reply ends in before its name is known is nothing.
    """

    def __init__(
        self,
        form: ReplyFormat,
        *,
        tools: bool | Sequence[Any],
        parallel: bool = True,
        opening: str = "",
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._thinking = form.leading_reasoning
        self._specials = form.specials
        starts = form.tools.marks.starts if form.tools and tools else ()
        self._calls = tuple(mark for mark in starts if mark.startswith(GUARD))  # they end reasoning that is not closed
        self._text_marks = tuple(mark for mark in starts if not mark.startswith(GUARD))  # reasoning may mention these
        self._parallel = parallel and not form.one_call
        self._new_reader = partial(form.reader, tools, new_id=new_id or form.new_id)
        self._reader = self._new_reader(parallel=self._parallel)
        self._attempt = self._reader  # at a call in reasoning
        self._num_tried = 0  # characters of `_held` that it has read
        self._tried: list[Event] = []
        self._held = ""
        self._state = self._start
        self._events: list[Event] = []
        self._final = False
        self._to_skip = len(opening)
        begun = form.opening(None) if tools else None
        self._has_begun_call = bool(begun) and opening.endswith(begun or "")
        self._opened = self._skip(self._read(opening)) if opening else []

    @property
    def ended(self) -> bool:
        """Whether no further call is wanted: the rest of the reply is ignored."""
        return self._reader.ended

    def push(self, text: str) -> list[Event]:
        """Read more of the reply; return the events that are now certain, often none."""
        opened, self._opened = self._opened, []
        return opened + self._skip(self._read(text))

    def finish(self) -> list[Event]:
        """End the reply: return the remaining events. A call that has not begun is text."""
        self._final = True
        return self.push("") + self._skip(self._reader.finish())

    def _read(self, text: str) -> list[Event]:
        self._held += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    # Each state consumes what it can of `_held` and returns whether the next state should continue.

    def _start(self) -> bool:
        """At the start: white space, and a mark that opens reasoning."""
        if self._thinking is None:
            self._state = self._body
            return True
        at = skip_blanks(self._held)
        rest = self._held[at:]
        if rest.startswith(self._thinking.open):
            self._emit(Blanks, at + len(self._thinking.open))
            self._state = self._lead
            return True
        if self._thinking.open.startswith(rest) and not self._final:
            return False
        self._state = self._body
        return True

    def _lead(self) -> bool:
        """What the template puts before reasoning."""
        lead = self._thinking.lead if self._thinking else ""
        if lead.startswith(self._held) and self._held != lead and not self._final:
            return False
        if self._held.startswith(lead):
            self._emit(Blanks, len(lead))
        self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        assert self._thinking is not None
        trail, close = self._thinking.trail, self._thinking.close
        ends = [close, *self._calls, *self._text_marks]
        found = min(((at, mark) for mark in ends if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            waits = (trail + close, *ends, *self._specials)
            kept = 0 if self._final else max(overlap(self._held, mark) for mark in waits)
            self._emit_reasoning(len(self._held) - kept)
            return False
        at, mark = found
        self._emit_reasoning(at - len(trail) if mark == close and self._held.endswith(trail, 0, at) else at)
        if mark == close:
            self._emit(Blanks, self._held.index(close) + len(close))
        self._state = self._attempted if mark in self._text_marks else self._after_reasoning
        self._attempt, self._num_tried, self._tried = self._new_reader(parallel=True), 0, []
        return True

    def _attempted(self) -> bool:
        """At a call in reasoning: it is one if nothing but calls follows, else the reasoning mentions it."""
        news = self._attempt.push(self._held[self._num_tried :])
        self._num_tried = len(self._held)
        is_mention = any(map(_is_no_call, news))
        self._tried += [*news, *(self._attempt.finish() if self._final and not is_mention else ())]
        whole: list[int] = []
        if self._final and not is_mention:
            whole = [at for at, event in enumerate(self._tried) if isinstance(event, CallEnd) and event.whole]
            is_mention = not whole
        if is_mention:
            self._emit_reasoning(1)
            self._state = self._reasoning
            return True
        if self._final:
            self._events += self._tried if self._parallel else self._tried[: whole[0] + 1]
            self._held, self._state = "", self._body
        return False

    def _after_reasoning(self) -> bool:
        """After reasoning: white space, which is not part of the text."""
        self._emit(Blanks, skip_blanks(self._held))
        if not self._held:
            return False
        self._state = self._body
        return True

    def _body(self) -> bool:
        text, self._held = self._held, ""
        self._events += self._reader.push(text)
        return False

    def _emit_reasoning(self, size: int) -> None:
        raw = self._held[:size]
        if raw:
            text = without(raw, self._specials)
            self._events.append(ReasoningDelta(text) if text == raw else ReasoningDelta(text, raw))
        self._held = self._held[size:]

    def _emit(self, kind: type[Blanks], size: int) -> None:
        if size:
            self._events.append(kind(self._held[:size]))
        self._held = self._held[size:]

    def _skip(self, events: list[Event]) -> list[Event]:
        """The events after the opening: calls that it has begun stay, without the text in it."""
        if not self._to_skip:
            return events
        kept: list[Event] = []
        for event in events:
            raw = event.raw
            rest = raw[self._to_skip :]
            self._to_skip -= len(raw) - len(rest)
            if rest == raw:
                kept.append(event)
            elif isinstance(event, CallStart | ArgumentsDelta | CallEnd):
                kept.append(replace(event, raw=rest))
            elif rest and self._final and self._has_begun_call:
                kept.append(Blanks(rest))
            elif rest:
                kept.append(_cut(event, rest, self._specials))
        return kept


def _is_no_call(event: Event) -> bool:
    return isinstance(event, TextDelta) or (isinstance(event, CallEnd) and not event.whole)


def opened_by(form: ReplyFormat, encoder: PromptEncoder, prompt: RenderedPrompt) -> str:
    """The part of the reply in the cue at the prompt's end, as structured text; usually empty."""
    return form.opened_at_end_of(structured(encoder, _tail(encoder, prompt)))


def begin_reply(
    form: ReplyFormat, encoder: PromptEncoder, *, prompt: RenderedPrompt, prefix: str = ""
) -> tuple[RenderedPrompt, str]:
    """Append `prefix` (structured text) to the prompt as the beginning of its reply; return both prompt and beginning.

    Reasoning that the cue has opened is ended first: a prefix is text, or a call.
    """
    opened = opened_by(form, encoder, prompt)
    if not prefix:
        return prompt, opened
    bridged = form.bridged(opened, prefix)
    return encoder.continued(prompt, bridged), opened + bridged


def _tail(encoder: PromptEncoder, prompt: RenderedPrompt) -> np.ndarray:
    """The ids of the prompt's end, from the first control token in it."""
    from_byte = max(len(prompt.key) - _TAIL_BYTES, 0)
    start = prompt.key.find(MARK, from_byte)
    return encoder.encode_rest(prompt, start if start >= 0 else len(prompt.key))


def _cut(event: ReasoningDelta | TextDelta | Blanks, raw: str, specials: Sequence[str]) -> Event:
    if isinstance(event, Blanks):
        return Blanks(raw)
    text = without(raw, specials)
    return type(event)(text) if text == raw else type(event)(text, raw)


# Stop strings in the answer's text: not in reasoning, nor in calls, whose arguments a client could not read then.
#
# Owns where in a reply stop strings are searched. What is read here is read again for the client: text in, text out.


class AnswerStream:
    """Incremental structured text of one reply, ended by a stop string in its answer; see `TextStream`.

    `stream` has no stop strings of its own, `reader` reads all calls.
    """

    def __init__(self, stream: TextStream, reader: ReplyStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._reader = reader
        self._search = StopSearch(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came: nothing follows."""
        return self._search.found is not None

    @property
    def stop_text(self) -> str | None:
        """The stop string that came."""
        return self._search.found

    @property
    def ends_anywhere(self) -> tuple[str, ...]:
        """No string ends the reply wherever it is."""
        return ()

    def watch_for(self, stop: Sequence[str]) -> None:
        """Stop at these strings from here on."""
        self._search.watch_for(stop)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; see `TextStream`."""
        return self._stream.token_bytes(token_id)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now certain, often none."""
        return "" if self.stopped else self._searched(self._reader.push(self._stream.push(token_id)))

    def finish(self) -> str:
        """Return the remaining text; empty after a stop string."""
        if self.stopped:
            return ""
        events = [*self._reader.push(self._stream.finish()), *self._reader.finish()]
        return self._searched(events) + self._search.flush()

    def _searched(self, events: Sequence[Event]) -> str:
        parts = []
        for event in events:
            if self.stopped:
                break
            is_answer = isinstance(event, TextDelta)
            parts.append(self._search.push(event.raw) if is_answer else self._search.flush() + event.raw)
        return "".join(parts)
