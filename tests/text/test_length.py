"""What cannot fit the context is known by its bytes, and what may fit is never refused."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import PromptTooLong
from rekindle.text.length import LEFT_OUT, PromptBound
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder
from rekindle.text.template import ChatTemplate
from rekindle.text.tokenizer import TokenizerFile
from tests.text.factories import KINDS, tokenizer_json
from tests.text.families import FAMILIES, encoder_for

SAID = st.text(st.sampled_from("ab 1\n.é日🙂<|im_end|>"), max_size=60)


class Counting(ChatTemplate):
    """A template that counts how often it is rendered."""

    num_rendered = 0

    def render(self, *args: object, **kwargs: object) -> str:
        self.num_rendered += 1
        return super().render(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(said=SAID)
def test_no_token_is_longer_than_the_longest(name: str, said: str) -> None:
    encoder = encoder_for(name).bounded(4096)
    assert encoder.bound is not None
    prompt = encoder.render_chat([Message("user", said)])
    assert len(prompt.key) <= encoder.bound.longest * len(encoder.encode(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_as_many_bytes_as_may_fit_is_taken_and_one_more_is_not(kind: str) -> None:
    encoder = PromptEncoder(TokenizerFile(tokenizer_json(kind).encode()), {}, ChatTemplate({}, {})).bounded(2048)
    assert encoder.bound is not None
    most = encoder.bound.max_bytes
    prompt = encoder.render_text("a" * (most - 40))
    if encoder.compares_text:
        assert most - 40 <= len(prompt.key) <= most
    with pytest.raises(PromptTooLong, match="tokens > 2047 maximum"):
        encoder.render_text("a" * (most * 2 + 2))


def test_what_is_several_times_too_long_is_not_even_rendered() -> None:
    file = TokenizerFile(tokenizer_json("cl100k").encode())
    template = Counting({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}, clock=datetime.now)
    encoder = PromptEncoder(file, {}, template).bounded(512)
    assert encoder.bound is not None
    most = encoder.bound.max_bytes
    long = "a " * (LEFT_OUT * most)
    call = ToolCall("1", "look", json.dumps({"at": long}))
    for messages in (
        [Message("user", long)],
        [Message("user", "Hi."), Message("assistant", "", reasoning=long), Message("user", "So?")],
        [Message("user", "Hi."), Message("assistant", "", tool_calls=(call,)), Message("tool", "ok")],
        [Message("user", "a")] * (most + 1),
    ):
        with pytest.raises(PromptTooLong):
            encoder.render_chat(messages)
    with pytest.raises(PromptTooLong):
        encoder.render_chat([Message("user", "Hi.")], [{"function": {"name": "f", "description": [long]}}])
    assert template.num_rendered == 0


def test_what_the_template_leaves_out_does_not_count() -> None:
    encoder = encoder_for("stripped").bounded(512)
    assert encoder.bound is not None
    thought = "<think>" + "word " * (encoder.bound.max_bytes // 4) + "</think>\n\nYes."
    prompt = encoder.render_chat([Message("user", "Hi."), Message("assistant", thought), Message("user", "So?")])
    assert len(prompt.key) < 200 < encoder.bound.max_bytes < len(thought)


def test_a_template_that_makes_much_of_little_is_refused() -> None:
    file = TokenizerFile(tokenizer_json("cl100k").encode())
    template = ChatTemplate({"default": "{{ messages[0].content * 2000 }}"}, {})
    encoder = PromptEncoder(file, {}, template).bounded(512)
    with pytest.raises(PromptTooLong):
        encoder.render_chat([Message("user", "much of little ")])


def test_ids_are_counted_as_they_are() -> None:
    bound = PromptBound(max_context=100, longest=8)
    bound.check_ids(100)
    with pytest.raises(PromptTooLong, match="101 tokens > 99"):
        bound.check_ids(101)
