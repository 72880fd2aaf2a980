"""How a caller steers a reply, whatever the dialect: which tool is called, how much is thought.

Owns what is made of it: the words a reply begins with, and what the chat template is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.answers.validation import short
from rekindle.text.messages import check_json
from rekindle.text.replies import ReplyFormat

# What the engine gives every template: not the caller's to change.
RESERVED = frozenset("self messages tools add_generation_prompt continue_final_message tokenize chat_template".split())
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BEYOND_HIGH = ("xhigh", "max")  # templates know none of them


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether calls are read ("none": not), and whether there must be one; `name`: of this tool alone."""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the reply has to begin with a call."""
        return self.kind == "required"


def parse_tool_choice(given: Any) -> ToolChoice:
    """The choice that OpenAI spells as a word, or as an object that names a function; BadRequest for others.

    The function's name stands in `function`, or beside `type` where the responses API has it.
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
    message = f"tool_choice: {short(given)} is not supported: use 'auto', 'none', 'required', or name a function"
    raise BadRequest(message, param="tool_choice")


def steered(
    request: GenerationRequest,
    form: ReplyFormat,
    choice: ToolChoice,
    *,
    tool_names: Collection[str],
    params: tuple[str, str] = ("tools", "tool_choice"),
) -> GenerationRequest:
    """The request whose reply begins as `choice` wants.

    `params` are the dialect's names of the two. Raises BadRequest where this model's template writes calls in no form
    known here, where a call cannot be forced, and where there is no such tool.
    """
    tools, asked = params
    if choice.kind == "none" or not (tool_names or choice.is_forced):
        return request
    if not tool_names:
        raise BadRequest(f"{asked}: a call needs tools: send {tools}", param=asked)
    if choice.name is not None and choice.name not in tool_names:
        raise BadRequest(f"{asked}: there is no tool {choice.name[:100]!r} in {tools}", param=asked)
    if form.tools is None:
        message = (
            f"{tools}: this model's chat template writes calls in no form that is read here: leave {tools} out, or set "
            f"{asked} to none and take the reply as text"
        )
        raise BadRequest(message, param=tools)
    if not choice.is_forced:
        return request
    opening = form.opening(choice.name)
    if opening is None or request.messages is None:
        raise BadRequest(f"{asked}: calls cannot be forced with this model and prompt: use auto", param=asked)
    return replace(request, reply_prefix=request.reply_prefix + opening)


def effort_kwargs(effort: str) -> dict[str, str]:
    """How a chat template is told of an effort, in every dialect; whoever wants another word gives it by its name."""
    return {"reasoning_effort": "high" if effort in _BEYOND_HIGH else effort}


def template_kwargs(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """What the chat template is told: the caller's own variables win over those made of `effort` (None: not given).

    Templates that think know one of two names: `reasoning_effort`, or `enable_thinking` as a switch. BadRequest for
    names that are not the caller's and for values that cannot stand in a prompt.
    """
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(f"reasoning_effort: use one of {', '.join(EFFORTS)}", param="reasoning_effort")
    told: dict[str, Any] = {}
    if effort == "none":
        told = {"enable_thinking": False}
    elif effort is not None:
        told = {"enable_thinking": True, **effort_kwargs(effort)}
    for name in given or {}:
        if name in RESERVED or name.endswith("_token") or not name.isidentifier():
            message = f"chat_template_kwargs: {name[:100]!r} is not for the caller to set"
            raise BadRequest(message, param="chat_template_kwargs")
    check_json(given, "chat_template_kwargs")
    return told | dict(given or {})
