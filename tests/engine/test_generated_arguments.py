"""Arguments of calls are read as they were generated where they are the same value, and in their turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.engine.intake.rewrites import is_same, with_generated_arguments
from rekindle.text.messages import Message, ToolCall
from rekindle.text.vocabulary import control_code

END = control_code(7)


def opening(name: str) -> bytes | None:
    return f'<call>{{"name": "{name}", "arguments":'.encode() if name != "unknown" else None


def stored(*calls: tuple[str, str]) -> bytes:
    return b"".join((opening(name) or b"") + b" " + text.encode() + b"}</call>" + END for name, text in calls)


def called(*calls: tuple[str, str]) -> list[Message]:
    return [Message("user", "Hi"), Message("assistant", "", tool_calls=tuple(ToolCall("c", *call) for call in calls))]


def written(key: bytes, *calls: tuple[str, str]) -> list[str]:
    found = with_generated_arguments(called(*calls), key, opening)
    assert [call.name for call in found[1].tool_calls] == [name for name, _ in calls]
    return [call.arguments for call in found[1].tool_calls]


def test_the_stored_text_of_the_same_value_is_taken() -> None:
    key = stored(("look", '{"a": 1,  "b": [true]}'), ("add", '{"a": 1,  "b": [true]  }'))
    assert written(key, ("look", '{"b":[true],"a":1.0}')) == ['{"a": 1,  "b": [true]}']
    assert written(key, ("add", '{"b":[true],"a":1}')) == ['{"a": 1,  "b": [true]  }'], "of the same tool alone"


def test_calls_with_one_value_are_taken_in_their_turn() -> None:
    key = stored(("look", '{"a": 1}'), ("look", '{"a":1}'), ("look", '{ "a":1}'))
    compact = ("look", '{"a":1}')
    assert written(key, compact, compact, compact) == ['{"a": 1}', '{"a":1}', '{ "a":1}']
    assert written(key, *[compact] * 5)[3:] == ['{ "a":1}'] * 2, "more than are stored: as the last one"


@pytest.mark.parametrize(
    "arguments", ['{"a": 2}', '{"a": true}', '{"a": "1"}', '{"a": 1, "b": null}', "[1]", "not json", "", '{"a": 1']
)
def test_other_values_stay_as_they_are(arguments: str) -> None:
    assert written(stored(("look", '{"a":1}')), ("look", arguments)) == [arguments]


@pytest.mark.parametrize("text", ["{", '{"a":', "nothing", "[1]", "", '{"a": 1'])
def test_what_is_stored_may_be_cut_off_or_no_json(text: str) -> None:
    key = (opening("look") or b"") + text.encode() + END + stored(("look", '{"a":1}'))
    assert written(key, ("look", '{"a": 1}')) == ['{"a":1}']
    assert written(stored(("look", '{"a":1}')), ("unknown", '{"a": 1}')) == ['{"a": 1}']


def test_bytes_of_half_characters_and_deep_nesting_do_no_harm() -> None:
    deep = "[" * 5000 + "]" * 5000
    key = (opening("look") or b"") + b' {"a": "\xc3' + END + (opening("look") or b"") + b' {"a":' + deep.encode() + b"}"
    assert written(key, ("look", '{"a": 1}')) == ['{"a": 1}']
    assert written(key, ("look", f'{{"a": {deep}}}')) == [f'{{"a": {deep}}}']


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": [1, {"b": 2}], "c": None}, {"c": None, "a": [1.0, {"b": 2}]}, True),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        (json.loads("1e400"), json.loads("1e400"), True),
    ],
)
def test_values_are_compared_as_json(one: Any, other: Any, same: bool) -> None:
    assert is_same(one, other) is same and is_same(other, one) is same
