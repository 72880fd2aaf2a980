"""Messages are normalised once; what cannot be served is refused by index."""

from __future__ import annotations

import random
import re

import pytest

from rekindle.errors import BadRequest
from rekindle.text.arguments import Arguments, arguments_for_template
from rekindle.text.messages import PIECE_CHARS, Message, ToolCall, is_sound, normalise_messages, sound


def refusal(*messages: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        normalise_messages(list(messages))
    return caught.value


def test_content_becomes_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert normalise_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": None, "refusal": None, "annotations": []},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]
    ) == (
        Message("system", "be brief"),
        Message("user", "one\ntwo", name="Ann"),
        Message("assistant", ""),
        Message("tool", "42", tool_call_id="c1"),
    )


def test_tool_arguments_stay_verbatim() -> None:
    generated = '{"b": 1.0,"a":"x"}'
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": generated}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"a": "é"}}},
    ]
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": calls}])
    assert message.tool_calls == (ToolCall("c1", "f", generated), ToolCall("c2", "g", '{"a": "é"}'))


def test_templates_get_objects_where_arguments_are_one() -> None:
    value = arguments_for_template('{"a": [1, "x"]}', str.upper)
    assert isinstance(value, Arguments)
    assert value == {"A": [1, "X"]}
    assert value.verbatim == '{"A": [1, "X"]}'
    assert arguments_for_template("", str) == {}
    assert arguments_for_template("not json", str) == "not json"
    assert arguments_for_template("[1]", str) == "[1]"


def test_escapes_that_no_prompt_may_hold_are_no_reason_to_refuse_what_a_model_wrote() -> None:
    """The text of arguments keeps its escapes; templates that print values see U+FFFD."""
    for escape in ("\\ufdd0", "\\ud83d"):
        generated = f'{{"a{escape}": "{escape}"}}'
        (message,) = normalise_messages([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": generated}]}])
        value = arguments_for_template(message.tool_calls[0].arguments, str)
        assert value == {"a\ufffd": "\ufffd"}
        assert value.verbatim == generated


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[1]"),
        ({"role": "judge", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[1].weight"),
        ({"role": "user", "content": "x", "name": 7}, "messages[1].name"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "messages[1].tool_calls[0]"),
        ({"role": "user", "content": "a\ufdd0b"}, "messages[1].content"),
        ({"role": "user", "content": "a\ud800b"}, "messages[1].content"),
    ],
)
def test_refusals_name_the_place(message: object, param: str) -> None:
    assert refusal({"role": "user", "content": "fine"}, message).param == param


@pytest.mark.parametrize("raw", [[], "hello", {"role": "user"}, None])
def test_messages_must_be_a_list(raw: object) -> None:
    with pytest.raises(BadRequest):
        normalise_messages(raw)


@pytest.mark.parametrize("seed", range(20))
def test_what_no_prompt_may_contain_is_found_anywhere_in_a_long_text(seed: int) -> None:
    rng = random.Random(seed)
    text = list(rng.choice(["a", "é", "日", "🙂"]) * (3 * PIECE_CHARS))
    for _ in range(seed % 4):
        around = rng.choice([0, 1, 2, 3]) * PIECE_CHARS + rng.randint(-2, 2)
        text[max(0, min(around, len(text) - 1))] = rng.choice(["\ud800", "\udfff", "\ufdd0"])
    sent = "".join(text)
    assert is_sound(sent) == (re.search("[\ud800-\udfff\ufdd0]", sent) is None)
    assert sound(sent) == re.sub("[\ud800-\udfff\ufdd0]", "\ufffd", sent)
