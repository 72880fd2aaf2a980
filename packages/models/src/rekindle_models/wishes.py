"""Which model a request is for, and how long that is to stay: from its path, a header, or its body.

    /models/NAME/…                  any route of a model's own server
    X-Rekindle-Model: NAME          the same, in a header
    {"model": NAME, …}              of requests that have a body
    none of these                   the first model, on routes that every server of one model has

Knows paths and bodies, and no processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import BadRequest
from rekindle.server.border import dialect_of, parse_json
from rekindle.server.gate.limits import FILES
from rekindle.server.ollama.bodies import KeepAlive
from rekindle_models.named import Model, Models

PREFIX = "/models/"
HEADER = "x-rekindle-model"
STATE = "rekindle_model"  # in a request's scope: the name in its path
CHAT, GENERATE = "/api/chat", "/api/generate"
# Routes of one model's server that are passed on to the first model where nothing names one.
EXACT = frozenset({"/openapi.json", "/tokenize", "/detokenize", "/tokenizer_info", "/overview", "/v1/stats"})
BELOW = ("/v1/agents", "/v1/coordination", "/v1/receipts", "/v1/responses")
BODIES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/tokenize")
OLLAMA = (CHAT, GENERATE, "/api/show")
# Asked by those who only watch, every few seconds or for hours: these start no model, and none stays loaded for them.
WATCHED = re.compile(
    r"/overview|/v1/stats|/metrics|/health(/live|/ready)?|/ping|/v1/coordination/sessions/[^/]+/events"
)
ANSWER = re.compile(r"/v1/(?:receipts/([^/]+)|responses/([^/]+)(?:/input_items)?)")
_KEEP_ALIVE: TypeAdapter[float | None] = TypeAdapter(KeepAlive | None)


class ByPrefix:
    """ASGI middleware: takes the name of a model from a path, of which the path of its own server is left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with the name in its state."""
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            raw = scope["raw_path"].decode("latin-1")
            name, slash, rest = raw.removeprefix(PREFIX).partition("/")
            if slash:
                scope.setdefault("state", {})[STATE] = unquote(name)  # the same state: the connection writes to it
                path = f"/{rest}"
                scope = {**scope, "path": unquote(path), "raw_path": path.encode("latin-1")}
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants: a model, `keep_alive` seconds of Ollama's requests (below 0: for good), and whether it has
    nothing to generate and only loads the model, or unloads it."""

    model: Model
    keep_alive: float | None = None
    is_empty: bool = False


def is_passed_on(scope: Scope) -> bool:
    """Whether a request is for a model: the routes of this server are others, where no name is in the path.

    A target that is no path, as `@other-host/`, is for none: put after a process's address it would name another host.
    """
    path = scope["path"]
    if not scope["raw_path"].startswith(b"/"):
        return False
    if names_one(scope) or path in EXACT or path in BODIES or path in OLLAMA:
        return True
    return any(path == each or path.startswith(f"{each}/") for each in BELOW)


def answer_of(scope: Scope) -> str | None:
    """Return the id of the stored response, or of the answer whose receipt, a request asks for without saying whose it
    is; else None."""
    if names_one(scope) or scope["method"] not in ("GET", "HEAD", "DELETE"):
        return None
    found = ANSWER.fullmatch(scope["path"])
    return None if found is None else found[1] or found[2]


def names_one(scope: Scope) -> bool:
    """Whether the path or a header of a request names a model."""
    return STATE in scope.get("state", {}) or HEADER in Headers(scope=scope)


def starts_nothing(scope: Scope) -> bool:
    """Whether a request is one of those that only watch."""
    return scope["method"] in ("GET", "HEAD") and WATCHED.fullmatch(scope["path"]) is not None


def wish_of(scope: Scope, body: bytes, models: Models) -> Wish:
    """Return what a request wants; NotFound for a name that is not served, BadRequest for a body that cannot be read.

    Takes as long as parsing the body.
    """
    dialect = dialect_of(scope)
    named = scope.get("state", {}).get(STATE, Headers(scope=scope).get(HEADER))
    fields = _fields(scope, body)
    if named is None:
        named = fields.get("model", fields.get("name") if scope["path"] == "/api/show" else None)
    if named is not None and not isinstance(named, str):
        raise BadRequest("model: must be a text", param="model")
    model = models.find(named, dialect)
    if scope["path"] not in (CHAT, GENERATE):
        return Wish(model)
    said = fields.get("messages" if scope["path"] == CHAT else "prompt")
    return Wish(model, _keep_alive(fields.get("keep_alive")), is_empty=not said)


def _fields(scope: Scope, body: bytes) -> Mapping[str, Any]:
    """Return the body's object; empty if there is no body, or a file in its place."""
    if not body or FILES.fullmatch(scope.get("raw_path", b"")):
        return {}
    found = parse_json(body)
    return found if isinstance(found, dict) else {}


def _keep_alive(value: Any) -> float | None:
    try:
        return _KEEP_ALIVE.validate_python(value)
    except ValidationError:
        raise BadRequest("keep_alive: use seconds, or a duration such as 5m", param="keep_alive") from None
