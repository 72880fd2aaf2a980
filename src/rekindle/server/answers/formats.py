"""Formats of a reply in the words of every dialect, as constraints of the engine.

response_format   {"type": "json_schema", "json_schema": {"schema": ...}}     OpenAI's chat, vLLM's completions
text.format       {"type": "json_schema", "schema": ...}                      OpenAI's responses, Anthropic's, too
structured_outputs {"json" | "regex" | "choice" | "grammar": ...}             vLLM; before as guided_json and so on
json_schema, grammar                                                          llama.cpp
format            "json", or a schema                                         Ollama's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.answers.validation import short
from rekindle.text.constraints.types import Constraint, Kind
from rekindle.text.messages import check_json

ANY_OBJECT = {"type": "object"}
# Names outside of `structured_outputs`: vLLM's until 0.11, and llama.cpp's.
NAMES: Mapping[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
# Of vLLM's `structured_outputs`: how its libraries behave, without effect on which replies are valid.
_STYLE = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def read_format(given: Any, param: str) -> Constraint | None:
    """Return the constraint of a format with a type; None for plain text. BadRequest names what is wrong."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint("json", ANY_OBJECT, param)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _checked("json", schema, f"{param}.json_schema.schema")
        case {"type": "json_schema", "schema": schema}:
            return _checked("json", schema, f"{param}.schema")
        case {"type": "json_schema"}:
            raise BadRequest(f"{param}: a format of type json_schema needs its schema", param=param)
    message = f"{param}: {short(given)} is not supported: use a type, text, json_object or json_schema"
    raise BadRequest(message, param=param)


def read_schema(given: str | Mapping[str, Any] | None, param: str) -> Constraint | None:
    """Return the constraint of Ollama's format: `json` for any object, or a schema; None without one, or for ""."""
    if given is None or given == "":
        return None
    if given == "json":
        return Constraint("json", ANY_OBJECT, param)
    if isinstance(given, str):
        raise BadRequest(f"{param}: {short(given)} is not supported: use 'json', or a JSON schema", param=param)
    return _checked("json", given, param)


def read_structured_outputs(given: Any) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`; None if it has none."""
    param = "structured_outputs"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadRequest(f"{param} must be an object", param=param)
    unknown = next((key for key in given if key not in (*_KINDS, *_STYLE, "json_object") and given[key]), None)
    if unknown is not None:
        raise BadRequest(
            f"{param}.{unknown[:80]} is not supported: use {', '.join(_KINDS)}", param=f"{param}.{unknown[:80]}"
        )
    found = [_checked(kind, given[kind], f"{param}.{kind}") for kind in _KINDS if given.get(kind) is not None]
    found += [Constraint("json", ANY_OBJECT, param)] if given.get("json_object") else []
    return only(*found)


def read_named(body: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that a body gives under one of `NAMES`."""
    return only(*(_checked(kind, body[name], name) for name, kind in NAMES.items() if body.get(name) is not None))


def only(*constraints: Constraint | None) -> Constraint | None:
    """Return the one constraint that is given; BadRequest for several."""
    given = [constraint for constraint in constraints if constraint is not None]
    if len(given) > 1:
        message = f"{given[1].param}: {given[0].param} constrains the reply already: send one of them"
        raise BadRequest(message, param=given[1].param)
    return given[0] if given else None


def _checked(kind: Kind, value: Any, param: str) -> Constraint:
    """Return the constraint, a schema that is sent as text parsed; BadRequest for values of another type."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRequest(f"{param} is not JSON: {error}", param=param) from None
    if kind == "choice":
        if not isinstance(value, list) or not value:
            raise BadRequest(f"{param} must be a list of texts", param=param)
        value = tuple(value)
    check_json(value, param)
    return Constraint(kind, value, param)
