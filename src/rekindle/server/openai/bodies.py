"""Models of OpenAI's request bodies, for validation and for the OpenAPI description.

Owns names and types. `model/params` owns sampling parameters, `text/messages` the format of messages.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rekindle.server.answers.options import RekindleOptions, Tool, with_sampling
from rekindle.server.answers.validation import Items, StrictModel

MAX_CHOICES = 128
COMPLETION_TOKENS = 16  # OpenAI's default for completions


class StreamOptions(StrictModel):
    """Usage in a last chunk, or with `continuous_usage_stats` as it is by then in each of them.

    `include_obfuscation` is accepted and ignored: chunks are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ChatOptions(RekindleOptions):
    """`prompt_ids` replace the messages as the prompt."""

    prompt_ids: Items[int] | None = Field(default=None, min_length=1)


@with_sampling("chat")
class _Drawn(StrictModel):
    model: str | None = Field(default=None, description="the served name, the path it was loaded from, or `default`")
    max_tokens: int | None = Field(default=None, description="of a reply; not given: the rest of the context")


class SamplingBody(_Drawn):
    """Sampling parameters; null always means "not given"."""

    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object, or json_schema with its schema: replies are JSON of it"
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's: json, regex, choice or grammar"
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = Field(default=None, description="in Lark's or llama.cpp's notation, as grammar")
    json_schema: dict[str, Any] | None = Field(default=None, description="llama.cpp's")
    grammar: str | None = Field(default=None, description="llama.cpp's")
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="vLLM's: log probabilities of the prompt's tokens, with alternatives"
    )
    return_token_ids: bool | None = Field(default=None, description="vLLM's: add the ids of prompt and reply")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = Field(default=None, description="answer as server-sent events")
    return_progress: bool | None = Field(
        default=None,
        description="llama.cpp's: a stream says how far its prompt is computed, in chunks before the reply",
    )
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
    logprobs: bool | None = Field(default=None, description="return the log probability of every token")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="alternatives to each token")
    tools: Items[Tool] | None = Field(default=None, description="what the model may call")
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: the reply ends after the first call")
    reasoning_effort: str | None = Field(default=None, description="for the chat template; none: without reasoning")
    include_reasoning: bool | None = Field(default=None, description="false: leave reasoning out of the answer")
    continue_final_message: bool | None = Field(
        default=None,
        description="the reply continues the last message, the assistant's, which also `prefix` in it says",
    )
    add_generation_prompt: bool | None = Field(default=None, description="false only with continue_final_message")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    rekindle: ChatOptions | None = Field(default=None, description="which stored KV may be reused")


class CompletionBody(SamplingBody):
    """POST /v1/completions. Control tokens in `prompt` count as tokens; several prompts are answered together."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(
        default=None,
        description=f"of a reply; not given: {COMPLETION_TOKENS}, as OpenAI does; 0: the prompt only",
    )
    echo: bool | None = Field(default=None, description="begin the text, and the logprobs, with the prompt")
    logprobs: int | None = Field(default=None, ge=0, le=5, description="alternatives to each token")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="vLLM's: logprobs name tokens by their ids, as `token_id:5`"
    )
    best_of: int | None = Field(default=None, description="must equal n")
    rekindle: RekindleOptions | None = None
