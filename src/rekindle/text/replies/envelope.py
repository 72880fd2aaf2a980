"""Calls as a JSON object with name and arguments, between marks, in a list or bare.

    <tool_call>                                         [TOOL_CALLS] [{"name": "look", "arguments": {}}]
    {"name": "look", "arguments": {"place": "attic"}}
    </tool_call>                                        {"name": "look", "parameters": {}}

The arguments are emitted verbatim, as they come. Members come in any order, further ones are skipped, a missing closing
mark and extra braces are accepted. A bare object is a call only if it has arguments, and the name of a tool if those
are known: replies that are JSON begin like it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.text.arguments import ARGUMENTS_KEYS, NAME_KEYS, Envelope, Verdict, object_text, skip_blanks
from rekindle.text.messages import GUARD
from rekindle.text.replies.arguments import JsonArguments, escaped, names_of
from rekindle.text.replies.reader import Begun, CallLayout, CallMarks, CallScan, Ended, Passed, Step
from rekindle.text.replies.sample import FENCE, MARK, TOOL, VALUES, CallSample, json_objects

HERMES = CallMarks("<tool_call>", "</tool_call>")
_TAG = f"{GUARD}<|python_tag|>"  # some models write it before bare calls, their templates do not


@dataclass(frozen=True, slots=True)
class EnvelopeForm:
    """Calls as JSON objects; `name_key` and `key` are those of the name and of the arguments; `blank` is what the
    template puts after the opening mark. `exact` as in a `CallLayout`.
    """

    marks: CallMarks = HERMES
    key: str = "arguments"
    blank: str = "\n"
    name_key: str = "name"
    exact: bool = False

    def opening(self, name: str | None) -> str:
        """How a call begins, up to its arguments or its name."""
        head = f'{self.marks.open}{self.blank}{"[" if self.marks.listed else ""}{{"{self.name_key}": "'
        return head if name is None else f'{head}{escaped(name)}", "{self.key}":'

    @property
    def layout(self) -> CallLayout:
        """How whole calls are written."""
        marks, listed = self.marks, self.marks.listed
        head, begin = f'{{"{self.name_key}": "', f"{marks.open}{self.blank}"
        middle, tail = f'", "{self.key}":', f"}}{self.blank}{marks.close}"
        if listed:
            return CallLayout(f"{begin}[", head, middle, "}", ", ", f"]{marks.close}", has_id=True, escape=escaped)
        joint = "\n" if marks.open else ""
        return CallLayout("", begin + head, middle, tail, joint, only_one=self.exact, exact=self.exact, escape=escaped)

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call."""
        names = None if self.marks.open else names_of(tools)
        return lambda: EnvelopeScan(self.marks, names)


def recognise_envelope(sample: CallSample) -> EnvelopeForm | None:
    """The form, if the sample's call is a JSON object with its name and arguments."""
    for start, end, value in json_objects(sample.body):
        key = next((key for key in ARGUMENTS_KEYS if value.get(key) == VALUES), None)
        name_key = next((key for key in NAME_KEYS if value.get(key) == TOOL), None)
        if name_key is not None and key is not None:
            form = _form_around(sample, start, end, key)
            return None if form is None else replace(form, name_key=name_key)
    return None


def _form_around(sample: CallSample, start: int, end: int, key: str) -> EnvelopeForm | None:
    between, gap, after = sample.split_at(start, end)
    before = re.search(rf"({MARK}|{FENCE})?(\s*)(\[?)(\s*)$", between)
    closing = re.match(rf"\s*(\]?)\s*({MARK}|```)?", after)
    assert before is not None and closing is not None  # every part of them may be missing
    open_, listed = before[1] or "", bool(before[3] and closing[1])
    if not open_:
        tag = _TAG if _TAG in sample.specials else ""
        return None if between.strip() else EnvelopeForm(CallMarks("", tag=tag), key, "")
    return EnvelopeForm(CallMarks(open_, closing[2] or "", gap, listed), key, before[2])


class EnvelopeScan:
    """One call; see `CallScan`. `names`: those a bare call may have, None if any is accepted."""

    def __init__(self, marks: CallMarks, names: frozenset[str] | None = None) -> None:
        self._is_bare = not marks.open
        self._names = names
        self._close = "" if marks.listed else marks.close
        self._envelope = Envelope()
        self._json = JsonArguments(self._close)
        self._is_whole = True
        self._step = self._head

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Step]:
        """Read one more piece."""
        return self._step(text, at, final)

    def _head(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """Before name and arguments are known."""
        verdict: Verdict = "go"
        while verdict == "go":
            at, verdict = self._envelope.advance(text, at)
        name, arguments = self._envelope.name, self._envelope.arguments
        if verdict == "more":
            return at, "more"
        has_none = verdict != "object" and arguments is None
        if name is None or verdict == "broken" or (self._is_bare and (has_none or not self._is_known(name))):
            return at, "broken"
        if verdict == "object":
            self._step = self._arguments
            return at, Begun(name)
        self._envelope.started = True
        self._step = self._closing
        return at, Begun(name, object_text(arguments or "{}"))

    def _arguments(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        end, found = self._json.advance(text, at, final=final)
        if isinstance(found, Passed) or found == "more":
            return end, found
        if found == "cut":
            return at + (len(self._close) if text.startswith(self._close, at) else 0), Ended(False)
        self._is_whole = self._json.whole
        self._envelope.resume()
        self._step = self._closing
        return self._closing(text, at, final)

    def _closing(self, text: str, at: int, final: bool) -> tuple[int, Step]:
        """After the arguments: the end of the envelope and the closing mark."""
        verdict: Verdict = "closed" if self._envelope.closed else "go"
        while verdict != "more":
            if verdict == "closed" and not self._close:
                return at, Ended(self._is_whole)
            inside = self._envelope.inside_value
            begin = at if inside else skip_blanks(text, at)
            rest = text[begin:]
            if not inside and self._close:
                if rest.startswith(self._close):
                    return begin + len(self._close), Ended(self._is_whole)
                if self._close.startswith(rest):
                    break
            taken, verdict = self._envelope.advance(text, begin)
            if verdict == "broken":
                return at, Ended(self._is_whole)
            at = taken
        return (len(text), Ended(self._is_whole)) if final else (at, "more")

    def _is_known(self, name: str) -> bool:
        return not self._names or name in self._names
