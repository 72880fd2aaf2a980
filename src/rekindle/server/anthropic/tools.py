"""Conversion of Anthropic's tools into the form that chat templates take: functions with a JSON schema.

Owns which tools can be offered: those that the client executes itself, described by it or known by their type
(`known_tools`). Tools that Anthropic's servers would run are left out. Deferred ones are not in the prompt until the
client's search finds them: then they are where it does, so that what comes before is not computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.anthropic.known_tools import described
from rekindle.text.messages import check_json
from rekindle.text.omissions import Omissions

# Keys for billing, caching, streaming or the reply, not part of the prompt.
_HARMLESS = frozenset("cache_control eager_input_streaming strict".split())
_DIRECTLY = (None, ["direct"])  # of `allowed_callers`: the model, which is the only caller here


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools as templates take them: those in the prompt, and by name those that a search has yet to find."""

    shown: tuple[dict[str, Any], ...] = ()
    deferred: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def offered_tools(tools: Sequence[Mapping[str, Any]], omissions: Omissions) -> OfferedTools:
    """Return the tools as templates take them; BadRequest names the index of one that cannot be offered."""
    read = [(tool, _function(tool, f"tools[{index}]", omissions)) for index, tool in enumerate(tools)]
    functions = [(tool.get("defer_loading") is True, function) for tool, function in read if function is not None]
    names = [function["function"]["name"] for _, function in functions]
    duplicate = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if duplicate is not None:
        raise BadRequest(f"tools: {duplicate[:80]!r} appears twice: names must be unique", param="tools")
    shown = tuple(function for is_deferred, function in functions if not is_deferred)
    return OfferedTools(shown, {each["function"]["name"]: each for is_deferred, each in functions if is_deferred})


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
    known = {"type", "name", "description", "input_schema", "input_examples", "defer_loading", *_HARMLESS}
    if tool.get("allowed_callers") in _DIRECTLY:
        known.add("allowed_callers")
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
