"""Tools of the responses API: functions, flat or in a namespace, in the form that chat templates take.

Owns the names that the model knows functions by, and which tools are left out: those that OpenAI's servers would run,
which clients offer by default. They are not shown to the model, and the answer lists them. Other kinds are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.answers.steering import ToolChoice, parse_tool_choice
from rekindle.server.answers.validation import short
from rekindle.server.responses.items import full_name

# Coding agents offer these with every request, to any server.
LEFT_OUT = frozenset("image_generation tool_search web_search web_search_2025_08_26 web_search_preview".split())
# Fields of a function that the model sees; the rest steers OpenAI's servers.
SHOWN = ("name", "description", "parameters")
Function = tuple[str | None, str]  # namespace, name


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """`shown`: for the template; `functions`: by the name the model knows; `left_out`: kinds of the other tools."""

    shown: tuple[dict[str, Any], ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> OfferedTools:
    """Parse the tools of a request; BadRequest names the first that cannot be offered."""
    shown: list[dict[str, Any]] = []
    functions: dict[str, Function] = {}
    left_out: dict[str, None] = {}
    for where, tool, namespace in _flat(given or ()):
        kind = tool.get("type")
        if kind in LEFT_OUT:
            left_out[str(kind)] = None
            continue
        if kind != "function":
            message = f"{where} is of type {short(kind)}: this server takes functions, alone or in a namespace"
            raise BadRequest(message, param=f"{where}.type")
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{where}.name must be a string", param=f"{where}.name")
        known = full_name(name, namespace)
        functions[known] = (namespace, name)
        described = {key: tool[key] for key in SHOWN if tool.get(key) is not None}
        shown.append({"type": "function", "function": {**described, "name": known}})
    return OfferedTools(tuple(shown), functions, tuple(left_out))


def _flat(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Yield every tool with its place in the request and its namespace."""
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield where, tool, None
            continue
        name, inside = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(inside, list):
            raise BadRequest(f"{where}: a namespace has a name and a list of tools", param=where)
        for at, each in enumerate(inside):
            if not isinstance(each, Mapping):
                raise BadRequest(f"{where}.tools[{at}] must be an object", param=f"{where}.tools[{at}]")
            yield f"{where}.tools[{at}]", each, name


def read_choice(given: Any, offered: OfferedTools) -> ToolChoice:
    """Parse `tool_choice`. `allowed_tools` may list all tools, or a single required one; BadRequest otherwise."""
    match given:
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list() as allowed}:
            names = {str(each.get("name")) for each in allowed if isinstance(each, Mapping)}
            if names == set(offered.functions):
                return ToolChoice(mode)
            if mode == "required" and len(names) == 1:
                return ToolChoice("required", names.pop())
            message = "tool_choice: some of the tools cannot be forbidden here: send those that are allowed as tools"
            raise BadRequest(message, param="tool_choice")
    return parse_tool_choice(given)
