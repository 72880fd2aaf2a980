"""Request options that steer a reply in any dialect: tool choice, strict tools and reasoning effort.

Owns their effect: the prefix that forces a tool call, what its arguments must be, and the variables passed to the chat
template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.answers.validation import short
from rekindle.text.constraints.types import CalledTool, Calls
from rekindle.text.messages import check_json
from rekindle.text.replies import ReplyFormat

# Template variables that the engine sets; callers may not override them.
RESERVED = frozenset("self messages tools add_generation_prompt continue_final_message tokenize chat_template".split())
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BEYOND_HIGH = ("xhigh", "max")  # unknown to templates


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether calls are parsed (not for "none") and whether one is required; `name`: only of this tool.

    `allowed`: the tools that may be called, None: all.
    """

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: frozenset[str] | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the reply must begin with a call."""
        return self.kind == "required"


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


def steered(
    request: GenerationRequest,
    form: ReplyFormat,
    choice: ToolChoice,
    *,
    tool_names: Collection[str],
    params: tuple[str, str] = ("tools", "tool_choice"),
    strict: Mapping[str, str] = MappingProxyType({}),
    parallel: bool = True,
) -> GenerationRequest:
    """Return the request with the calls that its reply may have, and the reply prefix that forces what `choice`
    requires.

    `params`: the dialect's names for tools and tool choice. `strict`: the tools whose arguments must be what their
    schema says, each with the schema's place in the request; the arguments of a forced call are, where that can be
    enforced. BadRequest if the model has no template, if a call cannot be forced or forbidden, or if there is no such
    tool.
    """
    tools, asked = params
    if choice.kind == "none" or not (tool_names or choice.is_forced):
        return request
    if not tool_names:
        raise BadRequest(f"{asked}: a call needs tools: send {tools}", param=asked)
    if choice.name is not None and choice.name not in tool_names:
        raise BadRequest(f"{asked}: there is no tool {choice.name[:100]!r} in {tools}", param=asked)
    if choice.allowed is not None and not (choice.allowed and choice.allowed <= set(tool_names)):
        unknown = sorted(choice.allowed - set(tool_names))
        what = f"there is no tool {unknown[0][:100]!r} in {tools}" if unknown else "name at least one tool"
        raise BadRequest(f"{asked}: {what}", param=asked)
    if form.tools is None:
        message = f"{tools}: this model has no chat template that could show them: leave {tools} out"
        raise BadRequest(message, param=tools)
    layout = form.tools.layout
    binds = layout is not None and layout.exact and not (request.params.min_tokens or request.params.ignore_eos)
    calls = _calls(request, choice, strict, tools, parallel=parallel, binds=binds)
    if layout is None:
        if choice.allowed is not None and choice.name is None:
            message = (
                f"{asked}: tools cannot be forbidden with this model's calls: send those that are allowed as {tools}"
            )
            raise BadRequest(message, param=asked)
        ignored = (*request.omitted.ignored, *([f"{tools}.strict"] if strict else []))
        request = replace(request, omitted=replace(request.omitted, ignored=ignored))
    if not choice.is_forced:
        return replace(request, calls=calls)
    opening = form.opening(choice.name)
    if opening is None or request.messages is None:
        raise BadRequest(f"{asked}: calls cannot be forced with this model and prompt: use auto", param=asked)
    return replace(request, reply_prefix=request.reply_prefix + opening, calls=calls)


def _calls(
    request: GenerationRequest,
    choice: ToolChoice,
    strict: Mapping[str, str],
    tools: str,
    *,
    parallel: bool,
    binds: bool,
) -> Calls:
    """Return the calls that a reply may have; without tools, where any call of any tool will do.

    `binds`: the model was not trained on the form of its calls, so none of them is left to it alone.
    """
    if not (choice.is_forced or strict or choice.allowed is not None or binds):
        return Calls((), parallel=parallel)
    functions = [tool["function"] for tool in request.tools or ()]
    called = tuple(
        CalledTool(
            function["name"],
            function.get("parameters") if choice.is_forced or binds or function["name"] in strict else None,
            is_strict=function["name"] in strict,
            param=strict.get(function["name"], tools),
        )
        for function in functions
        if choice.allowed is None or function["name"] in choice.allowed
    )
    return Calls(called, parallel=parallel and choice.name is None, is_forced=choice.is_forced, name=choice.name)


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
            message = f"chat_template_kwargs: {name[:100]!r} is not for the caller to set"
            raise BadRequest(message, param="chat_template_kwargs")
    check_json(given, "chat_template_kwargs")
    return kwargs | dict(given or {})
