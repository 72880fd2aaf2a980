"""From body to engine: large bodies aside, and nothing left running of what was refused or is no longer wanted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from starlette.requests import Request
from starlette.types import Message

from rekindle import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.types import Delta, GenerationRequest
from rekindle.errors import BadRequest, Cancelled
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.answer import FEW_TOKENS, LARGE_BODY, Answer, Stamp, accepted, submit_all
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.server.border import HttpError
from rekindle.server.gate.caller import Caller, grant
from rekindle.server.gate.keys import Access
from rekindle.server.observers.log import LogWatch, RequestLog, TurnLog
from rekindle.server.observers.metrics import Metrics
from rekindle.server.openai.calls import parse_completion
from rekindle.server.openai.text import CompletionReply
from rekindle.text.replies import find_reply_format
from tests.server.conftest import Served
from tests.server.test_metrics import samples, value
from tests.server.test_openai import report
from tests.text.families import encoder_for


class Sizes:
    """An observer that notes how large bodies came."""

    def __init__(self) -> None:
        self.told: list[tuple[int, threading.Thread]] = []

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> LogWatch:
        self.told.append((num_bytes, threading.current_thread()))
        return RequestLog().began(caller, endpoint, body)


class Workers:
    """What an app lends to requests with large bodies."""

    def __init__(self) -> None:
        self.workers = FairWorkers("bodies")
        self.bound = None


@pytest.fixture
def app() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.workers.stop()


def posted(raw: bytes, app: Workers) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": raw}

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}
    grant(scope, Access())
    return Request(scope, receive)


@pytest.mark.parametrize(("size", "is_aside"), [(LARGE_BODY, False), (LARGE_BODY + 1, True)])
def test_a_large_body_is_read_beside_the_event_loop(app: Workers, size: int, is_aside: bool) -> None:
    raw = json.dumps({"a": ""}).encode()
    raw += b" " * (size - len(raw))
    observer, here = Sizes(), threading.current_thread()

    def submit(body: Any, caller: Caller) -> threading.Thread:
        assert body == {"a": ""}
        return threading.current_thread()

    thread, _ = asyncio.run(accepted(posted(raw, app), observer, "/", submit))
    assert (thread is not here) == is_aside
    assert observer.told == [(size, here)], "observers are told on the event loop"


@pytest.mark.parametrize("value", [{}, [], 0, "x"], ids=str)
def test_a_body_of_many_values_is_read_beside_the_event_loop(app: Workers, value: Any) -> None:
    raw, here = json.dumps({"a": [value] * 2000}).encode(), threading.current_thread()
    assert len(raw) < LARGE_BODY

    def submit(body: Any, caller: Caller) -> threading.Thread:
        return threading.current_thread()

    thread, _ = asyncio.run(accepted(posted(raw, app), Sizes(), "/", submit))
    assert thread is not here


@pytest.mark.parametrize("padding", [0, LARGE_BODY])
def test_what_is_wrong_with_a_body_is_said_wherever_it_is_read(app: Workers, padding: int) -> None:
    def submit(body: Any, caller: Caller) -> None:
        raise BadRequest("no such thing") if body == [] else RecursionError

    def refusal(raw: bytes) -> str:
        with pytest.raises((BadRequest, HttpError)) as caught:
            asyncio.run(accepted(posted(raw + b" " * padding, app), Sizes(), "/", submit))
        return str(caught.value)

    assert "not JSON" in refusal(b"{")
    assert "no such thing" in refusal(b"[]")
    assert "nested too deeply" in refusal(b"[1]")


def test_large_bodies_are_answered_like_small_ones(served: Served) -> None:
    small = served.chat("A tin drum stands in the cellar.").json
    large = served.chat("A tin drum stands in the cellar.", user="x" * 2 * LARGE_BODY).json
    assert large["choices"][0]["message"] == small["choices"][0]["message"]
    refused = served.chat("Hello!", user="x" * 2 * LARGE_BODY, best_of=2)
    assert (refused.status, refused.error["param"]) == (400, "best_of")


def test_none_stays_queued_whatever_goes_wrong_with_a_later_one(served: Served) -> None:
    queued: list[Generation] = []

    class Breaking(Engine):
        """An engine that breaks after its first request."""

        def submit_many(self, request: GenerationRequest, n: int) -> list[Generation]:
            if queued:
                raise MemoryError
            queued.extend(served.engine.submit_many(request, n))
            return queued

    asked = GenerationRequest(text="Hello!")
    with pytest.raises(MemoryError):
        submit_all(Breaking(served.engine.settings), [asked, asked], 2)
    assert [generation.cancel_asked for generation in queued] == [True, True]


@pytest.mark.parametrize("form", ["whole", "stream"])
def test_a_cancel_before_the_beginning_is_the_clients_leaving_and_a_stop_to_who_still_reads(form: str) -> None:
    generation, metrics = Generation(), Metrics("toy")
    generation.put(Cancelled("cancelled before it began"))
    reply = CompletionReply(
        Stamp("cmpl-1", 0, "toy"),
        parse_completion({"prompt": "Hi"}, Caller()),
        [generation],
        decode=str,
        token_bytes=lambda _: b"",
    )
    answer = Answer(reply, [generation], metrics.began(Caller(), "/v1/completions", {}), params={}, ping_s=60.0)

    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}, silent)
    with pytest.raises(HttpError) as caught:
        asyncio.run(answer.whole(request) if form == "whole" else answer.stream(request))
    assert (caught.value.problem.status, caught.value.problem.code) == (503, "stopping")
    found = samples(metrics.text())
    assert value(found, "rekindle_failures_total", status="499") == value(found, "rekindle_failures_total") == 1


@pytest.mark.parametrize("prompt_tokens", [100, 10 * FEW_TOKENS])
def test_a_large_answer_is_written_beside_the_event_loop(prompt_tokens: int) -> None:
    class Noting(CompletionReply):
        """Notes which thread encodes it."""

        written_by: threading.Thread

        def whole(self) -> dict[str, Any]:
            self.written_by = threading.current_thread()
            return super().whole()

    generation, metrics = Generation(), Metrics("toy")
    said = report(prompt_tokens=prompt_tokens, computed_tokens=prompt_tokens - 90)
    generation.put(Delta("Hi", (1,), finish_reason="stop", report=said))
    call = parse_completion({"prompt": "Hi"}, Caller())
    reply = Noting(Stamp("cmpl-1", 0, "toy"), call, [generation], decode=str, token_bytes=lambda _: b"")
    answer = Answer(reply, [generation], metrics.began(Caller(), "/v1/completions", {}), params={}, ping_s=60.0)

    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}, silent)
    response = asyncio.run(answer.whole(request))
    assert json.loads(bytes(response.body))["choices"][0]["text"] == "Hi"
    assert (reply.written_by is not threading.current_thread()) == (prompt_tokens > FEW_TOKENS)


@pytest.mark.parametrize("form", ["whole", "stream"])
@pytest.mark.parametrize("prompt_tokens", [100, 10 * FEW_TOKENS])
def test_what_is_said_of_many_tokens_of_a_prompt_is_encoded_beside_the_event_loop(
    form: str, prompt_tokens: int
) -> None:
    class Noting(CompletionReply):
        """Notes which threads encode it."""

        encoded_by: ClassVar[set[threading.Thread]] = set()

        def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
            threads = self.encoded_by

            class Chunk(dict[str, Any]):
                """Notes which threads write it."""

                def items(self) -> ItemsView[str, Any]:
                    threads.add(threading.current_thread())
                    return super().items()

            threads.add(threading.current_thread())
            return [Chunk(each) for each in super().take(index, delta)]

    Noting.encoded_by.clear()
    generation, metrics = Generation(), Metrics("toy")
    generation.prompt_ids = (7,) * prompt_tokens
    generation.prompt_logprobs = (None, *(TokenLogprob(7, -1.5, b"word ") for _ in range(prompt_tokens - 1)))
    said = report(prompt_tokens=prompt_tokens, computed_tokens=prompt_tokens - 90)
    generation.put(Delta("Hi", (1,), finish_reason="stop", report=said))
    call = parse_completion({"prompt": "Hi", "echo": True, "logprobs": 0, "stream": form == "stream"}, Caller())
    reply = Noting(Stamp("cmpl-1", 0, "toy"), call, [generation], decode=str, token_bytes=lambda _: b"word ")
    answer = Answer(reply, [generation], metrics.began(Caller(), "/v1/completions", {}), params={}, ping_s=60.0)

    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def answered() -> bytes:
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}, silent)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        response = await (answer.whole(request) if form == "whole" else answer.stream(request))
        await response(request.scope, silent, send)
        return b"".join(message.get("body", b"") for message in sent)

    first = asyncio.run(answered()).partition(b"\n\n")[0].removeprefix(b"data: ")
    logprobs = json.loads(first)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["word "] * prompt_tokens
    assert logprobs["token_logprobs"] == [None, *[-1.5] * (prompt_tokens - 1)]
    assert (threading.current_thread() not in Noting.encoded_by) == (prompt_tokens > FEW_TOKENS)


def test_a_client_that_left_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rekindle.server"):
        watch = TurnLog(RequestLog()).began(Caller(agent="ada"), "/", {})
        watch.failed(1, Cancelled("cancelled before it began"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "turn failed tenant=default agent=ada id=-: failed with 499, cancelled before it began")
    ]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("family", ["coder", "glm", "hermes"])
def test_a_call_that_was_cut_off_ends_by_length(family: str, parallel: bool) -> None:
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    parser = ReplyParser(Choice(0, Generation()), form, tools=True, parallel=parallel)
    opening = form.opening("look")
    assert opening is not None
    parser.take(Delta(opening, (1,)))
    parser.take(Delta("<parameter=place>\nat" if family == "coder" else '{"place": "at', (2,), "length"))
    assert parser.reason == "length" and not parser.parsed.has_whole_call


def test_a_first_token_without_text_leaves_the_prompt_s_ids_for_the_next_chunk() -> None:
    generation = Generation()
    generation.prompt_ids = (7, 8)
    call = parse_completion({"prompt": [7, 8], "stream": True, "return_token_ids": True}, Caller())
    reply = CompletionReply(
        Stamp("cmpl-1", 0, "toy"), call, [generation], decode=lambda _: "", token_bytes=lambda _: b""
    )
    assert reply.take(0, Delta("", (1,))) == []
    (chunk,) = reply.take(0, Delta("é", (2,)))
    assert chunk["choices"][0]["prompt_token_ids"] == [7, 8]
    assert chunk["choices"][0]["token_ids"] == [1, 2]
