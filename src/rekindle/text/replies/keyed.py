"""Calls whose arguments are written like JSON, with bare keys and strings between special quotes.

    <|tool_call>call:look{place:<|"|>attic<|"|>,floors:[1,2]}<tool_call|>

The arguments are emitted as JSON; strings are emitted as they come. A value that is neither quoted nor a number, true,
false or null is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.arguments import escaped, json_of
from rekindle.text.replies.reader import Begun, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import MARK, TOOL, VALUES, CallSample
from rekindle.text.stream import overlap

CALL = "call:"
_NAME = re.compile(rf"[^\s{{}}\[\]<>\"{GUARD}]+")
_KEY = re.compile(rf"[^:,{{}}\[\]{GUARD}]*")
_BARE = re.compile(rf"[^,{{}}\[\]{GUARD}]*")
_NO_STRING = frozenset(("null", "boolean", "integer", "number"))
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class KeyedForm:
    """Calls between marks; `quote` is on both sides of a string."""

    marks: CallMarks
    quote: str

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        return self.marks.open + CALL + ("" if name is None else f"{name}{{")

    @property
    def layout(self) -> None:
        """None: arguments are neither JSON nor in tags."""
        return None

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return lambda: KeyedScan(self)


def recognise_keyed(sample: CallSample) -> KeyedForm | None:
    """The form, if the sample's call is written like this."""
    number, word = VALUES["probe_number"], VALUES["probe_word"]
    values = rf"probe_number:{number},probe_word:({MARK}){word}\1"
    found = re.search(rf"{CALL}{TOOL}\{{{values}\}}", sample.body)
    if found is None:
        return None
    between, gap, after = sample.split_at(*found.span())
    before, closing = re.search(rf"({MARK})\s*$", between), re.match(rf"\s*({MARK})", after)
    return KeyedForm(CallMarks(before[1], closing[1], gap), found[1]) if before and closing else None


class KeyedScan:
    """One call; see `CallScan`. `_open` are the brackets that are open, innermost last."""

    def __init__(self, form: KeyedForm) -> None:
        self._quote = form.quote
        self._close = form.marks.close
        self._open: list[str] = []
        self._step = self._head

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        was_closing = self._step == self._closing
        end, step = self._step(text, at)
        if step == "more" and final and (self._open or was_closing):
            return len(text), Ended(was_closing)
        return end, step

    def _head(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if not text.startswith(CALL, begin):
            return at, "more" if CALL.startswith(text[begin:]) else "broken"
        name = _NAME.match(text, begin + len(CALL))
        end = name.end() if name else begin + len(CALL)
        if end == len(text):
            return at, "more"
        if name is None or text[end] != "{":
            return at, "broken"
        self._step = self._first_value
        return end, Begun(name.group())

    def _first_value(self, text: str, at: int) -> tuple[int, Step]:
        return self._opened("{", at)

    def _opened(self, bracket: str, at: int) -> tuple[int, Step]:
        self._open.append(bracket)
        self._step = self._first
        return at + 1, Passed(bracket)

    def _closed(self, at: int) -> tuple[int, Step]:
        bracket = _CLOSERS[self._open.pop()]
        self._step = self._next if self._open else self._closing
        return at + 1, Passed(bracket)

    def _first(self, text: str, at: int) -> tuple[int, Step]:
        """After an opening bracket."""
        begin = skip_blanks(text, at)
        if text.startswith(_CLOSERS[self._open[-1]], begin):
            return self._closed(begin)
        if begin == len(text):
            return at, "more"
        return self._member(text, at)

    def _member(self, text: str, at: int) -> tuple[int, Step]:
        return self._key(text, at) if self._open[-1] == "{" else self._value(text, at)

    def _key(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if text.startswith(self._quote, begin):
            return self._quoted_key(text, at, begin + len(self._quote))
        if self._quote.startswith(text[begin:]):
            return at, "more"
        found = _KEY.match(text, begin)
        assert found is not None  # it may be empty
        if found.end() == len(text):
            return at, "more"
        if text[found.end()] != ":" or not found.group().strip():
            return at, self._cut()
        return self._keyed(found.group().strip(), found.end() + 1)

    def _quoted_key(self, text: str, at: int, start: int) -> tuple[int, Step]:
        end = text.find(self._quote, start)
        colon = skip_blanks(text, end + len(self._quote)) if end >= 0 else len(text)
        if colon == len(text):
            return at, "more"
        if text[colon] != ":" or GUARD in text[start:end]:
            return at, self._cut()
        return self._keyed(text[start:end], colon + 1)

    def _keyed(self, key: str, end: int) -> tuple[int, Step]:
        self._step = self._value
        return end, Passed(json.dumps(key, ensure_ascii=False) + ": ")

    def _value(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        rest = text[begin:]
        if rest.startswith(self._quote):
            self._step = self._string
            return begin + len(self._quote), Passed('"')
        if self._quote.startswith(rest):
            return at, "more"
        if rest[0] in _CLOSERS:
            return self._opened(rest[0], begin)
        found = _BARE.match(rest)
        assert found is not None  # it may be empty
        if found.end() == len(rest):
            return at, "more"
        if not found.group().strip():
            return at, self._cut()
        self._step = self._next
        return begin + found.end(), Passed(json_of(found.group().strip(), _NO_STRING))

    def _string(self, text: str, at: int) -> tuple[int, Step]:
        end = text.find(self._quote, at)
        guard = text.find(GUARD, at, end if end >= 0 else len(text))
        if guard >= 0 and not self._quote.startswith(text[guard:]):
            return (guard, Passed(escaped(text[at:guard]))) if guard > at else (at, self._cut())
        if end >= 0:
            self._step = self._next
            return end + len(self._quote), Passed(escaped(text[at:end]) + '"')
        size = len(text) - overlap(text[at:], self._quote)
        return (size, Passed(escaped(text[at:size]))) if size > at else (at, "more")

    def _next(self, text: str, at: int) -> tuple[int, Step]:
        """After a value."""
        begin = skip_blanks(text, at)
        if begin == len(text):
            return at, "more"
        if text[begin] == _CLOSERS[self._open[-1]]:
            return self._closed(begin)
        if text[begin] != ",":
            return at, self._cut()
        self._step = self._member
        return begin + 1, Passed(", ")

    def _closing(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if text.startswith(self._close, begin):
            return begin + len(self._close), Ended(True)
        return at, "more" if self._close.startswith(text[begin:]) else Ended(True)

    def _cut(self) -> Step:
        self._open = []
        return Ended(False)
