"""Tools for templates that have none: described in the text, called in a form of our own, answered by the user."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.text.constraints.matcher import ReplyConstraints
from rekindle.text.constraints.types import CalledTool, Calls
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import ParsedReply, ReplyFormat, ReplyStream, fit
from tests.text.factories import CHAT, make_encoder
from tests.text.families import FAMILIES, encoder_for
from tests.text.test_constraints import follow

CUE = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}" + CUE
# As SmolLM2's: words of its own where the caller has none.
WITH_DEFAULT = "{% if messages[0].role != 'system' %}<|start|>system\nYou help.<|end|>\n{% endif %}" + PLAIN
# As Gemma's: the system text is in the first user message, users and the model take turns, and texts are trimmed.
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
REFUSES_SYSTEM = (
    "{% for m in messages if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endfor %}"
    + PLAIN
)
DROPS_SYSTEM = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
# Shows tools, and a call in a form that nobody can read back.
UNKNOWN = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %} I use {{ c.function.name | upper }}.{% endfor %}<|end|>\n"
    "{% endfor %}" + CUE
)
TEMPLATES = {
    "plain": PLAIN,
    "with default": WITH_DEFAULT,
    "gemma": GEMMA,
    "refuses system": REFUSES_SYSTEM,
    "drops system": DROPS_SYSTEM,
    "unknown": UNKNOWN,
}

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "floor": {"type": "integer"}},
    "required": ["place", "floor"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks at <|end|>.", "parameters": LOOK}},
    {"type": "function", "function": {"name": "add"}},
]
CALLED = (CalledTool("look", LOOK, is_strict=False, param="tools"), CalledTool("add", None, False, "tools"))
SYSTEM = Message("system", "You keep the house.")


def fitted(template: str) -> tuple[PromptEncoder, ReplyFormat]:
    return fit(make_encoder("cl100k", template))


def call(number: int, place: str) -> ToolCall:
    return ToolCall(f"call_{number}", "look", json.dumps({"place": place, "floor": number}))


def talk() -> list[Message]:
    return [
        Message("user", "Where is the key?"),
        Message("assistant", "", tool_calls=(call(1, "attic"),)),
        Message("tool", "No key, only <|start|> and dust.\n", tool_call_id="call_1"),
        Message("assistant", "Let me look elsewhere. ", tool_calls=(call(2, "cellar"),)),
        Message("tool", "A copper key.", tool_call_id="call_2"),
        Message("assistant", "It is in the cellar."),
        Message("user", "Thanks. And the lamp?"),
        Message("assistant", "I do not know."),
        Message("user", "Look for it."),
    ]


def said_by(message: Message) -> str:
    """A reply as the model writes it."""
    calls = (f'{{"name": "{each.name}", "arguments": {each.arguments}}}' for each in message.tool_calls)
    return message.content + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_continues_where_the_last_reply_ended(name: str, system: bool) -> None:
    encoder, _ = fitted(TEMPLATES[name])
    messages = [SYSTEM, *talk()] if system else talk()
    replies = [at for at, each in enumerate(messages) if each.role == "assistant"]
    assert len(replies) == 4
    for at in replies:
        prompt = encoder.render_chat(messages[:at], TOOLS)
        reply = encoder.continued(prompt, said_by(messages[at]).rstrip())
        following = encoder.render_chat([*messages[: at + 1], *messages[at + 1 : at + 2]], TOOLS)
        assert following.key.startswith(reply.key)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_has_tools_and_results_as_text(name: str, system: bool) -> None:
    encoder, _ = fitted(TEMPLATES[name])
    text = encoder.readable(encoder.render_chat([SYSTEM, *talk()] if system else talk(), TOOLS).key)
    described = json.dumps(TOOLS[0]["function"], ensure_ascii=False)
    assert text.count(described) == 1 and text.index(described) < text.index("Where is the key?")
    assert '{"name": "add"}' in text
    assert '<tool_response name="look">\nNo key, only <|start|> and dust.\n\n</tool_response>' in text
    assert (SYSTEM.content in text) == (system and name != "drops system")
    assert encoder.render_chat(talk()[:1]).key == make_encoder("cl100k", TEMPLATES[name]).render_chat(talk()[:1]).key


def test_text_of_tools_and_results_is_never_a_control_token() -> None:
    encoder, _ = fitted(PLAIN)
    starts = encoder.controls.by_content["<|start|>"].id
    ids = encoder.encode(encoder.render_chat([SYSTEM, *talk()], TOOLS)).tolist()
    assert ids.count(starts) == len(talk()) + 2  # with the system text and the cue


def test_several_results_are_one_message() -> None:
    encoder, _ = fitted(GEMMA)
    messages = [
        Message("user", "Look."),
        Message("assistant", "", tool_calls=(call(1, "attic"), call(2, "cellar"))),
        Message("tool", "Dust.", tool_call_id="call_1"),
        Message("tool", "Mice.", tool_call_id="call_2"),
    ]
    text = encoder.readable(encoder.render_chat(messages, TOOLS).key)
    assert said_by(messages[1]) in text
    assert text.count("<tool_response") == 2 and text.count("<|start|>user") == 2


def test_a_result_has_a_name_only_if_it_is_known() -> None:
    encoder, _ = fitted(PLAIN)
    calls = tuple(ToolCall(None, name, "{}") for name in ("look", "add"))
    messages = [Message("user", "Look."), Message("assistant", "", tool_calls=calls), Message("tool", "Dust.")]
    assert "<tool_response>\nDust." in encoder.readable(encoder.render_chat(messages, TOOLS).key)
    named = [*messages[:2], Message("tool", "Dust.", name="look")]
    assert '<tool_response name="look">\nDust.' in encoder.readable(encoder.render_chat(named, TOOLS).key)


def read(form: ReplyFormat, text: str) -> ParsedReply:
    said, stream = ParsedReply(), ReplyStream(form, tools=TOOLS)
    for event in [*(event for sign in text for event in stream.push(sign)), *stream.finish()]:
        said.take(event)
    return said


def test_calls_are_read_as_they_are_written() -> None:
    _, form = fitted(PLAIN)
    message = talk()[3]
    said = read(form, said_by(message))
    assert said.text == message.content
    assert [(each.name, each.arguments) for each in said.calls] == [("look", message.tool_calls[0].arguments)]
    assert read(form, "No call, <tool_call> aside.").text == "No call, <tool_call> aside."


def ids_of(encoder: PromptEncoder, reply: str) -> list[int]:
    return [int(each) for each in encoder.encode(encoder.continued(RenderedPrompt(b""), reply))]


def allows(text: str, calls: Calls, opening: str = "") -> bool:
    """Whether a reply may be this text and end there."""
    encoder, form = fitted(PLAIN)
    end = encoder.controls.by_content["<|end|>"].id
    matcher = ReplyConstraints(encoder, form, ends=[end]).matcher(None, opening=opening, calls=calls)
    return follow(matcher, ids_of(encoder, text)) and (matcher.is_over or bool(matcher.allowed()[end]))


WHOLE = said_by(talk()[3])


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Just words, and {braces}.", True),
        (WHOLE, True),
        (said_by(talk()[1]), True),
        ('<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>', True),
        (WHOLE.replace("look", "peek"), False),
        (WHOLE.replace('"floor": 2', '"floor": "2"'), False),
        (WHOLE.replace('"floor": 2', '"floor":2'), False),
        (WHOLE.replace('"arguments": {', '"arguments":  {'), False),
        (WHOLE.replace("<tool_call>\n", "<tool_call>"), False),
        (WHOLE.removesuffix("\n</tool_call>"), False),
        (f"{WHOLE}\n{WHOLE}", False),
        (f"{WHOLE}\nThe result is dust.", False),
    ],
)
def test_a_grammar_leaves_calls_one_form(text: str, allowed: bool) -> None:
    assert allows(text, Calls(CALLED)) == allowed


def test_forced_calls_continue_their_beginning() -> None:
    _, form = fitted(PLAIN)
    opening = form.opening("look") or ""
    whole = said_by(Message("assistant", "", tool_calls=(call(1, "attic"),)))
    forced = Calls(CALLED[:1], is_forced=True, name="look", parallel=False)
    assert whole.startswith(opening)
    assert allows(whole.removeprefix(opening), forced, opening)
    assert not allows(whole.removeprefix(opening).replace("attic", "").replace("place", "room"), forced, opening)


def test_templates_with_calls_keep_their_own() -> None:
    for name in FAMILIES:
        encoder = encoder_for(name)
        same, form = fit(encoder)
        assert (same is encoder) == (form.tools is None or not getattr(form.tools.layout, "exact", False))
    assert fit(encoder_for("hermes"))[0] is encoder_for("hermes")
    assert fit(make_encoder("cl100k", CHAT))[1].tools is not None


def test_marks_are_no_tokens_of_the_tokenizer() -> None:
    """A mark that is a token would be one where the model writes it, and text where tools are described."""
    _, form = fitted(PLAIN)
    assert form.tools is not None and form.tools.marks.open == "<tool_call>"
    taken, other = fitted("{{ '<tool_call>' if false }}" + PLAIN)
    assert "<tool_call>" in taken.controls.by_content
    assert other.tools is not None and other.tools.marks.open == "<function_call>"
    assert "<function_call>" in taken.readable(taken.render_chat(talk()[:1], TOOLS).key)
