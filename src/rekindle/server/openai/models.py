"""Models of OpenAI's replies for the OpenAPI description; tests validate real replies against them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rekindle.server.answers.extension import RekindleReport


class _ReplyModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(_ReplyModel):
    """What is wrong, and which parameter to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_ReplyModel):
    """Every error has this shape; in a stream it comes as an event."""

    error: ErrorBody


class CachedTokens(_ReplyModel):
    """Tokens of the prompt that were reused."""

    cached_tokens: int


class ReasoningTokens(_ReplyModel):
    """Tokens of the replies that were reasoning."""

    reasoning_tokens: int


class Usage(_ReplyModel):
    """Tokens of each prompt, counted once, and of all choices; chats also have details of the replies."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class Alternative(_ReplyModel):
    """A token, its natural logarithm of probability before temperature, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A generated token and the most likely tokens in its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(_ReplyModel):
    """One entry per token."""

    content: list[ChatToken]
    refusal: None


class CalledFunction(_ReplyModel):
    """`arguments` verbatim as generated: usually a JSON object, not always a valid one."""

    name: str
    arguments: str


class Called(_ReplyModel):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_ReplyModel):
    """The reply."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Called] = []


class ChatChoice(_ReplyModel):
    """One of n replies."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    rekindle: RekindleReport | None = None


class ChatCompletion(_ReplyModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    rekindle: RekindleReport


class FunctionPiece(_ReplyModel):
    """The next piece of a call."""

    name: str | None = None
    arguments: str


class CallPiece(_ReplyModel):
    """A piece of a call; the first one has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatDelta(_ReplyModel):
    """The part of the message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] = []


class ChunkChoice(_ReplyModel):
    """A piece of one choice; chunks of several choices are interleaved."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(_ReplyModel):
    """An event of a stream; the last ones have `finish_reason` and `rekindle`, then usage if requested."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    rekindle: RekindleReport | None = None


class TextLogprobs(_ReplyModel):
    """One entry per token; offsets in characters of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(_ReplyModel):
    """One reply to one prompt; those to the first prompt come first."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    rekindle: RekindleReport | None = None


class TextCompletion(_ReplyModel):
    """A whole answer or, in a stream, one of its events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    rekindle: RekindleReport | None = None
