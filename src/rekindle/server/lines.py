"""The one line that a request leaves in the log, as it comes to be known: whose it is, what was wrong, how it ended.

Owns the request's id: the client's own, from `X-Request-ID`, else a new one. The line travels in the scope of its
request, where the guard notes the tenant and refusals say what was wrong; `log` writes it at the end. `CURRENT` shows
it to observers, which know no scopes.
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
MOST_PATH = 200  # characters of a path, as it was sent; the query is never shown: people put secrets there
MOST_METHOD = 20
MOST_PROBLEM = 300  # a message may quote what the client sent
_OWN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STATE = "rekindle_line"


def request_id(headers: Headers) -> str:
    """The id that a client sent, 1 to 128 visible ASCII characters, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _OWN_ID.fullmatch(given) else new_id()


def new_id() -> str:
    """An id that no other request has."""
    return f"req_{uuid.uuid4().hex}"


@dataclass(slots=True)
class Line:
    """What is known of one request so far. `tenant` None: nobody was let in; `details` describe its replies.

    `problem_status` stands for `problem`; it is not the answer's `status` where that had begun before.
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
        """The line of a request that begins; from now on its scope has it."""
        path = scope.get("raw_path") or scope.get("path", "-").encode("utf-8", "replace")
        line = cls(
            request_id(Headers(scope=scope)),
            str(scope.get("method", "-"))[:MOST_METHOD],
            shortened(path.decode("latin-1"), MOST_PATH),
            (scope.get("client") or (None,))[0],
        )
        scope.setdefault("state", {})[_STATE] = line
        return line

    def fail(self, status: int, message: str) -> None:
        """Note what was wrong, where nothing else was before."""
        if self.problem is None:
            self.problem, self.problem_status = shortened(message, MOST_PROBLEM), status

    def head(self) -> str:
        """Method, path, status, milliseconds, and who asked."""
        who = f"tenant={plain(self.tenant)} agent={plain(self.agent)} id={self.request_id} client={plain(self.client)}"
        return f"{self.method} {self.path} {self.status} {self.duration_ms:,.0f} ms {who}"

    def as_dict(self) -> dict[str, Any]:
        """The same as keys and values; null for what is not known."""
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
        """`error` and `error_status`, where there are any."""
        return {} if self.problem is None else {"error": self.problem, "error_status": self.problem_status}

    def about(self) -> str:
        """What came of it, for people; may be empty."""
        if self.problem is None:
            return ", ".join(self.details)
        return ", ".join([*self.details, f"failed with {self.problem_status}, {self.problem}"])

    @property
    def duration_ms(self) -> float:
        """Milliseconds since the request's head had come."""
        return (time.perf_counter() - self.began) * 1000


CURRENT: ContextVar[Line | None] = ContextVar("rekindle_line", default=None)


def line_of(scope: Mapping[str, Any]) -> Line | None:
    """The line of a request; None where nothing logs it."""
    line: Line | None = scope.get("state", {}).get(_STATE)
    return line


def plain(value: str | None) -> str:
    """A value as `name=value` can hold it: `-` for none, in quotes where it has blanks or signs of its own."""
    if value is None:
        return "-"
    return value if re.fullmatch(r"[^\s\"=]+", value) and value != "-" else json.dumps(value, ensure_ascii=False)


def shortened(text: str, most: int) -> str:
    """At most so many characters, and a sign where some are missing."""
    return text if len(text) <= most else f"{text[:most]}…"


def on_one_line(text: str) -> str:
    """The same with everything escaped that a terminal or a reader of lines would obey."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
