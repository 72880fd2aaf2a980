"""A backend that means harm: each request to it ends with a clear error, in little memory, and the next one is served.

What it answers is written byte by byte, status line included. Floods go on for a few times what is borne, and end well,
so that a front that bears all of it is found by its reply.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pytest

from tests.backends.foreign import Foreign, chunk, foreign, usage
from tests.server.conftest import Answer, Served
from tests.server.scripted import serving, write_scripted_model

BODY = {"messages": [{"role": "user", "content": "talk"}], "max_tokens": 5}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
OPEN = OK + b"Connection: close\r\n\r\n"
GOOD = chunk([5], "length") + usage(0)
MOST_S, MOST_BYTES = 20.0, 256 << 20


@contextmanager
def raw(backend: Foreign) -> Iterator[list[Iterable[bytes]]]:
    """A server that relays to `backend`, but for streams: to each of these it says the next entry of the list."""
    said: list[Iterable[bytes]] = []
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(backend.url.rpartition(":")[2])
    backend.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked = read_request(connection)
            if b'"stream":true' not in asked.replace(b" ", b"") or not said:
                with socket.create_connection(("127.0.0.1", port)) as there:
                    there.sendall(asked)
                    while data := there.recv(1 << 16):
                        connection.sendall(data)
                return
            for data in said.pop(0):
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield said
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def read_request(connection: socket.socket) -> bytes:
    """Read a request to the end of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:]]
    length = next((int(value) for name, value in lines if name == b"content-length"), 0)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@dataclass(frozen=True)
class Hostile:
    """A front, and what its backend says to the next streams."""

    front: Served
    said: list[Iterable[bytes]]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    model = write_scripted_model(tmp_path_factory.mktemp("hostile") / "scripted")
    with (
        foreign(body=GOOD) as backend,
        raw(backend) as said,
        serving(model=str(model), store="off", backend=f"vllm={backend.url}", silence_s=3.0) as front,
    ):
        yield Hostile(front, said)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def scored(logprob: Any, top: dict[str, Any]) -> list[bytes]:
    """A reply of one token with these log probabilities."""
    logprobs = {"token_logprobs": [logprob], "top_logprobs": [top]}
    return [OPEN, event(choices=[{"token_ids": [5], "logprobs": logprobs, "finish_reason": "length"}]), usage(0)]


def flood(*first: bytes, again: bytes, num_bytes: int = 4 << 20) -> Iterable[bytes]:
    """So many bytes of the same, and then a good end."""
    return (*first, *repeat(again * (1 + (1 << 14) // len(again)), num_bytes >> 14), GOOD)


def bomb(form: str) -> list[bytes]:
    """Gigabytes of zeros, compressed once for each word of the form."""
    data = gzip.compress(bytes(16 << 20)) * 128  # of several members
    for _ in form.split(",")[1:]:
        data = gzip.compress(data)
    return [OK + f"Content-Encoding: {form}\r\n\r\n".encode(), data]


def busy(after: str) -> list[bytes]:
    return [f"HTTP/1.1 503 Busy\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode()]


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED: dict[str, tuple[Iterable[bytes], str]] = {
    "pieces of nothing": (flood(OPEN, again=chunk([])), "1 MiB of lines that bring nothing"),
    "signs of life": (flood(OPEN, again=b": ping\n\n"), "1 MiB of lines that bring nothing"),
    "counts without end": (flood(OPEN, again=usage(3).partition(b"data: [DONE]")[0]), "bring nothing"),
    "tokens after the end": (flood(OPEN, chunk([5], "stop"), again=chunk([5])), "after the end"),
    "ends after the end": (flood(OPEN, again=chunk([], "stop")), "1 MiB of lines that bring nothing"),
    "a line of gigabytes": (flood(OPEN, b"data: ", again=b"x", num_bytes=17 << 20), "a line of more than 16 MiB"),
    "gzip": (bomb("gzip"), "compressed its answer (gzip)"),
    "gzip in gzip": (bomb("gzip, gzip"), "compressed its answer (gzip, gzip)"),
    "headers without end": (flood(OK, again=b"X-A: b\r\n"), "broke off its answer"),
    "a header without end": (flood(OK, b"X-A: ", again=b"b"), "broke off its answer"),
    "answers before the answer": (repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "sent nothing for 3 s"),
    "another host": ([b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"], "status 307"),
    "NaN": (scored(float("nan"), {}), "a log probability is nan"),
    "infinity": (scored(-0.5, {"token_id:5": float("-inf")}), "a log probability is -inf"),
    "a likely id that is none": (scored(-0.5, {"token_id:99999999": -1.0}), "99999999, which the model does not have"),
    "a likely id below 0": (scored(-0.5, {"token_id:-1": -1.0}), "id -1, which the model does not have"),
    "an id below 0": ([OPEN, chunk([-1]), GOOD], "id -1, which the model does not have"),
    "an id of 4,000 digits": ([OPEN, chunk([10**4000]), GOOD], "is no whole number"),
    "a reason of 8 MiB": ([OPEN, chunk([5], "x" * (8 << 20)) + usage(0)], "finish_reason is no word"),
    "another prompt": (
        [OPEN, event(choices=[{"token_ids": [5], "prompt_token_ids": [1, 2]}]) + GOOD],
        "another prompt",
    ),
    "busy for ever": (busy("inf"), "the backend is busy"),
    "busy for 1e300": (busy("1e300"), "the backend is busy"),
    "busy for nan": (busy("nan"), "the backend is busy"),
    "a chunk that is cut": ([CHUNKED + b"fff\r\ndata: {"], "broke off its answer"),
    "a chunk of no size": ([CHUNKED + b"xyz\r\n"], "broke off its answer"),
    "no HTTP": (flood(again=bytes(1000)), "broke off its answer"),
    "no answer": ([], "broke off its answer"),
}
SCORED = ("NaN", "infinity", "a likely id that is none", "a likely id below 0")


def ask(hostile: Hostile, said: Iterable[bytes], **more: Any) -> tuple[Answer, float]:
    """A request that is answered so, and how long it took; what it took in memory is checked, and that others go on."""
    hostile.said.append(said)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    answer = hostile.front.send("POST", "/v1/chat/completions", BODY | more, x_agent_id="ada")
    took_s = time.monotonic() - began
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (MOST_BYTES >> 10)
    assert hostile.front.send("POST", "/v1/chat/completions", BODY).status == 200
    return answer, took_s


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(hostile: Hostile, case: str) -> None:
    said, words = REFUSED[case]
    answer, took_s = ask(hostile, said, **({"logprobs": True, "top_logprobs": 2} if case in SCORED else {}))
    assert words in answer.error["message"] and answer.status in (502, 503), answer.body[:500]
    assert len(answer.body) < 2000 and took_s < MOST_S
    if "busy" in case:
        assert 1 <= int(answer.headers["retry-after"]) <= 3600
    agents = hostile.front.send("GET", "/v1/agents/ada")
    assert agents.status == 404 or agents.json["tokens"] < 40, "what it said is not remembered"


def test_what_is_cut_off(hostile: Hostile) -> None:
    for said in ([OPEN, chunk([5] * 1_000_000), GOOD], [CHUNKED + b"8000000000000000\r\n" + GOOD]):
        answer, _ = ask(hostile, said)
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] <= BODY["max_tokens"]


def test_a_prompt_alone_gets_no_reply_without_end(hostile: Hostile) -> None:
    """Computing a prompt asks for one token, which nobody reads."""
    hostile.said.append(flood(OPEN, again=chunk([5])))
    answer = hostile.front.send("POST", "/v1/agents/ada/prefill", {"messages": BODY["messages"]})
    assert answer.status == 502 and "a reply where one token was asked for" in answer.body.decode(), answer.body
