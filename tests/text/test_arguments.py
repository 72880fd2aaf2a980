"""Arguments that are no JSON object: what can be read of them, and templates that take objects only."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text.arguments import StringRepair, arguments_for_template, is_json, read_object, readable_part, repaired
from rekindle.text.messages import Message, ToolCall
from tests.text.families import FAMILIES, encoder_for

UNREAD = [
    '{"path": "a b", "text": "wri',
    '{"path": "a b',
    '{"path": 3, ',
    '{"path": 3, "te',
    '{"path": [1, 2',
    '{"path": "C:\\Users"}',
    "{'path': 3}",
    "{",
    "[1, 2]",
    "null",
    '"words"',
    "words",
    '{"path": 3}}',
    '{"path": ' * 3000,
]
ASKED, RESULT = Message("user", "Look."), Message("tool", "no such file", tool_call_id="abcdefgh9")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, "b": "x y', {"a": 1, "b": "x y"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": [1, 2', {"a": "[1, 2"}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1, }', {"a": 1}),
        ('{"a": 1, "b', {"a": 1, "arguments": ', "b'}),
        ('{"a": 1} and more', {"a": 1, "arguments": "} and more"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ("words", {"arguments": "words"}),
        ("{", {"arguments": "{"}),
        ("", {}),
    ],
)
def test_what_can_be_read_is_read_and_the_rest_is_text(text: str, value: object) -> None:
    assert readable_part(text) == value


@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text(), st.lists), max_size=4), st.data())
def test_a_cut_object_keeps_the_members_before_the_cut(value: dict[str, object], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    cut = data.draw(st.integers(0, len(text)))
    read = readable_part(text[:cut])
    whole = [key for key in value if json.dumps({key: value[key]}, ensure_ascii=False)[1:-1] in text[: max(cut - 1, 0)]]
    assert cut < len(text) or read == value
    assert all(key in read for key in whole if key != "arguments")


@pytest.mark.parametrize("text", UNREAD)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_goes_on_with_a_call_whose_arguments_are_no_object(family: str, text: str) -> None:
    encoder = encoder_for(family)
    call = ToolCall("abcdefgh9", "look", text)
    prompt = encoder.render_chat([ASKED, Message("assistant", "", tool_calls=(call,)), RESULT])
    read = [ToolCall("abcdefgh9", "look", json.dumps(readable_part(text)))]
    if prompt.num_unread:
        assert prompt.num_unread == 1
        assert prompt == encoder.render_chat([ASKED, Message("assistant", "", tool_calls=tuple(read)), RESULT])


def test_a_template_that_takes_texts_gets_them_as_they_were_written() -> None:
    call = ToolCall("c", "look", '{"path": "a')
    assert arguments_for_template(call.arguments, str) == call.arguments
    assert encoder_for("hermes").render_chat([ASKED, Message("assistant", "", tool_calls=(call,))]).num_unread == 0
    assert encoder_for("coder").render_chat([ASKED, Message("assistant", "", tool_calls=(call,))]).num_unread == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"path": "C:\\Users\\xy"}', {"path": "C:\\Users\\xy"}),
        ('{"path": "C:\\users"}', {"path": "C:\\users"}),
        ('{"path": "a\nb\tc"}', {"path": "a\nb\tc"}),
        ('{"a\\d": "\\\\ \\" \\/ \\n \\u00e9"}', {"a\\d": '\\ " / \n é'}),
    ],
)
def test_strings_are_repaired_however_they_come(text: str, value: object) -> None:
    assert read_object(text) == json.loads(repaired(text)) == value
    repair = StringRepair()
    assert "".join(map(repair.push, text)) == repaired(text)


@given(st.text(alphabet='\\"u0aA{}:,n\n', max_size=20))
def test_a_repair_changes_no_json(text: str) -> None:
    repair = StringRepair()
    assert "".join(map(repair.push, text)) + repair.held == repaired(text)
    assert not is_json(text) or repaired(text) == text or "\n" in text
    assert repaired(repaired(text)) == repaired(text)


def test_what_may_be_read_in_two_ways_is_not_repaired() -> None:
    assert read_object('{"a": "it\\\'s"}') is None
