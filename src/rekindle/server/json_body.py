"""Bodies as JSON, read strictly: an object with a key twice is refused, for readers disagree on which one counts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fastapi import Request

from rekindle.server.errors import invalid

MOST_KEY = 100  # characters of a key that are quoted


class _Twice(Exception):
    """An object has this key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def parse_json(raw: bytes) -> Any:
    """The JSON that a body spells; 400 where it is none, or an object in it has a key twice.

    Costs twice what `json.loads` does where a body is all small objects, nothing where it is text.
    """
    try:
        return json.loads(raw, object_pairs_hook=_unique)
    except _Twice as error:
        key = error.key[:MOST_KEY]
        raise invalid(400, f"the body has the key {key!r} twice in one object", param=key) from None
    except (ValueError, RecursionError) as error:
        raise invalid(400, f"the body is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _Twice(counts.most_common(1)[0][0])
    return made


class StrictRequest(Request):
    """A request whose `json` is read by `parse_json`, for routes that leave their bodies to FastAPI."""

    async def json(self) -> Any:
        """The body."""
        return parse_json(await self.body())
