"""How errors leave the server: one status per kind, in the shape of the dialect that the path speaks.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}     OpenAI's, and everything of our own
    {"type": "error", "error": {"type": ..., "message": ...}}               Anthropic's: /v1/messages, its models

Owns the mapping from the errors of `rekindle.errors`; adds the few that only HTTP knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from rekindle.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    NotFound,
    Overloaded,
    PromptTooLong,
    QuotaExceeded,
    RekindleError,
    StoreError,
    Timeout,
    Unavailable,
)
from rekindle.server.lines import line_of

ANTHROPIC_PATH = "/v1/messages"
# What Anthropic's clients make an exception class of is the status; the type says the same in a word.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
TOO_LONG = "context_length_exceeded"
CLIENT_LEFT = 499  # no standard; what proxies write into their logs for it


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self, path: str = "", *, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body, in the shape that clients of this path read; Anthropic's has the request's id, too."""
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            # Coding agents shorten their history when they read these words.
            told = f"prompt is too long: {self.message}" if self.code == TOO_LONG else self.message
            named = {} if request_id is None else {"request_id": request_id}
            return {"type": "error", "error": {"type": kind, "message": _sound(told)}, **named}
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {name: _sound(value) for name, value in error.items()}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, rounded up, to come back; the challenge of a 401; what a 415 takes."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 415:
            headers["Accept-Encoding"] = "identity"
        return headers

    def response(self, scope: Scope) -> JSONResponse:
        """The whole response to a request, in its dialect; the request's line in the log says what was wrong."""
        line = line_of(scope)
        if line is not None:
            line.fail(self.status, self.message)
        path = ANTHROPIC_PATH if is_anthropic(scope) else ""
        return JSONResponse(
            self.body(path, request_id=None if line is None else line.request_id), self.status, self.headers()
        )


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request speaks Anthropic's dialect. Models are asked for in both: a header tells them apart."""
    path: str = scope["path"]
    if path.startswith("/v1/models"):
        return any(name == b"anthropic-version" for name, _ in scope.get("headers", ()))
    return path.startswith(ANTHROPIC_PATH)


def _sound(text: str | None) -> str | None:
    """The same with halves of surrogate pairs replaced: a message may quote what the caller sent."""
    return text and text.encode("utf-8", "replace").decode()


class HttpError(RekindleError):
    """An error that only HTTP knows: who may come in, how large a body may be."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def invalid(status: int, message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    """The caller's fault, with this status."""
    return HttpError(Problem(status, "invalid_request_error", message, param, code))


def needs_admin(what: str) -> HttpError:
    """What only the operator may see."""
    message = f"{what} needs the admin key (REKINDLE_ADMIN_KEY of the server)"
    return HttpError(Problem(403, "permission_error", message, code="admin_key_required"))


def problem_of(error: Exception) -> Problem:
    """What to tell the client; what was not raised on purpose says no more than that."""
    message = str(error)
    if isinstance(error, HttpError):
        return error.problem
    if isinstance(error, NotFound):
        return Problem(404, "invalid_request_error", message, error.param, "not_found")
    if isinstance(error, Conflict):
        return Problem(409, "invalid_request_error", message, error.param, "conflict")
    if isinstance(error, QuotaExceeded):  # no 409 or 429: clients would send it again at once
        return Problem(400, "invalid_request_error", message, error.param, "quota_exceeded")
    if isinstance(error, PromptTooLong):
        return Problem(400, "invalid_request_error", message, error.param or "messages", TOO_LONG)
    if isinstance(error, BadRequest):
        return Problem(400, "invalid_request_error", message, error.param)
    if isinstance(error, Overloaded):
        return Problem(503, "server_error", message, code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, Unavailable):  # until it is started again; a load balancer sees it in /health
        return Problem(503, "server_error", message, code="unavailable")
    if isinstance(error, Timeout):  # what was computed is kept: asked again, it gets further
        return Problem(503, "server_error", message, code="timeout", retry_after_s=1)
    if isinstance(error, Cancelled):  # nobody reads it; logs and figures tell it apart from what we did wrong
        return Problem(CLIENT_LEFT, "invalid_request_error", message, code="cancelled")
    if isinstance(error, StoreError):  # a disk that is full or hangs: once it is mended, it can be asked again
        return Problem(503, "server_error", message, code="store_unavailable")
    if isinstance(error, RekindleError):
        return Problem(500, "server_error", message)
    if isinstance(error, RequestValidationError):
        return _malformed(error)
    if isinstance(error, HTTPException):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return Problem(error.status_code, kind, str(error.detail))
    return Problem(500, "server_error", "the server failed on this request; its log says how")


def _malformed(error: RequestValidationError) -> Problem:
    """What a body or a query of the simple routes does wrong first."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or None
    message = str(first["msg"])
    return Problem(400, "invalid_request_error", message if name is None else f"{name}: {message}", name)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the app."""
    return problem_of(error).response(request.scope)
