"""Models of Anthropic's replies for the OpenAPI description; tests validate real replies against them."""

from __future__ import annotations

from typing import Any, Literal

from rekindle.server.answers.options import RekindleReport
from rekindle.server.answers.validation import StrictModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicError(StrictModel):
    """The kind of an error, and what is wrong."""

    type: str
    message: str


class AnthropicErrorReply(StrictModel):
    """Every error under /v1/messages has this shape, with the request's id; in a stream it is an event without one."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str | None = None


class CacheCreation(StrictModel):
    """Tokens created, by how long they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputDetails(StrictModel):
    """Tokens of the output that were thinking."""

    thinking_tokens: int


class MessageUsage(StrictModel):
    """Tokens of the prompt are input + cache_read + cache_creation, always."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputDetails | None = None


class ReplyBlock(StrictModel):
    """A block of the reply: `text`, `thinking` with its `signature`, or a `tool_use` with the `input` of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AppliedEdits(StrictModel):
    """Always empty: this server does not edit histories."""

    applied_edits: list[Any]


class CacheMissReason(StrictModel):
    """The first part of a request that differs from the earlier one, and about how many tokens were computed for it.

    Without that number nothing can be said: no such message is known here, or only how the template is used differs.
    """

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: int | None = None


class Diagnostics(StrictModel):
    """Why the prompt does not continue that of the message which the request names."""

    cache_miss_reason: CacheMissReason


class MessageStart(StrictModel):
    """The message at the start of its stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: Diagnostics | None = None


class MessageAnswer(MessageStart):
    """A whole answer."""

    rekindle: RekindleReport
    context_management: AppliedEdits | None = None


class EventDelta(StrictModel):
    """A piece of a block, or (without `type`) why the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageEvent(StrictModel):
    """An event of a stream; its name is its `type`. Pings may come at any time."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: MessageStart | None = None
    index: int | None = None
    content_block: ReplyBlock | None = None
    delta: EventDelta | None = None
    usage: MessageUsage | None = None
    rekindle: RekindleReport | None = None
    context_management: AppliedEdits | None = None
    error: AnthropicError | None = None
