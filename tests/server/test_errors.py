"""Every error on purpose has one status, and the shape that clients of its path read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from rekindle.errors import (
    BadRequest,
    Cancelled,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    StoreError,
    quoted,
)
from rekindle.server.answers.validation import StrictModel, validated
from rekindle.server.border import invalid, problem_of
from rekindle.server.models import forms, unserved
from rekindle.text.messages import normalise_messages

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=5) | st.dictionaries(st.text(max_size=5), inside, max_size=5),
    max_leaves=12,
)


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
        (StoreError("disk"), 503, "server_error", None, "store_unavailable"),
        (HTTPException(405), 405, "invalid_request_error", None, None),
    ],
)
def test_mapping(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    response = problem_of(error).response({"path": "/v1/completions"})
    body = json.loads(bytes(response.body))["error"]
    assert response.status_code == status
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert body["message"]


def test_come_back_later() -> None:
    assert problem_of(Overloaded("full", retry_after_s=1.2)).response({"path": "/"}).headers["Retry-After"] == "2"


def test_accidents_tell_nothing() -> None:
    assert "secret" not in problem_of(RuntimeError("secret path")).message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("no", param="n"), 400, "invalid_request_error"),
        (NotFound("who?"), 404, "not_found_error"),
        (invalid(413, "large"), 413, "request_too_large"),
        (invalid(418, "tea"), 418, "invalid_request_error"),
        (Overloaded("full", retry_after_s=1.2), 503, "overloaded_error"),
        (StoreError("disk"), 503, "overloaded_error"),
        (RequestFailed("sorry"), 500, "api_error"),
    ],
)
def test_under_messages_errors_have_anthropics_shape(error: Exception, status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = problem_of(error).response({"path": path})
        body = json.loads(bytes(response.body))
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert set(body["error"]) == {"type", "message"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions", "/api/chat"])
def test_a_message_that_quotes_half_of_a_pair_can_be_sent(path: str) -> None:
    body = json.loads(bytes(problem_of(BadRequest("no \ud83d here", param="\ud83d")).response({"path": path}).body))
    assert "no ? here" in (body["error"] if path == "/api/chat" else body["error"]["message"])


@given(value=JSON)
def test_what_was_sent_is_quoted_as_python_writes_it(value: object) -> None:
    assert quoted(value) == repr(value)[:300]


def test_of_a_long_value_the_beginning_is_looked_at() -> None:
    class Unseen:
        """What ends a value that is not looked at to its end."""

        def __repr__(self) -> str:
            raise AssertionError("looked at")

    assert quoted([{}] * 150 + [Unseen()]) == repr([{}] * 150)[:300]
    assert quoted({str(at): 1 for at in range(100)} | {"z": Unseen()}) == repr({str(at): 1 for at in range(100)})[:300]
    assert quoted("word " * 1000) == repr("word " * 1000)[:300]


@pytest.mark.parametrize("long", ["word " * 100_000, [{}] * 100_000], ids=["text", "list"])
def test_messages_about_long_values_are_short(long: Any) -> None:
    with pytest.raises(BadRequest, match=r"suffix: .* is not supported") as refused:
        validated(StrictModel, {"suffix": long})
    assert len(str(refused.value)) < 400
    with pytest.raises(BadRequest, match=r"messages\[0\].role is ") as refused:
        normalise_messages([{"role": long}])
    assert len(str(refused.value)) < 400


def test_a_long_name_of_a_model_is_not_repeated() -> None:
    assert len(str(unserved("x" * 1_000_000, ["pocket"], "openai"))) < 400
    assert forms("Pocket:latest") == {"pocket:latest", "pocket"}
