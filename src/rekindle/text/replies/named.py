"""Calls as a name and then a JSON object, or as the only key of one (at the end).

    [TOOL_CALLS]look[ARGS]{"place": "attic"}        <function=look>{"place": "attic"}</function>

    <tool_call>look                                 <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>
    ```json                                         {"place": "attic"}<|tool_call_end|>
    {"place": "attic"}
    ```</tool_call>

Between the two is a mark, the first line of a fenced block, or nothing; some models write an id of the call after
another mark, which is skipped. Others write an id that has the name and the number of the call in place of the name:
that is the id of the call, since their templates render nothing else of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.text.arguments import skip_blanks
from rekindle.text.messages import GUARD, is_sound
from rekindle.text.replies.arguments import JsonArguments, escaped
from rekindle.text.replies.reader import Begun, CallLayout, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import FENCE, MARK, TOOL, VALUES, CallSample, json_objects

_NAME = re.compile(rf"[^\s{{}}\[\]<>\"{GUARD}]+")
_ID = re.compile(r"[\w\-]*")
_NAMING_ID = re.compile(r"(?:functions\.)?([^:.]+(?:\.[^:.]+)*)(?::\d+)?")
_FENCE, _ANY_FENCE = "```", re.compile(r"```\w*")
_STRING = re.compile(rf'"(?:[^"\\{GUARD}]|\\.)*"')
_PART_OF_STRING = re.compile(rf'"(?:[^"\\{GUARD}]|\\.)*\\?')


@dataclass(frozen=True, slots=True)
class NamedForm:
    """Calls as name and arguments; `separator` precedes these, `id_mark` an id. `is_named_by_id`: the name is in an id.

    `blank`: the template puts it before the separator.
    """

    marks: CallMarks
    separator: str
    id_mark: str = ""
    is_named_by_id: bool = False
    blank: str = ""

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name; ids and numbers are left to the model."""
        if name is None:
            return self.marks.open
        if self.is_named_by_id:
            return f"{self.marks.open}functions.{name}:"
        return f"{self.marks.open}{name}{self.blank}{self.separator}"

    @property
    def layout(self) -> CallLayout:
        """How whole calls are written."""
        fence = "\n```" if self.separator.startswith(_FENCE) else ""
        prefix = "functions." if self.is_named_by_id else ""
        middle = self.separator if self.is_named_by_id else self.blank + self.separator
        head = self.marks.open + prefix
        return CallLayout(
            "", head, middle, fence + self.marks.close, "\n", id_mark=self.id_mark, number=self.is_named_by_id
        )

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return lambda: NamedScan(self)


def recognise_named(sample: CallSample) -> NamedForm | None:
    """The form, if the sample's call is its name and then its arguments as JSON."""
    for start, end, value in json_objects(sample.body):
        name, name_at = TOOL, sample.body.rfind(TOOL, 0, start)
        if name_at < 0:
            name, name_at = sample.call_id, sample.body.rfind(sample.call_id, 0, start)
        if value != VALUES or name_at < 0:
            continue
        between, gap, after = sample.split_at(name_at, end)
        before = re.search(rf"({MARK}\w+{MARK}|{MARK}|<function=)\s*$", between)
        middle = re.fullmatch(rf"(?:({MARK})\w+)?(\s*)({MARK}|>|{FENCE})?\s*", sample.body[name_at + len(name) : start])
        closing = re.match(rf"\s*({_FENCE})?\s*({MARK})?", after)
        if before and middle and closing and bool(closing[1]) == (middle[3] or "").startswith(_FENCE):
            marks = CallMarks(before[1], closing[2] or "", gap)
            return NamedForm(marks, middle[3] or "", middle[1] or "", name != TOOL, middle[2] if middle[3] else "")
    return None


class NamedScan:
    """One call; see `CallScan`."""

    def __init__(self, form: NamedForm) -> None:
        self._form = form
        self._json = JsonArguments(form.marks.close)
        self._has_begun = False
        self._is_over = False  # the call has no arguments

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        return self._arguments(text, at, final) if self._has_begun else self._head(text, at)

    def _head(self, text: str, at: int) -> tuple[int, Step]:
        """The name and what follows it, read again until the arguments begin."""
        begin = skip_blanks(text, at)
        name = _NAME.match(text, begin)
        if name is None:
            return at, "more" if begin == len(text) else "broken"
        end = self._arguments_start(text, name.end())
        if end is None:
            return at, "more"
        close = self._form.marks.close
        has_none = bool(close) and text.startswith(close, end)
        if not has_none and (problem := self._no_object(text, end)) is not None:
            return at, problem
        begun = self._begun(name.group(), "{}" if has_none else None)
        self._has_begun = begun is not None
        return (at, "broken") if begun is None else (end, begun)

    def _no_object(self, text: str, at: int) -> Literal["more", "broken"] | None:
        """Why no object begins here. After a mark that plain text may have, its first sign must be that of one, too."""
        close = self._form.marks.close
        if not text.startswith("{", at):
            return "more" if close and close.startswith(text[at:]) else "broken"
        first = skip_blanks(text, at + 1)
        if GUARD in self._form.marks.open or text.startswith(('"', "}"), first):
            return None
        return "more" if first == len(text) else "broken"

    def _begun(self, name: str, arguments: str | None) -> Begun | None:
        self._is_over = arguments is not None
        if not self._form.is_named_by_id:
            return Begun(name, arguments)
        naming = _NAMING_ID.fullmatch(name)
        return Begun(naming[1], arguments, name) if naming else None

    def _arguments_start(self, text: str, at: int) -> int | None:
        """Where the arguments should begin; None: not known yet."""
        for mark, value in ((self._form.id_mark, _ID), (self._form.separator, None)):
            at = skip_blanks(text, at)
            rest = text[at:]
            if mark and rest.startswith(mark):
                found = value.match(text, at + len(mark)) if value else None
                at = found.end() if found else at + len(mark)
            elif mark and mark.startswith(rest):
                return None
            elif mark.startswith(_FENCE) and (fence := _ANY_FENCE.match(text, at)):
                if fence.end() == len(text):
                    return None
                at = fence.end()
        at = skip_blanks(text, at)
        return at if at < len(text) else None

    def _arguments(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        end, found = (at, "closed") if self._is_over else self._json.advance(text, at, final=final)
        if isinstance(found, Passed) or found == "more":
            return end, found
        close, is_whole = self._form.marks.close, self._is_over or self._json.whole
        end = skip_blanks(text, at)
        if self._form.separator.startswith(_FENCE):
            if _FENCE.startswith(text[end : end + len(_FENCE)]) and len(text) - end < len(_FENCE) and not final:
                return at, "more"
            end = skip_blanks(text, end + len(_FENCE)) if text.startswith(_FENCE, end) else end
        if close and text.startswith(close, end):
            return end + len(close), Ended(is_whole)
        if close and found == "closed" and not final and close.startswith(text[end:]):
            return at, "more"
        return at, Ended(is_whole)


# Calls as JSON objects whose only key is the name, in a list.
#
#     <|tools_prefix|>[{"look": {"place": "attic"}}]<|tools_suffix|>
#
# The arguments are emitted verbatim, as they come. What follows them in an object is no call.


@dataclass(frozen=True, slots=True)
class NameKeyForm:
    """Such calls between marks."""

    marks: CallMarks

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        return f'{self.marks.open}[{{"' + ("" if name is None else f'{escaped(name)}": ')

    @property
    def layout(self) -> CallLayout:
        """How whole calls are written."""
        return CallLayout(f"{self.marks.open}[", '{"', '":', "}", ", ", f"]{self.marks.close}", escape=escaped)

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        return NameKeyScan


def recognise_name_keys(sample: CallSample) -> NameKeyForm | None:
    """The form, if the sample's call is written like this."""
    for start, end, value in json_objects(sample.body):
        if value != {TOOL: VALUES}:
            continue
        between, gap, after = sample.split_at(start, end)
        before, closing = re.search(rf"({MARK})\s*\[\s*$", between), re.match(rf"\s*\]\s*({MARK})", after)
        if before and closing:
            return NameKeyForm(CallMarks(before[1], closing[1], gap, listed=True))
    return None


class NameKeyScan:
    """One call; see `CallScan`."""

    def __init__(self) -> None:
        self._json = JsonArguments()
        self._has_begun = False

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        return self._arguments(text, at, final) if self._has_begun else self._head(text, at)

    def _head(self, text: str, at: int) -> tuple[int, Step]:
        """The brace, the name and the colon, read again until the arguments begin."""
        end, name = at, ""
        for sign in ("{", '"', ":"):
            end = skip_blanks(text, end)
            if end == len(text):
                return at, "more"
            if text[end] != sign:
                return at, "broken"
            if sign == '"':
                found = _STRING.match(text, end)
                if found is None:
                    return at, "more" if _PART_OF_STRING.fullmatch(text, end) else "broken"
                end, name = found.end() - 1, found.group()
            end += 1
        end = skip_blanks(text, end)
        if end == len(text):
            return at, "more"
        if text[end] != "{":
            return at, "broken"
        try:
            name = json.loads(name, strict=False)
        except ValueError:
            return at, "broken"
        if not name or not is_sound(name):
            return at, "broken"
        self._has_begun = True
        return end, Begun(name)

    def _arguments(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        end, found = self._json.advance(text, at, final=final)
        if isinstance(found, Passed) or found == "more":
            return end, found
        if found == "cut":
            return at, Ended(False)
        end = skip_blanks(text, at)
        if end == len(text):
            return (end, Ended(self._json.whole)) if final else (at, "more")
        return end + 1 if text[end] == "}" else at, Ended(self._json.whole)
