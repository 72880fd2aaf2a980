"""Calls whose arguments are tags, values without quotes.

    <tool_call>
    <function=look>
    <parameter=place>
    attic
    </parameter>
    </function>
    </tool_call>

The arguments are emitted as JSON: a value has the type that the tool's definition requires, if that was sent. Strings
are emitted as they come, other values when they are complete. One line break belongs to each tag. Models sometimes omit
the marks around the function: that is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.messages import GUARD
from rekindle.text.replies.reader import Begun, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import MARK, TOOL, VALUES, CallSample
from rekindle.text.replies.types import escaped, json_of, types_of
from rekindle.text.stream import overlap
from rekindle.text.tools_json import skip_blanks

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
_NAME = re.compile(rf"[^<>\n{GUARD}]*")
_STRING = frozenset(("string",))


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """Calls as tags between marks; `blank` is what the template puts after the opening mark."""

    marks: CallMarks
    blank: str = "\n"

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        head = self.marks.open + self.blank + FUNCTION
        return head if name is None else f"{head}{name}>\n"

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return lambda: TaggedScan(self.marks.close, tools)


def recognise_tagged(sample: CallSample) -> TaggedForm | None:
    """The form, if the sample's call is written in these tags."""
    start = sample.body.find(f"{FUNCTION}{TOOL}>")
    end = sample.body.find(END_FUNCTION, start) + len(END_FUNCTION)
    has_values = all(f"{PARAMETER}{key}>\n{value}\n{END_PARAMETER}" in sample.body for key, value in VALUES.items())
    if start < 0 or end < start or not has_values:
        return None
    between, gap, after = sample.split_at(start, end)
    before, closing = re.search(rf"({MARK})(\s*)$", between), re.match(rf"\s*({MARK})", after)
    return TaggedForm(CallMarks(before[1], closing[1], gap, tag=FUNCTION), before[2]) if before and closing else None


class TaggedScan:
    """One call; see `CallScan`."""

    def __init__(self, close: str, tools: Sequence[Any]) -> None:
        self._close = close
        self._tools = tools
        self._name = ""
        self._num_values = 0
        self._types: frozenset[str] = frozenset()
        self._step = self._head

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        return self._step(text, at, final)

    def _head(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        at -= len(FUNCTION) if text.endswith(FUNCTION, 0, at) else 0  # the opening mark was left out
        found = _tag(text, at, FUNCTION)
        if isinstance(found, str):
            return at, "broken" if found == "other" else "more"
        end, self._name = found
        self._step = self._between
        return end, Begun(self._name) if self._name else "broken"

    def _between(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """Before a further argument or the end of the call."""
        found = _tag(text, at, PARAMETER)
        if not isinstance(found, str):
            end, key = found
            self._types = types_of(self._tools, self._name, key=key)
            self._step = self._string_begins if self._types == _STRING else self._value
            self._num_values += 1
            joint = ", " if self._num_values > 1 else "{"
            return end, Passed(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
        begin = skip_blanks(text, at)
        for mark in (END_FUNCTION, self._close):
            if text.startswith(mark, begin):
                self._step = self._closing
                size = len(mark) if mark == END_FUNCTION else 0
                return begin + size, Passed("}" if self._num_values else "{}")
        rest = text[begin:]
        if found == "part" or any(mark.startswith(rest) for mark in (END_FUNCTION, self._close)):
            return (len(text), Ended(False)) if final else (at, "more")
        return at, Ended(False)

    def _string_begins(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        if at == len(text):
            return (at, Ended(False)) if final else (at, "more")
        self._step = self._string
        return at + text.startswith("\n", at), Passed('"')

    def _string(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        end = text.find(END_PARAMETER, at)
        guard = text.find(GUARD, at, end if end >= 0 else len(text))
        if guard == at:
            return at, Ended(False)
        if guard > at:
            return guard, Passed(escaped(text[at:guard]))
        if end >= 0:
            self._step = self._between
            value = text[at:end].removesuffix("\n")
            return end + len(END_PARAMETER), Passed(escaped(value) + '"')
        rest = text[at:]
        kept = max(overlap(rest, "\n" + END_PARAMETER), overlap(rest, END_PARAMETER)) if not final else 0
        if kept < len(rest):
            return len(text) - kept, Passed(escaped(rest[: len(rest) - kept]))
        return at, Ended(False) if final else "more"

    def _value(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """A value that is not, or may not be, a string: its whole text is needed."""
        end = text.find(END_PARAMETER, at)
        guard = text.find(GUARD, at, end if end >= 0 else len(text))
        if guard >= 0:
            return guard, Ended(False)
        if end < 0:
            return (len(text), Ended(False)) if final else (at, "more")
        self._step = self._between
        value = text[at:end].removeprefix("\n").removesuffix("\n")
        return end + len(END_PARAMETER), Passed(json_of(value, self._types))

    def _closing(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if text.startswith(self._close, begin):
            return begin + len(self._close), Ended(True)
        if self._close.startswith(text[begin:]):
            return (len(text), Ended(True)) if final else (at, "more")
        return at, Ended(True)


def _tag(text: str, at: int, tag: str) -> tuple[int, str] | str:
    """The end of a tag, and the name in it; "part" if only a part is there, "other" for anything else."""
    begin = skip_blanks(text, at)
    if not text.startswith(tag, begin):
        return "part" if tag.startswith(text[begin:]) else "other"
    found = _NAME.match(text, begin + len(tag))
    assert found is not None  # it may be empty
    if text.startswith(">", found.end()):
        return found.end() + 1, found.group().strip()
    return "part" if found.end() == len(text) else "other"
