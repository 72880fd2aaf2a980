"""Places of messages are found in the prompt whatever the template does with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text.messages import Message, ToolCall
from rekindle.text.places import Place, positions
from rekindle.text.prompt import PromptEncoder
from tests.text import factories
from tests.text.factories import encoder_of, plain_texts

CHAT = [
    Message("system", "Be kind.\nBe brief."),
    Message("user", "Hello, who are you?"),
    Message("assistant", "", tool_calls=(ToolCall("c", "look", '{"at": "it"}'),)),
    Message("tool", "Nothing there."),
    Message("user", "And now?"),
]


def before(encoder: PromptEncoder, messages: list[Message], *places: Place) -> list[str]:
    """The text before each place."""
    prompt = encoder.render_chat(messages)
    ends = positions(encoder, prompt, messages, None, places)
    return [encoder.readable(prompt.key[:end]) for end in ends]


def test_places_in_and_behind_contents() -> None:
    found = before(encoder_of("cl100k"), CHAT, Place(0, 8), Place(0, None), Place(1, None), Place(None, None))
    assert [text.rpartition("\n")[2] for text in found] == ["Be kind.", "Be brief.", "Hello, who are you?", ""]
    assert found[3].endswith("system\n")


def test_behind_calls_begins_the_next_message() -> None:
    (found,) = before(encoder_of("cl100k"), CHAT, Place(2, None))
    assert '{"at": "it"}' in found
    assert found.endswith("tool\n")
    (last,) = before(encoder_of("cl100k"), CHAT[:3], Place(2, None))
    assert last == encoder_of("cl100k").readable(encoder_of("cl100k").render_chat(CHAT[:3]).key)


@pytest.mark.parametrize("template", [factories.TRIMS, factories.STRIPS_THINKING, factories.DATED])
def test_templates_that_look_at_a_content(template: str) -> None:
    messages = [Message("system", "  Be kind. \n"), Message("user", "A"), Message("assistant", "<think>x</think>B")]
    found = before(encoder_of("cl100k", template), messages, Place(0, None), Place(0, 6), Place(2, None))
    assert found[1].endswith("Be k")
    assert found[0].endswith("Be kind.")
    assert found[2].endswith("B")


def test_templates_that_move_a_message() -> None:
    found = before(encoder_of("cl100k", factories.MOVES_SYSTEM), [*CHAT[:2]], Place(0, None), Place(1, None))
    assert found[0].endswith("Be kind.\nBe brief.")
    assert found[1].endswith("Hello, who are you?")


def test_text_that_is_compared_by_ids_and_text_that_holds_a_probe() -> None:
    (found,) = before(encoder_of("lower"), CHAT, Place(1, None))
    assert found.endswith("who are you?")
    odd = [Message("system", "one \ufdd1 two"), Message("user", "three")]
    (found,) = before(encoder_of("cl100k"), odd, Place(0, None))
    assert found.endswith("two")
    odd = [Message("system", "one \ufdd1 two\uff01 three"), Message("user", "four")]  # begins as a probe does
    prompt = encoder_of("cl100k").render_chat(odd)
    (end,) = positions(encoder_of("cl100k"), prompt, odd, None, [Place(0, 9)])
    assert prompt.key[:end].endswith(b"two")


def test_more_places_than_probes_and_messages_that_are_not_there() -> None:
    places = [Place(0, at % 4) for at in range(40)]
    encoder = encoder_of("cl100k")
    prompt = encoder.render_chat(CHAT)
    assert positions(encoder, prompt, CHAT, None, places)[-1] == len(prompt.key)
    assert positions(encoder, prompt, CHAT, None, [Place(9, 0)]) == [len(prompt.key)]
    assert positions(encoder, prompt, CHAT, None, []) == []


@given(st.lists(plain_texts, min_size=1, max_size=4), st.data())
def test_a_place_splits_the_content_there(contents: list[str], data: st.DataObject) -> None:
    encoder = encoder_of("cl100k")
    messages = [
        Message(role, text) for role, text in zip(["system", "user", "assistant", "user"], contents, strict=False)
    ]
    index = data.draw(st.integers(0, len(messages) - 1))
    content = messages[index].content
    at = data.draw(st.integers(0, len(content)))
    prompt = encoder.render_chat(messages)
    (end,) = positions(encoder, prompt, messages, None, [Place(index, at)])
    kept = content[:at].rstrip()
    start = len(content) - len(content.lstrip())
    whole = [*messages[:index], Message(messages[index].role, content[: max(len(kept), start)])]
    expected = encoder.render_chat(whole, add_generation_prompt=False).key
    assert expected.startswith(prompt.key[:end])
    assert len(expected) - end <= len("<|end|>\n")
