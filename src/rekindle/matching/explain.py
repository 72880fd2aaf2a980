"""Explain why a prompt did not continue where its agent left off: the first difference and its likely cause.

Owns the causes and the wording. The state of the KV (evicted, not stored, other fingerprint) is passed in by the
engine; the other causes are derived from the two texts. Stored text is quoted only to the agent it belongs to: for
another agent's branch only the position is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rekindle.matching.matcher import Difference, TextMatch
from rekindle.text.normalise import attribution_end, without_dates
from rekindle.text.vocabulary import CODE_BYTES, MARK, on_boundary

if TYPE_CHECKING:
    from rekindle.spec import Change
    from rekindle.text.messages import Message
    from rekindle.text.prompt import PromptEncoder, RenderedPrompt

KnownCause = Literal["evicted", "window_ended", "not_stored", "other_fingerprint", "not_reported"]
Cause = Literal[
    "text_differs",
    "template_rewrote_history",
    "date_line",
    "attribution_header",
    "tool_order",
    "tool_arguments",
    KnownCause,
]

MOST_COMPARED, LEAST_LINE = 1 << 14, 8  # characters of a message, bytes of a line, that show which conversation it is
QUOTED_BYTES = 120  # of each text after the first difference; as many before it, within its line
_KNOWN: dict[KnownCause, str] = {
    "evicted": "the text matches what was stored, but its KV is no longer in memory or on disk",
    "window_ended": "the text matches further, but layers with a window keep their KV only where prompts are likely to "
    "go on",
    "not_stored": "nothing is stored for this agent yet",
    "other_fingerprint": "what is stored was computed by another model or with other settings",
    "not_reported": "the server that computes did not say what it reused, so it is counted as nothing",
}
_CHANGES = {  # by the input of a fingerprint: what is said of one that differs
    "model": "the model was {before!r}, now {now!r}",
    "weights": "the weights are others",
    "config": "the model's config is another",
    "tokenizer": "the tokenizer is another",
    "dtype": "dtype was {before}, now {now}",
    "rope": "RoPE was {before}, now {now}",
    "weight_format": "the weights were {before}, now {now}",
    "format": "blocks were of version {before}, now {now}",
    "kv": "KV was {before}, now {now}",
    "block_tokens": "blocks had {before} tokens, now {now}",
}
_FIRST = "this is the first request of a conversation: the agent's others begin otherwise"
_WORDS = re.compile(rb"\w+")
_NAMED = re.compile(rb'"name"\s*:\s*"([^"\\]+)"')  # how every template writes a tool's name


@dataclass(frozen=True, slots=True)
class Offer:
    """A setting that would help a client, the value for it, and the reason."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The likely cause, the message where the texts diverge (None: outside all messages), and both texts from there.

    `offer`: what would help this client, if that is known.
    """

    cause: Cause
    message_index: int | None
    stored: str | None
    sent: str | None
    detail: str
    offer: Offer | None = None


def explain(
    match: TextMatch,
    prompt: RenderedPrompt,
    messages: Sequence[Message] | None,
    *,
    encoder: PromptEncoder,
    num_tokens: int | None = None,
) -> Explanation | None:
    """Explain a match that causes recomputation beyond the new text; None if the prompt continues as stored.

    With the prompt's `num_tokens`, the explanation includes the cost of the difference.
    """
    if match.continues:
        return None
    difference = match.difference
    if difference is None:
        return Explanation("not_stored", None, None, None, _KNOWN["not_stored"])
    index = _message_at(difference.position, prompt, messages or (), encoder)
    sent = _quote(prompt.key, difference.position, encoder)
    where = f"message {index}" if index is not None else "the text outside all messages"
    if difference.source == "shared" or (difference.source == "parent" and match.relation == "none"):
        whose = "the prompts of others agree" if difference.source == "shared" else "its parent's prompt agrees"
        detail = f"{_KNOWN['not_stored']}; {whose} with it up to {where}"
        return Explanation("not_stored", index, None, sent, detail)
    cause = _cause(difference, prompt, messages or (), index, encoder)
    if cause == "text_differs" and index == 0 and messages and _is_another(difference, messages[0]):
        return Explanation("not_stored", index, None, None, _FIRST)
    place = f"first difference in {where}, byte {difference.position}{_cost(difference, num_tokens)}"
    detail = f"{_DETAILS[cause]} ({place})"
    return Explanation(cause, index, _quote(difference.stored_key, difference.position, encoder), sent, detail)


def explain_known(cause: KnownCause, what: str = "") -> Explanation:
    """Build the explanation for a cause not visible in the texts; `what` describes how much it affects."""
    return Explanation(cause, None, None, None, f"{_KNOWN[cause]}{f' ({what})' if what else ''}")


def explain_elsewhere(changes: Sequence[Change]) -> Explanation:
    """Build the explanation of an agent that another fingerprint knows; `changes` may be empty if nobody knows them."""
    named = [_CHANGES[each.input].format(before=each.before, now=each.now) for each in changes]
    return explain_known("other_fingerprint", "; ".join(named) or "its store does not say what differs")


_DETAILS: dict[Cause, str] = {
    "text_differs": "the prompt's text differs here from the stored conversation",
    "template_rewrote_history": "the same words are rendered differently from when they were stored: "
    "the template, or the client, dropped, trimmed or moved a part",
    "attribution_header": "the line with which the client signs each request has changed: it is removed with "
    "normalise=attribution, which is the default",
    "tool_order": "the same tools are described in another order: sort them, or serve with normalise=tools",
    "tool_arguments": "the arguments of a tool call are not those that the model wrote, nor the same JSON value",
    "date_line": "a date or time in the prompt has changed: put it at the end, or keep it fixed for a conversation",
}


def _message_at(
    position: int, prompt: RenderedPrompt, messages: Sequence[Message], encoder: PromptEncoder
) -> int | None:
    """Index of the first message whose rendering ends after `position`."""
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
    if _in_attribution(stored, position) or _in_attribution(sent, position):
        return "attribution_header"
    if _same_but_for_dates(_line(stored, position), _line(sent, position)):
        return "date_line"
    if index is not None and messages[index].tool_calls and _is_in_call(stored, sent, position):
        return "tool_arguments"
    if _is_reordered(stored, sent, position):
        return "tool_order"
    if index is not None and _contains(stored, messages[index], encoder):
        # The message's text is stored, elsewhere or next to other text. Was the text stored at this position sent too?
        replaced = _first_words(stored, position, encoder)
        is_sent = any(replaced in part for message in messages for part in (message.content, message.reasoning or ""))
        if is_sent or _is_moved(stored, sent, position) or messages[index].role == "assistant":
            return "template_rewrote_history"
    return "text_differs"


def _contains(stored: bytes, message: Message, encoder: PromptEncoder) -> bool:
    """Whether the stored text contains a message's text anywhere, or its tool names if it has no text."""
    texts = [message.content] if message.content.strip() else [call.name for call in message.tool_calls]
    needles = [encoder.content_key(message, text) for text in texts]
    return any(needles) and all(needle in stored for needle in needles)


def _is_another(difference: Difference, first: Message) -> bool:
    """Whether stored text is of another conversation than a prompt: they differ in the first half of the prompt's first
    message, and the stored text has less than half of the lines with which that begins."""
    text = first.content[:MOST_COMPARED].encode("utf-8", "surrogatepass")
    lines = [line for each in text.split(b"\n") if len(line := each.strip()) >= LEAST_LINE]
    known = sum(len(line) for line in lines if line in difference.stored_key)
    return 2 * difference.position < len(text) and 2 * known < sum(map(len, lines))


def _line_start(key: bytes, position: int) -> int:
    mark = key.rfind(MARK, 0, position)
    return min(position, max(key.rfind(b"\n", 0, position) + 1, mark + CODE_BYTES if mark >= 0 else 0))


def _line(key: bytes, position: int) -> str:
    """The line around `position`, bounded by control tokens."""
    start = _line_start(key, position)
    ends = [end for end in (key.find(b"\n", position), key.find(MARK, position)) if end >= 0]
    return key[start : min(ends, default=len(key))].decode("utf-8", "ignore")


def _same_but_for_dates(stored: str, sent: str) -> bool:
    return stored != sent and without_dates(stored) == without_dates(sent)


def _is_moved(stored: bytes, sent: bytes, position: int) -> bool:
    """Whether each text's line at `position` occurs later in the other text."""
    there, here = (_line(key, _text_start(key, position)).encode() for key in (stored, sent))
    return bool(there and here) and there in sent[position:] and here in stored[position:]


def _text_start(key: bytes, position: int) -> int:
    """Where text begins after the control tokens at `position`."""
    while key[position : position + 1] == MARK:
        position += CODE_BYTES
    return position


def _in_attribution(key: bytes, position: int) -> bool:
    """Whether `position` is inside the line that signs a request."""
    start = _line_start(key, position)
    return attribution_end(key[start : position + QUOTED_BYTES].decode("utf-8", "ignore")) > position - start


def _is_in_call(stored: bytes, sent: bytes, position: int) -> bool:
    """Whether both texts are inside a call, which begins with its name before the difference."""
    before = sent[max(sent.rfind(MARK, 0, position), 0) : position]
    return bool(_NAMED.search(before)) and stored[position : position + 1] != MARK


def _is_reordered(stored: bytes, sent: bytes, position: int) -> bool:
    """Whether the texts diverge inside tool definitions that are the same in another order."""
    here, there = _block(sent, position), _block(stored, position)
    names, others = _NAMED.findall(here), _NAMED.findall(there)
    if not names or here == there or Counter(names) != Counter(others):
        return False
    return names != others or Counter(_WORDS.findall(here)) == Counter(_WORDS.findall(there))


def _cost(difference: Difference, num_tokens: int | None) -> str:
    """Describe what could not be reused: stored tokens after the difference, as far as the prompt reaches there."""
    if num_tokens is None:
        return ""
    cost = min(difference.num_stored, num_tokens) - difference.num_kept
    return f"; up to {cost:,} stored tokens after it are recomputed"


def _block(key: bytes, position: int) -> bytes:
    """The text around `position` between two control tokens."""
    start = key.rfind(MARK, 0, position)
    end = key.find(MARK, position)
    return key[start + CODE_BYTES if start >= 0 else 0 : end if end >= 0 else len(key)]


def _first_words(key: bytes, position: int, encoder: PromptEncoder) -> str:
    """First line of the stored text at the difference, as a caller would have sent it."""
    quote = encoder.readable(key[_boundary(key, position) : _boundary(key, position + QUOTED_BYTES)]).strip()
    return quote.split("\n", 1)[0].strip()


def _boundary(key: bytes, at: int) -> int:
    at = min(at, len(key))
    while not on_boundary(key, at):
        at -= 1
    return at


def _quote(key: bytes, position: int, encoder: PromptEncoder) -> str:
    """The text at `position`, including the start of its line."""
    line = key.rfind(b"\n", 0, position) + 1
    start = _boundary(key, max(line, position - QUOTED_BYTES))
    return encoder.readable(key[start : _boundary(key, position + QUOTED_BYTES)])
