"""Every error Rekindle raises on purpose, split by whose fault it is.

    RekindleError
    ├── BadRequest            the caller's: 400, names the parameter
    │   ├── PromptTooLong     the prompt does not fit the context
    │   ├── NotFound          404: no such agent or model
    │   ├── Conflict          409: not now, something else is under way
    │   └── QuotaExceeded     400: the tenant's quota is used up; says what to delete
    ├── ConfigError           the operator's: a flag, variable or file
    │   └── PortTaken         another program listens there
    ├── ModelRefused          the model cannot be served; says why and what would fit
    │   └── HubUnreachable    it has to be fetched, and the hub does not answer
    ├── StoreError            the directory's
    │   ├── StoreLocked       another process holds it
    │   ├── StoreRefused      its disk is full or cannot be written: replies continue without it
    │   └── PurgeUnproved     an agent is deleted, but bytes of it may remain: purge it again
    ├── Overloaded            ours, temporary: 503 with a time to retry
    ├── Unavailable           ours, until a restart: 503, a thread has ended
    ├── Timeout               the request took longer than the operator allows
    ├── BackendFailed         the server that computes for us failed, or answered nonsense: 502
    ├── Cancelled             the reply is no longer wanted
    └── RequestFailed         one request failed; the others continue

A message says what is wrong and what to do. Broken invariants are asserts, shortages are values; neither is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_QUOTED = 300  # characters of what a caller sent, in a message


def quoted(value: Any) -> str:
    """The beginning of the `repr` of a JSON value, up to 300 characters; the rest of it is not looked at."""
    text = ""
    for part in _quoted(value):
        text += part
        if len(text) >= MOST_QUOTED:
            break
    return text[:MOST_QUOTED]


def _quoted(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield "{"
        for at, (key, item) in enumerate(value.items()):
            yield f"{', ' if at else ''}{str(key)[:MOST_QUOTED]!r}: "
            yield from _quoted(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for at, item in enumerate(value):
            yield ", " if at else ""
            yield from _quoted(item)
        yield "]"
    else:
        yield repr(value[:MOST_QUOTED] if isinstance(value, str) else value)


def first_line(error: BaseException) -> str:
    """The first line of what another library says, up to 300 characters; the error's type if it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


class RekindleError(Exception):
    """Root of the errors raised on purpose."""


class BadRequest(RekindleError):
    """The request cannot be served as it is; `param` names the field to change, if one is to blame.

    `details` say it to programs, in the words of their protocol.
    """

    def __init__(self, message: str, *, param: str | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.details = details


class PromptTooLong(BadRequest):
    """The prompt (with at least one token of answer) does not fit the context.

    The message begins as Anthropic's does: coding agents look for it, and for both numbers, to shorten their history.
    """

    @classmethod
    def of(cls, num_tokens: int, max_context: int, *, size: str = "") -> PromptTooLong:
        """Return the error for a prompt of `num_tokens`, or at least as many if its `size` is given in words."""
        count, counted = (f"at least {num_tokens}", f" ({size})") if size else (f"{num_tokens}", "")
        return cls(
            f"prompt is too long: {count} tokens > {max_context - 1} maximum{counted}: shorten it, or serve with a "
            "larger context (max_context, and that of the backend if there is one)",
            param="messages",
        )


class NotFound(BadRequest):
    """The object that the request names does not exist."""


class Conflict(BadRequest):
    """The request conflicts with work in progress; the message says what to do first."""


class QuotaExceeded(BadRequest):
    """The quota of the caller's namespace is used up; waiting does not help, deleting does."""


class ConfigError(RekindleError):
    """A setting is unknown, malformed or contradicts another."""


class PortTaken(ConfigError):
    """Another program listens on the port."""


class ModelRefused(RekindleError):
    """The model cannot be loaded or served correctly; the message gives the reason and what would fit.

    `remedy`: settings that may serve it, the end of the message; empty if there are none.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.remedy = remedy


class HubUnreachable(ModelRefused):
    """The model has to be fetched, and the hub cannot be reached: later it may be."""


class StoreError(RekindleError):
    """The store's directory cannot be used."""


class StoreLocked(StoreError):
    """Another process has the store open."""


class StoreRefused(StoreError):
    """The disk is full, or cannot be written or read; the data on it is intact."""


class PurgeUnproved(StoreError):
    """The agent is deleted, but it could not be verified that none of its bytes remain on the disk."""


class Overloaded(RekindleError):
    """No room for this request now, in memory or in the queue; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RekindleError):
    """A thread or a process that the engine needs has ended; nothing is served until the engine is restarted."""


class Timeout(RekindleError):
    """The request was stopped because it was not finished in time; what it had computed is kept."""


class BackendFailed(RekindleError):
    """The server that computes in our place failed on this request, or sent what cannot be read."""


class Cancelled(RekindleError):
    """The request was cancelled before it began; a reply that has begun ends with a last delta instead."""


class RequestFailed(RekindleError):
    """This request failed inside the engine; no other request was affected."""
