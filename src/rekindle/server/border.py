"""The border between routes and HTTP: strict parsing of bodies, and errors as responses.

An error has one status per kind, in the shape of the path's dialect:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}     OpenAI's, and everything of our own
    {"type": "error", "error": {"type": ..., "message": ...}}               Anthropic's: /v1/messages, its models
    {"error": ...}                                                          Ollama's: what is under /api

Owns the mapping from the errors of `rekindle.errors`, and the few errors that only HTTP has. An error that is not an
`Exception`, for example a panic of a library, fails only its request: otherwise it would bypass every error handler,
and the client would get the HTTP server's plain text; a SystemExit from a worker thread would end the event loop.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Scope

from rekindle.errors import (
    BackendFailed,
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
from rekindle.worker import MEANT_FOR_THE_LOOP, contained, failure_of

logger = logging.getLogger("rekindle.server")
P = ParamSpec("P")
T = TypeVar("T")
MAX_KEY_CHARS = 100  # of a key, in error messages
# Limits on a body's values: nobody else is answered while it is parsed, and many small values take the longest.
MOST_VALUES = 1_000_000  # for example the ids of a batch of prompts
MOST_MEMBERS = 150_000  # lists, objects and keys; 50,000 messages, or 9,000 tool calls with their results
FEW_BYTES = 256 << 10  # values of bodies up to this size are not counted
MOST_KEYS = 1024  # of an object of parameters: each that is not known is an error to be written
SHORT_BYTES = 64 << 10  # of such a body that the event loop parses
NO_MARKS = bytes(set(range(256)) - set(b",[{:"))  # what is not counted
JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # or its beginning
Dialect = Literal["openai", "anthropic", "ollama"]
ANTHROPIC_PATHS = ("/v1/messages", "/v1/complete")
SHARED_PATHS = ("/v1/models", "/v1/files", "/v1/skills")  # of OpenAI and Anthropic
# Anthropic's clients choose an exception class by status; the type repeats it in a word.
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
CLIENT_LEFT = 499  # the client disconnected; not a standard status, but proxies log it
OPENAI = ("chat/completions", "completions", "responses", "models", "embeddings")
ANTHROPIC = ("messages", "messages/count_tokens")
OLLAMA = ("chat", "generate", "tags", "show", "ps", "version")
# Ollama's routes that manage models, and what to do instead.
UNMANAGED = {
    "pull": "no model can be fetched while the server runs: start it with rekindle serve NAME",
    "push": "models are not published from here: use the hub's own tools",
    "create": "no model is made from another: start the server with the one to serve, and send options with requests",
    "copy": "models have no copies here: --served-model-name gives the model another name",
    "delete": "models are files that the server does not own: delete them on disk while it is stopped",
    "blobs": "no files are taken: start the server with the model to serve",
}
_LEAD = re.compile(r"(?:(?:api|openai|anthropic|v1|v1beta|v2)/)+")
# What other servers do under these names, and a language model does not.
ELSEWHERE = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "ranks",
    "/v1/score": "scores of pairs",
    "/v1/moderations": "moderation",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/images/generations": "images",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
# What OpenAI's server does with responses, and what to do here.
INSTEAD = {
    "/v1/responses/compact": "responses are not compacted here: send the conversation, what is stored of it is not "
    "computed again; if it is too long, ask POST /v1/responses for a summary and go on from that",
    "/v1/responses/{id}/cancel": "no response is made in the background: close the connection of a request to stop it",
}
# All that is under /api, but for base URLs of OpenAI's and Anthropic's clients that end there.
_OLLAMA_PATH = re.compile(r"/api/(?!v\d|openai/|anthropic/|chat/|(?:completions|responses|models|messages)\b).*")
_OLLAMA_ASTRAY = re.compile(rf"(?:/[\w.-]+)?/api/({'|'.join(OLLAMA)})/?")


# Errors for requests that miss a route: which one was meant, or that this server has nothing of the kind.
#
# Most are sent by clients with a wrong base URL: OpenAI's end in /v1, Anthropic's and Ollama's do not, and that is
# easily mistaken.


def is_ollama(path: str) -> bool:
    """Whether a path is one of Ollama's, or nearly."""
    return any(form.fullmatch(path) for form in (_OLLAMA_PATH, _OLLAMA_ASTRAY))


def meant(path: str) -> str | None:
    """Return what to do about a path that no route has; None if nothing like it is served."""
    astray = _OLLAMA_ASTRAY.fullmatch(path)
    if astray is not None:
        right = f"/api/{astray[1]}"
        return f"there is no route {path[:100]}, but {right}: the base URL of this client is the server's address alone"
    route = path.strip("/")
    route = _LEAD.sub("", route, count=1) if _LEAD.match(route) else route
    if route not in (*OPENAI, *ANTHROPIC) or path == f"/v1/{route}":
        return None
    base = "the server's address, without /v1" if route in ANTHROPIC else "the server's address with /v1 at its end"
    return f"there is no route {path[:100]}, but /v1/{route}: the base URL of this client is {base}"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    details: Mapping[str, Any] | None = None

    def body(self, dialect: Dialect = "openai", *, request_id: str | None = None) -> dict[str, Any]:
        """Return the JSON body in the shape of this dialect; Anthropic's includes the request's id."""
        if dialect == "ollama":
            return {"error": _sound(self.message)}
        if dialect == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            named = {} if request_id is None else {"request_id": request_id}
            error: dict[str, Any] = {"type": kind, "message": _sound(self.message)}
            if self.details is not None:
                error["details"] = dict(self.details)
            return {"type": "error", "error": error, **named}
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {name: _sound(value) for name, value in fields.items()}}

    def headers(self) -> dict[str, str]:
        """Return the headers: `Retry-After` in whole seconds, rounded up; a 401's challenge; a 415's encoding."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 415:
            headers["Accept-Encoding"] = "identity"
        return headers

    def response(self, scope: Scope) -> JSONResponse:
        """Build the response in the request's dialect, and record the error in the request's log line."""
        line = line_of(scope)
        if line is not None:
            line.fail(self.status, self.message)
        request_id = None if line is None else line.request_id
        return JSONResponse(self.body(dialect_of(scope), request_id=request_id), self.status, self.headers())


def dialect_of(scope: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a request by its path; some are in two, which a header distinguishes."""
    path: str = scope["path"]
    if path.startswith(SHARED_PATHS):
        return "anthropic" if any(name == b"anthropic-version" for name, _ in scope.get("headers", ())) else "openai"
    if path.startswith(ANTHROPIC_PATHS):
        return "anthropic"
    return "ollama" if is_ollama(path) else "openai"


def _sound(text: str | None) -> str | None:
    """Replace unpaired surrogates: a message may quote what the client sent."""
    return text and text.encode("utf-8", "replace").decode()


class HttpError(RekindleError):
    """An error that only HTTP has, such as a refused key or a body that is too large."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def invalid(status: int, message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    """Return an error of the client's, with this status."""
    return HttpError(Problem(status, "invalid_request_error", message, param, code))


def needs_admin(what: str) -> HttpError:
    """Return the error for something that only the operator may access."""
    message = f"{what} needs the admin key (REKINDLE_ADMIN_KEY of the server)"
    return HttpError(Problem(403, "permission_error", message, code="admin_key_required"))


def problem_of(error: Exception) -> Problem:
    """Convert an error for the client; unexpected errors reveal no details."""
    message = str(error)
    if isinstance(error, HttpError):
        return error.problem
    if isinstance(error, NotFound):
        return Problem(404, "invalid_request_error", message, error.param, "not_found")
    if isinstance(error, Conflict):
        return Problem(409, "invalid_request_error", message, error.param, "conflict")
    if isinstance(error, QuotaExceeded):  # not a 409 or 429: clients would retry at once
        return Problem(400, "invalid_request_error", message, error.param, "quota_exceeded")
    if isinstance(error, PromptTooLong):
        return Problem(400, "invalid_request_error", message, error.param or "messages", TOO_LONG)
    if isinstance(error, BadRequest):
        return Problem(400, "invalid_request_error", message, error.param, details=error.details)
    if isinstance(error, Overloaded):
        return Problem(503, "server_error", message, code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, Unavailable):  # until a restart; load balancers see it in /health
        return Problem(503, "server_error", message, code="unavailable")
    if isinstance(error, Timeout):  # computed KV is kept: a retry gets further
        return Problem(503, "server_error", message, code="timeout", retry_after_s=1)
    if isinstance(error, BackendFailed):
        return Problem(502, "server_error", message, code="backend_failed")
    if isinstance(error, Cancelled):  # not read by the client; logs and metrics separate it from server errors
        return Problem(CLIENT_LEFT, "invalid_request_error", message, code="cancelled")
    if isinstance(error, StoreError):  # the disk is full or hangs: retry once it is repaired
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
    """Describe the first validation error in a body or query that FastAPI parsed."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or None
    message = str(first["msg"])
    return Problem(400, "invalid_request_error", message if name is None else f"{name}: {message}", name)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Handle an exception of the app."""
    problem = problem_of(error)
    if problem.status == 404 and request.scope.get("route") is None and (hint := meant(request.scope["path"])):
        problem = replace(problem, message=hint)
    return problem.response(request.scope)


class _Twice(Exception):
    """An object has this key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def parse_json(raw: bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a body as JSON; 400 if it is invalid, has too many values, or an object in it has a duplicate key.

    Takes twice as long as `json.loads` for a body of small objects, three times as long for a large one of numbers, no
    longer for one that is mostly text.
    """
    is_large = len(raw) > FEW_BYTES
    if is_large:
        _check_values(raw)
    integer, decimal = (_integer, _decimal) if is_large else (None, None)
    try:
        return json.loads(raw, object_pairs_hook=pairs_hook or _unique, parse_int=integer, parse_float=decimal)
    except _Twice as error:
        key = error.key[:MAX_KEY_CHARS]
        raise invalid(400, f"the body has the key {key!r} twice in one object", param=key) from None
    except (ValueError, RecursionError) as error:
        raise invalid(400, f"the body is not JSON: {error}") from None


def _check_values(raw: bytes) -> None:
    """Refuse a body of more values than a request needs; strings are looked for only where they may matter.

    In UTF-16 and 32, which have zero bytes, all counts: half of another character may look like a quotation mark.
    """
    marks = raw.translate(None, NO_MARKS)
    if marks.count(b",") <= MOST_VALUES and _members(marks) <= MOST_MEMBERS:
        return
    strings = () if b"\0" in raw else JSON_STRING.finditer(raw)
    values = members = at = 0
    for start, end in chain((string.span() for string in strings), [(len(raw), len(raw))]):
        between = raw[at:start]
        values, members, at = values + between.count(b","), members + _members(between), end
        if values > MOST_VALUES or members > MOST_MEMBERS:
            most = f"{MOST_VALUES:,} values, or {MOST_MEMBERS:,} lists, objects and keys"
            is_prompt = b"," * MOST_VALUES in marks  # one list, of ids
            message = f"the body has more than {most}: send fewer messages, tools or ids in one request"
            raise invalid(400, message, code=TOO_LONG if is_prompt else None)


def _members(part: bytes) -> int:
    """Count lists, objects and keys where no string is."""
    return part.count(b"[") + part.count(b"{") + part.count(b":")


# Numbers are read by functions in Python, between which other threads have their turn: `int` and `float` would keep the
# interpreter from the first to the last, for 0.7 s where 16 MiB are long ones.


def _integer(digits: str) -> int:
    return int(digits)


def _decimal(digits: str) -> float:
    return float(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _Twice(counts.most_common(1)[0][0])
    return made


def _few(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise invalid(400, f"an object in the body has more than {MOST_KEYS:,} keys: leave out what is not known here")
    return _unique(pairs)


class StrictRequest(Request):
    """A request that parses its body with `parse_json`, for routes whose bodies FastAPI reads: on the event loop, and
    with an error for each key that it does not know, so no object may have many."""

    async def json(self) -> Any:
        """Return the parsed body."""
        raw = await self.body()
        return parse_json(raw, _few) if len(raw) <= SHORT_BYTES else await in_thread(parse_json, raw, _few)


class Route(APIRoute):
    """A route whose errors all reach the error handlers."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not inspect.iscoroutinefunction(endpoint):
            signature = inspect.signature(endpoint, eval_str=True)
            endpoint = contained(endpoint)
            endpoint.__dict__["__signature__"] = signature
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler to convert errors that are not an Exception."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(StrictRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, HttpError):  # how FastAPI wraps an error from reading the body
                    raise error.__cause__ from None
                raise
            except (Exception, *MEANT_FOR_THE_LOOP):
                raise
            except BaseException as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                raise failure_of(error) from error

        return answer


class Router(APIRouter):
    """A router of `Route`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=Route, **options)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` on a worker thread; return its result or raise its error."""
    return await run_in_threadpool(contained(work), *args, **kwargs)
