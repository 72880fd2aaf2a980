"""Tools of the responses API, flat or in a namespace, as functions in the form that chat templates take.

Owns the names that the model knows tools by, and which are left out: those that OpenAI's servers would run, and kinds
that are not known. They are not shown to the model, and the answer lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.engine.tool_choice import ToolChoice
from rekindle.errors import BadRequest
from rekindle.server.answers.options import parse_tool_choice
from rekindle.server.responses.call_items import (
    APPLY_PATCH,
    CUSTOM,
    FUNCTION,
    KINDS,
    LOCAL_SHELL,
    SHELL,
    ToolKind,
    full_name,
)
from rekindle.text.omissions import Omissions, kind_of

# Coding agents offer these with every request, to any server: they are no reason to refuse one.
LEFT_OUT = frozenset("image_generation tool_search web_search web_search_2025_08_26 web_search_preview".split())
# Fields of a function that the model sees; the rest steers OpenAI's servers.
SHOWN = ("name", "description", "parameters")
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_MILLISECONDS = {"type": "integer", "description": "milliseconds after which it is ended"}


# Tools of the responses API that are no functions but run by the client, as functions that any model can call.
#
# Owns their descriptions and parameters; names and fields are those of OpenAI's documentation.


def _function(name: str, description: str, required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    return {"name": name, "description": description, "parameters": parameters}


_BY_TYPE: Mapping[str, dict[str, Any]] = {
    LOCAL_SHELL.tool: _function(
        LOCAL_SHELL.tool,
        "Run a program on the user's machine.",
        "command",
        command={**_TEXTS, "description": "the program and its arguments"},
        working_directory=_TEXT,
        timeout_ms=_MILLISECONDS,
        env={"type": "object", "additionalProperties": _TEXT, "description": "variables of its environment"},
    ),
    SHELL.tool: _function(
        SHELL.tool,
        "Run commands in a shell.",
        "commands",
        commands={**_TEXTS, "description": "commands to run, one after another"},
        timeout_ms=_MILLISECONDS,
        max_output_length={"type": "integer", "description": "characters of output to return"},
    ),
    APPLY_PATCH.tool: _function(
        APPLY_PATCH.tool,
        "Create, update or delete a file. In a diff the first character says what a line is: + added, - removed, "
        "a space unchanged. The diff of a new file has added lines only; that of an update has a few unchanged lines "
        "around each change, and a line @@ before it.",
        "type path",
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path=_TEXT,
        diff={**_TEXT, "description": "of create_file and update_file"},
    ),
}


def described(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return name, description and parameters of a tool that its type describes; None for other types."""
    return _BY_TYPE.get(str(tool.get("type")))


def custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a custom tool as a function of one text; a grammar of its input is part of the description.

    BadRequest if description or format have another form than OpenAI's.
    """
    description = tool.get("description") or ""
    if not isinstance(description, str):
        raise BadRequest(f"{where}.description must be a string", param=f"{where}.description")
    match tool.get("format"):
        case None | {"type": "text"}:
            rule = ""
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str() as definition}:
            name = "Lark grammar" if syntax == "lark" else "regular expression"
            rule = f"The input must match this {name}:\n{definition}"
        case _:
            message = f"{where}.format is text, or a grammar with its syntax, lark or regex, and its definition"
            raise BadRequest(message, param=f"{where}.format")
    text = "\n\n".join(part for part in (description, rule) if part)
    return {**({"description": text} if text else {}), **_INPUT}


_INPUT = {
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "the input as plain text"}},
        "required": ["input"],
    }
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as its caller knows it."""

    name: str
    namespace: str | None = None
    kind: ToolKind = FUNCTION


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """`shown`: for the template; `known`: by the name the model knows; `left_out`: kinds of the other tools.

    `strict`: the names of those whose schemas are enforced, and where these are in the request.
    """

    shown: tuple[dict[str, Any], ...] = ()
    known: Mapping[str, OfferedTool] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    strict: Mapping[str, str] = field(default_factory=dict)


def read_tools(given: Sequence[Mapping[str, Any]] | None, omissions: Omissions) -> OfferedTools:
    """Parse the tools of a request; BadRequest names the first that has not the form of its kind."""
    shown: list[dict[str, Any]] = []
    known: dict[str, OfferedTool] = {}
    left_out: dict[str, None] = {}
    strict: dict[str, str] = {}
    for where, tool, namespace in _flat(given or ()):
        kind = tool.get("type")
        found = _offered(tool, namespace, where)
        if found is None:
            if kind not in LEFT_OUT:
                omissions.whole(tool, where)
            left_out[kind_of(tool)] = None
            continue
        offered, description = found
        name = full_name(offered.name, offered.namespace)
        known[name] = offered
        if offered.kind is FUNCTION and tool.get("strict") is True:
            strict[name] = f"{where}.parameters"
        shown.append({"type": "function", "function": {**description, "name": name}})
    return OfferedTools(tuple(shown), known, tuple(left_out), strict)


def _offered(
    tool: Mapping[str, Any], namespace: str | None, where: str
) -> tuple[OfferedTool, Mapping[str, Any]] | None:
    """Return a tool and what the model sees of it as a function; None if its kind cannot be offered here."""
    if not isinstance(tool.get("type"), str):
        raise BadRequest(f"{where}.type must be a string", param=f"{where}.type")
    kind = next((each for each in KINDS if each.tool == tool["type"]), None)
    if kind is None:
        return None
    by_type = described(tool)
    if by_type is not None:
        return OfferedTool(kind.tool, None, kind), by_type
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be a string", param=f"{where}.name")
    if kind is CUSTOM:
        return OfferedTool(name, namespace, kind), custom_function(tool, where)
    return OfferedTool(name, namespace, kind), {key: tool[key] for key in SHOWN if tool.get(key) is not None}


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
    """Parse `tool_choice`; BadRequest for what is none."""
    match given:
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list() as allowed}:
            names = {str(each.get("name", each.get("type"))) for each in allowed if isinstance(each, Mapping)}
            if names == set(offered.known):
                return ToolChoice(mode)
            if mode == "required" and len(names) == 1:
                return ToolChoice("required", names.pop())
            if names and names <= set(offered.known):
                return ToolChoice(mode, allowed=frozenset(names))
            raise BadRequest("tool_choice.tools: name some of the tools", param="tool_choice")
        case {"type": "custom", "name": str() as name}:
            return ToolChoice("required", name)
        case {"type": str() as name} if name in offered.known and offered.known[name].kind not in (FUNCTION, CUSTOM):
            return ToolChoice("required", name)
    return parse_tool_choice(given)
