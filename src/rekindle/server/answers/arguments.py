"""Streaming of tool-call arguments as valid JSON, even if the model's output is not.

Anthropic's clients parse `input_json_delta` pieces as they arrive and fail on invalid JSON, and Ollama's take arguments
as an object only. So the output is always a valid prefix of an object: line breaks inside strings are escaped, unpaired
surrogates are replaced. Where the object becomes invalid, what is open is closed, and the whole text of the arguments
is its last member: no tool takes the beginning for a call. Arguments that are not an object are converted to one when
they end.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pydantic_core

from rekindle.text.arguments import TEXT_KEY

# A complete token, or (the last group) one whose end may not have arrived yet.
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\n\r]+)
    |(?P<sign>[{}\[\]:,])
    |(?P<quote>")
    |(?P<word>(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?=[ \t\n\r{}\[\]:,"]))
    |(?P<part>[-+.\w]{1,400}\Z)""",
    re.VERBOSE,
)
_CHARS = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
MAX_DEPTH = 100  # nested brackets; clients' parsers fail at 200
MAX_NUMBER_CHARS = 400
_MAX_ESCAPE_CHARS = 12  # a surrogate pair
_REPLACED = "\\ufffd"


class ArgumentsJson:
    """Converts one call's arguments, piece by piece, into pieces of a JSON object."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._sent: list[str] = []
        self._held = ""
        self._stack: list[str] = []
        self._wants = "object"
        self._in_string = False
        self._is_broken = False
        self._is_whole = False

    def push(self, piece: str) -> str:
        """Add a piece; return the new output that is certain to be valid JSON."""
        self._raw.append(piece)
        self._held += piece
        out: list[str] = []
        while self._held and not self._is_broken and (self._string(out) if self._in_string else self._token(out)):
            pass
        text = "".join(out)
        self._sent.append(text)
        return text

    def finish(self) -> str:
        """Return the final output: arguments that are not an object are returned whole, as one."""
        if self._stack and self._is_broken:
            text = self._closed()
            self._sent.append(text)
            return text
        if self._stack or self._is_whole:
            return ""
        text = json.dumps(_as_object("".join(self._raw)), ensure_ascii=False)
        self._sent = [text]
        return text

    def value(self) -> dict[str, Any]:
        """Return the object as a client parses it from the pieces; a truncated string is not part of it."""
        sent = "".join(self._sent)
        found = pydantic_core.from_json(sent, allow_partial=True) if sent.strip() else {}
        assert isinstance(found, dict), sent
        return found

    def _closed(self) -> str:
        """Close what is open, the arguments as they were written as its last member."""
        written = f"{json.dumps(TEXT_KEY)}: {json.dumps(''.join(self._raw))}"
        out = ['"'] if self._in_string else []
        while self._stack:
            out.append({"colon": ": null", "value": "null"}.get(self._wants, ""))
            is_object, is_last = self._stack.pop() == "{", not self._stack
            if is_last:
                out.append(written if self._wants in ("key", "first key") else f", {written}")
            elif self._wants == "key":
                out.append('"": null')
            out.append("}" if is_object else "]")
            self._wants = "comma"
        return "".join(out)

    def _token(self, out: list[str]) -> bool:
        found = _TOKEN.match(self._held)
        before = self._wants, self._in_string, list(self._stack)
        if found is None or (found.lastgroup != "blank" and not self._allows(found)):
            self._wants, self._in_string, self._stack = before
            self._is_broken = True
            return False
        if found.lastgroup == "part":
            return False
        self._held = self._held[found.end() :]
        out.append(found.group())
        return True

    def _allows(self, found: re.Match[str]) -> bool:
        """Whether the grammar allows this token here; updates the state."""
        sign, wants = found.group(), self._wants
        if wants == "object":
            return sign == "{" and self._enter("{")
        if found.lastgroup == "quote":
            self._in_string = wants in ("key", "first key", "value", "first value")
            self._wants = "colon" if wants.endswith("key") else "comma"
            return self._in_string
        if found.lastgroup == "part":
            return wants in ("value", "first value")
        if found.lastgroup == "word":
            self._wants = "comma"
            return wants in ("value", "first value") and _is_readable(sign)
        return self._sign(sign, wants)

    def _sign(self, sign: str, wants: str) -> bool:
        if sign in "{[":
            return wants in ("value", "first value") and self._enter(sign)
        if sign in "}]":
            fits = bool(self._stack) and self._stack[-1] == {"}": "{", "]": "["}[sign]
            if not fits or wants not in ("comma", "first key" if sign == "}" else "first value"):
                return False
            self._stack.pop()
            self._is_whole = not self._stack
            self._wants = "comma" if self._stack else "nothing"
            return True
        if sign == ":":
            self._wants = "value"
            return wants == "colon"
        self._wants = "key" if self._stack and self._stack[-1] == "{" else "value"
        return wants == "comma"

    def _enter(self, sign: str) -> bool:
        self._stack.append(sign)
        self._wants = "first key" if sign == "{" else "first value"
        return len(self._stack) <= MAX_DEPTH

    def _string(self, out: list[str]) -> bool:
        """Consume part of a string; False if more input is needed."""
        found = _CHARS.match(self._held) or _PAIR.match(self._held)
        if found is not None:
            self._take(found.group(), found.end(), out)
            return True
        first = self._held[0]
        if first == '"':
            self._in_string = False
            self._take(first, 1, out)
        elif first != "\\":
            self._take(_REPLACED if first > "\x1f" else json.dumps(first)[1:-1], 1, out)
        else:
            return self._escape(out)
        return True

    def _escape(self, out: list[str]) -> bool:
        found = _ESCAPE.match(self._held)
        if found is None:
            self._is_broken = len(self._held) >= _MAX_ESCAPE_CHARS // 2 or not _may_become_escape(self._held)
            return False
        escape = found.group()
        if escape[1] == "u" and 0xD800 <= int(escape[2:], 16) <= 0xDFFF:
            if int(escape[2:], 16) < 0xDC00 and len(self._held) < _MAX_ESCAPE_CHARS and _may_pair(self._held[6:]):
                return False
            escape = _REPLACED
        self._take(escape, found.end(), out)
        return True

    def _take(self, text: str, size: int, out: list[str]) -> None:
        out.append(text)
        self._held = self._held[size:]


def _is_readable(word: str) -> bool:
    """Whether clients can parse this number or word: floats must be finite, integers short enough for Python."""
    return word in ("true", "false", "null") or (len(word) <= MAX_NUMBER_CHARS and math.isfinite(float(word)))


def _may_become_escape(held: str) -> bool:
    return held == "\\" or (held.startswith("\\u") and re.fullmatch(r"[0-9a-fA-F]*", held[2:]) is not None)


def _may_pair(held: str) -> bool:
    """Whether the second half of a surrogate pair may follow."""
    return re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]{0,2})?)?)?)?", held) is not None


def _as_object(raw: str) -> dict[str, Any]:
    """Convert arguments that do not begin as an object: decode a JSON string, or wrap the value as `arguments`."""
    for _ in range(2):
        try:
            value = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            break
        if isinstance(value, dict):
            return value
        if not isinstance(value, str):
            return {"arguments": value}
        raw = value
    return {"arguments": raw} if raw.strip() else {}
