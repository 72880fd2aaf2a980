"""Text and calls of a reply as they are generated, for any form of calls.

    text ─ opening mark ─▶ scan: name ─▶ arguments ─▶ end ─▶ blanks, a further call, or text

Owns what is text and what is deferred. Only a scan knows the syntax of a call (`CallScan`, one per form). A call begins
when its name is known and its arguments begin; what cannot be a call is text. Emitted events are final: a call that
turns out malformed ends where it breaks. Tokens flagged special follow a guard in a structured reply, and have no text
unless they are marks of the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.events import ArgumentsDelta, Blanks, CallEnd, CallStart, Event, TextDelta
from rekindle.text.stream import overlap


@dataclass(frozen=True, slots=True)
class Begun:
    """The name is known; `arguments`, if they are known at once and complete; `call_id`, if the model wrote one."""

    name: str
    arguments: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """More of the arguments; `text` is their JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The call is over; `whole`: its arguments are closed."""

    whole: bool


# "more": it depends on text to come; the text up to here was read. "broken": this is no call.
Step = Begun | Passed | Ended | Literal["more", "broken"]


class CallScan(Protocol):
    """Reads one call, starting after its opening mark."""

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece of `text` from `at`, where the last one ended; return where this one ends.

        `final`: nothing follows, so that after `Begun` the result is never "more".
        """


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks around calls.

    `open` empty: calls are bare JSON, which only begin a reply or follow a call. A call may begin with `tag` as well.
    `gap` is between a reply's text and its first call. `listed`: one opening mark, then calls in a list, then `close`;
    else the scan of each call knows its end. `item`: what each of a list begins with; if that can be anything, brackets
    and commas may be missing.
    """

    open: str
    close: str = ""
    gap: str = ""
    listed: bool = False
    tag: str = ""
    item: str = "{"

    @property
    def starts(self) -> tuple[str, ...]:
        """What a call begins with."""
        return tuple(mark for mark in (self.open, self.tag) if mark)


@dataclass(frozen=True, slots=True)
class Tags:
    """What is before and after a tool's name, a key and a value; what is after the last argument, if not the mark.

    A name with nothing after it ends with its line, or with the next tag. A key in quotes may have attributes after it.
    `lines`: a line break belongs to the tag before a value, and to that after it.
    """

    name: tuple[str, str] = ("<function=", ">")
    key: tuple[str, str] = ("<parameter=", ">")
    value: tuple[str, str] = ("", "</parameter>")
    end: str = "</function>"
    lines: bool = True

    @property
    def ends_in_mark(self) -> bool:
        """Whether the tag after a value is a token after other text, so that a text does not end before it."""
        return GUARD in self.value[1][1:]


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How calls are written whose arguments are JSON, or are in `tags`: what a grammar of calls is made from.

    `begin`, then a call, then further ones after a `joint` each, then `end`. A call is `head`, the name with `escape`,
    `middle`, its arguments and `tail`; after the name comes an id after `id_mark`, or with `number` a number, after the
    arguments with `has_id` a member with an id. Blanks are where the template has them. `only_one`: the reply ends with
    its first call. `exact`: it ends with its call, and blanks are those of the layout, with one before the arguments.
    """

    begin: str
    head: str
    middle: str
    tail: str
    joint: str = ""
    end: str = ""
    id_mark: str = ""
    number: bool = False
    has_id: bool = False
    only_one: bool = False
    exact: bool = False
    tags: Tags | None = None
    escape: Callable[[str], str] = str


class CallReader:
    """Reads one reply. Defers text only while it may belong to a call; `marks` None: all of it is text.

    With `parallel` False it ends after the first call: `ended` is True, and nothing follows.
    """

    def __init__(
        self,
        marks: CallMarks | None,
        new_scan: Callable[[], CallScan] | None,
        *,
        specials: Sequence[str] = (),
        parallel: bool = True,
        new_id: Callable[[], str],
    ) -> None:
        self.ended = False
        self._marks = marks
        self._new_scan = new_scan
        self._specials = tuple(specials)
        self._parallel = parallel
        self._new_id = new_id
        starts = marks.starts if marks else ()
        gaps = tuple(marks.gap + start for start in starts) if marks else ()
        self._waits_for = (*gaps, *starts, *self._specials)
        self._held = ""
        self._read = 0  # how much of `_held` was read already
        self._opened = 0  # where the text after the opening mark begins in `_held`
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._final = False
        self._has_begun = False
        self._in_list = False
        self._events: list[Event] = []
        self._scan: CallScan | None = None
        self._state: Callable[[], bool] = self._blanks if marks else self._text

    def push(self, text: str) -> list[Event]:
        """Read more of the reply; return the events that are now certain, often none."""
        self._held += text
        while not self.ended and self._held and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """End the reply: return the remaining events. A call that has not begun is text."""
        self._final = True
        events = self.push("")
        if self._has_begun and self._scan is not None:
            _, step = self._scan.advance("", 0, final=True)
            events.append(CallEnd(self._num_calls - 1, isinstance(step, Ended) and step.whole, ""))
            self._has_begun = False
        return events

    # Each state consumes what it can of `_held` and returns whether the next state should continue.

    def _blanks(self) -> bool:
        """White space where text or a call may follow: at the start, and after a call."""
        at = skip_blanks(self._held)
        rest = self._held[at:]
        start = next((mark for mark in self._starts if rest.startswith(mark)), None)
        if start is not None:
            return self._open(at, at + len(start))
        if not self._final and any(mark.startswith(rest) for mark in self._starts):
            return False
        if self._is_bare and rest.startswith("{"):
            return self._open(at, at)
        if self._is_bare and not rest and not self._final:
            return False
        if not rest and self._num_calls:
            self._emit(Blanks(self._held), at)
            return False
        self._state = self._text
        return True

    def _text(self) -> bool:
        found = min(((at, mark) for mark in self._starts if (at := self._held.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            gap = self._marks.gap if self._marks else ""
            size = at - len(gap) if self._held.endswith(gap, 0, at) else at
            self._emit_text(size)
            return self._open(at - size, at - size + len(mark))
        kept = 0 if self._final else max((overlap(self._held, start) for start in self._waits_for), default=0)
        self._emit_text(len(self._held) - kept)
        return False

    def _open(self, at: int, opened: int) -> bool:
        self._read = self._opened = opened
        assert self._new_scan is not None
        self._scan, self._has_begun = self._new_scan(), False
        self._state = self._list if self._marks and self._marks.listed else self._call
        return True

    def _list(self) -> bool:
        """After the opening mark of a list: its bracket."""
        at = skip_blanks(self._held, self._read)
        if at == len(self._held) and not self._final:
            return False
        has_bracket = self._held.startswith("[", at)
        self._in_list = has_bracket or not self._item
        self._read = at + has_bracket
        self._state = self._call
        return True

    def _call(self) -> bool:
        assert self._scan is not None
        size, step = self._scan.advance(self._held, self._read, final=self._final)
        if step == "more" and (self._has_begun or not self._final):
            self._read = size
            return False
        if isinstance(step, str):
            self._state, self._in_list = self._text, False
            self._emit_text(self._opened or 1)
            return True
        if isinstance(step, Begun):
            call_id = step.call_id if step.call_id and step.call_id not in self._call_ids else self._new_id()
            self._call_ids.add(call_id)
            self._emit(CallStart(self._num_calls, call_id, step.name, self._held[:size]), size)
            self._num_calls += 1
            self._has_begun = True
            if step.arguments is not None:
                self._emit(ArgumentsDelta(self._num_calls - 1, step.arguments, ""), 0)
        elif isinstance(step, Passed):
            self._emit(ArgumentsDelta(self._num_calls - 1, step.text, self._held[:size]), size)
        else:
            self._end(size, whole=step.whole)
        return True

    def _end(self, size: int, *, whole: bool) -> None:
        self._emit(CallEnd(self._num_calls - 1, whole, self._held[:size]), size)
        self._has_begun = False
        self._state = self._between if self._in_list or self._is_bare else self._blanks
        self.ended = not self._parallel

    def _between(self) -> bool:
        """After a call of a list, or a bare one: a sign that joins it to the next, or the end of the list."""
        at = skip_blanks(self._held)
        sign = self._held[at : at + 1]
        if not sign and not self._final:
            return False
        if sign in (",", ";"):
            after = skip_blanks(self._held, at + 1)
            if after == len(self._held) and not self._final:
                return False
            if self._held.startswith(self._item, after):
                return self._next(at, after)
        if self._in_list and not self._item and (sign.isalpha() or sign == "_"):
            return self._next(at, at)
        if sign == "]" and self._in_list:
            self._emit(Blanks(self._held[: at + 1]), at + 1)
            self._state = self._closing
        else:
            self._state = self._closing if self._in_list and not self._item else self._blanks
        self._in_list = False
        return True

    def _next(self, at: int, after: int) -> bool:
        """Begin a further call of a list at `after`."""
        self._open(at, after)
        self._state = self._call
        return True

    def _closing(self) -> bool:
        """After a list: its closing mark."""
        close = self._marks.close if self._marks else ""
        at = skip_blanks(self._held)
        rest = self._held[at:]
        if close and not self._final and close.startswith(rest) and rest != close:
            return False
        if close and rest.startswith(close):
            self._emit(Blanks(self._held[: at + len(close)]), at + len(close))
        self._state = self._blanks
        return True

    @property
    def _item(self) -> str:
        return self._marks.item if self._marks else ""

    @property
    def _starts(self) -> tuple[str, ...]:
        return self._marks.starts if self._marks else ()

    @property
    def _is_bare(self) -> bool:
        return self._marks is not None and not self._marks.open

    def _emit_text(self, size: int) -> None:
        raw = self._held[:size]
        if self._events and isinstance(self._events[-1], TextDelta):
            raw = self._events.pop().raw + raw
        if raw:
            self._events.append(text_piece(raw, self._specials))
        self._drop(size)

    def _emit(self, event: Event, size: int) -> None:
        self._events.append(event)
        self._drop(size)

    def _drop(self, size: int) -> None:
        self._held = self._held[size:]
        self._read = 0


def text_piece(raw: str, specials: Sequence[str]) -> TextDelta:
    """A piece of text without the special tokens in it."""
    text = without(raw, specials)
    return TextDelta(text) if text == raw else TextDelta(text, raw)


def without(raw: str, specials: Sequence[str]) -> str:
    """Structured text without its special tokens."""
    if GUARD not in raw:
        return raw
    for special in sorted(specials, key=len, reverse=True):
        raw = raw.replace(special, "")
    return raw.replace(GUARD, "")
