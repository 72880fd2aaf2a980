"""Request options that steer a reply in any dialect, as bodies have them: tool choice and reasoning effort.

Owns the variables passed to the chat template; the effect of a tool choice is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.engine.tool_choice import ToolChoice
from rekindle.errors import BadRequest
from rekindle.server.answers.validation import short
from rekindle.text.messages import check_json

# Template variables that the engine sets; callers may not override them.
RESERVED = frozenset("self messages tools add_generation_prompt continue_final_message tokenize chat_template".split())
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BEYOND_HIGH = ("xhigh", "max")  # unknown to templates


def parse_tool_choice(given: Any) -> ToolChoice:
    """Parse OpenAI's tool_choice, a word or an object that names a function; BadRequest for anything else.

    The function's name is in `function`, or next to `type` in the responses API.
    """
    match given:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return ToolChoice("required", name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as allowed},
        }:
            functions = [each.get("function") for each in allowed if isinstance(each, Mapping)]
            names = {str(each.get("name")) for each in functions if isinstance(each, Mapping)}
            return ToolChoice(mode, allowed=frozenset(names))
    message = f"tool_choice: {short(given)} is not supported: use 'auto', 'none', 'required', or name a function"
    raise BadRequest(message, param="tool_choice")


def effort_kwargs(effort: str) -> dict[str, str]:
    """Return the template variable for an effort, in every dialect. Callers can pass other values by name."""
    return {"reasoning_effort": "high" if effort in _BEYOND_HIGH else effort}


def template_fields(kwargs: Mapping[str, Any], given: Mapping[str, Any] | None, effort: str = "") -> dict[str, Any]:
    """Return the fields of a request for the template's variables, with the parameter that each came from:
    `chat_template_kwargs`, or that named `effort`."""
    params = {name: f"chat_template_kwargs.{name}" if name in (given or {}) else effort for name in kwargs}
    return {"template_kwargs": kwargs, "template_params": params}


def template_kwargs(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return the variables for the chat template; the caller's own override those derived from `effort`.

    `effort` None: not given. Templates of reasoning models know one of two names: `reasoning_effort`, or
    `enable_thinking` as a switch. BadRequest for reserved names and for values that a prompt cannot contain.
    """
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(f"reasoning_effort: use one of {', '.join(EFFORTS)}", param="reasoning_effort")
    kwargs: dict[str, Any] = {}
    if effort == "none":
        kwargs = {"enable_thinking": False}
    elif effort is not None:
        kwargs = {"enable_thinking": True, **effort_kwargs(effort)}
    for name in given or {}:
        if name in RESERVED or name.endswith("_token") or not name.isidentifier():
            message = f"chat_template_kwargs: {name[:100]!r} cannot be set by the caller"
            raise BadRequest(message, param="chat_template_kwargs")
    check_json(given, "chat_template_kwargs")
    return kwargs | dict(given or {})
