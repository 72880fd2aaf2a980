"""Why a prompt did not go on where its agent left off: the first difference, and what most likely made it.

Owns the causes and the wording. What became of KV (evicted, not stored, other fingerprint) is known to the engine and
passed in; the other causes are read off the two texts. Stored text is quoted to the agent it belongs to and to nobody
else: of another agent's branch only the position is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rekindle.cache.matcher import Difference, TextMatch
from rekindle.text.vocabulary import CODE_BYTES, MARK, on_boundary

if TYPE_CHECKING:
    from rekindle.text.messages import Message
    from rekindle.text.prompt import PromptEncoder, RenderedPrompt

KnownCause = Literal["evicted", "not_stored", "other_fingerprint"]
Cause = Literal["text_differs", "template_rewrote_history", "date_line", KnownCause]

QUOTED_BYTES = 120  # of each text, from the first difference on; as much before it, within its line
_KNOWN: dict[KnownCause, str] = {
    "evicted": "the text matches what was stored, but its KV is neither in memory nor on disk any more",
    "not_stored": "nothing is stored for this agent yet",
    "other_fingerprint": "what is stored was computed by another model, tokenizer or KV format",
}
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DATES = re.compile(
    rf"""(?ix) \d{{4}}-\d\d?-\d\d? (?:t\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?
    | \d\d?[/.]\d\d?[/.]\d{{2,4}} | \d{{4}}/\d\d?/\d\d?
    | \d\d?(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})? | {_MONTH}\s+\d\d?(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?
    | \b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b | \b(?:mon|tue|wed|thu|fri|sat|sun)\b
    | \d\d?:\d\d(?::\d\d)?(?:\.\d+)?(?:\s*[ap]\.?m\b)? | \b1[5-9]\d{{8}}(?:\d{{3}})?\b""",
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The likely cause; the message in which the texts part (None: before or after all); the two texts from there."""

    cause: Cause
    message_index: int | None
    stored: str | None
    sent: str | None
    detail: str


def explain(
    match: TextMatch,
    prompt: RenderedPrompt,
    messages: Sequence[Message] | None,
    *,
    encoder: PromptEncoder,
    known: KnownCause | None = None,
) -> Explanation | None:
    """Explain a match that left something to compute besides new text; None when the prompt goes on as stored."""
    if known is not None:
        return explain_known(known)
    if match.relation in ("exact", "extend"):
        return None
    difference = match.difference
    if difference is None:
        return Explanation("not_stored", None, None, None, _KNOWN["not_stored"])
    index = _message_at(difference.position, prompt, messages or (), encoder)
    sent = _quote(prompt.key, difference.position, encoder)
    where = f"message {index}" if index is not None else "the text outside all messages"
    if difference.source == "shared":
        detail = f"{_KNOWN['not_stored']}; the prompts of others agree with it up to {where}"
        return Explanation("not_stored", index, None, sent, detail)
    cause = _cause(difference, prompt, messages or (), index, encoder)
    detail = f"{_DETAILS[cause]} (first difference in {where}, byte {difference.position})"
    return Explanation(cause, index, _quote(difference.stored_key, difference.position, encoder), sent, detail)


def explain_known(cause: KnownCause, what: str = "") -> Explanation:
    """A cause that no text shows; `what` says how much it concerns."""
    return Explanation(cause, None, None, None, f"{_KNOWN[cause]}{f' ({what})' if what else ''}")


_DETAILS: dict[Cause, str] = {
    "text_differs": "the prompt says something else here than the stored conversation",
    "template_rewrote_history": "the same words are rendered otherwise than when they were stored: "
    "the template, or the client, dropped, trimmed or moved a part",
    "date_line": "a date or time in the prompt has moved on: put it at the end, or keep it fixed for a conversation",
}


def _message_at(
    position: int, prompt: RenderedPrompt, messages: Sequence[Message], encoder: PromptEncoder
) -> int | None:
    """The first message whose rendering ends behind `position`."""
    ends = encoder.message_ends(prompt, messages)
    return next((index for index, end in enumerate(ends) if end > position), None)


def _cause(
    difference: Difference,
    prompt: RenderedPrompt,
    messages: Sequence[Message],
    index: int | None,
    encoder: PromptEncoder,
) -> Cause:
    stored, sent, position = difference.stored_key, prompt.key, difference.position
    if _same_but_for_dates(_line(stored, position), _line(sent, position)):
        return "date_line"
    if index is not None and _stands_in(stored, messages[index], encoder):
        # The caller's words are there, at another place or beside others. Were the words that stand there now sent?
        gone = _first_words(stored, position, encoder)
        said_again = any(gone in part for message in messages for part in (message.content, message.reasoning or ""))
        if said_again or messages[index].role == "assistant":
            return "template_rewrote_history"
    return "text_differs"


def _stands_in(stored: bytes, message: Message, encoder: PromptEncoder) -> bool:
    needle = encoder.content_key(message, message.content)
    return bool(needle) and needle in stored


def _line(key: bytes, position: int) -> str:
    """The line of the text around `position`, up to control tokens."""
    start = max(key.rfind(b"\n", 0, position) + 1, key.rfind(MARK, 0, position) + CODE_BYTES if MARK in key else 0)
    ends = [end for end in (key.find(b"\n", position), key.find(MARK, position)) if end >= 0]
    return key[min(start, position) : min(ends, default=len(key))].decode("utf-8", "ignore")


def _same_but_for_dates(stored: str, sent: str) -> bool:
    return stored != sent and _DATES.sub("◦", stored) == _DATES.sub("◦", sent)


def _first_words(key: bytes, position: int, encoder: PromptEncoder) -> str:
    """The beginning of the stored text at the difference, as a caller would have sent it."""
    quote = encoder.readable(key[_boundary(key, position) : _boundary(key, position + QUOTED_BYTES)]).strip()
    return quote.split("\n", 1)[0].strip()


def _boundary(key: bytes, at: int) -> int:
    at = min(at, len(key))
    while not on_boundary(key, at):
        at -= 1
    return at


def _quote(key: bytes, position: int, encoder: PromptEncoder) -> str:
    """The text at `position` with what precedes it in its line."""
    line = key.rfind(b"\n", 0, position) + 1
    start = _boundary(key, max(line, position - QUOTED_BYTES))
    return encoder.readable(key[start : _boundary(key, position + QUOTED_BYTES)])
