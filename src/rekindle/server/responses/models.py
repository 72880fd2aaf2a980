"""Models of responses, for the OpenAPI description: tests validate real responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rekindle.server.answers.options import RekindleReport
from rekindle.server.answers.validation import OpenModel, StrictModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(StrictModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class ReasoningText(StrictModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(StrictModel):
    """A message of the reply."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(StrictModel):
    """Reasoning of the reply; `encrypted_content` if it was requested."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]
    encrypted_content: str | None = None


class CallItem(StrictModel):
    """A call; its arguments are verbatim as generated if the model writes JSON."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(StrictModel):
    """A call of a custom tool, whose input is text."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ActionItem(StrictModel):
    """A call of a shell."""

    id: str
    type: Literal["local_shell_call", "shell_call"]
    status: ItemStatus
    call_id: str
    action: dict[str, Any]


class PatchItem(StrictModel):
    """A call that creates, updates or deletes a file."""

    id: str
    type: Literal["apply_patch_call"]
    status: ItemStatus
    call_id: str
    operation: dict[str, Any]


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem | ActionItem | PatchItem


class InputDetails(StrictModel):
    """Input tokens that were reused, and those that were computed and stored in the cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(StrictModel):
    """Output tokens of reasoning, including its markers."""

    reasoning_tokens: int


class ResponseUsage(StrictModel):
    """Tokens of input and output."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseReport(RekindleReport):
    """`left_out_tools`: kinds of tools that the model is not shown. `not_stored`: why a response that was to be
    stored is not durable, and `store` therefore false."""

    left_out_tools: list[str] | None = None
    not_stored: str | None = None


class CacheDiagnostics(StrictModel):
    """What the request named for a comparison says about reuse: the first part that differs, and about how many tokens
    were computed for it. `unavailable`: the prompt continues the other one, and its KV is gone."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: Literal["model_changed", "tools_changed", "reasoning_effort_changed", "input_changed"] | None = None
    cache_missed_tokens: int | None = None


class IncompleteDetails(StrictModel):
    """Why the response is incomplete."""

    reason: Literal["max_output_tokens"]


class FailedResponse(StrictModel):
    """Why the response failed."""

    code: str
    message: str


class ResponseAnswer(StrictModel):
    """A response; the request fields it repeats have the values sent, or their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: FailedResponse | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    rekindle: ResponseReport | None = None
    prompt_cache_diagnostics: CacheDiagnostics | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(OpenModel):
    """An event of a stream, named by its type; numbered without gaps. The last one has the whole response."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
