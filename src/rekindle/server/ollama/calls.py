"""Parsing of bodies in Ollama's dialect into engine requests."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rekindle.engine.tool_choice import ToolChoice, steered
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import NOTHING_SAID, SamplingDefaults
from rekindle.server.answers.options import RekindleOptions, read_functions, read_schema, sampling_in, template_kwargs
from rekindle.server.answers.validation import short, validated
from rekindle.server.gate.caller import Caller
from rekindle.server.ollama.bodies import (
    LOADING,
    OFF,
    THINKING,
    AskBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from rekindle.text.messages import Message, ToolCall, check_text, joined, normalise_messages
from rekindle.text.omissions import Omissions
from rekindle.text.replies import ReplyFormat
from rekindle.text.replies.format import SHORT_ID_LENGTH

# Every prompt is whole here, and one that does not fit is an error: what Ollama does if these are false.
WHOLE = ("truncate", "shift")


# Conversion of Ollama's messages into those of this project.
#
# Owns what only Ollama has: pictures next to the content, results that name their tool in place of the call's id, and
# that a trailing assistant message prefills the reply.


def messages_of(given: Sequence[Any], omissions: Omissions, *, needs_ids: bool) -> tuple[tuple[Message, ...], str]:
    """Return the messages to reply to, and the beginning of the reply; BadRequest names the message that is wrong.

    `needs_ids`: the chat template accepts no call without an id, which Ollama's Python library drops.
    """
    read = normalise_messages([_plain(item) for item in given], omissions)
    shown = (
        _with_images(message, item.get("images"), f"messages[{index}].images", omissions)
        for index, (message, item) in enumerate(zip(read, given, strict=True))
    )
    messages = list(_paired(list(shown), needs_ids=needs_ids))
    last = messages[-1]
    if len(messages) > 1 and last.role == "assistant" and not last.tool_calls and not last.reasoning:
        return tuple(messages[:-1]), last.content
    return tuple(messages), ""


def prompt_messages(
    prompt: str, system: str | None, images: Sequence[str], omissions: Omissions
) -> tuple[Message, ...]:
    """Return the conversation that a prompt is, with its system message and pictures."""
    head = [Message("system", check_text(system, "system"))] if system else []
    asked = Message("user", check_text(prompt, "prompt"))
    return (*head, _with_images(asked, images, "images", omissions))


def _plain(item: Any) -> Any:
    """Return a message with the keys that the other dialects have; anything but an object as it is."""
    if not isinstance(item, Mapping):
        return item
    message = {key: value for key, value in item.items() if key not in ("images", "tool_name")}
    if isinstance(message.get("role"), str):
        message["role"] = message["role"].lower()
    if item.get("tool_name") is not None and message.get("name") is None:
        message["name"] = item["tool_name"]
    return message


def _with_images(message: Message, images: Any, where: str, omissions: Omissions) -> Message:
    """Return a message whose pictures, or the lines that stand for them, are before its content."""
    if not images:
        return message
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequest(f"{where} must be a list of pictures in base64", param=where)
    parts = [omissions.part({"type": "image", "data": each}, f"{where}[{at}]") for at, each in enumerate(images)]
    return replace(message, content=joined([*parts, message.content] if message.content else parts))


def _paired(messages: Sequence[Message], *, needs_ids: bool) -> Iterator[Message]:
    """Yield messages whose results have the ids of their calls: of that name, or the first without a result."""
    left = _Unanswered(())
    for at, message in enumerate(messages):
        if message.tool_calls:
            if needs_ids:
                message = replace(message, tool_calls=tuple(_with_ids(message.tool_calls, at)))
            left = _Unanswered(message.tool_calls)
        elif message.role == "tool":
            call = left.take(message)
            if call is not None:
                message = replace(message, tool_call_id=message.tool_call_id or call.id)
        yield message


class _Unanswered:
    """The calls of a message that have no result yet, in order: all, by id and by name."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._taken = set[int]()
        self._left = defaultdict[tuple[str, str | None], deque[tuple[int, ToolCall]]](deque)
        for each in enumerate(calls):
            for key in (("any", None), ("id", each[1].id), ("name", each[1].name)):
                self._left[key].append(each)

    def take(self, result: Message) -> ToolCall | None:
        """Take the call of a result away, and return it; None if it has none."""
        key = ("any", None) if result.name is None else ("name", result.name)
        queue = self._left["id", result.tool_call_id] if result.tool_call_id is not None else self._left[key]
        while queue:
            at, call = queue.popleft()
            if at not in self._taken:
                self._taken.add(at)
                return call
        return None


def _with_ids(calls: Sequence[ToolCall], at: int) -> Iterator[ToolCall]:
    """Yield calls with ids, the same in every turn; those of a message's place and their own in it."""
    for number, call in enumerate(calls):
        yield call if call.id else replace(call, id=f"{at:06d}{number:03d}"[-SHORT_ID_LENGTH:])


@dataclass(frozen=True, slots=True)
class ModelSide:
    """The traits of the served model that decide how bodies are parsed; `name` is for errors."""

    name: str
    form: ReplyFormat
    max_context: int
    defaults: SamplingDefaults = NOTHING_SAID
    sees: bool = False

    @property
    def can_think(self) -> bool:
        """Whether replies may begin with reasoning."""
        return self.form.thinking is not None

    @property
    def can_call(self) -> bool:
        """Whether replies may call tools."""
        return self.form.tools is not None

    @property
    def needs_ids(self) -> bool:
        """Whether the template refuses calls without an id."""
        return self.form.call_ids == "short"


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """A parsed body. `request` None: nothing is generated, and the model is to stay loaded or, by `stays`, is not.

    `form` is how the reply is written: text alone where the prompt was the model's input.
    """

    request: GenerationRequest | None
    model: str | None
    stream: bool
    stays: bool
    form: ReplyFormat
    return_ids: bool

    @property
    def read_tools(self) -> Sequence[Any]:
        """Definitions of the tools whose calls are parsed in the reply."""
        return (self.request.tools if self.request is not None else None) or ()


class Parse(Protocol):
    """A parser of one route's bodies; BadRequest says what to change.

    `strict`: what would be left out of the prompt or ignored is refused.
    """

    def __call__(self, body: Any, caller: Caller, side: ModelSide, *, strict: bool = False) -> OllamaCall:
        """Parse a JSON body."""


def parse_chat(body: Any, caller: Caller, side: ModelSide, *, strict: bool = False) -> OllamaCall:
    """Parse the body of a chat."""
    omissions = Omissions(strict=strict, sees=side.sees)
    asked = validated(OllamaChatBody, _known(body), omissions=omissions, harmless=(), neutral={})
    if asked.tools and not side.can_call:
        raise BadRequest(f"{side.name!r} does not support tools: leave them out", param="tools")
    if not asked.messages:
        return _call(asked, None, side.form)
    messages, prefix = messages_of(asked.messages, omissions, needs_ids=side.needs_ids)
    found = read_functions(asked.tools, body.get("tools"), omissions)
    request = _request(asked, caller, side, omissions, messages=messages, tools=found.shown, prefix=prefix)
    steering = steered(request, side.form, ToolChoice(), tool_names=found.names, strict=found.strict)
    return _call(asked, steering, side.form)


def parse_generate(body: Any, caller: Caller, side: ModelSide, *, strict: bool = False) -> OllamaCall:
    """Parse the body of a prompt."""
    omissions = Omissions(strict=strict, sees=side.sees)
    asked = validated(OllamaGenerateBody, _known(body), omissions=omissions, harmless=(), neutral={})
    _check_prompt(asked, side)
    if not asked.prompt:
        return _call(asked, None, side.form)
    images = asked.images or []
    if not asked.raw:
        messages = prompt_messages(asked.prompt, asked.system, images, omissions)
        return _call(asked, _request(asked, caller, side, omissions, messages=messages), side.form)
    for index in range(len(images)):
        omissions.whole({"type": "image"}, f"images[{index}]")
    text = check_text(asked.prompt, "prompt")
    return _call(asked, _request(asked, caller, side, omissions, text=text), ReplyFormat())


def _known(body: Any) -> Any:
    """Return a body without what changes nothing here; anything but an object as it is."""
    if not isinstance(body, dict):
        return body
    given = {name: value for name, value in body.items() if name not in WHOLE or value is not False}
    options = given.get("options")
    if isinstance(options, dict):
        given["options"] = {name: value for name, value in options.items() if not _is_idle(name, value, options)}
    return given


def _is_idle(name: str, value: Any, options: dict[str, Any]) -> bool:
    """Whether an option changes nothing here."""
    if value is None or name in LOADING or (name.startswith("mirostat_") and options.get("mirostat") in (None, 0)):
        return True
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF.get(name, ()))


def _check_prompt(asked: OllamaGenerateBody, side: ModelSide) -> None:
    """Refuse what would make another prompt than the one asked for."""
    if asked.raw and (asked.template or asked.system or asked.context):
        raise BadRequest("raw mode does not support template, system, or context: leave them out", param="raw")
    if asked.raw and asked.think:
        raise BadRequest("think: raw mode has no template that could ask for it: leave it out", param="think")
    if asked.suffix:
        message = (
            f"{side.name!r} does not support insert: leave suffix out, or send raw: true and a prompt with the model's "
            "own tokens for it"
        )
        raise BadRequest(message, param="suffix")
    if asked.template:
        message = "template: prompts have the model's own template; send raw: true and a prompt that you rendered"
        raise BadRequest(message, param="template")
    if asked.context:
        message = (
            "context: conversations are not kept as tokens: send them to /api/chat as messages, whose KV is found by "
            "their text"
        )
        raise BadRequest(message, param="context")


def _request(
    asked: AskBody,
    caller: Caller,
    side: ModelSide,
    omissions: Omissions,
    *,
    messages: tuple[Message, ...] | None = None,
    text: str | None = None,
    tools: Sequence[Any] | None = None,
    prefix: str = "",
) -> GenerationRequest:
    """Build a request for messages, or for a text that is the model's input."""
    options = asked.rekindle or RekindleOptions()
    kwargs = _thinking(asked.think, side)
    return GenerationRequest(
        messages=messages,
        text=text,
        agent=caller.agent,
        namespace=caller.namespace,
        tools=tools,
        params=_params(asked, side, omissions),
        reuse=options.reuse,
        parent=caller.parent,
        template_kwargs=kwargs,
        template_params=dict.fromkeys(kwargs or ("enable_thinking",), "think") if asked.think is not None else {},
        reply_prefix=prefix,
        constraint=read_schema(asked.format, "format"),
        structured=messages is not None,
        omitted=omissions.all(),
        pictures=omissions.pictures,
    )


def _call(asked: AskBody, request: GenerationRequest | None, form: ReplyFormat) -> OllamaCall:
    return OllamaCall(
        request=request,
        model=asked.model,
        stream=asked.stream is not False,
        stays=asked.stays,
        form=form,
        return_ids=asked.rekindle is not None and asked.rekindle.return_ids,
    )


def _thinking(think: bool | str | None, side: ModelSide) -> dict[str, Any]:
    """Return the template's variables for `think`; BadRequest if the model cannot, or for other words."""
    if isinstance(think, str) and think not in THINKING:
        raise BadRequest(f"think: {short(think)} is not known: use true, false, {', '.join(THINKING)}", param="think")
    if think and not side.can_think:
        raise BadRequest(f"{side.name!r} does not support thinking: leave think out, or send false", param="think")
    if think is None or not side.can_think:
        return {}
    return {"enable_thinking": think} if isinstance(think, bool) else template_kwargs(None, think)


def _params(asked: AskBody, side: ModelSide, omissions: Omissions) -> SamplingParams:
    """Build the sampling parameters, with the model's or Ollama's defaults for what is not given."""
    given = asked.options or OllamaOptions()
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    if given.num_ctx is not None and given.num_ctx > side.max_context:
        omissions.key("num_ctx", "options")
    most = given.num_predict if given.num_predict is not None and given.num_predict > 0 else None
    named = sampling_in(given)
    if given.top_k is not None:
        named["top_k"] = max(0, given.top_k)
    if given.seed == -1:
        del named["seed"]
    if not given.stop:
        named.pop("stop", None)
    scores = {"logprobs": (asked.top_logprobs or 0) if asked.logprobs else None}
    return side.defaults.params("ollama", {**named, **_penalties(given, omissions), "max_tokens": most, **scores})


def _penalties(given: OllamaOptions, omissions: Omissions) -> dict[str, float]:
    """Return the penalties; they count all tokens, and a number of last ones is named unless nothing depends on it."""
    if given.repeat_last_n == 0:
        return {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if given.repeat_last_n not in (None, -1) and given.repeat_penalty not in (None, 1):
        omissions.key("repeat_last_n", "options")
    return {} if given.repeat_penalty is None else {"repetition_penalty": given.repeat_penalty}
