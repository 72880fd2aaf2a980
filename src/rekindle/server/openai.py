"""Chat completions as OpenAI speaks them: a body in, a completion or chunks out.

Two directions over the same values: `parse_chat` makes a `ChatCall`, `completion` and `Chunks` spell a reply. A
parameter that would change the answer and is not implemented is refused by name; a short list that cannot change it
is ignored. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rekindle.engine.types import ChatResult, Delta, GenerationRequest, Report
from rekindle.errors import BadRequest
from rekindle.model.sampler import SamplingParams
from rekindle.text.messages import normalise_messages

# They name, bill or route; no answer depends on them.
HARMLESS = frozenset(
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store "
    "user".split()
)
# Not implemented, but harmless at the value that means "off".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "min_p": (0,),
    "repetition_penalty": (1,),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """`include_obfuscation` pads chunks elsewhere; there is nothing to pad here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class RekindleOptions(_Body):
    """`return_ids` puts the ids of prompt and reply into the answer; `prompt_ids` are computed instead of messages."""

    reuse: Literal["continuation", "canonical", "off"] | None = None
    return_ids: bool = False
    prompt_ids: list[int] | None = Field(default=None, min_length=1)


class ChatBody(_Body):
    """What a body may hold, after the harmless parameters were dropped; `SamplingParams` owns the ranges of numbers."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    rekindle: RekindleOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed body: what to generate, and how to answer."""

    request: GenerationRequest
    model: str | None
    stream: bool
    include_usage: bool
    return_ids: bool


def parse_chat(body: Any, *, agent: str | None, namespace: str) -> ChatCall:
    """The call a JSON body makes; BadRequest names the parameter to change."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    # null means "not given", but only of a parameter that is known
    unset = {name for name in (*ChatBody.model_fields, *NEUTRAL) if body.get(name) is None}
    given = {name: value for name, value in body.items() if name not in HARMLESS | unset}
    for name, neutral in NEUTRAL.items():
        if name in given:
            # 0 == False in Python; as JSON they are different values.
            if not any(
                given[name] == value and isinstance(given[name], bool) == isinstance(value, bool) for value in neutral
            ):
                raise BadRequest(f"{name}: {given[name]!r} is not supported; leave it out", param=name)
            del given[name]
    try:
        chat = ChatBody.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    options = chat.rekindle or RekindleOptions()
    ids = tuple(options.prompt_ids) if options.prompt_ids is not None else None
    request = GenerationRequest(
        messages=normalise_messages(chat.messages) if ids is None else None,
        token_ids=ids,
        agent=agent,
        namespace=namespace,
        tools=chat.tools or None,
        params=_params(chat),
        reuse=options.reuse,
    )
    usage = chat.stream_options is not None and chat.stream_options.include_usage
    return ChatCall(request, chat.model, bool(chat.stream), usage, options.return_ids)


def _refusal(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unknown parameter {name!r}: it is not supported here", param=name)
    return BadRequest(f"{name}: {first['msg']}", param=name)


def _params(chat: ChatBody) -> SamplingParams:
    """Parameters that were not given keep the defaults of `SamplingParams`, where these are written."""
    given = chat.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "seed"}, exclude_none=True)
    if chat.max_completion_tokens is not None:
        given["max_tokens"] = chat.max_completion_tokens
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    return SamplingParams(stop=stop, **given)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every piece of one completion repeats: its id, when it was made (Unix seconds), the served model."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """The common start of a completion or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(report: Report) -> dict[str, Any]:
    """Honest to the token: the reused ones are part of the prompt, and 0 is 0."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
    }


def headers_of(report: Report) -> dict[str, str]:
    """The outcome for clients that drop unknown fields."""
    return {
        "X-Rekindle-Outcome": report.outcome,
        "X-Rekindle-Reused": str(report.reused_tokens),
        "X-Rekindle-Source": report.source or "none",
    }


def _rekindle(report: Report, ids: tuple[tuple[int, ...], tuple[int, ...]] | None) -> dict[str, Any]:
    described = report.as_dict()
    if ids is not None:
        described |= {"prompt_ids": list(ids[0]), "completion_ids": list(ids[1])}
    return described


def completion(stamp: Stamp, result: ChatResult, *, return_ids: bool) -> dict[str, Any]:
    """A whole reply."""
    message = {"role": "assistant", "content": result.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": result.finish_reason}
    return {
        **stamp.head("chat.completion"),
        "choices": [choice],
        "usage": usage_of(result.report),
        "rekindle": _rekindle(result.report, (result.prompt_ids, result.token_ids) if return_ids else None),
    }


class Chunks:
    """Spells deltas as chunks: the role first, `rekindle` beside `finish_reason`, usage last if it was asked for."""

    def __init__(self, stamp: Stamp, call: ChatCall) -> None:
        self._stamp = stamp
        self._call = call
        self._started = False
        self._token_ids: list[int] = []

    def of(self, delta: Delta, prompt_ids: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """The chunks one delta makes; none for one that has no text and ends nothing."""
        self._token_ids.extend(delta.token_ids)
        if not self._started:
            self._started = True
            yield self._chunk({"role": "assistant", "content": ""})
        if delta.text:
            yield self._chunk({"content": delta.text})
        if delta.finish_reason is None:
            return
        last = self._chunk({}, delta.finish_reason)
        if delta.report is not None:
            ids = (prompt_ids, tuple(self._token_ids)) if self._call.return_ids else None
            last["rekindle"] = _rekindle(delta.report, ids)
        yield last
        if self._call.include_usage and delta.report is not None:
            usage = {**self._stamp.head("chat.completion.chunk"), "choices": [], "usage": usage_of(delta.report)}
            yield usage

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._stamp.head("chat.completion.chunk"), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk
