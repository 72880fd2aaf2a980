"""Which calls a reply may have: the choice of tools, strict schemas, and the beginning of a call that is forced.

The same for all dialects and for the library, in terms of one model's format of replies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.text.constraints.types import CalledTool, Calls
from rekindle.text.replies import ReplyFormat


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


def steered(
    request: GenerationRequest,
    form: ReplyFormat,
    choice: ToolChoice,
    *,
    tool_names: Collection[str],
    params: tuple[str, str] = ("tools", "tool_choice"),
    strict: Mapping[str, str] = MappingProxyType({}),
    parallel: bool = True,
    loaded: Sequence[Mapping[str, Any]] = (),
) -> GenerationRequest:
    """Return the request with the calls that its reply may have, and the reply prefix that forces what `choice`
    requires.

    `params`: the dialect's names for tools and tool choice. `loaded`: tools that the history defines. `strict`: the
    tools whose arguments must be what their schema says, each with the schema's place in the request; the arguments of
    a forced call are, where that can be enforced. BadRequest if the model has no template, if a call cannot be forced
    or forbidden, or if there is no such tool.
    """
    tools, asked = params
    if choice.kind == "none" or not (tool_names or choice.is_forced):
        return request
    _check(choice, tool_names, tools, asked)
    if form.tools is None:
        message = f"{tools}: this model has no chat template that could show them: leave {tools} out"
        raise BadRequest(message, param=tools)
    layout = form.tools.layout
    binds = layout is not None and layout.exact and not (request.params.min_tokens or request.params.ignore_eos)
    offered = (*(request.tools or ()), *loaded)
    calls = _calls(offered, choice, strict, tools, parallel=parallel, binds=binds)
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
    opening = form.opening(calls.name)
    if opening is None or request.messages is None:
        raise BadRequest(f"{asked}: calls cannot be forced with this model and prompt: use auto", param=asked)
    return replace(request, reply_prefix=request.reply_prefix + opening, calls=calls)


def _check(choice: ToolChoice, tool_names: Collection[str], tools: str, asked: str) -> None:
    """Raise BadRequest for a choice of tools that there are not."""
    if not tool_names:
        raise BadRequest(f"{asked}: a call needs tools: send {tools}", param=asked)
    if choice.name is not None and choice.name not in tool_names:
        raise BadRequest(f"{asked}: there is no tool {choice.name[:100]!r} in {tools}", param=asked)
    if choice.allowed is not None and not (choice.allowed and choice.allowed <= set(tool_names)):
        unknown = sorted(choice.allowed - set(tool_names))
        what = f"there is no tool {unknown[0][:100]!r} in {tools}" if unknown else "name at least one tool"
        raise BadRequest(f"{asked}: {what}", param=asked)


def _calls(
    offered: Sequence[Mapping[str, Any]],
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
    functions = [tool["function"] for tool in offered]
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
    name = called[0].name if choice.is_forced and len(called) == 1 else choice.name  # the only one: it is begun, too
    return Calls(called, parallel=parallel and choice.name is None, is_forced=choice.is_forced, name=name)


def strict_functions(tools: Sequence[Any]) -> tuple[list[str], dict[str, str]]:
    """Return the names of tools in OpenAI's format, and where the schemas of those are that are strict; BadRequest for
    what is no function with a name."""
    names, strict = [], {}
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            message = f'tools[{at}]: a tool is {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            raise BadRequest(message, param=f"tools[{at}]")
        names.append(function["name"])
        if function.get("strict"):
            strict[function["name"]] = f"tools[{at}].function.parameters"
    return names, strict
