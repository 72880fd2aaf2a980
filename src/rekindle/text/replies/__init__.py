"""Replies of a model: reasoning, text and tool calls, parsed as they are generated.

    tokens ─TextStream(visible)─▶ structured text ─ReplyStream─▶ events ─ParsedReply─▶ a message

*Structured text* is what a reader sees, and of the tokens flagged special those that are marks of the model's form:
each as a guard (U+FDD0) and its content. No model can generate the guard, so look-alike text is never such a mark.

The format of a model's replies is found by rendering (`find_reply_format`), not by its name; where a template has no
calls, `fit` has a form for them. Malformed output is text, never an error. A scan for each form of calls:
`envelope`, `named`, `tagged`, `keyed`, `pythonic`; replies in channels: `channels`.
"""

from rekindle.text.replies.events import (
    ArgumentsDelta,
    Blanks,
    CallEnd,
    CallStart,
    Event,
    ParsedReply,
    ReasoningDelta,
    SentCall,
    TextDelta,
    new_call_id,
)
from rekindle.text.replies.format import ReplyFormat, ThinkingFormat, ToolFormat
from rekindle.text.replies.probes import find_reply_ends, find_reply_format, fit
from rekindle.text.replies.stream import AnswerStream, ReplyStream, begin_reply, opened_by

__all__ = [
    "AnswerStream",
    "ArgumentsDelta",
    "Blanks",
    "CallEnd",
    "CallStart",
    "Event",
    "ParsedReply",
    "ReasoningDelta",
    "ReplyFormat",
    "ReplyStream",
    "SentCall",
    "TextDelta",
    "ThinkingFormat",
    "ToolFormat",
    "begin_reply",
    "find_reply_ends",
    "find_reply_format",
    "fit",
    "new_call_id",
    "opened_by",
]
