"""Answers of any size as JSON, written so that no other thread waits long for the interpreter.

Python's encoder keeps it until a document is complete: for the log probabilities of a long prompt that is a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse

FEW_ITEMS = 16  # a list of so many is written item by item: choices, which may be large
PART_CHARS = 1 << 16  # written at a time, about


class LargeDocument(JSONResponse):
    """A JSON response with the bytes of a `JSONResponse`. Build it in a worker thread."""

    def render(self, content: Any) -> bytes:
        """Encode it part by part."""
        return b"".join(part.encode() for part in _parts(content))


def in_parts(value: Any) -> str:
    """Write a value as JSON part by part. Call it in a worker thread."""
    return "".join(_parts(value))


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for at, (key, item) in enumerate(value.items()):
            yield f"{',' if at else '{'}{_written(key)}:"
            yield from _parts(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) <= FEW_ITEMS:
        for at, item in enumerate(value):
            yield "," if at else "["
            yield from _parts(item)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        yield "["
        yield from _runs(value)
        yield "]"
    else:
        yield _written(value)


def _runs(items: list[Any]) -> Iterator[str]:
    """Yield the items of a list in runs, each twice as long as the one before while they stay short."""
    at, size = 0, 1
    while at < len(items):
        run = _written(items[at : at + size])[1:-1]
        yield f",{run}" if at else run
        at += size
        size = 2 * size if len(run) < PART_CHARS else max(1, size // 2)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
