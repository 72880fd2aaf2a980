"""Models of Anthropic's request bodies, for validation and for the OpenAPI description.

Owns names and types. Content blocks and tools are parsed in `conversation` and `tools`, whose errors name the index
of what cannot be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rekindle.model.params import MAX_STOPS
from rekindle.server.answers.options import RekindleOptions
from rekindle.server.answers.validation import Items, OpenModel, StrictModel

# Parameters for naming, billing, routing or extra data; no answer depends on them.
HARMLESS = frozenset(
    "metadata service_tier inference_geo container user_profile_id workspace_id speed betas "
    "billing_policy fallbacks fallback_credit_token anthropic_version anthropic_beta".split()
)
# Not implemented, but harmless at the value that means "off".
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],)}


class CacheControl(OpenModel):
    """Keep the prompt up to this block for this long; each reuse restarts the time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        """Seconds to keep it; 5 minutes by default."""
        return 3600.0 if self.ttl == "1h" else 300.0


class Thinking(OpenModel):
    """Whether the model is to think; `budget_tokens` is accepted but has no effect: `max_tokens` is the limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(StrictModel):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(StrictModel):
    """`effort` is passed to the chat template as `reasoning_effort`; `format`: replies are JSON of its schema."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ContextEdit(OpenModel):
    """An edit of the history. The server makes none, and says so in the answer."""

    type: str
    keep: Any = None


class ContextManagement(StrictModel):
    """Edits of the history by the server: this server makes none."""

    edits: Items[ContextEdit] | None = None


_CONTROL = {"type": "object", "properties": {"type": {"enum": ["ephemeral"]}, "ttl": {"enum": ["5m", "1h"]}}}
_TEXT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}, "cache_control": _CONTROL},
}
_BLOCK: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]},
        "text": {"type": "string"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
        "tool_use_id": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]},
        "is_error": {"type": "boolean"},
        "thinking": {"type": "string"},
        "signature": {"type": "string"},
        "data": {"type": "string"},
        "cache_control": _CONTROL,
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"enum": ["custom"]},
        "name": {"type": "string"},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
        "cache_control": _CONTROL,
    },
}
Messages = Annotated[
    Items[dict[str, Any]],
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE}),
    Field(min_length=1),
]
System = Annotated[
    str | Items[dict[str, Any]], WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]})
]
Tools = Annotated[Items[dict[str, Any]], WithJsonSchema({"type": "array", "items": _TOOL})]


class Diagnostics(OpenModel):
    """Why the prompt cache missed, compared with the request that this message answered. Null: the first of them."""

    previous_message_id: str | None = None


class PromptBody(StrictModel):
    """The parameters that make up a prompt, whether it is counted or answered."""

    model: str | None = Field(
        default=None, description="the served name, the path it was loaded from, `default`, or any name of claude-"
    )
    messages: Messages
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(default=None, description="the older name of output_config.format")
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = Field(default=None, description="as if set on the last block that allows it")


class CountBody(PromptBody):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=0, description="0: compute and keep the prompt, answer nothing")
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOPS)
    stream: bool | None = None
    diagnostics: Diagnostics | None = Field(default=None, description="say which part of the request was changed")
    temperature: float | None = None
    top_k: int | None = Field(default=None, description="0: no limit")
    top_p: float | None = None
    rekindle: RekindleOptions | None = None
