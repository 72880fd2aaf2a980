"""Thousands of connections opened, broken off and forgotten: nothing of them stays."""

from __future__ import annotations

import json
import random
import socket

from tests.hostile.conftest import KEYS, Target

ROUNDS = 2_000
AT_ONCE = 100
LONG = {"messages": [{"role": "user", "content": "attic " * 60}], "max_tokens": 400, "stream": True, "temperature": 0}


def opening(target: Target) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.port), timeout=60)


def request(body: bytes, announced: int | None = None) -> bytes:
    """A chat request as bytes, perhaps announcing more than it brings."""
    size = len(body) if announced is None else announced
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['left']}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode() + body


def test_thousands_opened_and_dropped(target: Target) -> None:
    target.settled()
    before, threads, draw = target.num_open(), target.process.num_threads(), random.Random(3)
    body = json.dumps(LONG).encode()
    said = [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\r\n" * 50,
        request(b'{"mess', 10_000),
        b"A" * 5_000,
    ]
    for _ in range(ROUNDS // AT_ONCE):
        opened = [opening(target) for _ in range(AT_ONCE)]
        for connection in opened:
            connection.sendall(draw.choice(said))
        for connection in opened:
            connection.close()
    assert target.answers()
    assert target.num_open(before + 2) <= before + 2
    assert target.process.num_threads() <= threads + 2
    for _ in range(60):  # these cost work, until they leave
        connection = opening(target)
        connection.sendall(request(body))
        if draw.random() < 0.5:
            connection.recv(draw.choice([1, 200, 2_000]))
        connection.close()
    stats = target.settled()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_held_blocks"] == 0
    assert target.num_open(before + 2) <= before + 2
    assert target.num_files() <= 2 * threads + 12, "two for each thread that reads at most, and those of the writers"


def test_work_that_is_left_again_and_again_leaves_no_memory_behind(target: Target) -> None:
    body = json.dumps({**LONG, "stream": False}).encode()

    def round_of(count: int) -> int:
        for number in range(count):
            connection = opening(target)
            connection.sendall(request(body.replace(b"attic", b"attic%d" % (number % 7))))
            connection.close()
        target.settled()
        rss: int = target.process.memory_info().rss
        return rss

    round_of(60)
    before = round_of(60)
    assert round_of(120) - before < 24e6
