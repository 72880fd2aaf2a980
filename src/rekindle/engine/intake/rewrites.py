"""What clients change in a history when they send it again is put back, so that the prompt continues as stored.

One rule for all of it: render a candidate, match it, keep it if stored text continues far enough then; otherwise it may
be another conversation's. In this order, each over what the one before it gave:

    preamble    A request for a summary comes without the agent's tools, some with another system text. Candidates have
                the agent's. Kept if stored text continues to the end of what came before the first reply. Never without
                a name, as it would be another's. A system text that was sent in place of the agent's moves to the head
                of the newest user message, where the model reads it as late as it can. Where the history comes as a
                quote in one message (`quotes`), candidates have its messages in place of the quote. Kept if less is to
                be computed then.
    head        After a summary some clients write later what was the end of the system text, or came after the user's
                first words. The candidate has it where it was. Kept if stored text continues to the end of the head
                then.
    tails       Changing tails of the system text. The candidate has them where stored text has them. Kept if that
                continues to the end of the first reply.
    arguments   Calls whose arguments are the same JSON values, written otherwise. The candidate has them as they were
                generated; they mean the same, so it is kept as it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rekindle.engine.intake.candidates import (
    BETWEEN,
    COMPACTION,
    Candidate,
    candidates,
    heads,
    with_messages,
    with_quoted,
)
from rekindle.engine.intake.prompt_lookup import PromptLookup
from rekindle.engine.intake.rendering import Renderer, Rendering
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.types import GenerationRequest
from rekindle.errors import PromptTooLong
from rekindle.text.arguments import ValueScan, read_object
from rekindle.text.messages import GUARD, Message, ToolCall, leading_system
from rekindle.text.prompt import PromptEncoder
from rekindle.text.tails import volatile_spans
from rekindle.text.vocabulary import MARK

TAIL = "tail"  # a kind of normalisation
LEAST_GAIN = 256  # bytes of stored text; less is not worth another prompt than was sent
LEAST_ROOM = 2048  # tokens for a summary, if its request asks for no fewer
Rewritten = tuple[GenerationRequest, Rendering]
ContentKey = Callable[[Message, str], bytes]  # text of a message -> how it is written in keys
Opening = Callable[[str], bytes | None]  # name of a tool -> how its calls begin in a key; None: not known


class Rewrites:
    """Recognises what clients change by the stored text that a request continues without the change."""

    def __init__(self, encoder: PromptEncoder, renderer: Renderer, lookup: PromptLookup, *, max_context: int) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._lookup = lookup
        self._max_context = max_context

    def rendered(self, request: GenerationRequest, on_memory: OnMemory) -> Rewritten:
        """Return a request with what was put back, and its rendering."""
        request, rendering = self._with_preamble(request, self._renderer.render(request), on_memory)
        request, rendering = self._with_head(request, rendering, on_memory)
        request = replace(request, tools=rendering.request.tools)
        request, rendering = self._with_earlier_tails(request, rendering, on_memory)
        return self._with_arguments(request, rendering, on_memory)

    def _again(self, request: GenerationRequest, before: Rendering) -> Rendering:
        """Render a request that was changed since it was rendered before."""
        again = self._renderer.render(request)
        kept = (pair for pair in before.removed if pair[0].kind == COMPACTION)
        return replace(again, removed=(*again.removed, *kept))

    def _with_preamble(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        known = on_memory(lambda: self._lookup.preamble(request)) if COMPACTION in self._renderer.kinds else None
        if known is None:
            return request, rendering
        without, _ = self._lookup.nearest(rendering, on_memory=on_memory)
        history = on_memory(lambda: self._lookup.history(request))
        for candidate in (*candidates(request, known), *with_quoted(request, known, history)):
            try:
                again = self._renderer.render(candidate.request)
            except PromptTooLong:  # what was sent may be shorter
                continue
            changed, again = self._with_arguments(candidate.request, again, on_memory)
            if self._is_kept(candidate, again, rendering, without, on_memory):
                kept = ((each, without) for each in candidate.kept)
                return changed, replace(again, removed=(*again.removed, *kept))
        return request, rendering

    def _is_kept(
        self, candidate: Candidate, again: Rendering, rendering: Rendering, without: int, on_memory: OnMemory
    ) -> bool:
        """Whether a candidate, rendered `again`, takes the place of what was sent, of which `without` bytes are
        stored."""
        matched, _ = self._lookup.nearest(again, on_memory=on_memory)
        if matched < max(without + LEAST_GAIN, self._renderer.first_reply(again)[0]):
            return False
        if candidate.said is not None:
            rest, rest_as_sent = len(again.prompt.key) - matched, len(rendering.prompt.key) - without
            history = again.prompt.key[: self._renderer.before_newest(again)]
            if rest + LEAST_GAIN > rest_as_sent or not all(
                self._encoder.content_key(each, each.reasoning or "") in history for each in candidate.said
            ):
                return False
        most = candidate.request.params.max_tokens
        room = LEAST_ROOM if most is None else min(most, LEAST_ROOM)
        return self._lookup.num_tokens(again, on_memory=on_memory) + room <= self._max_context

    def _with_head(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        known = on_memory(lambda: self._lookup.own_preamble(request)) if COMPACTION in self._renderer.kinds else None
        for candidate in () if known is None else heads(request, known):
            again = self._renderer.render(candidate.request)
            without, _ = self._lookup.nearest(rendering, on_memory=on_memory)
            matched, _ = self._lookup.nearest(again, on_memory=on_memory)
            settled = again.request.messages or ()
            head = leading_system(settled)
            if matched >= max(without + LEAST_GAIN, self._encoder.message_ends(again.prompt, head)[-1]):
                kept = ((each, without) for each in candidate.kept)
                return candidate.request, replace(again, removed=(*again.removed, *kept))
        return request, rendering

    def _with_earlier_tails(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        if not any(each.kind == TAIL for each, _ in rendering.removed) or self._lookup.is_off(request):
            return request, rendering
        best, (matched, stored) = (request, rendering), self._lookup.nearest(rendering, on_memory=on_memory)
        least = matched + LEAST_GAIN
        while stored:  # with its first tail, a prompt may be nearest to another text, which shows more of them
            changed = with_earlier_tails(request.messages or (), stored, self._encoder.content_key)
            if changed in (request.messages, best[0].messages):
                break
            other = with_messages(request, changed)
            again = self._again(other, rendering)
            most, stored = self._lookup.nearest(again, on_memory=on_memory)
            if most <= matched:
                break
            best, matched = (other, again), most
        return best if matched >= max(least, self._renderer.first_reply(best[1])[1]) else (request, rendering)

    def _with_arguments(self, request: GenerationRequest, rendering: Rendering, on_memory: OnMemory) -> Rewritten:
        messages = rendering.request.messages
        if messages is None or self._lookup.is_off(request) or not any(message.tool_calls for message in messages):
            return request, rendering
        _, stored = self._lookup.nearest(rendering, on_memory=on_memory)
        if not stored:
            return request, rendering
        changed = with_generated_arguments(request.messages or (), stored, self._renderer.opening_of)
        if changed == request.messages:
            return request, rendering
        request = replace(request, messages=changed)
        return request, self._again(request, rendering)


# Tails of system texts that changed since a conversation began: each stays where the stored text has it.
#
# A tail (`text.tails`) moves to the head of the first user message. When it has changed, a resumed conversation would
# be computed again from there, however long it is. Stored text shows which tails the conversation had, and before which
# of its user messages; a tail that it does not have comes before the newest user message, as news.


def with_earlier_tails(messages: Sequence[Message], stored: bytes, content_key: ContentKey) -> tuple[Message, ...]:
    """Return messages, as they were sent, with the tails that the `stored` key of their conversation has.

    The first tail takes the place of the system text's own, which moves before a later user message. Unchanged if the
    stored conversation began with the same tail or with none, or if no user message is new enough for another.
    """
    sent, unchanged = _tails(messages), tuple(messages)
    users = [at for at, message in enumerate(messages) if message.role == "user"]
    if not sent or len(users) < 2:
        return unchanged
    placed = _stored_tails(messages, users, stored, content_key)
    first = placed.pop(users[0], None)
    if first is None:
        return unchanged
    now = BETWEEN.join(sent)
    if ([*placed.values()] or [first])[-1] != now:
        if users[-1] in placed:
            return unchanged
        placed[users[-1]] = now
    parts = [first[start:end] for start, end in volatile_spans(first)]
    if (first == now and not placed) or len(parts) != len(sent):
        return unchanged
    return tuple(
        replace(message, content=f"{placed[at]}{BETWEEN}{message.content}") if at in placed else message
        for at, message in enumerate(_with_tails(messages, parts))
    )


def _tails(messages: Sequence[Message]) -> list[str]:
    """Return the tails of the leading system messages, without blanks around them."""
    found = []
    for message in messages:
        if message.role != "system":
            break
        found += [message.content[start:end].strip() for start, end in volatile_spans(message.content)]
    return found


def _with_tails(messages: Sequence[Message], parts: Sequence[str]) -> list[Message]:
    """Return the messages with these tails in place of those of the leading system messages, one for one."""
    left, changed = list(parts), list(messages)
    for at, message in enumerate(messages):
        if message.role != "system":
            break
        content, done = "", 0
        for start, end in volatile_spans(message.content):
            content += message.content[done:start] + left.pop(0)
            done = end
        changed[at] = replace(message, content=content + message.content[done:]) if done else message
    return changed


def _stored_tails(
    messages: Sequence[Message], users: Sequence[int], stored: bytes, content_key: ContentKey
) -> dict[int, str]:
    """Return the tails that stored text has at the head of user messages, by the message's index, in order."""
    found: dict[int, str] = {}
    cursor = 0
    for at in users:
        key = content_key(messages[at], messages[at].content)
        place = stored.find(key, cursor) if key else -1
        if place < 0:
            break
        head = stored[max(cursor, stored.rfind(MARK, 0, place)) : place].decode("utf-8", "ignore")
        cursor = place + len(key)
        spans: Mapping[int, int] = dict(volatile_spans(head))
        if spans and head[max(spans.values()) :].strip() == "":
            found[at] = head[min(spans) :].strip()
    return found


# Arguments of tool calls as the model generated them, for clients that write the same JSON anew.
#
# A client that parses arguments and serializes them again sends `{"a":1}` for `{"a": 1}`: another text, so the whole
# call and all after it would be computed again. Stored text that a call begins in the same way, and whose arguments are
# the same JSON value, shows how they were written.


def with_generated_arguments(messages: Sequence[Message], stored: bytes, opening: Opening) -> tuple[Message, ...]:
    """Return the messages with the arguments of their calls as they are in the `stored` key of a conversation.

    Only text changes, never a value. Of several calls with one value, each gets the text of its turn.
    """
    found = _Generated(stored, opening)
    return tuple(
        replace(message, tool_calls=tuple(map(found.written, message.tool_calls))) if message.tool_calls else message
        for message in messages
    )


class _Generated:
    """The calls of one stored text, read as far as they are asked for."""

    def __init__(self, stored: bytes, opening: Opening) -> None:
        self._stored = stored
        self._opening = opening
        self._calls: dict[str, list[tuple[Any, str]]] = {}  # by name: value and text of each call
        self._seen: Counter[tuple[str, str]] = Counter()

    def written(self, call: ToolCall) -> ToolCall:
        """Return the call with its arguments as they were generated, if they are the same value."""
        value = read_object(call.arguments) if call.arguments.strip() else None
        if value is None:
            return call
        texts = [text for other, text in self._of(call.name) if is_same(value, other)]
        if not texts:
            return call
        turn = (call.name, json.dumps(value, sort_keys=True))
        at = min(self._seen[turn], len(texts) - 1)
        self._seen[turn] += 1
        return replace(call, arguments=texts[at])

    def _of(self, name: str) -> list[tuple[Any, str]]:
        if name not in self._calls:
            opening = self._opening(name)
            self._calls[name] = [] if not opening else self._read(opening)
        return self._calls[name]

    def _read(self, opening: bytes) -> list[tuple[Any, str]]:
        """Return the JSON objects that follow each occurrence of the opening."""
        found = []
        at = self._stored.find(opening)
        while at >= 0:
            start = at + len(opening)
            end = self._stored.find(MARK, start)
            text = self._stored[start : end if end >= 0 else None].decode("utf-8", "ignore").lstrip()
            scan = ValueScan(GUARD)
            text = text[: scan.read(text, 0)]
            value = read_object(text) if scan.done else None  # None: cut off, or not JSON
            if value is not None:
                found.append((value, text))
            at = self._stored.find(opening, start)
        return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: numbers by value, members of objects in any order."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
