"""Anthropic's messages, whole and as events, encoded from deltas."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Breakpoint, Delta, Progress, Report
from rekindle.server.answers.answer import Stamp, progress_text
from rekindle.server.answers.arguments import ArgumentsJson
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.server.answers.sse import comment, event
from rekindle.server.anthropic.calls import MessagesCall
from rekindle.server.anthropic.conversation import sign
from rekindle.server.anthropic.diagnosis import Diagnosis
from rekindle.server.border import Problem
from rekindle.text.messages import Message
from rekindle.text.replies import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, ReplyFormat, TextDelta

PING = event({"type": "ping"}, "ping")
Events = list[dict[str, Any]]
LONG_S = 3600.0
# The tools whose results have an error that says so.
_RESULTS = ("web_search", "web_fetch", "code_execution")


# Anthropic's `usage` of a prompt, exact to the token.
#
#     |------- cache_read -------|---- cache_creation ----|---- input ----|
#     0 ......................reused ............. last breakpoint .... the prompt's end
#
# Always true: input + cache_read + cache_creation = the tokens of the prompt.


def usage_of(known: Report | Progress | None, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Return the `usage` object; `known` None: nothing is known yet.

    Read tokens were reused, with or without a breakpoint; created ones were computed before the last breakpoint. Those
    before a breakpoint of an hour are kept for an hour.
    """
    prompt = known.prompt_tokens if known is not None else 0
    reused = known.reused_tokens if known is not None else 0
    places = known.breakpoint_tokens if known is not None else ()
    lasting = [place for place, mark in zip(places, breakpoints, strict=False) if mark.ttl_s >= LONG_S]
    created, created_1h = (max(0, max(before, default=0) - reused) for before in (places, lasting))
    return {
        "input_tokens": prompt - reused - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": reused,
        "cache_creation": {"ephemeral_5m_input_tokens": created - created_1h, "ephemeral_1h_input_tokens": created_1h},
        "output_tokens": known.completion_tokens if isinstance(known, Report) else 0,
    }


# The content blocks of a reply, built while it is streamed.
#
# Owns the order that Anthropic's clients rely on: one block at a time, its deltas between its start and its stop,
# indices from 0; the blocks in a stream are the same as those of the whole answer.


class Blocks:
    """The blocks of one reply; `take` and `close` return stream events. `hidden` omits the text of thinking blocks."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block
        self._arguments = ArgumentsJson()
        self._is_open = False

    def content(self) -> Events:
        """Return all blocks; the last one must be closed."""
        assert not self._is_open, "a block is still open"
        return self._blocks

    def take(self, event: Event) -> Events:
        """Return the stream events that one event of the reply adds."""
        match event:
            case ReasoningDelta() if event.text:
                events = self._begin("thinking", {"thinking": "", "signature": ""})
                self._pieces.append(event.text)
                return events if self._hidden else events + self._delta("thinking_delta", thinking=event.text)
            case TextDelta() if event.text:  # a stray marker has no text, and clients refuse to send empty blocks back
                events = self._begin("text", {"text": ""})
                self._pieces.append(event.text)
                return events + self._delta("text_delta", text=event.text)
            case CallStart():
                self._arguments = ArgumentsJson()
                events = self.close()
                return events + self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case ArgumentsDelta():
                return self._json(self._arguments.push(event.text))
            case CallEnd():
                return self.close()
        return []

    def add(self, block: dict[str, Any]) -> Events:
        """Add a whole block; its text follows its start."""
        text = block.get("text", "")
        events = self._begin(block["type"], block | ({"text": ""} if text else {}))
        self._pieces = [text]
        return events + (self._delta("text_delta", text=text) if text else []) + self.close()

    def close(self) -> Events:
        """End the open block, if any."""
        if not self._is_open:
            return []
        block, text = self._blocks[-1], "".join(self._pieces)
        events: Events = []
        if block["type"] == "thinking":
            signature = sign(text, hidden=self._hidden)
            block |= {"thinking": "" if self._hidden else text, "signature": signature}
            events = self._delta("signature_delta", signature=signature)
        elif block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            events = self._json(self._arguments.finish())
            block["input"] = self._arguments.value()
        self._is_open = False
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _begin(self, kind: str, empty: dict[str, Any]) -> Events:
        """Open a block of this kind, unless one is already open."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return []
        events, block = self.close(), {"type": kind, **empty}
        self._blocks.append(block)
        self._pieces, self._is_open = [], True
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _json(self, text: str) -> Events:
        return self._delta("input_json_delta", partial_json=text) if text else []

    def _delta(self, kind: str, **what: str) -> Events:
        index = len(self._blocks) - 1
        return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, **what}}]


class MessagesReply:
    """The answer to one call; `message` is its id, `model` the served name."""

    events: Literal["typed"] = "typed"

    def __init__(
        self,
        stamp: Stamp,
        call: MessagesCall,
        generation: Generation,
        *,
        form: ReplyFormat,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self._stamp = stamp
        self.id = stamp.id
        self._diagnosis = diagnosis
        self._call = call
        choice = Choice(0, generation)
        self._reading = ReplyParser(choice, form, tools=call.read_tools, parallel=call.parallel)
        self._blocks = Blocks(hidden=call.hides_thinking)
        self._has_begun = False

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the start of the message: reuse is known before prefill."""
        self._has_begun = True
        return [self._start(progress)]

    def beat(self, progress: Progress | None) -> bytes:
        """Return a ping, with the progress of the prompt in a comment, which clients ignore."""
        return (comment(progress_text(progress)) if progress is not None else b"") + PING

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the block events of a delta, after `message_start` if that was not sent yet."""
        events: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(self._start(delta.report))
        for each in self._reading.take(delta):
            events += self._blocks.take(each)
        if delta.finish_reason is None:
            return events
        given = _refusal(self._call.unavailable) if self._call.unavailable is not None else []
        return events + self._blocks.close() + [each for block in given for each in self._blocks.add(block)]

    def has_ended(self, index: int) -> bool:
        """Whether the only allowed call is complete."""
        return self._reading.has_ended

    def message(self, index: int) -> Message:
        """Return the message as clients send it back."""
        return self._reading.parsed.message()

    def ending(self) -> list[dict[str, Any]]:
        """Return the event with stop reason and usage, then the last event."""
        ended = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage(), **self._extras()}
        return [ended, {"type": "message_stop"}]

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """Return the error as an event."""
        return [problem.body("anthropic")]

    def whole(self) -> dict[str, Any]:
        """Return the whole message."""
        head = self._head() | _diagnosed(self._diagnosis, self._reading.choice.report)
        return head | {"content": self._blocks.content(), **self._stopped(), "usage": self._usage(), **self._extras()}

    def _head(self) -> dict[str, Any]:
        return {"id": self._stamp.id, "type": "message", "role": "assistant", "model": self._stamp.model}

    def _start(self, known: Report | Progress | None) -> dict[str, Any]:
        usage = usage_of(known, self._call.request.breakpoints)
        head = self._head() | _diagnosed(self._diagnosis, known)
        message = head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": message}

    def _stopped(self) -> dict[str, Any]:
        reading, report, asked = self._reading, self._reading.choice.report, self._call.request
        stop_text = None if reading.has_ended else reading.stop_text
        if asked.task != "generate":
            reason = "max_tokens" if self._call.unavailable is None else "end_turn"
        elif stop_text is not None:
            reason = "stop_sequence"
        elif reading.reason == "length":
            is_full = report is not None and report.completion_tokens < (asked.params.max_tokens or 0)
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            reason = "tool_use" if reading.reason == "tool_calls" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_text}

    def _usage(self) -> dict[str, Any]:
        report = self._reading.choice.report
        details = {"thinking_tokens": self._reading.num_reasoning_tokens}
        return usage_of(report, self._call.request.breakpoints) | {"output_tokens_details": details}

    def _extras(self) -> dict[str, Any]:
        """Return our report, and an empty list of edits if the client requested edits."""
        described = self._reading.described(return_ids=self._call.return_ids)
        edits: dict[str, Any] = {"context_management": {"applied_edits": []}} if self._call.reports_edits else {}
        return edits | {"rekindle": described}


def _diagnosed(diagnosis: Diagnosis | None, known: Report | Progress | None) -> dict[str, Any]:
    return {} if diagnosis is None else {"diagnostics": diagnosis.described(known)}


# Clients force a search with a request of its own, and show what it returns. They get the tool's own error, and a
# sentence where they show text alone. The prompt is computed, as its report and its usage say, and nothing generated: a
# model without the tool would make results up.


def _refusal(name: str) -> Events:
    """Return the blocks that answer for a tool that nobody runs here: its call and its error, in the shape of its
    results, where it has one, and a sentence."""
    text = {"type": "text", "text": f"{name} is not available on this server."}
    if name not in _RESULTS:
        return [text]
    call_id = f"srvtoolu_{uuid.uuid4().hex[:24]}"
    failure = {"type": f"{name}_tool_result_error", "error_code": "unavailable"}
    return [
        {"type": "server_tool_use", "id": call_id, "name": name, "input": {}},
        {"type": f"{name}_tool_result", "tool_use_id": call_id, "content": failure},
        text,
    ]
