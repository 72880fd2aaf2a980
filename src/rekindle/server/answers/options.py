"""What requests may say in every dialect: formats, sampling, tools and their choice, effort, and `rekindle`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, Field, create_model

from rekindle.engine.tool_choice import ToolChoice
from rekindle.errors import BadRequest
from rekindle.model.params import BODIES, PARAMETERS, Api, SamplingParams
from rekindle.server.answers.validation import Items, OpenModel, StrictModel, short
from rekindle.text.constraints.types import Constraint, Kind
from rekindle.text.messages import check_json
from rekindle.text.omissions import Omissions

ANY_OBJECT = {"type": "object"}
# Names outside of `structured_outputs`: vLLM's until 0.11, and llama.cpp's.
NAMES: Mapping[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
# Of vLLM's `structured_outputs`: how its libraries behave, without effect on which replies are valid.
_STYLE = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
Body = TypeVar("Body", bound=BaseModel)
_FORMS: Mapping[Any, Any] = {
    Sequence[str]: str | Items[str],
    Sequence[int]: Items[int],
    Sequence[tuple[int, float]]: dict[str, float],
}
# Template variables that the engine sets; callers may not override them.
RESERVED = frozenset("self messages tools add_generation_prompt continue_final_message tokenize chat_template".split())
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BEYOND_HIGH = ("xhigh", "max")  # unknown to templates
FUNCTION = "function"


# Formats of a reply in the words of every dialect, as constraints of the engine.
#
# response_format   {"type": "json_schema", "json_schema": {"schema": ...}}     OpenAI's chat, vLLM's completions
# text.format       {"type": "json_schema", "schema": ...}                      OpenAI's responses, Anthropic's, too
# structured_outputs {"json" | "regex" | "choice" | "grammar": ...}             vLLM; before as guided_json and so on
# json_schema, grammar                                                          llama.cpp
# format            "json", or a schema                                         Ollama's


def read_format(given: Any, param: str) -> Constraint | None:
    """Return the constraint of a format with a type; None for plain text. BadRequest names what is wrong."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint("json", ANY_OBJECT, param)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _checked("json", schema, f"{param}.json_schema.schema")
        case {"type": "json_schema", "schema": schema}:
            return _checked("json", schema, f"{param}.schema")
        case {"type": "json_schema"}:
            raise BadRequest(f"{param}: a format of type json_schema needs its schema", param=param)
    message = f"{param}: {short(given)} is not supported: use a type, text, json_object or json_schema"
    raise BadRequest(message, param=param)


def read_schema(given: str | Mapping[str, Any] | None, param: str) -> Constraint | None:
    """Return the constraint of Ollama's format: `json` for any object, or a schema; None without one, or for ""."""
    if given is None or given == "":
        return None
    if given == "json":
        return Constraint("json", ANY_OBJECT, param)
    if isinstance(given, str):
        raise BadRequest(f"{param}: {short(given)} is not supported: use 'json', or a JSON schema", param=param)
    return _checked("json", given, param)


def read_structured_outputs(given: Any) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`; None if it has none."""
    param = "structured_outputs"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadRequest(f"{param} must be an object", param=param)
    unknown = next((key for key in given if key not in (*_KINDS, *_STYLE, "json_object") and given[key]), None)
    if unknown is not None:
        raise BadRequest(
            f"{param}.{unknown[:80]} is not supported: use {', '.join(_KINDS)}", param=f"{param}.{unknown[:80]}"
        )
    found = [_checked(kind, given[kind], f"{param}.{kind}") for kind in _KINDS if given.get(kind) is not None]
    found += [Constraint("json", ANY_OBJECT, param)] if given.get("json_object") else []
    return only(*found)


def read_named(body: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that a body gives under one of `NAMES`."""
    return only(*(_checked(kind, body[name], name) for name, kind in NAMES.items() if body.get(name) is not None))


def only(*constraints: Constraint | None) -> Constraint | None:
    """Return the one constraint that is given; BadRequest for several."""
    given = [constraint for constraint in constraints if constraint is not None]
    if len(given) > 1:
        message = f"{given[1].param}: {given[0].param} constrains the reply already: send one of them"
        raise BadRequest(message, param=given[1].param)
    return given[0] if given else None


def _checked(kind: Kind, value: Any, param: str) -> Constraint:
    """Return the constraint, a schema that is sent as text parsed; BadRequest for values of another type."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRequest(f"{param} is not JSON: {error}", param=param) from None
    if kind == "choice":
        if not isinstance(value, list) or not value:
            raise BadRequest(f"{param} must be a list of texts", param=param)
        value = tuple(value)
    check_json(value, param)
    return Constraint(kind, value, param)


# Sampling parameters in request bodies, from the table in `model/params`.
#
# Owns the form that they have in JSON; null always means "not given".


def with_sampling(api: Api, **own: Any) -> Callable[[type[Body]], type[Body]]:
    """Return a decorator that adds the parameters an API takes to a body, after the fields that it has.

    `own`: type and field of those that the API describes itself. Chat completions have the table's words, others none.
    """
    kinds = get_type_hints(SamplingParams)
    fields: dict[str, Any] = {}
    for name in BODIES[api]:
        said = PARAMETERS[name].help if api == "chat" else None
        fields[name] = (_FORMS.get(kinds[name], kinds[name]) | None, Field(default=None, description=said))

    def add(body: type[Body]) -> type[Body]:
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **{**fields, **own}
        )

    return add


def sampling_in(body: BaseModel) -> dict[str, Any]:
    """Return what a body says of parameters under the names that they have in the table."""
    return body.model_dump(include=PARAMETERS.keys() & type(body).model_fields.keys(), exclude_none=True)


# Request options that steer a reply in any dialect, as bodies have them: tool choice and reasoning effort.
#
# Owns the variables passed to the chat template; the effect of a tool choice is the engine's.


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


# Tools as chat templates take them, which is how OpenAI's and Ollama's clients send them.
#
# Tools of other types, which the servers of a vendor would run or know, are not shown to the model: they are left out
# and named, as in every dialect.


class ToolFunction(OpenModel):
    """A function the model may call; `parameters` is a JSON schema, which its calls have with `strict`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenModel):
    """A tool offered to the model; one of another type than `function` is left out, and named."""

    type: str = Field(default=FUNCTION, min_length=1)
    function: ToolFunction | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a request: as they were sent, for the template (None: there are none), and their names.

    `strict`: the names of those whose schemas are enforced, and where these are in the body.
    """

    shown: list[Any] | None = None
    names: frozenset[str] = frozenset()
    strict: Mapping[str, str] = field(default_factory=dict)


def read_functions(tools: Sequence[Tool] | None, sent: Any, omissions: Omissions) -> Functions:
    """Return the functions among the tools; BadRequest for one without its function.

    `sent`: the same tools, unparsed, as the template prints every key, in the order sent.
    """
    shown: list[Any] = []
    names: set[str] = set()
    strict: dict[str, str] = {}
    for at, (tool, unparsed) in enumerate(zip(tools or (), sent if tools else (), strict=True)):
        if tool.function is not None:
            shown.append(unparsed)
            names.add(tool.function.name)
            if tool.function.strict:
                strict[tool.function.name] = f"tools[{at}].function.parameters"
        elif tool.type == FUNCTION:
            raise BadRequest(f"tools[{at}].function is missing", param=f"tools[{at}].function")
        else:
            omissions.whole(unparsed, f"tools[{at}]")
    return Functions(shown or None, frozenset(names), strict)


# The `rekindle` object of requests and answers.


class RekindleOptions(StrictModel):
    """Which stored KV may be reused, and whether the answer includes the token ids of prompt and reply."""

    reuse: Literal["continuation", "canonical", "off"] | None = None
    return_ids: bool = False


class RekindleReport(OpenModel):
    """What was reused, from where, and why no more."""

    outcome: Literal["exact", "extend", "diverge", "miss"]
    source: Literal["own", "parent", "shared"] | None
    matched_bytes: int
    prompt_tokens: int
    reused_tokens: int
    hot_tokens: int
    warm_tokens: int
    computed_tokens: int
    completion_tokens: int
    reuse: Literal["continuation", "canonical", "off"]
    timings: dict[str, float]
    explanation: dict[str, Any] | None
    normalised: list[dict[str, Any]] = Field(default=[], description="what was removed from the prompt")
    left_out: list[dict[str, Any]] = Field(default=[], description="what a text model cannot see of the prompt")
    ignored: list[str] = Field(default=[], description="parameters that are not known here, or not to the template")
    broken_calls: list[str] = Field(default=[], description="tools whose calls are not whole: their JSON is not valid")
    generic_tools: bool = Field(default=False, description="the template has no tools: they are in the prompt's text")
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
