"""The arguments of a call as JSON, passed on while they are generated, and their types from the definitions of tools.

Shared by the forms. JSON is passed on verbatim but for strings, which are repaired (`text/arguments`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rekindle.text.arguments import StringRepair, ValueScan, read_object
from rekindle.text.messages import GUARD
from rekindle.text.replies.reader import Passed

# "closed": the value is complete. "cut": a mark interrupts it. "more": it depends on text to come.
Found = Passed | Literal["closed", "cut", "more"]
MOST_REFERENCES = 16  # one inside another
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print them


class JsonArguments:
    """Reads one JSON value, which the mark `close` (if there is one) and special tokens cut off."""

    def __init__(self, close: str = "") -> None:
        self._close = close
        self._scan = ValueScan(close[:1] or GUARD)
        self._repair = StringRepair()
        self._passed: list[str] = []

    @property
    def closed(self) -> bool:
        """Whether the value has ended."""
        return self._scan.done

    @property
    def whole(self) -> bool:
        """Whether the value is complete, and JSON if it is an object. Costs a pass over it."""
        text = "".join(self._passed)
        return self._scan.done and (not text.startswith("{") or read_object(text) is not None)

    @property
    def begun(self) -> bool:
        """Whether anything of the value was read."""
        return self._scan.begun

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Found]:
        """Read one more piece of `text` from `at`; at the end of everything (`final`) an open value is "cut"."""
        end = self._scan.read(text, at)
        while not self._scan.done and end < len(text):
            rest = text[end:]
            is_part = bool(self._close) and self._close.startswith(rest) and not final
            if rest.startswith(GUARD) or (self._close and rest.startswith(self._close)) or is_part:
                break
            end = self._scan.read(text, end + 1)
        if end > at:
            is_object = (self._passed or [text[at]])[0].startswith("{")
            return end, self._pass(self._repair.push(text[at:end]) if is_object else text[at:end])
        if self._scan.done:
            return at, "closed"
        rest = text[at:]
        waits = not final and (not rest or (bool(self._close) and self._close.startswith(rest) and rest != self._close))
        if not waits and self._repair.held:
            held, self._repair = self._repair.held, StringRepair()
            return at, self._pass(held)
        return at, "more" if waits else "cut"

    def _pass(self, text: str) -> Passed:
        self._passed.append(text)
        return Passed(text)


# Types of arguments from the definitions of tools, and text as JSON of these types.
#
# For forms that write values without types: the text `7` is a number for one tool and a string for another.


def function_of(tool: Any) -> Mapping[str, Any]:
    """The function in a tool's definition, with or without the object around it."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def names_of(tools: Sequence[Any]) -> frozenset[str]:
    """The names of these tools."""
    return frozenset(name for tool in tools if isinstance(name := function_of(tool).get("name"), str))


def types_of(tools: Sequence[Any], name: str, *, key: str) -> frozenset[str]:
    """The JSON types that argument `key` of tool `name` may have; empty if none are declared."""
    for function in map(function_of, tools):
        if function.get("name") == name:
            schema = function.get("parameters") or function.get("input_schema")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return types_in(properties.get(key), schema) if isinstance(properties, Mapping) else frozenset()
    return frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON for a value written as bare text; a string if it has no other type that is allowed."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    kind = _kind_of(bare)
    wanted = kind is not None and (not types or kind in types or (kind == "integer" and "number" in types))
    if wanted and kind is not None and ("string" not in types or kind == "null"):
        return bare
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Text as it is inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _kind_of(text: str) -> str | None:
    """The JSON type of this text; None for strings and for what is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, str) else kind_of_value(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def types_in(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types that a value of a schema may have; empty if none are declared. `root` has its definitions."""
    kinds = [_types_of_leaf(leaf) for leaf in leaves(schema, root)]
    return frozenset().union(*kinds) if all(kinds) else frozenset()


def leaves(schema: Any, root: Any = None) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, references to definitions in `root` followed; empty for what is no schema."""
    return _leaves(schema, root, MOST_REFERENCES)


def _leaves(schema: Any, root: Any, left: int) -> list[Mapping[str, Any]]:
    if not isinstance(schema, Mapping):
        return [{}] if schema is True else []
    reference = schema.get("$ref")
    if isinstance(reference, str) and left:
        return _leaves(_referenced(reference, root), root, left - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        inside = schema.get(key)
        if isinstance(inside, list) and left and (key != "allOf" or len(inside) == 1):
            return [leaf for each in inside for leaf in _leaves(each, root, left - 1)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": each} for each in schema["type"]]
    return [schema]


def _referenced(reference: str, root: Any) -> Any:
    """The definition that a reference within a schema points at; None if there is none."""
    found = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _types_of_leaf(leaf: Mapping[str, Any]) -> frozenset[str]:
    if isinstance(leaf.get("type"), str):
        return frozenset((leaf["type"],))
    if "const" in leaf:
        return frozenset((kind_of_value(leaf["const"]),))
    return frozenset(map(kind_of_value, leaf["enum"])) if isinstance(leaf.get("enum"), list) else frozenset()


def kind_of_value(value: Any) -> str:
    """The JSON type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return kinds.get(type(value), "null")
