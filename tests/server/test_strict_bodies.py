"""Bodies that readers could take for something else are refused: coded ones, and objects with a key twice."""

from __future__ import annotations

import gzip
import json
import re
import zlib

import pytest

from tests.server.conftest import Served

SAID = [{"role": "user", "content": "Hello!"}]
CHAT = {"model": "default", "messages": SAID, "max_tokens": 2, "temperature": 0}
PLAIN = json.dumps(CHAT).encode()
# On every way that a body takes: parsed by hand, aside, and by FastAPI.
ROUTES = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/tokenize",
    "/v1/agents/ada/pin",
    "/api/chat",
    "/api/show",
)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("coding", "body"),
    [("gzip", gzip.compress(PLAIN)), ("deflate", zlib.compress(PLAIN)), ("br", PLAIN), ("identity, zstd", PLAIN)],
)
def test_a_coded_body_is_refused_by_its_coding(served: Served, path: str, coding: str, body: bytes) -> None:
    answer = served.send("POST", path, body, content_encoding=coding)
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    message = answer.json["error"] if path.startswith("/api/") else answer.json["error"]["message"]
    assert repr(coding.split()[-1]) in message and ("type" in answer.json) == path.startswith("/v1/messages")


@pytest.mark.parametrize("coding", ["", "identity", "Identity, identity"])
def test_a_body_that_is_not_coded_may_say_so(served: Served, coding: str) -> None:
    assert served.send("POST", "/v1/chat/completions", PLAIN, content_encoding=coding).status == 200
    assert served.send("GET", "/v1/models", content_encoding="gzip").status == 200, "there is no body"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"messages": [], "messages": []}', "messages"),
        ('{"messages": [{"role": "user", "role": "system", "content": "a"}], "max_tokens": 2}', "role"),
        ('{"a": {"b": [{"c": 1, "d": 2, "d": 2}]}}', "d"),
        ('{"ttl_s": 1, "ttl\\u005fs": 2}', "ttl_s"),
        ('{"": 1, "": 2}', ""),
        ('{"pad": "' + "x" * 300_000 + '", "model": 1, "model": 1}', "model"),
    ],
)
def test_a_key_twice_is_refused_by_its_name(served: Served, path: str, body: str, key: str) -> None:
    answer = served.send("POST", path, body.encode())
    assert answer.status == 400, answer.body
    assert f"the key {key!r} twice" in str(answer.json["error"])
    assert path.startswith(("/v1/messages", "/api/")) or answer.error["param"] == key


def test_the_same_key_in_two_objects_is_no_matter(served: Served) -> None:
    body = {**CHAT, "messages": [*SAID, {"role": "assistant", "content": "Hi."}, *SAID]}
    assert served.send("POST", "/v1/chat/completions", body).status == 200
    assert served.send("POST", "/v1/tokenize", b'{"text": "a"').error["message"].startswith("the body is not JSON")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/agents/a/pin", "KEYS"),
        ("/v1/agents/a/fork", '{"target": "b", "more": KEYS}'),
        ("/v1/coordination/sessions", '{"agents": [{"name": "Ada"}, KEYS]}'),
    ],
)
def test_bodies_of_which_every_unknown_key_is_an_error_have_few(served: Served, path: str, body: str) -> None:
    for count, said in ((1000, "Extra inputs|required"), (1025, "more than 1,024 keys"), (100_000, "more than 1,024")):
        keys = json.dumps({f"k{at}": at for at in range(count)})
        answer = served.send("POST", path, body.replace("KEYS", keys).encode())
        assert answer.status == 400 and re.search(said, answer.error["message"]), answer.body[:300]


def test_a_session_with_a_key_twice_is_refused(served: Served) -> None:
    body = b'{"agents": [{"name": "Ada"}, {"name": "Bo", "name": "Cy"}]}'
    assert "'name' twice" in served.send("POST", "/v1/coordination/sessions", body).error["message"]
