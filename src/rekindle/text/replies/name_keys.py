"""Calls as JSON objects whose only key is the name, in a list.

    <|tools_prefix|>[{"look": {"place": "attic"}}]<|tools_suffix|>

The arguments are emitted verbatim, as they come. What follows them in an object is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.text.messages import GUARD, is_sound
from rekindle.text.replies.arguments import JsonArguments
from rekindle.text.replies.reader import Begun, CallLayout, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import MARK, TOOL, VALUES, CallSample, json_objects
from rekindle.text.replies.types import escaped
from rekindle.text.tools_json import skip_blanks

_STRING = re.compile(rf'"(?:[^"\\{GUARD}]|\\.)*"')
_PART_OF_STRING = re.compile(rf'"(?:[^"\\{GUARD}]|\\.)*\\?')


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
