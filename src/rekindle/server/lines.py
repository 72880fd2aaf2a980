"""The log line of a request, filled in while the request is processed.

Owns the request's id: the client's, from `X-Request-ID`, else a new one. The line is stored in the request's scope,
where the guard sets the tenant and refusals set the error; `log` writes it at the end. Observers, which have no scope,
get it from `CURRENT`.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

REQUEST_ID = "x-request-id"
MAX_PATH_CHARS = 200  # of a path as it was sent; the query is never logged: it may contain secrets
MAX_METHOD_CHARS = 20
MAX_PROBLEM_CHARS = 300  # a message may quote what the client sent
_OWN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STATE = "rekindle_line"


def request_id(headers: Headers) -> str:
    """Return the id that the client sent, 1 to 128 visible ASCII characters, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _OWN_ID.fullmatch(given) else new_id()


def new_id() -> str:
    """Create a unique id."""
    return f"req_{uuid.uuid4().hex}"


@dataclass(slots=True)
class Line:
    """The facts known about one request so far. `tenant` None: not admitted; `details` describe its replies.

    `problem_status` is the status of `problem`; it differs from `status` if the answer had begun before the problem.
    """

    request_id: str
    method: str = "-"
    path: str = "-"
    client: str | None = None
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None
    tenant: str | None = None
    agent: str | None = None
    problem: str | None = None
    problem_status: int | None = None
    details: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scope: Scope) -> Line:
        """Create the line of a new request and store it in the request's scope."""
        path = scope.get("raw_path") or scope.get("path", "-").encode("utf-8", "replace")
        line = cls(
            request_id(Headers(scope=scope)),
            str(scope.get("method", "-"))[:MAX_METHOD_CHARS],
            shortened(path.decode("latin-1"), MAX_PATH_CHARS),
            (scope.get("client") or (None,))[0],
        )
        scope.setdefault("state", {})[_STATE] = line
        return line

    def fail(self, status: int, message: str) -> None:
        """Record an error, unless one is already recorded."""
        if self.problem is None:
            self.problem, self.problem_status = shortened(message, MAX_PROBLEM_CHARS), status

    def head(self) -> str:
        """Return method, path, status, milliseconds, and the sender."""
        who = f"tenant={plain(self.tenant)} agent={plain(self.agent)} id={self.request_id} client={plain(self.client)}"
        return f"{self.method} {self.path} {self.status} {self.duration_ms:,.0f} ms {who}"

    def as_dict(self) -> dict[str, Any]:
        """Return the line as keys and values; null if unknown."""
        return {
            "event": "request",
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_ms": round(self.duration_ms, 3),
            "client": self.client,
            "tenant": self.tenant,
            "agent": self.agent,
            **self.fields,
            **self.failure(),
        }

    def failure(self) -> dict[str, Any]:
        """Return `error` and `error_status` of a failed request, else nothing."""
        return {} if self.problem is None else {"error": self.problem, "error_status": self.problem_status}

    def about(self) -> str:
        """Describe the result in words; may be empty."""
        if self.problem is None:
            return ", ".join(self.details)
        return ", ".join([*self.details, f"failed with {self.problem_status}, {self.problem}"])

    @property
    def duration_ms(self) -> float:
        """Milliseconds since the request's head arrived."""
        return (time.perf_counter() - self.began) * 1000


CURRENT: ContextVar[Line | None] = ContextVar("rekindle_line", default=None)


def line_of(scope: Mapping[str, Any]) -> Line | None:
    """Return the line of a request; None if it is not logged."""
    line: Line | None = scope.get("state", {}).get(_STATE)
    return line


def plain(value: str | None) -> str:
    """Format a value for `name=value`: `-` for None, quoted if it contains blanks, quotes or `=`."""
    if value is None:
        return "-"
    return value if re.fullmatch(r"[^\s\"=]+", value) and value != "-" else json.dumps(value, ensure_ascii=False)


def shortened(text: str, most: int) -> str:
    """Truncate to `most` characters, with an ellipsis if any are missing."""
    return text if len(text) <= most else f"{text[:most]}…"


def on_one_line(text: str) -> str:
    """Escape every character that a terminal or line parser would interpret."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
