"""Recorded bodies with an agent's own replies replaced by this server's, as a live client would send them.

Owns which assistant message was the reply to which recorded request: the one of the same session and agent whose
messages (except system messages, which may change at midnight) are exactly those before it. One session at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from rekindle.server.dayfile import RecordedRequest

Mode = Literal["live", "recorded"]


class LiveReplies:
    """The replies of one session so far.

    A reply of a different kind than the recorded one (text instead of tool calls, or another number of calls) is not
    used: the rest of the recording would not fit it.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._answers: dict[tuple[str, bytes], Mapping[str, Any]] = {}
        self.num_replaced = 0
        self.num_kept = 0

    def body(self, request: RecordedRequest) -> dict[str, Any]:
        """Return the body to send; count the replies replaced and those left as recorded."""
        body = dict(request.body)
        if self._mode == "recorded" or "messages" not in body:
            return body
        messages = []
        for message, key in _keyed(request, request.messages):
            live = self._answers.get(key) if message.get("role") == "assistant" else None
            self.num_replaced += live is not None
            self.num_kept += live is None and message.get("role") == "assistant"
            messages.append(message if live is None else _with_ids(live, message))
        return body | {"messages": messages}

    def answered(self, request: RecordedRequest, reply: Mapping[str, Any]) -> None:
        """Use the reply to a request in place of the recorded one."""
        if request.answer is None:
            return
        recorded = request.answer.get("tool_calls") or ()
        calls = reply.get("tool_calls") or ()
        if len(recorded) != len(calls) or not (calls or reply.get("content")):
            return
        taken = {"role": "assistant", "content": reply.get("content") or ""}
        if calls:
            taken["tool_calls"] = list(calls)
        for _, key in _keyed(request, [*request.messages, request.answer]):
            last = key
        self._answers[last] = taken


def _with_ids(live: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a live reply with the ids that its calls have in the recorded history, to which the results refer."""
    if not live.get("tool_calls"):
        return live
    pairs = zip(live["tool_calls"], recorded.get("tool_calls") or (), strict=True)
    return {**live, "tool_calls": [{**call, "id": old.get("id") or call.get("id")} for call, old in pairs]}


def _keyed(
    request: RecordedRequest, messages: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, bytes]]]:
    """Yield each message with a digest of everything up to and including it."""
    digest = b""
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            content = json.dumps([digest.hex(), *_content(message)], sort_keys=True)
            digest = hashlib.sha256(content.encode()).digest()
        yield message, (request.agent or "", digest)


def _content(message: Mapping[str, Any]) -> list[Any]:
    """Return what identifies a message: clients add and drop empty fields when they send a reply back, and some write
    the arguments of its calls anew."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [[function.get("name"), _value(function.get("arguments"))] for function in functions]
    return [message.get("role"), message.get("content") or "", calls]


def _value(arguments: Any) -> Any:
    """Return what arguments mean, or their text if that is no JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
