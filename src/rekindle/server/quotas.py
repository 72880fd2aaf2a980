"""Quotas of one tenant for coordination sessions and stored responses, so that none takes another's space.

Both count towards `--disk-bytes`, next to the KV, which yields space to them; each has a share there that is divided
equally among tenants. Without a store they are in memory.
"""

from __future__ import annotations

from rekindle.config import WORDS_SHARE, ServerSettings
from rekindle.engine.api import Engine
from rekindle.server.responses.stored import MAX_BYTES

MEMORY_BYTES = 128 << 20  # for sessions, and the same for responses, without a disk


def session_bytes(engine: Engine, settings: ServerSettings) -> int:
    """Return the bytes of coordination sessions that a namespace may have."""
    return _part(engine, settings)


def response_bytes(engine: Engine, settings: ServerSettings) -> int:
    """Return the packed bytes of stored responses that a namespace may have."""
    return min(MAX_BYTES, _part(engine, settings))


def _part(engine: Engine, settings: ServerSettings) -> int:
    store = engine.stats().store
    share = MEMORY_BYTES if store is None else int(WORDS_SHARE * store["disk_bytes"])
    return share // len(settings.namespaces())
