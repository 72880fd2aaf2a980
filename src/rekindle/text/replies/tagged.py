"""Calls whose arguments are tags, values without quotes.

    <tool_call>             <tool_call>look                 <minimax:tool_call>
    <function=look>         <arg_key>place</arg_key>        <invoke name="look">
    <parameter=place>       <arg_value>attic</arg_value>    <parameter name="place">attic</parameter>
    attic                   </tool_call>                    </invoke>
    </parameter>                                            </minimax:tool_call>
    </function>
    </tool_call>

The arguments are emitted as JSON: a value has the type that the tool's definition requires, if that was sent, or that
its tag states (`string="true"`). Strings are emitted as they come, other values when they are complete. Models
sometimes omit the marks around the function, and some write several calls between one pair: both are accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.arguments import escaped, json_of, types_of
from rekindle.text.replies.reader import Begun, CallLayout, CallMarks, CallScan, Ended, Passed, Step, Tags
from rekindle.text.replies.sample import MARK, TOOL, VALUES, CallSample
from rekindle.text.stream import overlap

_BARE = re.compile(rf"[^<>\n{GUARD}]*")
_QUOTED = re.compile(rf"[^\"\n{GUARD}]*")
_ATTRIBUTES = re.compile(rf"[^<>\n{GUARD}]*>")
_STRING = frozenset(("string",))
_NO_STRING = frozenset(("null", "boolean", "integer", "number", "object", "array"))
_STATED = {'string="true"': _STRING, 'string="false"': _NO_STRING}
_PREFIX = rf"(?:{GUARD}?[^\s<>\"/{GUARD}]{{0,20}})"  # of the words in tags: `<PREFIXinvoke name=`


_XML = Tags()


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """Calls as tags between marks; `blank` is what the template puts after the opening mark."""

    marks: CallMarks
    blank: str = "\n"
    tags: Tags = _XML

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        head = self.marks.open + self.blank + self.tags.name[0]
        return head if name is None else f"{head}{name}{self.tags.name[1]}\n"

    @property
    def layout(self) -> CallLayout:
        """How whole calls are written; those whose keys are in quotes are in one pair of marks."""
        before, after = self.tags.name
        end = f"\n{self.tags.end}" if self.tags.end else ""
        begin, close = self.marks.open + self.blank, f"\n{self.marks.close}"
        if self.tags.key[1] == '"':
            return CallLayout(begin, before, after, end, "\n", close, tags=self.tags)
        return CallLayout("", begin + before, f"{after}\n", end + close, "\n", tags=self.tags)

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return lambda: TaggedScan(self, tools)


def recognise_tagged(sample: CallSample) -> TaggedForm | None:
    """The form, if the sample's call is written in such tags."""
    for tags in _candidates(sample.body):
        start = sample.body.find("".join((tags.name[0], TOOL, tags.name[1])))
        found = [_argument(tags, key, value, sample.body) for key, value in VALUES.items()]
        ends = [match.end() for match in found if match]
        last = sample.body.find(tags.end, max(ends, default=0))
        if start < 0 or len(ends) < len(found) or last < start:
            continue
        end = last + len(tags.end)
        between, gap, after = sample.split_at(start, end)
        mark = rf"{MARK}|<{_PREFIX}\w+>"
        before, closing = re.search(rf"({mark})(\s*)$", between), re.match(rf"\s*({MARK}|</{_PREFIX}\w+>)", after)
        if before and closing:
            marks = CallMarks(before[1], closing[1], gap, tag=tags.name[0])
            return TaggedForm(marks, before[2], tags)
    return None


def _candidates(body: str) -> Iterator[Tags]:
    """Yield the tags that this text may be written in."""
    yield Tags()
    yield Tags(lines=False)
    keys = re.search(
        rf"({GUARD}?<arg_key>)probe_number({GUARD}?</arg_key>)\s*({GUARD}?<arg_value>)7({GUARD}?</arg_value>)", body
    )
    if keys:
        yield Tags(("", ""), (keys[1], keys[2]), (keys[3], keys[4]), "", lines=False)
    invoked = re.search(rf'<({_PREFIX})invoke name="', body)
    if invoked:
        prefix = invoked[1]
        quoted = (f'<{prefix}parameter name="', '"')
        yield Tags((invoked[0], '">'), quoted, ("", f"</{prefix}parameter>"), f"</{prefix}invoke>", lines=False)


def _argument(tags: Tags, key: str, value: Any, body: str) -> re.Match[str] | None:
    """Find an argument of the sample, written in these tags."""
    attributes = r"[^<>\n]*>" if tags.key[1] == '"' else ""
    before, after, begin, end = (re.escape(text) for text in (*tags.key, *tags.value))
    line = "\n" if tags.lines else ""
    blanks = r"\s*" if tags.value[0] else ""
    return re.search(rf"{before}{key}{after}{attributes}{blanks}{begin}{line}{value}{line}{end}", body)


class TaggedScan:
    """One call; see `CallScan`."""

    def __init__(self, form: TaggedForm, tools: Sequence[Any]) -> None:
        self._close, self._tags = form.marks.close, form.tags
        self._tools = tools
        self._name = ""
        self._num_values = 0
        self._types: frozenset[str] = frozenset()
        self._step = self._head

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        return self._step(text, at, final)

    def _head(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        before, after = self._tags.name
        at -= len(before) if text.endswith(before, 0, at) else 0  # the opening mark was left out
        found = _tag(text, at, before, after)
        if isinstance(found, str):
            return at, "broken" if found == "other" else "more"
        end, self._name, _ = found
        self._step = self._between
        return end, Begun(self._name) if self._name else "broken"

    def _between(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """Before a further argument or the end of the call."""
        found = _tag(text, at, *self._tags.key)
        if not isinstance(found, str):
            end, key, attributes = found
            self._types = _STATED.get(attributes.strip(), types_of(self._tools, self._name, key=key))
            self._step = self._value_begins
            self._num_values += 1
            joint = ", " if self._num_values > 1 else "{"
            return end, Passed(f"{joint}{json.dumps(key, ensure_ascii=False)}: ")
        begin = skip_blanks(text, at)
        ends = [mark for mark in (self._tags.end, self._close) if mark]
        for mark in ends:
            if text.startswith(mark, begin):
                self._step = self._closing
                size = len(mark) if mark == self._tags.end else 0
                return begin + size, Passed("}" if self._num_values else "{}")
        rest = text[begin:]
        if found == "part" or any(mark.startswith(rest) for mark in ends):
            return (len(text), Ended(False)) if final else (at, "more")
        return at, Ended(False)

    def _value_begins(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """After a key: the tag of the value, if it has one."""
        tag = self._tags.value[0]
        begin = skip_blanks(text, at) if tag else at
        if tag and not text.startswith(tag, begin):
            if tag.startswith(text[begin:]):
                return (len(text), Ended(False)) if final else (at, "more")
            return at, Ended(False)
        end = begin + len(tag)
        if end == len(text) and not final and self._tags.lines:
            return at, "more"
        end += self._tags.lines and text.startswith("\n", end)
        if self._types == _STRING:
            self._step = self._string
            return end, Passed('"')
        self._step = self._value
        return self._value(text, end, final)

    def _string(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        end, certain = self._end_of_value(text, at, final)
        guard = text.find(GUARD, at, certain)
        if guard >= 0:
            return (guard, Passed(escaped(text[at:guard]))) if guard > at else (at, Ended(False))
        if end >= 0:
            self._step = self._between
            return end + len(self._tags.value[1]), Passed(escaped(self._trimmed(text[at:end])) + '"')
        if certain > at:
            return certain, Passed(escaped(text[at:certain]))
        return at, Ended(False) if final else "more"

    def _value(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """A value that is not, or may not be, a string: its whole text is needed."""
        end, certain = self._end_of_value(text, at, final)
        guard = text.find(GUARD, at, certain)
        if guard >= 0:
            return guard, Ended(False)
        if end < 0:
            return (len(text), Ended(False)) if final else (at, "more")
        self._step = self._between
        return end + len(self._tags.value[1]), Passed(json_of(self._trimmed(text[at:end]), self._types))

    def _end_of_value(self, text: str, at: int, final: bool) -> tuple[int, int]:
        """Where the value ends (-1: not yet), and up to where the text is certainly its own.

        A closing tag ends it that a further argument or the end of the call follows; any other is part of the value.
        """
        tag = self._tags.value[1]
        end = text.find(tag, at)
        while end >= 0:
            follows = self._follows(text, end + len(tag), final)
            if follows:
                return end, end
            if follows is None:
                return -1, end - (self._tags.lines and text.startswith("\n", end - 1) and end > at)
            end = text.find(tag, end + 1)
        if final:
            return end, len(text)
        rest = text[at:]
        kept = max(overlap(rest, tag), overlap(rest, "\n" + tag) if self._tags.lines else 0)
        return end, len(text) - kept

    def _follows(self, text: str, at: int, final: bool) -> bool | None:
        """Whether the call continues after a closing tag as it may; None: that is not known yet."""
        begin = skip_blanks(text, at)
        marks = [mark for mark in (self._tags.key[0], self._tags.end, self._close) if mark]
        if any(text.startswith(mark, begin) for mark in marks):
            return True
        is_part = any(mark.startswith(text[begin : begin + len(mark)]) for mark in marks)
        return begin == len(text) if final else None if is_part else False

    def _trimmed(self, value: str) -> str:
        return value.removesuffix("\n") if self._tags.lines else value

    def _closing(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        begin = skip_blanks(text, at)
        if text.startswith(self._close, begin):
            return begin + len(self._close), Ended(True)
        if self._close.startswith(text[begin:]):
            return (len(text), Ended(True)) if final else (at, "more")
        return at, Ended(True)


def _tag(text: str, at: int, before: str, after: str) -> tuple[int, str, str] | str:
    """The end of a tag, the name in it and its attributes; "part": only a part is there, "other": anything else."""
    begin = skip_blanks(text, at)
    if not text.startswith(before, begin):
        return "part" if before.startswith(text[begin:]) else "other"
    is_quoted = after.startswith('"')
    found = (_QUOTED if is_quoted else _BARE).match(text, begin + len(before))
    assert found is not None  # it may be empty
    end, name = found.end(), found.group().strip()
    if not after:
        return (end, name, "") if end < len(text) else "part"
    if not text.startswith(after, end):
        return "part" if after.startswith(text[end:]) else "other"
    end += len(after)
    if not is_quoted or after.endswith(">"):
        return end, name, ""
    attributes = _ATTRIBUTES.match(text, end)
    if attributes is None:
        return "part" if GUARD not in text[end:] and not set("<\n") & set(text[end:]) else "other"
    return attributes.end(), name, attributes.group()[:-1]
