"""Parsing of bodies in Anthropic's dialect into engine requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rekindle.engine.tool_choice import ToolChoice as Steer
from rekindle.engine.tool_choice import steered
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.sampling_defaults import NOTHING_SAID, SamplingDefaults
from rekindle.server.answers.options import RekindleOptions, effort_kwargs, only, read_format, sampling_in
from rekindle.server.answers.validation import validated
from rekindle.server.anthropic.bodies import (
    HARMLESS,
    NEUTRAL,
    ContextEdit,
    CountBody,
    Diagnostics,
    MessagesBody,
    PromptBody,
    Thinking,
    ToolChoice,
)
from rekindle.server.anthropic.conversation import Conversation, Prompt, TemplateHabits
from rekindle.server.anthropic.typed_tools import described, forced_server_tool
from rekindle.server.gate.caller import Caller
from rekindle.text.constraints.types import Constraint
from rekindle.text.messages import check_json
from rekindle.text.omissions import Omissions
from rekindle.text.replies import ReplyFormat

Body = TypeVar("Body", bound=PromptBody)
# Keys for billing, caching, streaming or the reply, not part of the prompt.
_HARMLESS = frozenset("cache_control eager_input_streaming strict".split())
_DIRECTLY = (None, ["direct"])  # of `allowed_callers`: the model, which is the only caller here


# Conversion of Anthropic's tools into the form that chat templates take: functions with a JSON schema.
#
# Owns which tools can be offered: those that the client executes itself, described by it or known by their type
# (`known_tools`). Tools that Anthropic's servers would run are left out. Deferred ones are not in the prompt until the
# client's search finds them: then they are where it does, so that what comes before is not computed again.


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
    first = {name: at for at, name in reversed([*enumerate(names)])}
    duplicate = next((name for at, name in enumerate(names) if first[name] < at), None)
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


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The traits of the served model that decide how bodies are parsed: its reply format, its template's habits, and
    what is sampled with if a body does not say, and whether it reads pictures."""

    form: ReplyFormat
    habits: TemplateHabits
    defaults: SamplingDefaults = NOTHING_SAID
    sees: bool = False


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A parsed body: what to generate, and how to answer.

    `calls_tools`: the reply may contain calls, several if `parallel`. `hides_thinking`: thinking blocks have only their
    signature. `reports_edits`: the answer says that the history was not edited. `unavailable`: the name of a tool that
    must be called and that nobody runs here; nothing is generated then. `loaded`: deferred tools that it found.
    `diagnostics`: what the answer is to be compared with.
    """

    request: GenerationRequest
    model: str | None
    stream: bool
    calls_tools: bool
    parallel: bool
    hides_thinking: bool
    reports_edits: bool
    return_ids: bool
    unavailable: str | None
    loaded: tuple[Any, ...] = ()
    diagnostics: Diagnostics | None = None

    @property
    def read_tools(self) -> Sequence[Any]:
        """Definitions of the tools whose calls are parsed in the reply."""
        return [*(self.request.tools or ()), *self.loaded] if self.calls_tools else ()


def parse_messages(body: Any, caller: Caller, side: ModelSide, *, strict: bool = False) -> MessagesCall:
    """Parse a body; BadRequest names the parameter to change.

    `strict`: what would be left out of the prompt or ignored is refused.
    """
    omissions = Omissions(strict=strict, sees=side.sees)
    asked = _validated(MessagesBody, body, omissions)
    options, choice = asked.rekindle or RekindleOptions(), asked.tool_choice or ToolChoice(type="auto")
    if asked.max_tokens == 0:
        _check_warm_up(asked, choice)
    given = sampling_in(asked) | {"max_tokens": asked.max_tokens or 1, "stop": tuple(asked.stop_sequences or ())}
    request, loaded = _request(asked, caller, side, omissions)
    unavailable = forced_server_tool(asked.tools or (), asked.tool_choice)
    request = replace(
        request,
        params=side.defaults.params("openai", given),
        reuse=options.reuse,
        task="generate" if asked.max_tokens and unavailable is None else "prefill",
    )
    return MessagesCall(
        request=request,
        model=asked.model,
        stream=bool(asked.stream),
        calls_tools=choice.type != "none",
        parallel=not choice.disable_parallel_tool_use,
        hides_thinking=asked.thinking is not None and asked.thinking.display == "omitted",
        reports_edits=asked.context_management is not None,
        return_ids=options.return_ids,
        unavailable=unavailable,
        loaded=loaded,
        diagnostics=asked.diagnostics,
    )


def parse_count(
    body: Any, caller: Caller, side: ModelSide, *, strict: bool = False
) -> tuple[GenerationRequest, str | None]:
    """Parse a request to count into the request and its model; parameters that only steer a reply are ignored."""
    names = [*HARMLESS, *(name for name in MessagesBody.model_fields if name not in CountBody.model_fields)]
    omissions = Omissions(strict=strict, sees=side.sees)
    asked = _validated(CountBody, body, omissions, harmless=frozenset(names))
    return _request(asked, caller, side, omissions)[0], asked.model


def _validated(kind: type[Body], body: Any, omissions: Omissions, *, harmless: frozenset[str] = HARMLESS) -> Body:
    if isinstance(body, dict) and body.get("thread") is not None:
        # Anthropic's library goes on without threads when it reads this.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        message = "thread: conversations are not stored under /v1/messages: send the whole history"
        raise BadRequest(message, param="thread", details=details)
    asked = validated(kind, body, omissions=omissions, harmless=harmless, neutral=NEUTRAL)
    for index, edit in enumerate((asked.context_management and asked.context_management.edits) or ()):
        if not _keeps_all(edit):
            omissions.key(edit.type, f"context_management.edits[{index}]")
    return asked


def _request(
    asked: PromptBody, caller: Caller, side: ModelSide, omissions: Omissions
) -> tuple[GenerationRequest, tuple[Any, ...]]:
    """Build a request with the prompt, and the deferred tools in its history; the caller sets the sampling."""
    offered = offered_tools(asked.tools or (), omissions)
    conversation = Conversation(side.habits, omissions, offered.deferred)
    prompt = _prompt(asked, conversation)
    tools, loaded = list(offered.shown) if asked.tools else None, tuple(conversation.loaded.values())
    is_unavailable = forced_server_tool(asked.tools or (), asked.tool_choice) is not None
    choice = Steer("none") if is_unavailable else _steer(asked.tool_choice)
    if (prompt.prefix or choice.is_forced) and asked.thinking is not None and asked.thinking.type == "enabled":
        raise BadRequest("thinking: a reply whose beginning is given cannot think first: disable it", param="thinking")
    request = GenerationRequest(
        messages=prompt.messages,
        agent=caller.agent,
        namespace=caller.namespace,
        tools=tools,
        parent=caller.parent,
        template_kwargs=_template_kwargs(asked, starts_given=bool(prompt.prefix) or choice.is_forced),
        template_params=_template_params(asked),
        reply_prefix=prompt.prefix,
        constraint=None if choice.is_forced else _constraint(asked),
        breakpoints=prompt.breakpoints,
        structured=True,
        echoes_thoughts=prompt.echoes_reasoning,
        omitted=omissions.all(),
        pictures=omissions.pictures,
    )
    names = frozenset(tool["function"]["name"] for tool in (*offered.shown, *loaded))
    strict = {
        str(tool.get("name")): f"tools[{at}].input_schema"
        for at, tool in enumerate(asked.tools or ())
        if tool.get("strict") and tool.get("name") in names and tool.get("name") not in conversation.loaded
    }
    parallel = asked.tool_choice is None or not asked.tool_choice.disable_parallel_tool_use
    steering = steered(request, side.form, choice, tool_names=names, strict=strict, parallel=parallel, loaded=loaded)
    return steering, loaded


def _constraint(asked: PromptBody) -> Constraint | None:
    wanted = asked.output_config.format if asked.output_config is not None else None
    return only(read_format(wanted, "output_config.format"), read_format(asked.output_format, "output_format"))


def _prompt(asked: PromptBody, conversation: Conversation) -> Prompt:
    conversation.add_tools(asked.tools or ())
    if asked.system:
        conversation.add_system(asked.system)
    conversation.add_messages(asked.messages)
    return conversation.finish(asked.cache_control)


def _steer(choice: ToolChoice | None) -> Steer:
    if choice is None or choice.type == "auto":
        return Steer()
    if choice.type == "none":
        return Steer("none")
    if choice.type == "tool" and not choice.name:
        raise BadRequest("tool_choice.name: name the tool to call", param="tool_choice.name")
    return Steer("required", choice.name if choice.type == "tool" else None)


def _template_kwargs(asked: PromptBody, *, starts_given: bool) -> dict[str, Any]:
    """Return the template's variables; parameters not given set none, so that the template's defaults apply."""
    kwargs: dict[str, Any] = {}
    if starts_given:
        kwargs["enable_thinking"] = False
    elif asked.thinking is not None:
        kwargs["enable_thinking"] = asked.thinking.type != "disabled"
    return kwargs | _effort(asked)


def _template_params(asked: PromptBody) -> dict[str, str]:
    """Return the parameter that each of the template's variables is asked for by."""
    thinking = {} if asked.thinking is None else {"enable_thinking": "thinking"}
    return thinking | dict.fromkeys(_effort(asked), "output_config.effort")


def _effort(asked: PromptBody) -> dict[str, str]:
    effort = asked.output_config.effort if asked.output_config is not None else None
    return {} if effort is None else effort_kwargs(effort)


def _check_warm_up(asked: MessagesBody, choice: ToolChoice) -> None:
    """Refuse parameters of the answer with max_tokens 0, which has none, as Anthropic documents."""
    thinking: Thinking | None = asked.thinking
    for name, is_asked in (
        ("stream", bool(asked.stream)),
        ("thinking", thinking is not None and thinking.type == "enabled"),
        ("tool_choice", choice.type in ("any", "tool")),
    ):
        if is_asked:
            raise BadRequest(f"{name}: max_tokens 0 computes the prompt and answers nothing: leave it out", param=name)


def _keeps_all(edit: ContextEdit) -> bool:
    """Whether an edit changes nothing, as the one that clients send with every request."""
    keeps_all = edit.keep == "all" or (isinstance(edit.keep, dict) and edit.keep.get("type") == "all")
    return edit.type == "clear_thinking_20251015" and keeps_all
