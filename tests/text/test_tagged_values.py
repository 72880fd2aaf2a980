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


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("key", ["text", "any"])
def test_a_value_may_have_its_closing_tag_in_it(family: str, key: str) -> None:
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    assert isinstance(form.tools, TaggedForm)
    close = form.tools.tags.value[1].replace("\ufdd0", "")
    for text in (f"a {close} b", f"{close}{close} b", f"a\n{close}\nb"):
        call = ToolCall(form.new_id(), "look", json.dumps({key: text, "number": 7}))
        messages = [Message("user", "Look."), Message("assistant", "", tool_calls=(call,))]
        begun = encoder.render_chat(messages[:1], [TOOL])
        whole = encoder.render_chat(messages, [TOOL], add_generation_prompt=False)
        said = read_reply(form, encoder, encoder.encode_rest(whole, len(begun.key)), tools=[TOOL])
        assert [(json.loads(each.arguments), each.whole) for each in said.calls] == [({key: text, "number": 7}, True)]
