"""What OpenAI's request bodies may hold, as models that validate and describe them.

Owns names and types. `SamplingParams` owns the ranges of numbers, `text/messages` what a message may be.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from rekindle.server.answers.extension import RekindleOptions
from rekindle.server.answers.validation import Items

MAX_CHOICES = 128
COMPLETION_TOKENS = 16  # OpenAI's default for completions


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Open(BaseModel):
    """Takes further keys: they are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(_Body):
    """`include_obfuscation` pads chunks elsewhere; there is nothing to pad here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatOptions(RekindleOptions):
    """`prompt_ids` are computed instead of the messages."""

    prompt_ids: Items[int] | None = Field(default=None, min_length=1)


class ToolFunction(_Open):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Open):
    """A tool on offer."""

    type: Literal["function"] = "function"
    function: ToolFunction


class SamplingBody(_Body):
    """How tokens are picked; null everywhere means "not given"."""

    model: str | None = Field(default=None, description="the served name, the path it was loaded from, or `default`")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0: no limit")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, description="token id to bias, -100 to 100")
    seed: int | None = Field(default=None, description="choice i is drawn with seed + i")
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"enum": ["function"]},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL, "description": "of assistant messages"},
        "tool_call_id": {"type": "string"},
        "reasoning_content": {"type": "string"},
    },
}
Messages = Annotated[
    Items[dict[str, Any]], WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE}), Field(min_length=1)
]


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens; it wins")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Items[Tool] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, description="for the chat template; none: without thinking")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    rekindle: ChatOptions | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions. Control tokens spelled in `prompt` are tokens; several prompts are answered together."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = Field(default=None, description="begin the text with the prompt")
    logprobs: int | None = Field(default=None, ge=0, le=5)
    best_of: int | None = Field(default=None, description="only what n is")
    rekindle: RekindleOptions | None = None
