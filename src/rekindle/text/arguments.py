"""Arguments of tool calls: the text that a model wrote, and the object that a template or a tool reads.

Owns what can be read of a text that is no JSON object, because the reply was cut off or the model made a mistake. Knows
no dialect and no form of calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.text.messages import GUARD, map_strings, sound
from rekindle.text.tools_json import ValueScan, is_json, repaired, skip_blanks

TEXT_KEY = "arguments"  # of what has no key of its own


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
