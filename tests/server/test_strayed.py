"""Requests of clients and balancers that feel their way: HEAD, health, and base URLs that are not quite right."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

import pytest

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.logged import listening, text

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/health/ready", "/v1/agents", "/openapi.json", "/api/tags", "/api/version"]
)
def test_head_has_the_head_of_get(served: Served, path: str) -> None:
    got, head = served.send("GET", path), served.send("HEAD", path)
    assert (head.status, head.body) == (got.status, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"]


def test_head_of_what_has_no_get_is_refused(served: Served) -> None:
    assert served.send("HEAD", "/v1/chat/completions").status == 405
    assert served.send("HEAD", "/nowhere").status == 404


def test_a_connection_stays_usable_after_head(served: Served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        for method in ("HEAD", "GET", "HEAD"):
            connection.request(method, "/v1/models")
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, method == "GET")


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_needs_no_key(served: Served, path: str) -> None:
    assert served.send("GET", path).json == {"status": "ok"}
    with serving(served.engine, ServerSettings(api_key="secret-key")) as locked:
        assert locked.send("GET", path).status == locked.send("HEAD", path).status == 200
        assert locked.send("HEAD", "/v1/models").status == 401


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
    ],
)
def test_a_wrong_base_url_is_told_the_right_route(served: Served, path: str, route: str) -> None:
    for method in ("POST", "GET"):
        answer = served.send(method, path, CHAT if method == "POST" else None)
        message = answer.json["error"]["message"]
        assert answer.status == 404 and f"but {route}: " in message
        assert ("without /v1" in message) == route.endswith("messages")
    assert served.send("POST", "/v1/elsewhere", CHAT).json["error"]["message"] == "Not Found"


@pytest.mark.parametrize(
    ("path", "route"),
    [("/v1/api/chat", "/api/chat"), ("/api/api/tags", "/api/tags"), ("/ollama/api/show", "/api/show"),
     ("/api/generate/", "/api/generate")],
)  # fmt: skip
def test_a_wrong_base_url_of_ollamas_clients_is_told_the_right_route_in_their_shape(
    served: Served, path: str, route: str
) -> None:
    answer = served.send("POST", path, CHAT)
    assert answer.status == 404 and f"but {route}: " in answer.json["error"]
    assert served.send("POST", "/api/elsewhere", CHAT).json == {"error": "Not Found"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"), ("DELETE", "/v1/models/pocket"), ("GET", "/v1/embeddings"),
        ("PUT", "/v1/responses/resp_x"), ("POST", "/v1/responses/resp_x"), ("GET", "/v1/responses"),
        ("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/conversations"), ("GET", "/v1"),
        ("POST", "/v1/audio/translations"), ("POST", "/v1/nowhere"), ("POST", "/api/v1/nowhere"),
        ("POST", "/api/chat/completions"),
    ],
)  # fmt: skip
def test_what_openai_has_and_we_have_not_is_an_error_in_its_shape(served: Served, method: str, path: str) -> None:
    answer = served.send(method, path, CHAT if method == "POST" else None)
    assert answer.status in (404, 405) and answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "version"),
    [
        ("GET", "/v1/messages", None), ("GET", "/v1/messages/count_tokens", None), ("POST", "/v1/complete", None),
        ("POST", "/v1/messages/batches", None), ("GET", "/v1/messages/batches/x/results", None),
        ("POST", "/v1/models", "2023-06-01"), ("GET", "/v1/files", "2023-06-01"), ("POST", "/v1/skills", "2023-06-01"),
    ],
)  # fmt: skip
def test_what_anthropic_has_and_we_have_not_is_an_error_in_its_shape(
    served: Served, method: str, path: str, version: str | None
) -> None:
    headers = {} if version is None else {"anthropic_version": version}
    answer = served.send(method, path, CHAT if method == "POST" else None, **headers)
    assert answer.status in (404, 405) and set(answer.json) == {"type", "error", "request_id"}
    assert set(answer.json["error"]) == {"type", "message"} and answer.json["type"] == "error"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/chat"), ("POST", "/api/tags"), ("POST", "/api/version"), ("PUT", "/api/blobs/sha256:1"),
        ("GET", "/api/embed"), ("POST", "/api/me"), ("POST", "/api/web_search"), ("GET", "/api/nowhere/at/all"),
    ],
)  # fmt: skip
def test_what_ollama_has_and_we_have_not_is_an_error_in_its_shape(served: Served, method: str, path: str) -> None:
    answer = served.send(method, path, CHAT if method == "POST" else None)
    assert answer.status in (404, 405) and isinstance(answer.json["error"], str) and set(answer.json) == {"error"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/compact", ("not compacted here", "ask POST /v1/responses for a summary")),
        ("/v1/responses/resp_x/cancel", ("in the background", "close the connection of a request")),
    ],
)
def test_what_is_not_done_with_responses_is_said_with_what_to_do(
    served: Served, path: str, words: tuple[str, str]
) -> None:
    for body in ({"model": "default", "input": "Hi"}, None):
        answer = served.send("POST", path, body)
        assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
        assert all(each in answer.error["message"] for each in words)


@pytest.mark.parametrize("stream", [True, False])
def test_closing_the_connection_stops_a_response(served: Served, stream: bool) -> None:
    body = {"input": "Tell me of the attic.", "stream": stream, "ignore_eos": True, "rekindle": {"reuse": "off"}}
    with listening() as heard:
        with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
            connection.request("POST", "/v1/responses", json.dumps(body), {"X-Request-ID": f"left-{stream}"})
            if stream:
                connection.getresponse().readline()
        (record,) = heard.until(served, f"left-{stream}")
    assert "failed with 499, " in text(record)
    served.until_idle()


def test_what_the_model_cannot_do_is_refused_by_name(served: Served) -> None:
    answer = served.send("POST", "/v1/embeddings", {"model": "default", "input": "Hi"})
    assert answer.status == 400 and "has no embeddings" in answer.error["message"]
    for path in ("/api/embed", "/api/embeddings"):
        answer = served.send("POST", path, {"model": "default", "input": "Hi"})
        assert answer.status == 400 and "has no embeddings" in answer.json["error"]
