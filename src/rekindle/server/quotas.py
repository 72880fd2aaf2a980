"""What one tenant may have of words, so that none takes another's room: its part of sessions and kept responses.

Both lie within `--disk-bytes`, next to the KV, which gives way to them; each has a share there that all tenants have
equal parts of. Without a store they are in memory.
"""

from __future__ import annotations

from rekindle.agents.log.usage import Quota
from rekindle.config import WORDS_SHARE, ServerSettings
from rekindle.engine.api import Engine
from rekindle.server.responses.kept import MAX_BYTES

MEMORY_BYTES = 128 << 20  # for sessions, and again for responses, where there is no disk


def session_quota(engine: Engine, settings: ServerSettings) -> Quota:
    """What a namespace may have of coordination sessions."""
    return Quota(num_bytes=_part(engine, engine.settings.store.session_bytes, settings))


def response_bytes(engine: Engine, settings: ServerSettings) -> int:
    """Packed bytes of kept responses that a namespace may have."""
    return min(MAX_BYTES, _part(engine, engine.settings.store.response_bytes, settings))


def _part(engine: Engine, given: int | None, settings: ServerSettings) -> int:
    store = engine.stats().store
    share = MEMORY_BYTES if store is None else int(WORDS_SHARE * store["disk_bytes"])
    return (share if given is None else given) // len(settings.namespaces())
