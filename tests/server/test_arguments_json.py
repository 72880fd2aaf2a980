"""Whatever a model writes as arguments, clients read JSON: at every moment, and the same however it was cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.server.answers.arguments import MAX_DEPTH, ArgumentsJson

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
OBJECTS = st.dictionaries(
    st.text(), st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
)
ALMOST = st.text(alphabet='{}[]:,"\\ud8dc3f0naultrse1-.+ \n\x01é🙂', max_size=40).map(lambda rest: '{"a": ' + rest)


def read(pieces: list[str]) -> tuple[str, dict[str, Any]]:
    arguments = ArgumentsJson()
    told = "".join([arguments.push(piece) for piece in pieces])
    return told + arguments.finish(), arguments.value()


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(OBJECTS, st.booleans(), st.lists(st.integers(min_value=0), max_size=5))
def test_an_object_goes_out_as_it_was_written(value: dict[str, Any], ascii_only: bool, places: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    told, found = read(cut(text, places))
    assert (told, found) == (text, value)


@given(ALMOST | st.text(max_size=30) | SCALARS.map(json.dumps), st.lists(st.integers(min_value=0), max_size=5))
def test_anything_else_is_the_beginning_of_an_object(text: str, places: list[int]) -> None:
    told, value = read(cut(text, places))
    assert read([text]) == (told, value), "it does not matter how it was cut"
    assert jiter.from_json(told.encode(), partial_mode=True) == value, "the official client reads the same"
    json.dumps(value, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": "line\nbreak"}', '{"a": "line\\nbreak"}'),
        ('{"a": "\\ud83d half"}', '{"a": "\\ufffd half"}'),
        ('{"a": "\\ud83d\\ude42"}', '{"a": "\\ud83d\\ude42"}'),
        ('{"a": 1, "b": oops}', '{"a": 1, "b": null, "arguments": "{\\"a\\": 1, \\"b\\": oops}"}'),
        ('{"a": 1e999}', '{"a": null, "arguments": "{\\"a\\": 1e999}"}'),
        ('{"a": [{"b": [1,, 2', '{"a": [{"b": [1,null]}], "arguments": "{\\"a\\": [{\\"b\\": [1,, 2"}'),
        ('{"a": {"b": 1, c', '{"a": {"b": 1, "": null}, "arguments": "{\\"a\\": {\\"b\\": 1, c"}'),
        ('{"a\\q": 1', '{"a": null, "arguments": "{\\"a\\\\q\\": 1"}'),
        ("{'a': 1}", '{"arguments": "{\'a\': 1}"}'),
        ('{"a": 1} and more', '{"a": 1} '),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("[1, 2]", '{"arguments": [1, 2]}'),
        ("the attic", '{"arguments": "the attic"}'),
        ("", "{}"),
    ],
)
def test_what_becomes_of_it(text: str, told: str) -> None:
    assert read([text])[0] == told


def test_what_is_nested_too_deeply_ends_there() -> None:
    text = '{"a": ' + "[" * 10_000
    told, value = read([text])
    assert told.partition('"arguments"')[0].count("[") == MAX_DEPTH - 1
    assert jiter.from_json(told.encode(), partial_mode=True) == value
