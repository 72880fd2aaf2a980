"""Calls as in Python, with keyword arguments, in a list or on lines of their own.

    <|tool_call_start|>[look(place="attic", floors=[1, 2])]<|tool_call_end|>      <function_calls>
                                                                                  look(place="attic")
                                                                                  </function_calls>

The arguments are emitted as JSON; strings are emitted as they come, other values when they are complete. A value may be
a literal of Python or of JSON; what is neither is a string.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.arguments import escaped
from rekindle.text.replies.reader import Begun, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import MARK, TOOL, VALUES, CallSample

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_KEY = re.compile(r"[\w\-]+")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a pair of surrogates
_FIRST_HALF = re.compile(_HIGH)
# An escape that may go on after the text.
_OPEN_ESCAPE = re.compile(rf"(?:{_HIGH})?(?:\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{{0,3}}|U[0-9a-fA-F]{{0,7}})?)?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_QUOTES = ("'", '"')
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class PythonicForm:
    """Calls between marks; `blank` is what the template puts after the opening one, `lead` what is before the first."""

    marks: CallMarks
    blank: str = ""
    lead: str = "["

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        return f"{self.marks.open}{self.blank}{self.lead}" + ("" if name is None else f"{name}(")

    @property
    def layout(self) -> None:
        """None: arguments are neither JSON nor in tags."""
        return None

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return PythonicScan


def recognise_pythonic(sample: CallSample) -> PythonicForm | None:
    """The form, if the sample's call is written like this."""
    number, word = VALUES["probe_number"], VALUES["probe_word"]
    values = rf"probe_number\s*=\s*{number}\s*,\s*probe_word\s*=\s*(['\"]){word}\1"
    found = re.search(rf"{TOOL}\({values}\)", sample.body)
    if found is None:
        return None
    between, gap, after = sample.split_at(*found.span())
    before, closing = re.search(rf"({MARK})(\s*)(\[?)$", between), re.match(rf"\s*(\]?)\s*({MARK})", after)
    if before is None or closing is None or bool(before[3]) != bool(closing[1]):
        return None
    return PythonicForm(CallMarks(before[1], closing[2], gap, listed=True, item=""), before[2], before[3])


class PythonicScan:
    """One call; see `CallScan`."""

    def __init__(self) -> None:
        self._num_values = 0
        self._quote = ""  # of the string that is being read
        self._step = self._head

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        end, step = self._step(text, at)
        if step == "more" and final and self._step != self._head:
            return len(text), Ended(False)
        return end, step

    def _head(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        name = _NAME.match(text, begin)
        end = skip_blanks(text, name.end()) if name else begin
        if end == len(text):
            return at, "more"
        if name is None or text[end] != "(":
            return at, "broken"
        self._step = self._argument
        return end + 1, Begun(name.group())

    def _argument(self, text: str, at: int) -> tuple[int, Step]:
        """Before an argument, or the end of the call."""
        begin = skip_blanks(text, at)
        if text.startswith(")", begin):
            self._step = self._closed
            return begin + 1, Passed("}" if self._num_values else "{}")
        if self._num_values and text.startswith(",", begin):
            begin = skip_blanks(text, begin + 1)
            if text.startswith(")", begin):  # a comma after the last
                self._step = self._closed
                return begin + 1, Passed("}")
        elif self._num_values and begin < len(text):
            return at, Ended(False)
        key = _KEY.match(text, begin)
        end = skip_blanks(text, key.end()) if key else begin
        if end == len(text):
            return at, "more"
        if key is None or text[end] != "=":
            return at, Ended(False)
        self._num_values += 1
        self._step = self._value
        joint = ", " if self._num_values > 1 else "{"
        return end + 1, Passed(f"{joint}{json.dumps(key.group(), ensure_ascii=False)}: ")

    def _value(self, text: str, at: int) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if begin == len(text):
            return at, "more"
        if text[begin] in _QUOTES:
            self._quote, self._step = text[begin], self._string
            return begin + 1, Passed('"')
        end = _end_of_value(text, begin)
        guard = text.find(GUARD, begin, len(text) if end is None else end)
        if guard >= 0 or end == begin:
            return at, Ended(False)
        if end is None:
            return at, "more"
        self._step = self._argument
        return end, Passed(_json_of(text[begin:end].strip()))

    def _string(self, text: str, at: int) -> tuple[int, Step]:
        end, is_closed = _end_of_string(text, at, self._quote)
        guard = text.find(GUARD, at, end)
        end = guard if guard >= 0 else end
        piece = _unescaped(text[at:end])
        if guard >= 0:
            return (guard, Passed(escaped(piece))) if guard > at else (at, Ended(False))
        if is_closed:
            self._step = self._argument
            return end + 1, Passed(escaped(piece) + '"')
        return (end, Passed(escaped(piece))) if end > at else (at, "more")

    def _closed(self, text: str, at: int) -> tuple[int, Step]:
        return at, Ended(True)


def _end_of_string(text: str, at: int, quote: str) -> tuple[int, bool]:
    """Where the text of a string ends, and whether its quote follows; else up to where it can be read."""
    position, escape = at, len(text)
    while position < len(text) and text[position] != quote:
        if text[position] == "\\" and not _FIRST_HALF.fullmatch(text, escape, position):
            escape = position
        position += 2 if text[position] == "\\" else 1
    if position < len(text):
        return position, True
    return (escape if _OPEN_ESCAPE.fullmatch(text, escape) else len(text)), False


def _end_of_value(text: str, at: int) -> int | None:
    """Where a value that is no string ends: at a comma or a bracket outside its own; None if not yet."""
    opened: list[str] = []
    while at < len(text):
        sign = text[at]
        if sign in _QUOTES:
            end, is_closed = _end_of_string(text, at + 1, sign)
            if not is_closed:
                return None
            at = end
        elif sign in _CLOSERS:
            opened.append(_CLOSERS[sign])
        elif opened and sign == opened[-1]:
            opened.pop()
        elif not opened and sign in ",)":
            return at
        at += 1
    return None


def _json_of(text: str) -> str:
    """The JSON of a literal; of other text, a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _unescaped(text: str) -> str:
    """The text of a string's source. What is no escape stays as it is; half a pair of surrogates is replaced."""
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_escaped_sign, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped_sign(found: re.Match[str]) -> str:
    digits, sign = found[1] or found[2] or found[3], found[4]
    if digits is not None:
        return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else found[0]
    return _ESCAPED.get(sign, sign if sign in "\\'\"" else found[0])
