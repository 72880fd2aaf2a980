"""What rendering with probes shows of a prompt: the places of messages in it, and how the next one begins.

A place follows some characters of a message's content. The conversation is rendered once more with a probe at every
place: without the probes it is the prompt, and the probes mark the places. Templates that inspect a text before they
write it (trim it, test whether it is empty) may then write something else; in that case each place is probed alone, and
is where that rendering first differs from the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from rekindle.errors import BadRequest
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.vocabulary import MARK, WHITE_SPACE, agreeing, on_boundary

# Noncharacters, never assigned; the comparison detects a text that holds them. U+FDD0 is the guard.
_PROBES = tuple(map(chr, range(0xFDD1, 0xFDF0)))
_PROBE = re.compile(b"\xef\xb7[\x91-\xaf]")
MOST_PLACES = len(_PROBES)
# What follows: a user message, results of the calls, results and then a user message, or more text in the last message
# itself.
Probes = Literal["user", "tool", "tool_user", "more"]
# They share no prefix, so that nothing of them is in what both prompts have in common; nor do their calls' ids, which
# have nine letters and digits because some templates accept no others.
_NEXT = (("Yes, go on.", "a"), ("4 of them.", "b"))
_MORE = (" more", "\n4")
_LONGEST_RUN = 8  # bytes that hold any two blanks


@dataclass(frozen=True, slots=True)
class Place:
    """The place after `num_chars` characters of a message's content (None: after all of it and its tool calls).

    `message_index` None: after the tools, where the first message begins.
    """

    message_index: int | None
    num_chars: int | None


def positions(
    encoder: PromptEncoder,
    prompt: RenderedPrompt,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    places: Sequence[Place],
    **template_kwargs: Any,
) -> list[int]:
    """Return the byte of `prompt.key` for each place; `prompt` is the rendering of messages and tools, or its start.

    Costs one more rendering, and none without places. Places beyond `MOST_PLACES` are put at the end.
    """
    key, end = prompt.key, len(prompt.key)
    spots = [_spot(place, messages) for place in places[:MOST_PLACES]]
    wanted = sorted({spot for spot in spots if spot is not None})
    found = _probed(encoder, key, messages, tools, wanted, template_kwargs) if wanted else {}
    at = [end if spot is None else min(found[spot], end) for spot in spots]
    return at + [end] * (len(places) - len(at))


_Spot = tuple[int, int]


def _spot(place: Place, messages: Sequence[Message]) -> _Spot | None:
    """The place as (message, character) inside what templates keep of a content; None: after everything."""
    index, num_chars = place.message_index, place.num_chars
    if index is None:
        index, num_chars = 0, 0
    if index >= len(messages):
        return None
    content = messages[index].content
    if num_chars is None and messages[index].tool_calls:
        return _spot(Place(index + 1, 0), messages)
    start = len(content) - len(content.lstrip())
    return index, max(start, len(content[:num_chars].rstrip()))


def _probed(
    encoder: PromptEncoder,
    key: bytes,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    spots: Sequence[_Spot],
    kwargs: Mapping[str, Any],
) -> dict[_Spot, int]:
    marked = _rendered(encoder, messages, tools, dict(zip(spots, _PROBES, strict=False)), kwargs)
    if _PROBE.sub(b"", marked).startswith(key):
        at: dict[str, int] = {}
        for number, probe in enumerate(_PROBE.finditer(marked)):
            at.setdefault(probe.group().decode(), probe.start() - number * len(probe.group()))
        if len(at) == len(spots):
            return {spot: at[probe] for spot, probe in zip(spots, _PROBES, strict=False)}
    alone = {spot: _rendered(encoder, messages, tools, {spot: _PROBES[0]}, kwargs) for spot in spots}
    return {spot: _common(key, other) for spot, other in alone.items()}


def _rendered(
    encoder: PromptEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    probes: Mapping[_Spot, str],
    kwargs: Mapping[str, Any],
) -> bytes:
    """The key with probes in the messages; empty if the template refuses them."""
    changed = list(messages)
    for (index, at), probe in sorted(probes.items(), reverse=True):
        content = changed[index].content
        changed[index] = replace(changed[index], content=content[:at] + probe + content[at:])
    try:
        return encoder.render_chat(changed, tools, **kwargs).key
    except BadRequest:
        return b""


def _common(key: bytes, other: bytes) -> int:
    at = agreeing(key, other)
    while not on_boundary(key, at):
        at -= 1
    return at


# The prefix of the next prompt of a conversation, whatever its next message is.
#
# Renders two prompts that continue differently; the next prompt shares what they have in common. That prefix ends where
# encoding may be cut: its ids do not depend on what follows. Knows no branches and no KV.


def anticipated(
    encoder: PromptEncoder,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    template_kwargs: Mapping[str, Any],
    probes: Probes,
    call_ids: Sequence[str] = (),
) -> RenderedPrompt | None:
    """Return the common prefix of all prompts that continue `messages` with a user message or with tool results.

    "tool" probes answer every call of the last message; "tool_user" ones end with a user message, which some
    templates treat as the end of the previous work. `call_ids`: the ids that its calls will have when it is sent
    back; without them, nothing that depends on them counts as common. None if the template refuses such a
    conversation, or if nothing is common. Costs two renderings.
    """
    try:
        one, other = (
            encoder.render_chat(_continued(messages, probes, call_ids, number), tools, **template_kwargs).key
            for number in (0, 1)
        )
    except BadRequest:
        return None
    agreed = agreeing(one, other)
    cut = next(cut for cut in encoder.safe_cuts(one, agreed, agreed) if _is_independent(one, cut))
    return RenderedPrompt(one[:cut]) if cut else None


def _is_independent(key: bytes, cut: int) -> bool:
    """Whether the text before a safe cut is split the same way if nothing follows it.

    Splitters look one character past a run of blanks: two or more may be one token at the end of a text, but are
    divided before words. Next to a control token a text ends in any case.
    """
    before = key[max(0, cut - _LONGEST_RUN) : cut].decode("utf-8", "replace")
    return key.startswith(MARK, cut) or len(before) - len(before.rstrip(WHITE_SPACE)) < 2


def _continued(messages: Sequence[Message], probes: Probes, call_ids: Sequence[str], number: int) -> list[Message]:
    text, letter = _NEXT[number]
    if probes == "user" or not messages:
        return [*messages, Message("user", text)]
    *earlier, last = messages
    if probes == "more":
        return [*earlier, replace(last, content=f"{last.content}{_MORE[number]}")]
    ids = call_ids or [f"{letter}{index:08d}" for index in range(len(last.tool_calls))]
    calls = tuple(replace(call, id=call_id) for call, call_id in zip(last.tool_calls, ids, strict=True))
    results = [Message("tool", text, tool_call_id=each) for each in ids]
    words = [Message("user", text)] if probes == "tool_user" else []
    return [*earlier, replace(last, tool_calls=calls), *results, *words]


def likely_probes(messages: Sequence[Message]) -> tuple[Probes, ...]:
    """Return what may follow the last message, the likeliest first.

    After calls: results, alone or followed by a user message; first the form that followed the previous calls.
    """
    *earlier, reply = messages
    if not reply.tool_calls:
        return ("user",)
    followers = [after.role for before, after in pairwise(earlier) if before.role == "tool" and after.role != "tool"]
    return ("tool_user", "tool") if followers[-1:] == ["user"] else ("tool", "tool_user")
