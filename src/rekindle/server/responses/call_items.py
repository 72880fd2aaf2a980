"""Items of calls and of their results: functions, custom tools, and the shells and patches that a client runs.

Owns which items belong to a kind of tool, and what the model wrote for each: to the model every tool is a function,
with arguments in JSON. Shapes of items are those of OpenAI's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.responses.item_fields import Item, item_id, new_item_id, text_field
from rekindle.text.messages import check_json, content_text
from rekindle.text.omissions import Omissions


@dataclass(frozen=True, slots=True)
class ToolKind:
    """The types of a kind's tool, of items with its calls and their results; `holds`: the field with the arguments."""

    tool: str
    call: str
    output: str
    holds: str
    prefix: str


FUNCTION = ToolKind("function", "function_call", "function_call_output", "arguments", "fc")
CUSTOM = ToolKind("custom", "custom_tool_call", "custom_tool_call_output", "input", "ctc")
LOCAL_SHELL = ToolKind("local_shell", "local_shell_call", "local_shell_call_output", "action", "lsh")
SHELL = ToolKind("shell", "shell_call", "shell_call_output", "action", "sh")
APPLY_PATCH = ToolKind("apply_patch", "apply_patch_call", "apply_patch_call_output", "operation", "apc")
KINDS = (FUNCTION, CUSTOM, LOCAL_SHELL, SHELL, APPLY_PATCH)
BY_CALL: Mapping[str, ToolKind] = {kind.call: kind for kind in KINDS}
BY_OUTPUT: Mapping[str, ToolKind] = {kind.output: kind for kind in KINDS}


def full_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool, including its namespace."""
    return name if not namespace else f"{namespace}__{name}"


def name_of(item: Item) -> str:
    """The name by which the model knows the tool of a call; tools without one have the name of their kind."""
    kind = BY_CALL[item["type"]]
    return full_name(item["name"], item.get("namespace")) if kind in (FUNCTION, CUSTOM) else kind.tool


def arguments_of(item: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON: what the model wrote, or text of the same value."""
    kind = BY_CALL[item["type"]]
    held = item[kind.holds]
    if kind is FUNCTION:
        return str(held)
    if kind is CUSTOM:
        value = {"input": held}
    elif kind is APPLY_PATCH:
        value = held
    else:
        value = {key: each for key, each in held.items() if key != "type" and each not in (None, {})}
    return json.dumps(value, ensure_ascii=False)


def held_of(kind: ToolKind, arguments: str) -> Any:
    """What an item holds for the arguments of a call; None if they do not have the form of this kind."""
    if kind is FUNCTION:
        return arguments
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    match given:
        case {"input": str() as text} if kind is CUSTOM and len(given) == 1:
            return text
        case {"command": [*words]} if kind is LOCAL_SHELL and _are_texts(words):
            return {"type": "exec", "env": {}, **_only(given, "command env timeout_ms user working_directory")}
        case {"commands": [*lines]} if kind is SHELL and _are_texts(lines):
            return _only(given, "commands timeout_ms max_output_length")
        case {"type": "create_file" | "update_file", "path": str(), "diff": str()} if kind is APPLY_PATCH:
            return _only(given, "type path diff")
        case {"type": "delete_file", "path": str()} if kind is APPLY_PATCH:
            return _only(given, "type path")
    return arguments if kind is CUSTOM else None


def _are_texts(given: list[Any]) -> bool:
    return bool(given) and all(isinstance(each, str) for each in given)


def _only(given: Mapping[str, Any], keys: str) -> dict[str, Any]:
    return {key: given[key] for key in given if key in keys.split() and given[key] is not None}


def call_item(
    kind: ToolKind, call_id: str, name: str, held: Any, *, namespace: str | None = None, id: str | None = None
) -> Item:
    """An item of a call that is whole."""
    item = {"id": id or new_item_id(kind.prefix), "type": kind.call, "status": "completed", "call_id": call_id}
    named = {"name": name} if kind in (FUNCTION, CUSTOM) else {}
    return {**item, **named, kind.holds: held, **({"namespace": namespace} if namespace else {})}


def read_call(item: Mapping[str, Any], where: str) -> Item:
    """Return a caller's item of a call in the form that is stored; BadRequest names the field that is wrong."""
    kind = BY_CALL[item["type"]]
    call_id = text_field(item, "call_id", where)
    own_id = item_id(item, kind.prefix)
    if kind in (FUNCTION, CUSTOM):
        namespace = None if item.get("namespace") is None else text_field(item, "namespace", where)
        name, text = text_field(item, "name", where), text_field(item, kind.holds, where)
        return call_item(kind, call_id, name, text, namespace=namespace, id=own_id)
    param = f"{where}.{kind.holds}"
    check_json(item.get(kind.holds), param)
    held = held_of(kind, arguments_of(item)) if isinstance(item.get(kind.holds), Mapping) else None
    if held is None:
        raise BadRequest(f"{param} does not have the form of a {kind.call}", param=param)
    return call_item(kind, call_id, kind.tool, held, id=own_id)


def read_output(item: Mapping[str, Any], where: str, omissions: Omissions) -> Item:
    """Return a caller's item of a result in the form that is stored; BadRequest names the field that is wrong."""
    kind = BY_OUTPUT[item["type"]]
    by = "id" if kind is LOCAL_SHELL and item.get("call_id") is None else "call_id"
    head = {"id": item_id(item, f"{kind.prefix}o"), "type": kind.output, "status": "completed"}
    head |= {"call_id": text_field(item, by, where)}
    given, param = item.get("output"), f"{where}.output"
    if kind is APPLY_PATCH:
        status = item.get("status")
        if status not in ("completed", "failed"):
            raise BadRequest(f"{where}.status is completed or failed", param=f"{where}.status")
        return {**head, "status": status, "output": "" if given is None else text_field(item, "output", where)}
    if given is None:
        raise BadRequest(f"{param} must be a string or a list of parts", param=param)
    if kind is SHELL:
        return {**head, "output": _shell_parts(given, param)}
    return {**head, "output": content_text(given, param, omissions)}


def _shell_parts(given: Any, param: str) -> list[Any]:
    """Return the results of a shell's commands; BadRequest if they have another form."""
    check_json(given, param)
    for part in given if isinstance(given, list) else [None]:
        match part:
            case {"stdout": str(), "stderr": str(), "outcome": {"type": "exit", "exit_code": int()}}:
                continue
            case {"stdout": str(), "stderr": str(), "outcome": {"type": "timeout"}}:
                continue
        raise BadRequest(f"{param} must be a list of parts with stdout, stderr and outcome", param=param)
    return list(given)


def output_text(item: Item) -> str:
    """The result of a call as the model reads it."""
    output = item["output"]
    if item["type"] == APPLY_PATCH.output:
        return str(output or item["status"])
    if item["type"] != SHELL.output:
        return str(output)
    texts: list[str] = []
    for part in output:
        outcome = part["outcome"]
        ending = "timed out" if outcome["type"] == "timeout" else f"exit code {outcome['exit_code']}"
        texts += [text.rstrip("\n") for text in (part["stdout"], part["stderr"]) if text] + [f"({ending})"]
    return "\n".join(texts)
