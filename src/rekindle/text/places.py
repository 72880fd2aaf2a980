"""Find places of messages in a rendered prompt, whatever the template makes of the messages.

A place follows some characters of a message's content. The conversation is rendered once more with a probe at every
place: without the probes it is the prompt, and the probes mark the places. Templates that inspect a text before they
write it (trim it, test whether it is empty) may then write something else; in that case each place is probed alone, and
is where that rendering first differs from the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.vocabulary import agreeing, on_boundary

# Noncharacters, never assigned; the comparison detects a text that holds them. U+FDD0 is the guard.
_PROBES = tuple(map(chr, range(0xFDD1, 0xFDF0)))
_PROBE = re.compile(b"\xef\xb7[\x91-\xaf]")
MOST_PLACES = len(_PROBES)


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
