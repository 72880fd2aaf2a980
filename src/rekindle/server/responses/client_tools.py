"""Tools of the responses API that are no functions but run by the client, as functions that any model can call.

Owns their descriptions and parameters; names and fields are those of OpenAI's documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.responses.call_items import APPLY_PATCH, LOCAL_SHELL, SHELL

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_MILLISECONDS = {"type": "integer", "description": "milliseconds after which it is ended"}


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
