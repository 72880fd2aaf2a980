"""Conversion of Anthropic's tools into the form that chat templates take: functions with a JSON schema.

Owns which tools can be offered: those that the client executes itself, described by it or known by their type
(`known_tools`). Tools that Anthropic's servers would run are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.anthropic.known_tools import described
from rekindle.text.messages import check_json
from rekindle.text.omissions import Omissions

# Keys for billing, caching, streaming or the reply, not part of the prompt.
_HARMLESS = frozenset("cache_control eager_input_streaming strict".split())
# Harmless at their default values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"defer_loading": (None, False), "allowed_callers": (None, ["direct"])}


def functions_of(tools: Sequence[Mapping[str, Any]], omissions: Omissions) -> list[dict[str, Any]]:
    """Return the tools as templates take them; BadRequest names the index of one that cannot be offered."""
    read = (_function(tool, f"tools[{index}]", omissions) for index, tool in enumerate(tools))
    functions = [function for function in read if function is not None]
    names = [function["function"]["name"] for function in functions]
    duplicate = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if duplicate is not None:
        raise BadRequest(f"tools: {duplicate[:80]!r} appears twice: names must be unique", param="tools")
    return functions


def _function(tool: Mapping[str, Any], where: str, omissions: Omissions) -> dict[str, Any] | None:
    """Return one tool as templates take it; None if it is left out."""
    if tool.get("type") not in (None, "custom"):
        known_tool = described(tool)
        if known_tool is None:
            omissions.whole(tool, where)
            return None
        tool = known_tool
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be a string that is not empty", param=f"{where}.name")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema must be a JSON schema, an object", param=f"{where}.input_schema")
    for key, neutral in _NEUTRAL.items():
        if tool.get(key) not in neutral:
            raise BadRequest(f"{where}.{key} is not supported: leave it out", param=f"{where}.{key}")
    known = {"type", "name", "description", "input_schema", "input_examples", *_HARMLESS, *_NEUTRAL}
    for key in (key for key in tool if key not in known and tool[key] is not None):
        omissions.key(key, where)
    description = tool.get("description")
    if not isinstance(description, str | None):
        raise BadRequest(f"{where}.description must be a string", param=f"{where}.description")
    if tool.get("input_examples"):
        schema = {**schema, "examples": tool["input_examples"]}
    function = {"name": name, **({"description": description} if description is not None else {}), "parameters": schema}
    check_json(function, where)
    return {"type": "function", "function": function}
