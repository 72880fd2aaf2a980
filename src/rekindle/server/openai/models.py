"""What OpenAI's replies look like, for the description of the server: tests hold real replies against these."""

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
    """Of the prompt, how much was not computed."""

    cached_tokens: int


class ReasoningTokens(_ReplyModel):
    """Of the replies, how much was thought."""

    reasoning_tokens: int


class Usage(_ReplyModel):
    """Tokens of each prompt once, and of all choices; details of replies only of chats."""

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
    """A generated token and the most likely ones in its place."""

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
    """A call the model made."""

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
    """More of a call."""

    name: str | None = None
    arguments: str


class CallPiece(_ReplyModel):
    """Its first piece has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatDelta(_ReplyModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] = []


class ChunkChoice(_ReplyModel):
    """Chunks of several choices come as they are made."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(_ReplyModel):
    """An event of a stream; the last ones have `finish_reason` and `rekindle`, then usage if it was asked for."""

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
    """An answer or, in a stream, an event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    rekindle: RekindleReport | None = None
