"""A closing tag inside a value is part of it."""

from __future__ import annotations

import json

import pytest

from rekindle.text.messages import Message, ToolCall
from rekindle.text.replies import find_reply_format
from rekindle.text.replies.tagged import TaggedForm
from tests.text.families import FAMILIES, encoder_for, read_reply

TAGGED = [name for name in FAMILIES if isinstance(find_reply_format(encoder_for(name)).tools, TaggedForm)]
KINDS = {"text": {"type": "string"}, "number": {"type": "integer"}, "any": {}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": KINDS}}}


def came_back(family: str, key: str, text: str) -> bool:
    """Whether a call with this argument is read as it was, whole, from what the template makes of it."""
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    call = ToolCall(form.new_id(), "look", json.dumps({key: text, "number": 7}))
    messages = [Message("user", "Look."), Message("assistant", "", tool_calls=(call,))]
    begun = encoder.render_chat(messages[:1], [TOOL])
    whole = encoder.render_chat(messages, [TOOL], add_generation_prompt=False)
    said = read_reply(form, encoder, encoder.encode_rest(whole, len(begun.key)), tools=[TOOL])
    return [(json.loads(each.arguments), each.whole) for each in said.calls] == [({key: text, "number": 7}, True)]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("key", ["text", "any"])
def test_a_value_may_have_its_closing_tag_in_it(family: str, key: str) -> None:
    form = find_reply_format(encoder_for(family))
    assert isinstance(form.tools, TaggedForm)
    close = form.tools.tags.value[1].replace("\ufdd0", "")
    for text in (f"a {close} b", f"{close}{close} b", f"a\n{close}\nb"):
        assert came_back(family, key, text)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("key", ["text", "any"])
@pytest.mark.parametrize("text", ["a\n", "\na", "\n", "a\n\n"])
def test_a_value_keeps_line_breaks_at_its_ends(family: str, key: str, text: str) -> None:
    assert came_back(family, key, text)
