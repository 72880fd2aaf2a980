"""Parsing of bodies in OpenAI's dialect into engine requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rekindle.engine.tool_choice import ToolChoice
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.model.sampling_defaults import NOTHING_SAID, SamplingDefaults
from rekindle.server.answers.options import (
    NAMES,
    RekindleOptions,
    only,
    parse_tool_choice,
    read_format,
    read_functions,
    read_named,
    read_structured_outputs,
    sampling_in,
    template_fields,
    template_kwargs,
)
from rekindle.server.answers.validation import MAX_NAME_CHARS, NEUTRAL, short, validated
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.bodies import (
    COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatBody,
    ChatOptions,
    CompletionBody,
    SamplingBody,
)
from rekindle.text.constraints.types import Constraint
from rekindle.text.messages import Message, normalise_messages
from rekindle.text.omissions import Omissions

Body = TypeVar("Body", bound=SamplingBody)

# llama.cpp's and Ollama's names.
_RENAMED = {"n_predict": "max_tokens", "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Values that mean "not given" to other servers: no limit, no cut-off.
_UNSET = {"max_tokens": -1, "top_k": -1, "max_completion_tokens": -1, "thinking_token_budget": -1}
# Parameters of samplers and outputs that are not implemented, with the values at which they change nothing.
TEXT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "typical": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
    "truncate_prompt_tokens": (-1,),
    "thinking_token_budget": (),
    "prompt_embeds": (),
}
CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **TEXT_NEUTRAL,
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "return_tokens_as_token_ids": (False,),
}


# Names and values that other servers, and older clients, have for OpenAI's parameters.
#
# Owns the translation of a body into the parameters of `bodies`; one that is given under its own name wins. Pure.


def text_parameters(body: Any) -> Any:
    """Return a body of completions with OpenAI's names; anything but an object as it is."""
    if not isinstance(body, dict):
        return body
    given = dict(body)
    for other, name in _RENAMED.items():
        value = given.pop(other, None)
        if given.get(name) is None and value is not None:
            given[name] = value
    for name, unset in _UNSET.items():
        if given.get(name) == unset and not isinstance(given[name], bool):
            del given[name]
    return given


def chat_parameters(body: Any) -> Any:
    """Return a body of chat completions with OpenAI's names, as `text_parameters` does."""
    given = text_parameters(body)
    if not isinstance(given, dict):
        return given
    _read_thinking(given)
    _read_functions(given)
    if given.get("tool_choice") == "any":
        given["tool_choice"] = "required"
    messages = given.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping) and "prefix" in messages[-1]:
        last = dict(messages[-1])
        if last.pop("prefix") is True:
            given["continue_final_message"] = True
        given["messages"] = [*messages[:-1], last]
    return given


def _read_thinking(given: dict[str, Any]) -> None:
    """Translate the switches for reasoning: `thinking`, `enable_thinking`, and `reasoning` with its effort."""
    thinking, switch, reasoning = (given.pop(name, None) for name in ("thinking", "enable_thinking", "reasoning"))
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled", "auto", "adaptive"):
        switch = thinking["type"] != "disabled" if switch is None else switch
    elif thinking is not None:
        raise BadRequest(
            f"thinking: {short(thinking)} is not supported: use a type, enabled or disabled", param="thinking"
        )
    if switch is not None:
        kwargs = given.get("chat_template_kwargs")
        given["chat_template_kwargs"] = {"enable_thinking": switch, **(kwargs if isinstance(kwargs, Mapping) else {})}
    if isinstance(reasoning, Mapping) and given.get("reasoning_effort") is None:
        effort = "none" if reasoning.get("enabled") is False else reasoning.get("effort")
        if effort is not None:
            given["reasoning_effort"] = effort
        if reasoning.get("exclude") is True:
            given.setdefault("include_reasoning", False)


def _read_functions(given: dict[str, Any]) -> None:
    """Translate the form that tools had before: `functions` and `function_call`."""
    functions, call = given.pop("functions", None), given.pop("function_call", None)
    if functions is not None and given.get("tools") is None:
        if not isinstance(functions, list):
            raise BadRequest("functions: must be a list; better send tools", param="functions")
        given["tools"] = [{"type": "function", "function": function} for function in functions]
    if call is not None and given.get("tool_choice") is None:
        given["tool_choice"] = {"type": "function", "function": call} if isinstance(call, Mapping) else call


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body: what to generate, how many replies to each prompt, and how to answer.

    `return_ids` are in the `rekindle` object, with `adds_ids` they are where vLLM has them. `num_prompt_logprobs`:
    alternatives to each token of the prompt, None if their logprobs are not in the answer.
    """

    requests: tuple[GenerationRequest, ...]
    num_choices: int
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    shows_progress: bool
    return_ids: bool
    adds_ids: bool
    has_logprobs: bool
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class ChatCall(Call):
    """A parsed chat body; `parallel`: the reply may contain several calls, `shows_reasoning`: the answer has it.

    `strict`: the names of tools whose schemas are enforced, and where these are in the body.
    """

    tool_choice: ToolChoice
    tool_names: frozenset[str]
    strict: Mapping[str, str]
    parallel: bool
    shows_reasoning: bool

    @property
    def read_tools(self) -> Sequence[Any]:
        """Definitions of the tools whose calls are parsed in the reply."""
        return (self.requests[0].tools or ()) if self.tool_choice.kind != "none" else ()


@dataclass(frozen=True, slots=True)
class CompletionCall(Call):
    """A parsed completion body; `echo`: the text begins with the prompt. `num_logprobs`: alternatives per token.

    `tokens_by_id`: logprobs name tokens by their ids.
    """

    echo: bool
    num_logprobs: int
    tokens_by_id: bool


def parse_chat(
    body: Any,
    caller: Caller,
    *,
    defaults: SamplingDefaults = NOTHING_SAID,
    strict: bool = False,
    sees: bool = False,
    knows_progress: bool = True,
) -> ChatCall:
    """Parse the JSON body of a chat; BadRequest names the parameter to change.

    `defaults`: what is sampled with if the body does not say. `strict`: what would be left out of the prompt or ignored
    is refused. `sees`: pictures are read. `knows_progress`: how far a prompt is can be said meanwhile.
    """
    omissions = Omissions(strict=strict, sees=sees)
    body = chat_parameters(body)
    chat = _read(ChatBody, body, omissions, neutral=CHAT_NEUTRAL, knows_progress=knows_progress)
    options = chat.rekindle or ChatOptions()
    ids = tuple(options.prompt_ids) if options.prompt_ids is not None else None
    choice = parse_tool_choice(chat.tool_choice)
    functions = read_functions(chat.tools, body.get("tools"), omissions)
    messages = normalise_messages(chat.messages, omissions) if ids is None else None
    messages, prefix = _continued(chat, messages)
    request = GenerationRequest(
        messages=messages,
        token_ids=ids,
        agent=caller.agent,
        namespace=caller.namespace,
        tools=functions.shown,
        params=_params(chat, _renamed(chat), defaults),
        reuse=options.reuse,
        parent=caller.parent,
        **_template_fields(chat),
        reply_prefix=prefix,
        constraint=None if choice.is_forced else _constraint(chat),
        structured=True,
        omitted=omissions.all(),
        pictures=omissions.pictures,
    )
    return ChatCall(
        **_common(chat, options, (request,)),
        tool_choice=choice,
        tool_names=functions.names,
        strict=functions.strict,
        parallel=chat.parallel_tool_calls is not False and choice.name is None,
        shows_reasoning=chat.include_reasoning is not False,
    )


def _renamed(chat: ChatBody) -> dict[str, Any]:
    """The sampling that chats call by other names; BadRequest if it does not go together."""
    if chat.top_logprobs and not chat.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    extra: dict[str, Any] = {"logprobs": (chat.top_logprobs or 0) if chat.logprobs else None}
    if chat.max_completion_tokens is not None:
        extra["max_tokens"] = chat.max_completion_tokens
    return extra


def _template_fields(chat: ChatBody) -> dict[str, Any]:
    given = chat.chat_template_kwargs
    return template_fields(template_kwargs(given, chat.reasoning_effort), given, "reasoning_effort")


def _continued(chat: ChatBody, messages: tuple[Message, ...] | None) -> tuple[tuple[Message, ...] | None, str]:
    """Return the messages to reply to and the beginning of the reply: the last message, if it is to be continued."""
    if not chat.continue_final_message:
        if chat.add_generation_prompt is False:
            message = "add_generation_prompt: a reply needs it; continue_final_message continues the last message"
            raise BadRequest(message, param="add_generation_prompt")
        return messages, ""
    param = "continue_final_message"
    if messages is None or len(messages) < 2 or messages[-1].role != "assistant":
        raise BadRequest(f"{param}: the last of several messages must be the assistant's", param=param)
    if messages[-1].tool_calls or messages[-1].reasoning:
        raise BadRequest(f"{param}: a reply can be begun with text only, not with calls or reasoning", param=param)
    return messages[:-1], messages[-1].content


def parse_completion(
    body: Any,
    caller: Caller,
    *,
    defaults: SamplingDefaults = NOTHING_SAID,
    strict: bool = False,
    knows_progress: bool = True,
) -> CompletionCall:
    """Parse the JSON body of a completion, as `parse_chat` does; one request per prompt."""
    omissions = Omissions(strict=strict)
    given = text_parameters(body)
    asked = _read(CompletionBody, given, omissions, neutral=TEXT_NEUTRAL, knows_progress=knows_progress)
    options = asked.rekindle or RekindleOptions()
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise BadRequest("best_of: replies are not ranked here; leave it out and ask for n", param="best_of")
    limit = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    scored = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    extra = {
        "logprobs": asked.logprobs,
        "prompt_logprobs": max((num for num in scored if num is not None), default=None),
        "max_tokens": limit or None,
    }
    params = _params(asked, extra, defaults)
    requests = tuple(
        GenerationRequest(
            text=prompt if isinstance(prompt, str) else None,
            token_ids=tuple(prompt) if not isinstance(prompt, str) else None,
            agent=caller.agent,
            namespace=caller.namespace,
            params=params,
            reuse=options.reuse,
            parent=caller.parent,
            task="generate" if limit else "prefill",
            constraint=_constraint(asked),
            omitted=omissions.all(),
        )
        for prompt in _prompts(asked.prompt)
    )
    if len(requests) * (asked.n or 1) > MAX_CHOICES:
        message = f"prompt: {len(requests)} prompts with n = {asked.n or 1} are more than {MAX_CHOICES} choices"
        raise BadRequest(message, param="prompt")
    return CompletionCall(
        **_common(asked, options, requests),
        echo=bool(asked.echo),
        num_logprobs=asked.logprobs or 0,
        tokens_by_id=bool(asked.return_tokens_as_token_ids),
    )


def _read(
    kind: type[Body], given: Any, omissions: Omissions, *, neutral: Mapping[str, tuple[Any, ...]], knows_progress: bool
) -> Body:
    body = validated(kind, given, omissions=omissions, neutral=neutral)
    if body.return_progress and not knows_progress:
        omissions.parameter("return_progress")
    return body


def _constraint(body: SamplingBody) -> Constraint | None:
    return only(
        read_format(body.response_format, "response_format"),
        read_structured_outputs(body.structured_outputs),
        read_named(body.model_dump(include=set(NAMES))),
    )


def _prompts(prompt: str | Sequence[Any]) -> Sequence[Any]:
    """Return one entry per prompt, a string or ids."""
    several = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not several or any(not isinstance(each, str) and not each for each in several):
        raise BadRequest("prompt is empty: send text, token ids, or a list of either", param="prompt")
    return several


def _common(body: SamplingBody, options: RekindleOptions, requests: tuple[GenerationRequest, ...]) -> dict[str, Any]:
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequest("prompt_logprobs: not in a stream; leave stream out", param="prompt_logprobs")
    return {
        "requests": requests,
        "num_choices": body.n or 1,
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "continuous_usage": body.stream_options is not None and body.stream_options.continuous_usage_stats,
        "shows_progress": bool(body.return_progress),
        "return_ids": options.return_ids,
        "adds_ids": bool(body.return_token_ids),
        "num_prompt_logprobs": body.prompt_logprobs,
        "has_logprobs": requests[0].params.logprobs is not None,
    }


def _params(body: SamplingBody, extra: Mapping[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    given = sampling_in(body)
    given["logit_bias"] = tuple((_token_id(key), bias) for key, bias in given.get("logit_bias", {}).items())
    return defaults.params("openai", {**given, **extra})


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12 and str(int(key)) == key):
        raise BadRequest(f"logit_bias: {key[:MAX_NAME_CHARS]!r} is no token id", param="logit_bias")
    return int(key)
