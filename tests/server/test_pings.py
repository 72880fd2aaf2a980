"""Signs of life while a prompt is computed: the head goes out, and what happens after it still arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from rekindle import Engine
from rekindle.config import ServerSettings
from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Progress
from rekindle.errors import BadRequest, Cancelled, RekindleError, Timeout
from rekindle.server.answers.answer import Answer, Stamp
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.metrics import Metrics
from rekindle.server.openai.calls import parse_chat
from rekindle.server.openai.replies import ChatReply
from rekindle.text.replies import ReplyFormat
from tests.given import settings_of
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.server.test_log import report

PROGRESS = Progress("extend", "own", 1000, 600, 100, 0, 2.5)
LONG = "A brass lamp stands on the third shelf of the pantry, beside the jar of nails. " * 60


Step = tuple[Callable[[list[str]], bool], Callable[[], None]]


class Stream:
    """One streamed chat over a generation that the test feeds, pinged as often as the loop turns."""

    def __init__(self) -> None:
        self.generation = Generation()
        self.lines: list[str] = []
        self._call = parse_chat({"messages": [{"role": "user", "content": "Hi"}], "stream": True}, Caller())

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer(self) -> Response:
        form = ReplyFormat()
        reply = ChatReply(Stamp("chatcmpl-1", 0, "toy"), self._call, [self.generation], form=form)
        watch = Metrics("toy").began(Caller(), "/v1/chat/completions", {})
        answer = Answer(reply, [self.generation], watch, params={}, ping_s=0.001)
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        return await answer.stream(Request(scope, self.receive))

    async def run(self, response: Response, steps: Sequence[Step]) -> None:
        """Send the body; each step is done once what was sent so far satisfies its condition."""
        waiting = list(steps)

        async def send(message: Message) -> None:
            self.lines += message.get("body", b"").decode().split("\n\n")[:-1]
            if waiting and waiting[0][0](self.lines):
                waiting.pop(0)[1]()

        await response({"type": "http"}, self.receive, send)


def data(lines: Sequence[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def test_the_head_goes_out_before_the_prompt_is_computed_and_comments_say_how_far_it_is() -> None:
    stream = Stream()

    def begin() -> None:
        stream.generation.put(PROGRESS)

    def speak() -> None:
        stream.generation.put(Delta("Hi.", (1, 2), "stop", report(1000, 600, 0, 1.0)))

    async def go() -> Response:
        response = await stream.answer()
        await stream.run(response, [(lambda lines: len(lines) >= 2, begin), (lambda lines: "700" in lines[-1], speak)])
        return response

    response = asyncio.run(asyncio.wait_for(go(), 30))
    assert "X-Rekindle-Outcome" not in response.headers, "nothing was known yet"
    first_data = next(at for at, line in enumerate(stream.lines) if not line.startswith(":"))
    assert stream.lines[0] == ": waiting"
    assert stream.lines[first_data - 1] == ": prefill 700 of 1000 tokens, 600 of them reused"
    chunks = data(stream.lines)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hi."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert stream.lines[-1] == "data: [DONE]"


def test_a_head_that_waited_for_the_prompt_to_begin_says_what_is_reused() -> None:
    stream = Stream()
    stream.generation.put(PROGRESS)

    async def go() -> Response:
        response = await stream.answer()
        await stream.run(response, [(bool, lambda: stream.generation.put(Timeout("too long")))])
        return response

    response = asyncio.run(asyncio.wait_for(go(), 30))
    assert (response.headers["X-Rekindle-Outcome"], response.headers["X-Rekindle-Reused"]) == ("extend", "600")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Timeout("it took longer than 3 s"), "timeout"),
        (BadRequest("no", param="messages"), None),
        (Cancelled("x"), "stopping"),
    ],
)
def test_an_error_behind_the_head_is_the_last_event(error: RekindleError, code: str | None) -> None:
    stream = Stream()

    async def go() -> None:
        response = await stream.answer()
        await stream.run(response, [(bool, lambda: stream.generation.put(error))])

    asyncio.run(asyncio.wait_for(go(), 30))
    (event,) = data(stream.lines)
    assert set(event["error"]) == {"message", "type", "param", "code"}
    assert event["error"]["code"] == code
    assert stream.lines[-1] == "data: [DONE]"


def test_a_slow_prefill_over_a_socket_shows_that_it_lives(served: Served) -> None:
    """Steps of 16 tokens make the prompt slow; comments come before the first chunk, and clients pass over them."""
    with serving(served.engine, ServerSettings(ping_s=0.02)) as running:
        body = {"messages": [{"role": "user", "content": LONG}], "stream": True, "max_tokens": 4, "temperature": 0}
        answer = running.send("POST", "/v1/chat/completions", {**body, "rekindle": {"reuse": "off"}})
        lines = answer.body.decode().split("\n\n")
        assert answer.status == 200
        assert lines[0].startswith(": ")
        comments = [line for line in lines if line.startswith(": ")]
        assert len(comments) >= 3
        chunks = running.client().chat.completions.create(
            model="default", messages=[{"role": "user", "content": LONG[1:]}], stream=True, max_tokens=4, temperature=0
        )
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_timeout_behind_the_head_is_the_clients_exception(tmp_path: Path) -> None:
    flags = {"store": tmp_path, "threads": 1, "max_chunk_tokens": 16, "request_timeout_s": 1.0, "ping_s": 0.02}
    flags["kernels"] = "torch"  # the prompt shall take longer than that
    settings = settings_of(**flags)
    with proved(Engine(settings)) as engine, serving(engine, settings.server) as running:
        stream = running.client().chat.completions.create(
            model="default", messages=[{"role": "user", "content": LONG * 2}], stream=True
        )
        assert stream.response.status_code == 200
        with pytest.raises(openai.APIError, match=r"second|time|long") as caught:
            list(stream)
    assert not isinstance(caught.value, openai.APIStatusError)
