"""Every error Rekindle raises on purpose, split by whose fault it is.

    RekindleError
    ├── BadRequest            the caller's: 400, names the parameter
    │   ├── PromptTooLong     the prompt does not fit the context
    │   ├── NotFound          404: no such agent or model
    │   ├── Conflict          409: not now, something else is under way
    │   └── QuotaExceeded     400: a tenant has as much as it may have; says what to delete
    ├── ConfigError           the operator's: a flag, variable or file
    ├── ModelRefused          the model cannot be served; says why and what would fit
    ├── StoreError            the directory's
    │   ├── StoreLocked       another process holds it
    │   ├── StoreRefused      its disk is full or may not be written: answers go on without it
    │   └── PurgeUnproved     an agent is forgotten, and bytes of it may be left: purge it again
    ├── Overloaded            ours, for now: 503 with a time to come back
    ├── Unavailable           ours, until it is started again: 503, a thread has ended
    ├── Timeout               the request took longer than the operator allows
    ├── Cancelled             nobody wants the reply any more
    └── RequestFailed         one request failed alone; the others go on

A message says what is wrong and what to do. Broken invariants are asserts, shortages are values; neither is here.
"""

from __future__ import annotations


class RekindleError(Exception):
    """Root of the errors raised on purpose."""


class BadRequest(RekindleError):
    """The request cannot be served as it stands; `param` names the field to change, if one is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(BadRequest):
    """The prompt (with at least one token of answer) does not fit the context."""


class NotFound(BadRequest):
    """What the request names does not exist."""


class Conflict(BadRequest):
    """What the request asks for does not go together with what is under way; the message says what to do first."""


class QuotaExceeded(BadRequest):
    """The caller's namespace has as much of this as it may have; waiting does not help, deleting does."""


class ConfigError(RekindleError):
    """A setting is unknown, malformed or contradicts another."""


class ModelRefused(RekindleError):
    """The model cannot be loaded or served right; the message gives the reason and what would fit."""


class StoreError(RekindleError):
    """The store's directory cannot be used."""


class StoreLocked(StoreError):
    """Another process has the store open."""


class StoreRefused(StoreError):
    """The disk is full, or may not be written or read: nothing is wrong with what is on it."""


class PurgeUnproved(StoreError):
    """The agent is forgotten, but that none of its bytes are left on the disk could not be shown."""


class Overloaded(RekindleError):
    """No room for this request now, in memory or in the queue; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RekindleError):
    """A thread that the engine needs has ended; nothing can be done until it is started again."""


class Timeout(RekindleError):
    """The request was stopped because it was not finished in time; what it had computed is kept."""


class Cancelled(RekindleError):
    """The request was cancelled before anything was known of it; once it has begun, a last delta says so instead."""


class RequestFailed(RekindleError):
    """This request failed inside the engine; no other one was touched."""
