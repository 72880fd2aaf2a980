"""Tools named by a type alone, as Anthropic's models know them: a shell, an editor or a memory that the client runs,
and those that only Anthropic's servers run, such as a search in the web.

Owns descriptions and schemas of the former for other models; names, commands and inputs are those of Anthropic's
documentation. What needs a screen is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.server.anthropic.bodies import ToolChoice

_TEXT = {"type": "string"}
_PATH = {"type": "string", "description": "absolute path of a file or directory"}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "of view: first and last line, from 1; -1: to the end",
}
_BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "the command to run"},
        "restart": {"type": "boolean", "description": "true: start the shell anew instead"},
    },
}


def _files(commands: str, **more: Any) -> dict[str, Any]:
    """Return the schema of a tool that edits files with these commands."""
    properties = {
        "command": {"type": "string", "enum": commands.split()},
        "path": _PATH,
        "view_range": _LINES,
        "file_text": {**_TEXT, "description": "of create: the whole content"},
        "old_str": {**_TEXT, "description": "of str_replace: text that is in the file exactly once"},
        "new_str": {**_TEXT, "description": "of str_replace: what takes its place"},
        "insert_line": {"type": "integer", "description": "of insert: the line after which to insert, 0 for the start"},
        **more,
    }
    return {"type": "object", "properties": properties, "required": ["command"]}


_INSERTED = {"insert_text": {**_TEXT, "description": "of insert: the text"}}
_RENAMED = {
    "old_path": {**_TEXT, "description": "of rename: the path now"},
    "new_path": {**_TEXT, "description": "of rename: the path then"},
}
_SHELL = "Run a command in a shell that keeps its state between calls."
_EDITOR = "View and edit text files."
_MEMORY = (
    "Keep notes for later in files under /memories. Look there before a task, and write down what is worth knowing."
)
# By the beginning of the type, which ends in a date; the longest one counts.
_KNOWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (_SHELL, _BASH),
    "text_editor_": (_EDITOR, _files("view create str_replace insert", **_INSERTED)),
    "text_editor_2024": (_EDITOR, _files("view create str_replace insert undo_edit")),
    "text_editor_20250124": (_EDITOR, _files("view create str_replace insert undo_edit")),
    "memory_": (_MEMORY, _files("view create str_replace insert delete rename", **_INSERTED, **_RENAMED)),
}


def described(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a tool that is named by its type with description and input schema; None if it is not known."""
    kind = tool.get("type")
    if not isinstance(kind, str) or not isinstance(tool.get("name"), str):
        return None
    start = max((each for each in _KNOWN if kind.startswith(each)), key=len, default=None)
    if start is None:
        return None
    description, schema = _KNOWN[start]
    return {"name": tool["name"], "description": description, "input_schema": schema, **_marks(tool)}


def _marks(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": tool["cache_control"]} if "cache_control" in tool else {}


def forced_server_tool(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> str | None:
    """Return the name of the tool that must be called and that only Anthropic's servers run; None: there is none."""
    left_out = [tool for tool in tools if tool.get("type") not in (None, "custom") and described(tool) is None]
    if choice is None or choice.type not in ("any", "tool"):
        return None
    if choice.type == "any" and len(left_out) < len(tools):
        return None
    wanted = choice.name if choice.type == "tool" else None
    return next((str(tool.get("name")) for tool in left_out if wanted in (None, tool.get("name"))), None)
