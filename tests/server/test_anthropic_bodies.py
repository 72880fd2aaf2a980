"""What becomes of Anthropic's bodies: messages, marks and tools, and what is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.intake.rendering import Renderer
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.server.anthropic.calls import ModelSide, parse_count, parse_messages
from rekindle.server.anthropic.conversation import TemplateHabits, find_habits, reasoning_of, sign
from rekindle.server.anthropic.reply import Blocks
from rekindle.server.gate.caller import Caller
from rekindle.server.openai.calls import parse_chat
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReasoningDelta, ReplyFormat, TextDelta
from rekindle.text.replies.envelope import EnvelopeForm
from tests.tiny_models import write_tokenizer

FREE, STRICT = TemplateHabits(takes_late_system=True), TemplateHabits(takes_late_system=False)
MARK, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "attic", "n": [1, {}]}}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "t1",
    "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is there."}],
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(content[0], str) else [*content]}


def said(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def asked(messages: Sequence[Any], *, habits: TemplateHabits = FREE, **more: Any) -> GenerationRequest:
    body = {"messages": [*messages], "max_tokens": 9, **more}
    return parse_messages(body, Caller(), ModelSide(ReplyFormat(), habits)).request


def last_content(*messages: Any) -> str:
    return (asked(messages).messages or ())[-1].content


def test_system_and_messages_become_plain_text() -> None:
    request = asked(
        [user("Hi"), said(text("Good "), text("day")), user(text("Look"), text("up"))],
        system=[text("Be"), text("kind")],
    )
    assert request.messages == (
        Message("system", "Be\nkind"),
        Message("user", "Hi"),
        Message("assistant", "Good day"),
        Message("user", "Look\nup"),
    )


def test_turns_of_one_role_are_one_turn() -> None:
    request = asked([user("a"), user("b"), said("c"), said("d"), user("e")])
    assert request.messages == (Message("user", "a\nb"), Message("assistant", "cd"), Message("user", "e"))


def test_tools_are_used_and_answered() -> None:
    thinking = {"type": "thinking", "thinking": "Where?", "signature": "of another server"}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    messages = [user("Find it"), said(thinking, redacted, text("Let me look."), USE), user(RESULT, text("Well?"))]
    call = ToolCall("t1", "look", '{"place": "attic", "n": [1, {}]}')
    head = (Message("user", "Find it"), Message("assistant", "Let me look.", tool_calls=(call,), reasoning="Where?"))
    result, word = Message("tool", "It\nis there.", tool_call_id="t1"), Message("user", "Well?")
    assert asked(messages).messages == (*head, result, word)


def test_a_failure_without_words_does_not_look_like_a_success() -> None:
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    assert last_content(user("a"), said(USE), user(failed)) == "error"
    told = {**failed, "content": "no such place"}
    assert last_content(user("a"), said(USE), user(told)) == "no such place"


def test_a_system_message_in_the_middle_stands_where_the_template_takes_it() -> None:
    messages = [user("a"), said("b"), {"role": "system", "content": [text("Now whisper.")]}, user("c")]
    assert [message.role for message in asked(messages).messages or ()] == ["user", "assistant", "system", "user"]
    strict = asked(messages, habits=STRICT).messages
    assert strict == (Message("user", "a"), Message("assistant", "b"), Message("user", "Now whisper.\nc"))


def test_hidden_thoughts_come_back_out_of_their_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": sign("Där uppe 🙂?", hidden=True)}
    _, answer, _ = asked([user("a"), said(hidden, text("b")), user("c")]).messages or ()
    assert answer.reasoning == "Där uppe 🙂?"
    for foreign in (sign("x", hidden=False), "rekindle-2-!", "rekindle-2-/w==", None, 7):
        assert reasoning_of(foreign) == ""


def test_marks_become_breakpoints() -> None:
    request = asked(
        [user(text("abc", cache_control=MARK), text("de"), text("f", cache_control=MARK))],
        system=[text("Be", cache_control=LONG), text("kind")],
        tools=[TOOL, {**TOOL, "name": "add", "cache_control": LONG}],
        tool_choice={"type": "none"},
    )
    assert request.breakpoints == (
        Breakpoint(None, None, 3600.0),
        Breakpoint(0, 2, 3600.0),
        Breakpoint(1, 3, 300.0),
        Breakpoint(1, None, 300.0),
    )
    results = [user("a"), said({**USE, "cache_control": MARK}), user({**RESULT, "cache_control": MARK})]
    assert asked(results).breakpoints == (Breakpoint(1, None, 300.0), Breakpoint(2, None, 300.0))


def test_one_mark_for_all_stands_at_the_end_once() -> None:
    assert asked([user("a"), said("b"), user("c")], cache_control=LONG).breakpoints == (Breakpoint(2, None, 3600.0),)
    marked = [user(text("a", cache_control=MARK))]
    assert asked(marked, cache_control=MARK).breakpoints == (Breakpoint(0, None, 300.0),)
    begun = [user("a"), said(text("b", cache_control=MARK))]
    assert asked(begun).breakpoints == (Breakpoint(0, None, 300.0),), "behind what is replied to"


def test_tools_are_functions() -> None:
    tool = {**TOOL, "type": "custom", "cache_control": MARK, "strict": True, "input_examples": [{"place": "attic"}]}
    request = asked([user("a")], tools=[tool], tool_choice={"type": "none"})
    schema = {"type": "object", "examples": [{"place": "attic"}]}
    function = {"name": "look", "description": "Look.", "parameters": schema}
    assert request.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_what_templates_are_told(given: dict[str, Any], told: dict[str, Any]) -> None:
    assert asked([user("a")], **given).template_kwargs == told


def test_the_beginning_of_a_reply_is_no_message() -> None:
    request = asked([user("a"), said(text("It "), text("is"))])
    assert (request.messages, request.reply_prefix) == ((Message("user", "a"),), "It is")
    assert request.template_kwargs == {"enable_thinking": False}, "who is told how to begin does not think first"
    assert asked([user("a"), said("")]).reply_prefix == ""


def test_whether_thoughts_come_back_is_told_by_the_history() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    assert asked([user("a")]).echoes_thoughts is True
    assert asked([user("a"), said("b"), user("c")]).echoes_thoughts is False
    assert asked([user("a"), said(thought, text("b")), user("c"), said("d"), user("e")]).echoes_thoughts is True


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0]"),
        (
            {"messages": [user("a"), said(USE), user({**RESULT, "content": [{"type": "image"}]})]},
            "messages[2].content[0].content[0]",
        ),
        ({"messages": [user({"type": "tool_use"})]}, "messages[0].content[0]"),
        ({"messages": [user("a"), said(USE)]}, "tool_result"),
        ({"messages": [user("a"), said("b ")]}, "trailing whitespace"),
        ({"messages": [user("a"), said({"type": "thinking", "thinking": "b", "signature": ""})]}, "text only"),
        ({"messages": [said("a")]}, "of the user"),
        ({"messages": [user("a")], "system": [text("x")], "cache_control": {"type": "for ever"}}, "cache_control"),
        (
            {"messages": [user(text("a", cache_control={"type": "ephemeral", "ttl": "1d"}))]},
            "messages[0].content[0].cache_control",
        ),
        ({"messages": [user(text("a", cache_control=MARK), text("b", cache_control=LONG))]}, "'1h'"),
        ({"messages": [user(text("", cache_control=MARK))]}, "an empty text"),
        ({"messages": [{**user("a"), "name": "bo"}]}, "messages[0].name"),
        ({"messages": [user("a \ufdd0")]}, "messages[0].content"),
        ({"messages": [user("a"), said({**USE, "input": "x"}), user(RESULT)]}, "input must be an object"),
        ({"messages": [user("a")], "tools": [TOOL, TOOL]}, "twice"),
        ({"messages": [user("a")], "tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
        ({"messages": [user("a")], "tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"messages": [user("a")], "tools": [TOOL]}, "tools"),
        ({"messages": [user("a")], "thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"messages": [user("a"), said("b")], "thinking": {"type": "enabled"}}, "thinking"),
        ({"messages": [user("a")], "max_tokens": 0, "stream": True}, "stream"),
        (
            {"messages": [user("a")], "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "edits[0]",
        ),
    ],
)
def test_what_cannot_be_served_is_named(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_messages({"max_tokens": 9, **body}, Caller(), ModelSide(ReplyFormat(), FREE), strict=True)
    assert says in str(caught.value)


def test_what_the_engine_is_asked() -> None:
    form = ReplyFormat(tools=EnvelopeForm())
    caller = Caller(namespace="n", agent="sub", parent="main")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = {"messages": [user("a")], "max_tokens": 9, "tools": [TOOL], "tool_choice": choice, "temperature": 0.5}
    more = {"stop_sequences": ["x"], "rekindle": {"reuse": "off"}, "stream": True}
    call = parse_messages({**body, **more}, caller, ModelSide(form, FREE))
    asked_for = call.request
    assert (asked_for.namespace, asked_for.agent, asked_for.parent) == ("n", "sub", "main")
    assert asked_for.params == SamplingParams(max_tokens=9, temperature=0.5, stop=("x",))
    assert (asked_for.task, asked_for.reuse, asked_for.structured) == ("generate", "off", True)
    assert (call.stream, call.parallel, call.read_tools) == (True, False, asked_for.tools)
    warm = parse_messages({"messages": [user("a")], "max_tokens": 0}, caller, ModelSide(form, FREE))
    assert warm.request.task == "prefill"
    unread = parse_messages({**body, "tool_choice": {"type": "none"}}, caller, ModelSide(form, FREE))
    assert (unread.read_tools, unread.request.tools) == ((), asked_for.tools)


def test_counting_takes_what_asking_takes() -> None:
    body = {"messages": [user("a")], "max_tokens": 9, "stream": True, "temperature": 1, "metadata": {"user_id": "x"}}
    request, model = parse_count({**body, "model": "claude-x"}, Caller(), ModelSide(ReplyFormat(), FREE))
    assert (request.messages, model) == ((Message("user", "a"),), "claude-x")


ALTERNATING = """
{%- for message in messages %}
{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role != 'assistant' %}
{{- raise_exception('user and assistant take turns') }}
{%- elif message.role == 'system' and not loop.first %}{{- raise_exception('system comes first') }}
{%- endif %}{{ message.content }}
{%- endfor %}"""
OPEN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
DROPPING = """
{%- for message in messages %}
{%- if message.role != 'system' or loop.first %}{{ message.content }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(("template", "habits"), [(OPEN, FREE), (ALTERNATING, STRICT), (DROPPING, STRICT)])
def test_what_a_template_takes_is_found_by_rendering(template: str, habits: TemplateHabits, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template)
    assert find_habits(PromptEncoder.from_dir(tmp_path)) == habits


@pytest.mark.parametrize("template", [OPEN, ALTERNATING])
def test_words_behind_a_result_stand_where_the_template_takes_them_in_every_dialect(
    template: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, template)
    encoder = PromptEncoder.from_dir(tmp_path)
    theirs = asked([user("Find it"), said(USE), user(RESULT, text("Well?", cache_control=MARK))])
    function = {"name": "look", "arguments": '{"place": "attic", "n": [1, {}]}'}
    body = [
        {"role": "user", "content": "Find it"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "content": "It\nis there.", "tool_call_id": "t1"},
        {"role": "user", "content": "Well?"},
    ]
    ours = parse_chat({"messages": body}, Caller()).requests[0]
    prompt = Renderer(encoder, ReplyFormat(), frozenset()).render(theirs)
    assert encoder.readable(prompt.prompt.key).strip().endswith("Well?")
    assert encoder.render_chat(ours.messages or ()) == prompt.prompt
    (end,) = prompt.breakpoints
    assert encoder.readable(prompt.prompt.key[:end]).endswith("Well?"), "marks are found in them, too"


def test_what_has_no_text_makes_no_block() -> None:
    blocks = Blocks(hidden=False)
    told = [
        *blocks.take(ReasoningDelta("", "\ufdd0<|x|>")),
        *blocks.take(TextDelta("", "\ufdd0<|x|>")),
        *blocks.close(),
    ]
    assert (told, blocks.content()) == ([], []), "clients send no empty block back"


def test_a_deferred_tool_is_in_the_prompt_where_a_search_finds_it() -> None:
    side = ModelSide(ReplyFormat(tools=EnvelopeForm()), FREE)
    late = {**TOOL, "name": "late", "defer_loading": True, "allowed_callers": ["code_execution_20250825"]}
    body: dict[str, Any] = {"max_tokens": 9, "tools": [TOOL, late, {**late, "name": "never"}]}
    before = parse_messages({**body, "messages": [user("a")]}, Caller(), side)
    assert [each["function"]["name"] for each in before.read_tools] == ["look"]
    assert before.request.omitted.ignored == ("tools[].allowed_callers",)
    found = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "late"}]}
    turns = [user("a"), said(USE), user(found), said({**USE, "id": "t2"}), user({**found, "tool_use_id": "t2"})]
    after = parse_messages({**body, "messages": turns}, Caller(), side)
    assert after.request.tools == before.request.tools, "what comes before is not computed again"
    assert [each["function"]["name"] for each in after.read_tools] == ["look", "late"]
    first, again = (message.content for message in after.request.messages or () if message.role == "tool")
    assert json.loads(first) == after.read_tools[1]
    assert json.loads(first)["function"] == {"name": "late", "description": "Look.", "parameters": {"type": "object"}}
    assert again == "late", "defined once"
    forced = parse_messages(
        {**body, "messages": turns, "tool_choice": {"type": "tool", "name": "late"}}, Caller(), side
    )
    assert '"late"' in forced.request.reply_prefix
    calls = forced.request.calls
    assert calls is not None and calls.name == "late" and [tool.name for tool in calls.tools] == ["look", "late"]
    needed = parse_messages({**body, "messages": turns, "tool_choice": {"type": "any"}}, Caller(), side).request
    assert needed.calls is not None and needed.calls.name is None and len(needed.calls.tools) == 2
    with pytest.raises(BadRequest):
        parse_messages({**body, "tool_choice": {"type": "tool", "name": "never"}}, Caller(), side)
