"""Lines of Ollama's streams while a prompt is computed, and after something has failed."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import Message

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Progress, Timings
from rekindle.errors import RequestFailed
from rekindle.server.answers.answer import Answer
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.metrics import Metrics
from rekindle.server.ollama.calls import ModelSide, parse_chat
from rekindle.server.ollama.heading import Heading, chat_piece
from rekindle.server.ollama.reply import OllamaReply
from rekindle.text.replies import ReplyFormat
from tests.server.test_log import report

SIDE = ModelSide("m", ReplyFormat(), 4096)


class Stream:
    """One streamed chat over a generation that the test feeds."""

    def __init__(self) -> None:
        self.generation = Generation()
        self.lines: list[dict[str, Any]] = []

    async def run(self) -> None:
        call = parse_chat({"messages": [{"role": "user", "content": "Hi"}]}, Caller(), SIDE)
        heading = Heading("m", lambda: 0.0, 0.0)
        reply = OllamaReply(heading, call, self.generation, piece=chat_piece)
        watch = Metrics("toy").began(Caller(), "/api/chat", {})
        answer = Answer(reply, [self.generation], watch, params={}, ping_s=0.001)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            self.lines += [json.loads(line) for line in message.get("body", b"").splitlines()]
            if self.lines and "progress" in self.lines[-1]:
                self.generation.put(Delta("Hello", (1,), report=report(1000, 600, 0, 1.0)))
                self.generation.put(RequestFailed("the disk is gone"))

        scope = {"type": "http", "method": "POST", "path": "/api/chat", "headers": []}
        self.generation.put(Progress("extend", "own", 1000, 600, 100, 0, 2.5))
        await (await answer.stream(Request(scope, receive)))(scope, receive, send)


def test_lines_without_text_keep_a_stream_alive_and_its_last_line_may_be_an_error() -> None:
    stream = Stream()
    asyncio.run(asyncio.wait_for(stream.run(), 30))
    *pings, said, error = stream.lines
    empty = {"model": "m", "created_at": "1970-01-01T00:00:00Z", "message": {"role": "assistant", "content": ""}}
    assert pings[0] == {**empty, "done": False, "progress": "prefill 700 of 1000 tokens, 600 of them reused"}
    assert (said["message"]["content"], error) == ("Hello", {"error": "the disk is gone"})


def test_durations_are_parts_of_the_time_from_the_request_on() -> None:
    times = iter((3.0, 10.0, 20.0))
    heading = Heading("m", lambda: 0.0, 1.0, timer=lambda: next(times))
    call = parse_chat({"messages": [{"role": "user", "content": "Hi"}]}, Caller(), SIDE)
    reply = OllamaReply(heading, call, Generation(), piece=chat_piece)
    reached = replace(report(1000, 600, 0, 1.0), timings=Timings(100.0, 20.0, 3.0, 4000.0, 4500.0))
    reply.take(0, Delta("Hi", (1,), "stop", reached))
    found = reply.whole()
    assert found["total_duration"] == 9_000_000_000, "the body was read for two of these seconds"
    assert (found["load_duration"], found["prompt_eval_duration"]) == (123_000_000, 4_000_000_000)
    assert found["eval_duration"] == 2_500_000_000
    assert found["prompt_eval_count"] == 1000
    never = replace(reached, timings=Timings(100.0, math.nan, math.inf, math.nan, math.inf))
    figures = heading.figures(never, submitted=20.0)
    assert (figures["load_duration"], figures["prompt_eval_duration"], figures["eval_duration"]) == (100_000_000, 0, 1)
