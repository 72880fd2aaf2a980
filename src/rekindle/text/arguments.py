"""Arguments of tool calls: the JSON that a model writes, and the object that a template or a tool reads.

Owns what can be read of a text that is no JSON object, because the reply was cut off or the model made a mistake. Knows
no dialect and no form of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from rekindle.text.messages import GUARD, is_sound, map_strings, sound

TEXT_KEY = "arguments"  # of what has no key of its own
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


class Arguments(dict[str, Any]):
    """Tool arguments as a template sees them: an object, whose JSON is the text the model generated."""

    def __init__(self, value: Mapping[str, Any], verbatim: str) -> None:
        super().__init__(value)
        self.verbatim = verbatim


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object that this text is, its strings repaired, the empty one for no text; None if it is none."""
    if not text.strip():
        return {}
    try:
        value = json.loads(repaired(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def object_text(text: str) -> str:
    """Return the object that arguments in JSON mean: null is none, a string may hold one; other values as they are."""
    value = json.loads(text, strict=False)
    if value is None:
        return "{}"
    return value if isinstance(value, str) and value.strip() and read_object(value) is not None else text


def readable_part(text: str) -> dict[str, Any]:
    """Return an object with what can be read of arguments, and the rest as text; nothing is lost, nothing raised.

    Of an object that breaks off, the value that is not whole is its text, so far as it goes. What has no key is under
    `arguments`, as are values of other types; a string that holds an object is that object.
    """
    for _ in range(2):
        found = read_object(text)
        if found is not None:
            return found
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return _members(text)
        if not isinstance(value, str):
            return value if isinstance(value, dict) else {TEXT_KEY: value}
        text = value
    return {TEXT_KEY: text}


def _members(text: str) -> dict[str, Any]:
    """The members before the place where this text stops being an object."""
    text, members = repaired(text), dict[str, Any]()
    at = skip_blanks(text)
    while text[at : at + 1] == ("," if members else "{"):
        found = _member(text, skip_blanks(text, at + 1))
        if found is None:
            break
        key, begin, end = found
        value = text[begin:end]
        members[key] = json.loads(value, strict=False) if is_json(value) else _open_text(value)
        at = skip_blanks(text, end)
    rest = text[at:].strip()
    return members if members and not rest.strip(",} \t\r\n") else members | {TEXT_KEY: rest}


def _member(text: str, at: int) -> tuple[str, int, int] | None:
    """The key at this place, and where its value begins and ends, in this text; None if none is there."""
    end = _value_end(text, at)
    colon = skip_blanks(text, end)
    if text[at : at + 1] != '"' or text[colon : colon + 1] != ":" or not is_json(text[at:end]):
        return None
    begin = skip_blanks(text, colon + 1)
    return json.loads(text[at:end], strict=False), begin, _value_end(text, begin)


def _value_end(text: str, at: int) -> int:
    """Where the value at this place ends; one that does not ends with the text."""
    scan = ValueScan(halt=GUARD)
    end = scan.read(text, at)
    return end if scan.done else len(text)


def _open_text(rest: str) -> str:
    """A value that may not be whole, as text: of a string what is in it."""
    if not rest.startswith('"'):
        return rest
    for num_cut in range(min(len(rest), 7)):  # the text may end inside an escape
        try:
            return str(json.loads(f'{rest[: len(rest) - num_cut]}"', strict=False))
        except ValueError:
            continue
    return rest[1:]


def arguments_for_template(arguments: str, change: Callable[[str], str]) -> Any:
    """Return tool arguments as an object if they are one, else the string; `change` is applied to every string.

    JSON escapes can encode what no prompt may contain: values get U+FFFD for it, the text keeps its escapes.
    """
    value = read_object(arguments)
    values = None if value is None else _changed(value, change)
    return change(arguments) if values is None else Arguments(values, change(arguments) if arguments.strip() else "{}")


def object_for_template(arguments: str, change: Callable[[str], str]) -> dict[str, Any]:
    """The same for templates that take objects only: an object with what can be read of the arguments."""
    values = _changed(readable_part(arguments), change)
    return {TEXT_KEY: change(arguments)} if values is None else values


def _changed(value: Any, change: Callable[[str], str]) -> dict[str, Any] | None:
    """An object with every string in it changed; None if it is nested too deeply."""
    try:
        return dict(map_strings(value, lambda text: change(sound(text))))
    except RecursionError:
        return None


# The JSON inside a tool call, read as it is generated.
#
# Owns where a value ends and what the envelope `{"name": ..., "arguments": ...}` holds so far. Inside values only
# strings and brackets are followed: the caller interprets arguments. What models get wrong in strings is put right
# where only one reading is possible. Knows no marks around the call.


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
