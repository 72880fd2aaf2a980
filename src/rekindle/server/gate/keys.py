"""What each API key grants, and the limits of its namespace: from the settings, and from a file that may change.

Owns the reading of that file while the server runs: whenever a request finds it changed (one `stat`, 2 µs), and when it
is asked to. So a key that was revoked is refused from the next request on; a request that was admitted runs to its end.
A file that cannot be read changes nothing: the keys that it had stay, and the reason is logged once and is a problem of
the server's health. For one event loop.
"""

from __future__ import annotations

import hmac
import logging
import os
from dataclasses import dataclass

from starlette.datastructures import Headers

from rekindle.config import DEFAULT_NAMESPACE, ServerSettings
from rekindle.config.key_file import KeyFile, NamespaceLimits, digest_of
from rekindle.errors import ConfigError
from rekindle.server.gate.quotas import Tokens

logger = logging.getLogger("rekindle.server")
NO_LIMITS = NamespaceLimits()
_Seen = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Access:
    """What a key grants: one namespace and, if `is_admin`, the operator's routes.

    `has_key` False: the request has no key and may reach only routes that need none, such as health checks.
    """

    namespace: str = "default"
    is_admin: bool = False
    has_key: bool = True


class Keys:
    """The access that each key grants. A given key is compared with every known one, by digest, in constant time.

    ConfigError at first if the file of keys cannot be read.
    """

    def __init__(self, settings: ServerSettings) -> None:
        all_are_admins = not settings.separates
        named = dict(settings.api_keys)
        if settings.api_key is not None:
            named[DEFAULT_NAMESPACE] = settings.api_key
        self._of_settings = [(digest_of(key), Access(name, is_admin=all_are_admins)) for name, key in named.items()]
        if settings.admin_key is not None:
            self._of_settings.append((digest_of(settings.admin_key), Access(is_admin=True)))
        self.without = None if settings.needs_key else Access(is_admin=all_are_admins)
        self._settings = settings
        self._path = settings.key_file
        self._seen: _Seen = None
        self._problem: str | None = None
        self._take(KeyFile())
        if self._path is not None:
            self._seen = self._look()
            self._take(KeyFile.read(self._path))

    def access(self, headers: Headers) -> Access | None:
        """Return what the key in these headers grants, or what is granted without one; None: nothing."""
        if self._path is not None and self._look() != self._seen:
            self.reload()
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest, found = digest_of(given), self.without
        for known, access in self._known:
            if hmac.compare_digest(digest, known):
                found = access
        return found

    def requests_per_minute(self, namespace: str) -> int | None:
        """Return how many requests a namespace may send a minute; None: any number."""
        own = self._file.limits.get(namespace, NO_LIMITS).requests_per_minute
        return own or self._settings.requests_per_minute

    def tokens_per_day(self, namespace: str) -> Tokens:
        """Return how many tokens a namespace may use on a day."""
        own, of_all = self._file.limits.get(namespace, NO_LIMITS), self._settings
        return Tokens(
            own.computed_tokens_per_day or of_all.computed_tokens_per_day,
            own.generated_tokens_per_day or of_all.generated_tokens_per_day,
        )

    def reload(self) -> None:
        """Read the file again, if there is one; what is wrong with it is logged."""
        if self._path is None:
            return
        self._seen, before = self._look(), self._file
        try:
            self._take(KeyFile.read(self._path))
        except ConfigError as error:
            self._problem = f"{error}; the keys that were read before stay"
            logger.error("%s", self._problem)
            return
        self._problem = None
        if self._file != before:
            logger.info("key file %s: %d keys are valid", self._path, len(self._known) - len(self._of_settings))

    def problems(self) -> tuple[str, ...]:
        """Return why the file in its present form is not used, if it is not."""
        return () if self._problem is None else (self._problem,)

    def _take(self, file: KeyFile) -> None:
        self._file = file
        valid = [(key.digest, Access(key.namespace, key.is_admin)) for key in file.keys if key.revoked is None]
        self._known = [*self._of_settings, *valid]

    def _look(self) -> _Seen:
        """Return what changes when the file does; None while it cannot be looked at."""
        assert self._path is not None, "there is no file of keys"
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
