"""Types of arguments from the definitions of tools, and text as JSON of these types.

For forms that write values without types: the text `7` is a number for one tool and a string for another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print them


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
            return types_in(properties.get(key)) if isinstance(properties, Mapping) else frozenset()
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
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def types_in(schema: Any) -> frozenset[str]:
    """The types of a schema, also of its alternatives and of the values of an enumeration."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    if isinstance(schema.get("enum"), list):
        return frozenset("string" if isinstance(each, str) else "number" for each in schema["enum"])
    choices = [each for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return frozenset().union(*map(types_in, choices))
