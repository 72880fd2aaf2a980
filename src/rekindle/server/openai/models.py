"""Models of OpenAI's replies for the OpenAPI description; tests validate real replies against them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rekindle.server.answers.options import RekindleReport
from rekindle.server.answers.validation import StrictModel


class ErrorBody(StrictModel):
    """What is wrong, and which parameter to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(StrictModel):
    """Every error has this shape; in a stream it comes as an event."""

    error: ErrorBody


class CachedTokens(StrictModel):
    """Tokens of the prompt that were reused."""

    cached_tokens: int


class ReasoningTokens(StrictModel):
    """Tokens of the replies that were reasoning."""

    reasoning_tokens: int


class Usage(StrictModel):
    """Tokens of each prompt, counted once, and of all choices; chats also have details of the replies."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class Alternative(StrictModel):
    """A token, its natural logarithm of probability before temperature, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A generated token and the most likely tokens in its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(StrictModel):
    """One entry per token."""

    content: list[ChatToken]
    refusal: None


class CalledFunction(StrictModel):
    """`arguments` verbatim as generated: usually a JSON object, not always a valid one."""

    name: str
    arguments: str


class Called(StrictModel):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(StrictModel):
    """The reply."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="the same, by its newer name")
    tool_calls: list[Called] = Field(default=[])


class PromptToken(StrictModel):
    """A prompt token; `rank` 1: the likeliest of the vocabulary."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]  # by token id; the first token has none


class ChatChoice(StrictModel):
    """One of n replies."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None
    rekindle: RekindleReport | None = None


class ChatCompletion(StrictModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rekindle: RekindleReport


class FunctionPiece(StrictModel):
    """The next piece of a call."""

    name: str | None = None
    arguments: str


class CallPiece(StrictModel):
    """A piece of a call; the first one has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatDelta(StrictModel):
    """The part of the message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="the same, by its newer name")
    tool_calls: list[CallPiece] = Field(default=[])


class ChunkChoice(StrictModel):
    """A piece of one choice; chunks of several choices are interleaved."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class PromptProgress(StrictModel):
    """How far a prompt is, in tokens: `processed` of `total`, those of the `cache` included; time since it began."""

    total: int
    cache: int
    processed: int
    time_ms: int


class ChatChunk(StrictModel):
    """An event of a stream; the last ones have `finish_reason` and `rekindle`, then usage if requested."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = Field(default=None, description="in a stream with `return_progress`")
    rekindle: RekindleReport | None = None


class TextLogprobs(StrictModel):
    """One entry per token, null for the first of an echoed prompt; offsets in characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(StrictModel):
    """One reply to one prompt; those to the first prompt come first."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rekindle: RekindleReport | None = None


class TextCompletion(StrictModel):
    """A whole answer or, in a stream, one of its events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = Field(default=None, description="in a stream with `return_progress`")
    rekindle: RekindleReport | None = None
