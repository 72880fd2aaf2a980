"""Large answers are written in parts, to the bytes of one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from rekindle.server.answers.documents import LargeDocument

FLAT = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUES = st.recursive(
    FLAT | TEXT,
    lambda inside: st.lists(inside, max_size=40) | st.dictionaries(TEXT, inside, max_size=5),
    max_leaves=60,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, more=st.integers(0, 300))
def test_the_bytes_are_those_of_one_part(value: Any, more: int) -> None:
    for each in (value, [value] * more, {"a": [value] * more}):
        assert LargeDocument(each).body == JSONResponse(each).body


def test_long_lists_and_large_items_too() -> None:
    large: list[Any] = [
        list(range(300_000)),
        ["word " * 20_000] * 40,
        [{"a": ["x" * 5_000] * 30}] * 20,
        [[], {}, [[]], [{}]],
    ]
    for each in large:
        assert LargeDocument(each).body == JSONResponse(each).body
    with pytest.raises(ValueError, match="JSON"):
        LargeDocument({"a": float("nan")})
