"""The JSON inside a tool call, read as it is generated.

Owns where a value ends and what the envelope `{"name": ..., "arguments": ...}` holds so far. Inside values only strings
and brackets are followed: the caller interprets arguments. What models get wrong in strings is put right where only
one reading is possible. Knows no marks around the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from rekindle.text.messages import GUARD, is_sound

# "go": a piece was read. "more": it depends on text to come. "object": the arguments begin here and can be passed on
# as they come. "ready": name and arguments are known. "closed": the envelope is closed. "broken": this is no call.
Verdict = Literal["go", "more", "object", "ready", "closed", "broken"]

NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
_QUOTE = re.compile('"')
_ODD = re.compile(r'["\\\x00-\x1f]')  # in a string: its end, an escape, or what may not be there
_ESCAPE = re.compile(r"""\\(?:["\\/bfnrt']|u[0-9a-fA-F]{4})""")
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_BLANKS = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(rf'["\\{GUARD}]')
# For each step between values: the sign that may come, and the next step.
_NEXT: Mapping[str, Mapping[str, str]] = {
    "open": {"{": "first key"},
    "colon": {":": "value"},
    "comma": {",": "key", "}": "end"},
    "end": {},
}
_SCALAR_END = re.compile(rf"[,{{}}\[\]<{GUARD}\" \t\n\r]")


def skip_blanks(text: str, at: int = 0) -> int:
    """The first place at or after `at` that holds no JSON white space."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at


class StringRepair:
    """Puts right what strings in JSON may not contain, in text that comes in pieces.

    A backslash that escapes nothing becomes two, a control character its escape. `\\'` stays: it may mean either sign.
    """

    def __init__(self) -> None:
        self.held = ""  # the beginning of an escape
        self._in_string = False

    def push(self, piece: str) -> str:
        """Add a piece; return what is certain by now."""
        text, at, out = self.held + piece, 0, list[str]()
        while at < len(text):
            found = (_ODD if self._in_string else _QUOTE).search(text, at)
            out.append(text[at : found.start() if found else None])
            at = found.start() if found else len(text)
            if found is None or (found.group() == "\\" and _OPEN_ESCAPE.fullmatch(text, at)):
                break
            escape = _ESCAPE.match(text, at)
            out.append(escape.group() if escape else self._sign(found.group()))
            at = escape.end() if escape else at + 1
        self.held = text[at:]
        return "".join(out)

    def _sign(self, sign: str) -> str:
        if sign == '"':
            self._in_string = not self._in_string
            return sign
        return json.dumps(sign)[1:-1]


def repaired(text: str) -> str:
    """The same of a whole text."""
    repair = StringRepair()
    return repair.push(text) + repair.held


def is_json(text: str) -> bool:
    """Whether this is one JSON value; control characters inside strings are accepted, as models write them."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


class ValueScan:
    """Finds the end of one value in text that comes in pieces; the value starts where `read` is first called.

    It halts where a mark may begin: at the sign `halt` outside strings, and at a guard anywhere.
    """

    def __init__(self, halt: str = "<") -> None:
        self.done = False
        self._outside = _outside(halt)
        self._kind: Literal["string", "brackets", "scalar"] | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def begun(self) -> bool:
        """Whether anything was read."""
        return self._kind is not None

    def read(self, text: str, at: int) -> int:
        """Continue from `at`. Return the place after the value (`done`), of a sign it halts at, or the end."""
        if self._kind is None and at < len(text):
            self._kind = "string" if text[at] == '"' else "brackets" if text[at] in "{[" else "scalar"
        if self._kind == "scalar":
            found = _SCALAR_END.search(text, at)
            self.done = found is not None
            return found.start() if found else len(text)
        while at < len(text) and not self.done:
            begin = at + (self._escaped and text[at] != GUARD)
            found = (_IN_STRING if self._in_string else self._outside).search(text, begin)
            if found is None:
                self._escaped = False
                return len(text)
            self._escaped = False
            if found.group() not in '"\\{}[]':
                return found.start()
            at = found.end()
            self._take(found.group())
            if self._escaped and at < len(text) and text[at] != GUARD:
                at, self._escaped = at + 1, False
        return at

    def _take(self, sign: str) -> None:
        if sign == "\\":
            self._escaped = True
            return
        if sign == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if sign in "{[" else -1
        self.done = self._depth <= 0 and not self._in_string


@cache
def _outside(halt: str) -> re.Pattern[str]:
    return re.compile(rf'["{{}}\[\]{re.escape(halt)}{GUARD}]')


class Envelope:
    """Reads the object around a call, a step at a time; `name` and `arguments` as far as they are known.

    Once `started` (its name and arguments were emitted), further members are skipped and extra braces accepted.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.started = False
        self._step = "open"
        self._key: str | None = None
        self._scan: ValueScan | None = None
        self._start = 0

    @property
    def inside_value(self) -> bool:
        """Whether a key or value has begun and not ended."""
        return self._scan is not None

    @property
    def closed(self) -> bool:
        """Whether its last brace was read."""
        return self._step == "end"

    def resume(self) -> None:
        """Continue after arguments that were read elsewhere."""
        self.started, self._step = True, "comma"

    def advance(self, text: str, at: int) -> tuple[int, Verdict]:
        """Read one more piece of `text` from `at`, where the last one ended; return where this one ends."""
        if self._scan is not None:
            return self._value(text, at, self._scan)
        at = skip_blanks(text, at)
        if at == len(text):
            return at, "more"
        if self._step not in _NEXT:
            return self._begin(text, at)
        step = _NEXT[self._step].get(text[at])
        if step is None and self._step == "end" and self.started and text[at] == "}":
            step = "end"
        if step is None:
            return at, "broken"
        self._step = step
        return at + 1, "closed" if step == "end" else "go"

    def _begin(self, text: str, at: int) -> tuple[int, Verdict]:
        """The first character of a key or value."""
        sign, is_value = text[at], self._step == "value"
        if self._step == "first key" and sign == "}":
            self._step = "end"
            return at + 1, "closed"
        if not is_value and sign != '"':
            return at, "broken"
        is_arguments = is_value and self._key in ARGUMENTS_KEYS and not self.started
        if is_arguments and sign == "{" and self.name is not None:
            return at, "object"
        self._scan, self._start = ValueScan(), at
        return self._value(text, at, self._scan)

    def _value(self, text: str, at: int, scan: ValueScan) -> tuple[int, Verdict]:
        end = scan.read(text, at)
        if not scan.done:
            return end, "more" if end == len(text) else "broken"
        self._scan = None
        value = text[self._start : end]
        if self._step != "value":
            self._key, self._step = value[1:-1], "colon"
            return end, "go"
        self._step = "comma"
        return end, "go" if self.started else self._member(value)

    def _member(self, value: str) -> Verdict:
        value = repaired(value)
        if not is_json(value):
            return "broken"
        if self._key in NAME_KEYS:
            name = json.loads(value, strict=False)
            if not isinstance(name, str) or not name or not is_sound(name):
                return "broken"
            self.name = name
        elif self._key in ARGUMENTS_KEYS:
            self.arguments = value
        return "ready" if self.name is not None and self.arguments is not None else "go"
