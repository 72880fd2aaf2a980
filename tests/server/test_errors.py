"""Every error on purpose has one status and OpenAI's shape."""

from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from rekindle.errors import BadRequest, Cancelled, NotFound, Overloaded, PromptTooLong, RequestFailed, StoreError
from rekindle.server.errors import invalid, problem_of


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (BadRequest("no", param="n"), 400, "invalid_request_error", "n", None),
        (PromptTooLong("long"), 400, "invalid_request_error", "messages", "context_length_exceeded"),
        (NotFound("who?", param="id"), 404, "invalid_request_error", "id", "not_found"),
        (invalid(413, "large"), 413, "invalid_request_error", None, None),
        (Overloaded("full", retry_after_s=1.2), 503, "server_error", None, "overloaded"),
        (Cancelled("gone"), 499, "invalid_request_error", None, "cancelled"),
        (RequestFailed("sorry"), 500, "server_error", None, None),
        (StoreError("disk"), 500, "server_error", None, None),
        (HTTPException(405), 405, "invalid_request_error", None, None),
    ],
)
def test_mapping(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    response = problem_of(error).response()
    body = json.loads(bytes(response.body))["error"]
    assert response.status_code == status
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert body["message"]


def test_come_back_later() -> None:
    assert problem_of(Overloaded("full", retry_after_s=1.2)).response().headers["Retry-After"] == "2"


def test_accidents_tell_nothing() -> None:
    assert "secret" not in problem_of(RuntimeError("secret path")).message
